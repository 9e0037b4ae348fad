"""codegen.kernels.triton"""
