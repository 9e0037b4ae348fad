"""`zgraph.plan`: compiles a step for a cluster that does not exist, and predicts its memory, traffic and time."""
