"""Passes on the graph of a whole training step, which contains the optimizer's updates."""
