"""Compression and optimizer kernels: references in PyTorch, and bitwise equal kernels in C++ and Triton."""
