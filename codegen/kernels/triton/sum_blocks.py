"""The CUDA kernel of `zgraph::sum_ranks`: one launch that reads each rank's piece once and writes the sum.

Sums run in rank order, in fp32, and are divided as IEEE says: bit for bit what the operator does elsewhere.
"""

from __future__ import annotations

import importlib.util
from types import MappingProxyType

import torch
from torch import Tensor

from zgraph.codegen.kernels.triton import source as pieces
from zgraph.dialect import sum_ranks as operator

_BLOCK = 1024
_WARPS = 4
_LOADS = MappingProxyType({torch.bfloat16: "from_bf16(tl.load(received + {at}, mask=inside, other=0))"})
_STORES = MappingProxyType({torch.bfloat16: "to_bf16(total)", torch.float16: "total.to(tl.float16)"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def emit_sum(wire: torch.dtype, dtype: torch.dtype, *, divides: bool) -> str:
    """The source of a kernel `sum_pieces`.

    Args:
        wire: dtype of what was received.
        dtype: of the sums; both fp32, bf16 or fp16, of which bf16 is read and written as int16.
        divides: whether the sums are divided.
    """
    load = _LOADS.get(wire, "tl.load(received + {at}, mask=inside, other=0).to(tl.float32)")
    body = [
        "at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "inside = at < numel",
        f"total = {load.format(at='at')}",
        "for sender in range(1, ranks):",
        f"    total += {load.format(at='tl.cast(sender, tl.int64) * numel + at')}",
        *(["total = tl.div_rn(total, tl.cast(divisor, tl.float32))"] if divides else []),
        f"tl.store(output + at, {_STORES.get(dtype, 'total')}, mask=inside)",
    ]
    arguments = ["output", "received", "numel: tl.int64", "ranks", "divisor", "BLOCK: tl.constexpr"]
    return pieces.joined(
        pieces.comment([f"Sums of {pieces.dtype_name(wire)} pieces in rank order, as {pieces.dtype_name(dtype)}."]),
        pieces.IMPORTS,
        pieces.BF16,
        pieces.kernel("sum_pieces", arguments, ["numel", "ranks", "divisor"], pieces.indented(body)),
    )


def sum_pieces(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """What `zgraph.dialect.sum_ranks.sum_pieces` computes, by one kernel."""
    pieces.require_contiguous("sum_blocks", [received])
    output = received.new_empty((received.shape[0] // world, *received.shape[1:]), dtype=dtype)
    numel = output.numel()
    if numel:
        names = pieces.load(emit_sum(received.dtype, dtype, divides=divisor > 1))
        names["sum_pieces"][(-(-numel // _BLOCK),)](
            *(tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor for tensor in (output, received)),
            numel,
            world,
            float(divisor),
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
