"""The CUDA implementation of `zgraph::sum_ranks`: one kernel launch, which reads each rank's piece once.

Sums are in rank order, in fp32, with IEEE division, and bitwise equal to other devices.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from zgraph.codegen.kernels.triton import checks, launch_options
from zgraph.codegen.kernels.triton.constants import dtype_name
from zgraph.dialect import sum_ranks as operator

_BLOCK = 1024
_WARPS = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sum_pieces(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Compute `zgraph.dialect.sum_ranks.sum_pieces` with one kernel launch."""
    checks.require_contiguous("sum_blocks", [received])
    output = received.new_empty((received.shape[0] // world, *received.shape[1:]), dtype=dtype)
    numel = output.numel()
    if numel:
        launch_options.load("sum_pieces")[(-(-numel // _BLOCK),)](
            *(tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor for tensor in (output, received)),
            numel,
            world,
            float(divisor),
            WIRE=dtype_name(received.dtype),
            OUTPUT=dtype_name(dtype),
            DIVIDES=divisor > 1,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return output


@operator.sum_ranks.register_kernel("cuda")
def _(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    known = {received.dtype, dtype} <= set(_DTYPES) and received.is_contiguous()
    if not known or importlib.util.find_spec("triton") is None:
        return operator.sum_pieces(received, world, divisor, dtype)
    with torch.cuda.device(received.device):
        return sum_pieces(received, world, divisor, dtype)
