"""`zgraph.plan`: compiles a training step for a planned cluster, and predicts its memory, traffic and time."""
