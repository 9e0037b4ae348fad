"""Metrics of each training step, and writers for them."""
