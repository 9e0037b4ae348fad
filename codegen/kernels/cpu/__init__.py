"""C++ kernels for CPUs, their generated source, and their compilation."""
