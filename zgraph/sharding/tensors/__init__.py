"""Sharded parameters and gradients that behave in a training loop like those of the plain model."""
