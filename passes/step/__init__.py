"""Passes on the graph of a whole training step: forward, backward and optimizer."""
