"""AdamW on packed state in single-pass C++, bitwise equal to kernels/adam_reference.py."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels import adam_reference
from zgraph.codegen.kernels.adam_reference import AdamOptions, update_key
from zgraph.codegen.kernels.cpu.load import function_of
from zgraph.compression.packed_state import is_coded


def update(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[float],
    options: AdamOptions,
    grad_scale: float | None = None,
) -> None:
    """Update tensors like `adam_reference.update`, on torch.get_num_threads() threads."""
    kernel = _kernel()
    if kernel is None:
        return adam_reference.update(parameters, grads, states, steps, options, grad_scale)
    members, factors = array("q"), array("f")
    copies: list[tuple[Tensor, Tensor]] = []
    for *given, step in zip(parameters, grads, states, steps, strict=True):
        tensors = [one.contiguous() for one in given]
        parameter, _, state = tensors
        written = zip(given, tensors, (True, grad_scale is not None, True), strict=True)
        copies += [(one, copy) for one, copy, is_written in written if is_written and one is not copy]
        members.extend(one.data_ptr() for one in tensors)
        is_half = parameter.dtype == torch.bfloat16
        members.extend((parameter.numel(), update_key(step), is_coded(parameter, state), is_half))
        factors.extend(options.factors(step, grad_scale).values())
    kernel(
        members.buffer_info()[0],
        factors.buffer_info()[0],
        len(parameters),
        grad_scale is not None,
        torch.get_num_threads(),
    )
    for one, copy in copies:
        one.copy_(copy)


@functools.cache
def _kernel() -> Any:
    source = resources.files("zgraph.codegen.kernels.cpu").joinpath("adam.cpp").read_text()
    argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool, ctypes.c_int32)
    return function_of(source, "packed_adamw", argtypes)
