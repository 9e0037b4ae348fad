"""C++ kernels and their source."""
