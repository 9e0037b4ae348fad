"""Checks and helpers for the tensors of users' models: buffers, tied memory, writes to weights, replaced parameters."""
