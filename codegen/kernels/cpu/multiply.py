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
from zgraph.compression.payload import BucketLayout


def multiply(
    x: Tensor, payloads: Tensor, layout: BucketLayout, rows: int, columns: int, *, transpose: bool
) -> Tensor | None:
    """Return `x @ weight.T` or `x @ weight`, computed on torch.get_num_threads() threads.

    Args:
        x: [n, columns] fp32, or [n, rows] without a transpose; contiguous, with few rows.
        payloads: [ranks, bytes] uint8, of contiguous rows with any stride between them.
        layout: layout of one rank's payload.
        rows, columns: shape of the weight; `columns` is a multiple of the method's group.
        transpose: whether the weight is transposed.

    Returns:
        [n, rows] fp32, or [n, columns] without a transpose; None if the source cannot be compiled.
    """
    method = layout.method
    assert isinstance(method, BlockMethod) and not method.rotate and payloads.stride(1) == 1, "checked by the pass"
    kernel = _kernel(method, "multiply" if transpose else "multiply_rows")
    if kernel is None:
        return None
    outputs = rows if transpose else columns
    found, (codes_at, scales_at) = x.new_empty((len(x), outputs)), layout.offsets()[0]
    kernel(
        x.data_ptr(),
        len(x),
        x.shape[1],
        payloads.data_ptr(),
        payloads.stride(0),
        codes_at,
        scales_at,
        layout.numels[0] // columns,
        outputs,
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found


@functools.cache
def _kernel(method: BlockMethod, name: str) -> Any:
    inputs = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    weights = (ctypes.c_void_p, *[ctypes.c_int64] * 5)
    return function_of(emit_multiply(method), name, (*inputs, *weights, ctypes.c_void_p, ctypes.c_int32))
