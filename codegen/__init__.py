"""Turns final graphs into callables; importing this package registers the kernels of zgraph's operators."""

from zgraph.codegen import adam_kernels, compressed_kernels, low_rank_kernels
from zgraph.codegen.kernels.triton import sum_blocks

__all__ = ["adam_kernels", "compressed_kernels", "low_rank_kernels", "sum_blocks"]
