"""Kernels of compression: plain references, and those for CPUs and for Triton that equal them."""
