"""Triton kernels, their sources and launches."""
