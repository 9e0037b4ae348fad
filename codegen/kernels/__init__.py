"""codegen.kernels"""
