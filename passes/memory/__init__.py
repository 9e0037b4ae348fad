"""Passes that offload tensors from device memory and bring them back."""
