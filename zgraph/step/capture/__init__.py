"""Capture of a training step as one graph: running its Python code, and the inputs and outputs of the graph."""
