"""Adam and AdamW with bf16 moments in single-pass C++, bitwise equal to kernels/adam_reference.py."""

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


def update(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    salts: Sequence[int],
    firsts: Sequence[int],
    options: AdamOptions,
    grad_scale: float | None = None,
) -> None:
    """Update tensors like `adam_reference.update`, on torch.get_num_threads() threads."""
    kernel = _kernel()
    if kernel is None:
        return adam_reference.update(
            parameters, grads, exp_avgs, exp_avg_sqs, steps, salts, firsts, options, grad_scale
        )
    members, factors = array("q"), array("f")
    copies: list[tuple[Tensor, Tensor]] = []
    lists = zip(parameters, grads, exp_avgs, exp_avg_sqs, steps, salts, firsts, strict=True)
    for *given, step, salt, first in lists:
        tensors = [one.contiguous() for one in given]
        copies += [(one, copy) for one, copy in zip(given, tensors, strict=True) if one is not copy]
        members.extend(one.data_ptr() for one in tensors)
        members.extend((tensors[0].numel(), first, update_key(step, salt)))
        factors.extend(options.factors(step, grad_scale).values())
    kernel(
        members.buffer_info()[0],
        factors.buffer_info()[0],
        len(parameters),
        grad_scale is not None,
        not options.decoupled and options.weight_decay != 0,
        torch.get_num_threads(),
    )
    for one, copy in copies:
        one.copy_(copy)


@functools.cache
def _kernel() -> Any:
    source = resources.files("zgraph.codegen.kernels.cpu").joinpath("adam.cpp").read_text()
    argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool, ctypes.c_bool, ctypes.c_int32)
    return function_of(source, "fused_adam", argtypes)
