"""codegen.kernels.cpu"""
