"""Lowering, from the final graph to a callable; importing the room registers the kernels of the dialect's operators."""

from zgraph.codegen import adam_kernels, compressed_kernels, low_rank_kernels
from zgraph.codegen.kernels.triton import sum_blocks

__all__ = ["adam_kernels", "compressed_kernels", "low_rank_kernels", "sum_blocks"]
