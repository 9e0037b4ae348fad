"""The two compression kernels for CPUs in single-pass C++, bitwise equal to kernels/reference.py.

The source (`zgraph.codegen.kernels.cpu.source`) is generated for one method and dtype, and compiled once for buckets of
any shape. Other processes load the compiled library from disk.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.cpu.load import function_of
from zgraph.codegen.kernels.cpu.source import C_TYPES, emit_dequantize, emit_quantize
from zgraph.compression.methods import BlockMethod, RngKey
from zgraph.compression.payload import BucketLayout


def quantize_bucket(
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    layout: BucketLayout,
    draw: RngKey,
    rank: int,
    payload: Tensor,
) -> None:
    """Quantize a bucket like `reference.quantize_bucket`, on torch.get_num_threads() threads.

    Gradients that are not contiguous are copied first.
    """
    calls = _quantize_calls(layout, tuple(grad.dtype for grad in grads))
    if calls is None:
        return reference.quantize_bucket(grads, states, layout, draw, rank, payload)
    assert payload.stride(1) == 1
    held = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
    for call in calls:
        places = array("q")
        for member in call.members:
            grad, state = held[member], states[member]
            error, error_scale = state.get("error"), state.get("error_scale")
            places.extend(
                (
                    grad.data_ptr(),
                    grad.numel(),
                    0 if error is None else error.data_ptr(),
                    0 if error_scale is None else error_scale.data_ptr(),
                )
            )
        call.kernel(
            call.table.buffer_info()[0],
            places.buffer_info()[0],
            len(call.members),
            layout.world,
            layout.stretches,
            payload.data_ptr(),
            payload.stride(0),
            draw.step,
            rank,
            draw.salt,
            torch.get_num_threads(),
        )


def dequantize_sum_bucket(
    received: Tensor,
    layout: BucketLayout,
    draw: RngKey,
    first_rank: int,
    divisor: int,
    outputs: Sequence[Tensor],
    *,
    accumulate: bool = False,
) -> None:
    """Decode and sum like `reference.dequantize_sum_bucket`, on torch.get_num_threads() threads."""
    calls = _dequantize_calls(layout, tuple(output.dtype for output in outputs))
    if calls is None:
        return reference.dequantize_sum_bucket(
            received, layout, draw, first_rank, divisor, outputs, accumulate=accumulate
        )
    assert received.stride(1) == 1 and all(output.is_contiguous() for output in outputs)
    for call in calls:
        places = array("q", [outputs[member].data_ptr() for member in call.members])
        call.kernel(
            call.table.buffer_info()[0],
            places.buffer_info()[0],
            len(call.members),
            received.shape[0],
            layout.stretches,
            received.data_ptr(),
            received.stride(0),
            draw.step,
            first_rank,
            draw.salt,
            divisor,
            accumulate,
            torch.get_num_threads(),
        )


def dequantize_each_bucket(received: Tensor, layout: BucketLayout, draw: RngKey, outputs: Sequence[Tensor]) -> None:
    """Decode like `reference.dequantize_each_bucket`, with one kernel call (about a microsecond) per rank."""
    for rank in range(received.shape[0]):
        parts = [output[rank] for output in outputs]
        dequantize_sum_bucket(received[rank : rank + 1], layout, draw, rank, 1, parts)


@dataclass(frozen=True)
class Call:
    """Arguments of a C++ kernel call that depend only on the layout of the bucket, not on its tensors.

    Attributes:
        kernel: function in the compiled library.
        members: gradients that the call processes, all of one dtype, as indices in the bucket.
        table: one `struct Member` for each of these gradients.
    """

    kernel: Any
    members: tuple[int, ...]
    table: array[int]


_SHARED = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_int64)
_DRAWN = (ctypes.c_uint32,) * 3  # modulo 2^32, as in sign_key


@functools.lru_cache(maxsize=4096)
def _quantize_calls(layout: BucketLayout, dtypes: tuple[torch.dtype, ...]) -> tuple[Call, ...] | None:
    kernels = {dtype: _quantize_kernel(layout.method, dtype) for dtype in dict.fromkeys(dtypes)}
    return _calls(layout, dtypes, kernels)


@functools.lru_cache(maxsize=4096)
def _dequantize_calls(layout: BucketLayout, dtypes: tuple[torch.dtype, ...]) -> tuple[Call, ...] | None:
    kernels = {dtype: _dequantize_kernel(layout.method, dtype) for dtype in dict.fromkeys(dtypes)}
    return _calls(layout, dtypes, kernels)


def _calls(
    layout: BucketLayout, dtypes: tuple[torch.dtype, ...], kernels: dict[torch.dtype, Any]
) -> tuple[Call, ...] | None:
    if None in kernels.values():
        return None
    offsets = layout.offsets() if layout.numels else []
    calls: list[Call] = []
    for dtype, kernel in kernels.items():
        members = tuple(member for member, found in enumerate(dtypes) if found == dtype)
        table = array("q", [value for member in members for value in (layout.numels[member], *offsets[member])])
        calls.append(Call(kernel, members, table))
    return tuple(calls)


@functools.cache
def _quantize_kernel(method: BlockMethod, dtype: torch.dtype) -> Any:
    if dtype not in C_TYPES:
        return None
    return function_of(emit_quantize(method, dtype), "quantize", (*_SHARED, *_DRAWN, ctypes.c_int32))


@functools.cache
def _dequantize_kernel(method: BlockMethod, dtype: torch.dtype) -> Any:
    if dtype not in C_TYPES:
        return None
    source = emit_dequantize(method, dtype)
    return function_of(source, "dequantize_sum", (*_SHARED, *_DRAWN, ctypes.c_float, ctypes.c_bool, ctypes.c_int32))
