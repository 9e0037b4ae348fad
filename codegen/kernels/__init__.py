"""Compression and optimizer kernels: plain references, and C++ and Triton kernels that equal them bit for bit."""
