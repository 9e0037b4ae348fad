"""The capture of a training step as one graph: what Python does meanwhile, and the inputs and outputs of the graph."""
