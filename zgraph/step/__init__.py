"""The whole training step as one graph: capture of a loop body, its inputs, and what it may not do."""
