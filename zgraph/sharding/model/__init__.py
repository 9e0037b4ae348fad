"""Checks and helpers for the tensors of users' models: buffers, hooks, tied memory, writes to weights."""
