"""Optimizer steps, gradient clipping and loss scaling for sharded parameters."""
