"""Checkpoints, and kills while they are written."""
