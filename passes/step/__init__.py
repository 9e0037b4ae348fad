"""Passes on the graph of a whole training step, which holds the optimizer's updates."""
