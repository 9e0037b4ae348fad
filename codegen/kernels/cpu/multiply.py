"""Products with weights that are stored as codes, in C++ that decodes in registers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.cpu.load import function_of
from zgraph.codegen.kernels.cpu.source import emit_multiply
from zgraph.compression.methods import BlockMethod
from zgraph.dialect.compressed import layout_of


def multiply(
    x: Tensor,
    received: Tensor,
    method: str,
    numel: int,
    offset: int,
    world: int,
    rows: int,
    columns: int,
    *,
    transpose: bool,
) -> Tensor | None:
    """Return `x @ weight.T` or `x @ weight`, computed on torch.get_num_threads() threads.

    Args:
        x: [n, columns] fp32, or [n, rows] without a transpose; contiguous, with few rows.
        received, method, numel, offset, world: as for `zgraph::multiply_codes`.
        rows, columns: shape of the weight; `columns` is a multiple of the method's group.
        transpose: whether the weight is transposed.

    Returns:
        [n, rows] fp32, or [n, columns] without a transpose; None if the source cannot be compiled.
    """
    kernel, codes_at, scales_at = _kernel(method, numel, transpose)
    if kernel is None:
        return None
    count, width = x.shape
    outputs = rows if transpose else columns
    found = x.new_empty((count, outputs))
    kernel(
        x.data_ptr(),
        count,
        width,
        received.data_ptr() + offset,
        received.shape[0] // world,
        codes_at,
        scales_at,
        numel // columns,
        outputs,
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found


@functools.cache
def _kernel(text: str, numel: int, transpose: bool) -> tuple[Any, int, int]:
    """Return the C++ function, and the byte offsets of a payload's codes and scales.

    Found once: a call takes half as long as its preparation.
    """
    layout = layout_of(text, (numel,), 1, 1)
    method, (codes_at, scales_at) = layout.method, layout.offsets()[0]
    assert isinstance(method, BlockMethod) and not method.rotate, "checked by the pass"
    inputs = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    weights = (ctypes.c_void_p, *[ctypes.c_int64] * 5)
    name = "multiply" if transpose else "multiply_rows"
    kernel = function_of(emit_multiply(method), name, (*inputs, *weights, ctypes.c_void_p, ctypes.c_int32))
    return kernel, codes_at, scales_at
