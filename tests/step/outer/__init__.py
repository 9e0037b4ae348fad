"""Outer steps: rounds, loops of users, refusals."""
