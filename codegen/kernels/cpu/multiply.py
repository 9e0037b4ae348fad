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


def multiply(x: Tensor, payloads: Tensor, layout: BucketLayout, rows: int) -> Tensor | None:
    """Return `x @ weight.T`, computed on torch.get_num_threads() threads; None if the source cannot be compiled.

    Args:
        x: [n, columns] fp32, contiguous, with few rows.
        payloads: [ranks, bytes] uint8, of contiguous rows with any stride between them.
        layout: layout of one rank's payload.
        rows: number of rows of the weight.

    Returns:
        [n, rows] fp32.
    """
    method = layout.method
    assert isinstance(method, BlockMethod) and not method.rotate and payloads.stride(1) == 1, "checked by the pass"
    kernel = _kernel(method)
    if kernel is None:
        return None
    found, (codes_at, scales_at) = x.new_empty((len(x), rows)), layout.offsets()[0]
    kernel(
        x.data_ptr(),
        len(x),
        x.shape[1],
        payloads.data_ptr(),
        payloads.stride(0),
        codes_at,
        scales_at,
        layout.numels[0] // x.shape[1],
        rows,
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found


@functools.cache
def _kernel(method: BlockMethod) -> Any:
    inputs = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    weights = (ctypes.c_void_p, *[ctypes.c_int64] * 5)
    return function_of(emit_multiply(method), "multiply", (*inputs, *weights, ctypes.c_void_p, ctypes.c_int32))
