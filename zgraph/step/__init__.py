"""The whole training step as one graph: capture of a loop body, its inputs, and unsupported operations."""
