"""Triton kernels, and the functions that launch them."""
