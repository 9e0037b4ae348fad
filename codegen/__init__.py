"""Lowering, from the final graph to a callable; importing the room registers the kernels of compressed collectives."""

from zgraph.codegen import compressed_kernels, low_rank_kernels
from zgraph.codegen.kernels.triton import sum_blocks

__all__ = ["compressed_kernels", "low_rank_kernels", "sum_blocks"]
