"""Capture of a training step as one graph, with the graph's inputs and outputs."""
