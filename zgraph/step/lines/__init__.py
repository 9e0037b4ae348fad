"""Interception of the user's calls while a step is traced: uses traced tensors, and refuses unsupported operations."""
