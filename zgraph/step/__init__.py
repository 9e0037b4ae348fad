"""Whole training steps as one graph: capture of the user's function, the graph's inputs, unsupported operations."""
