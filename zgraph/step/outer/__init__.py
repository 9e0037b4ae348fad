"""Outer steps: sites train separately for some steps, and exchange what has changed, a fragment at a time."""
