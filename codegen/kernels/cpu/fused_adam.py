"""Adam and AdamW with fp32 moments, to the bits of torch's fused kernel, in one region of threads for all tensors.

torch's threads meet at the end of each tensor of a call. Beside other threads, as those that compute while the host
updates, they wait there for whichever the system has put aside. Here each thread has an equal share of all elements,
and they meet once.

Which products torch's compiler has contracted with sums, and how long its vectors are, depends on the build of torch
and on the processor. So both kernels are tried on the same numbers, once in a process; where a bit differs, and for
all that this kernel does not take, torch's own runs.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, cast

import torch
from torch import Tensor, nn

from zgraph.codegen.kernels.adam_reference import AdamOptions
from zgraph.torch_compat.inductor import load_cpp

aten = torch.ops.aten
FEWEST = 1 << 20  # elements of a call; with fewer torch's own is faster, by some microseconds of Python
_LANES = (8, 16, 4)  # of AVX2, for which torch compiles this kernel on x86; of longer and of shorter vectors
_TRIED = (1, 7, 8, 15, 16, 100, 1003)  # elements of tensors
_TENSORS = frozenset({Tensor, nn.Parameter})  # and no subclass, such as a fake tensor
_ADAM = (aten._fused_adam_.default, aten._fused_adam_.tensor_lr)
_ADAMW = (aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)  # whose weight decay is decoupled


def faster(operator: object, otherwise: Callable[..., Any], fewest: int = FEWEST) -> Callable[..., None] | None:
    """What computes the bits of torch's fused Adam or AdamW on several threads; None for other operators.

    Args:
        operator: of a call whose tensors lie on the CPU, such as `aten._fused_adamw_.default`.
        otherwise: calls torch's own kernel, with one thread or for what this kernel does not take.
        fewest: elements from which on the kernel is taken.
    """
    if operator not in (*_ADAM, *_ADAMW):
        return None
    decoupled = operator in _ADAMW

    def update(
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor],
        state_steps: Sequence[Tensor],
        *,
        lr: float | Tensor,
        amsgrad: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        **options: Any,
    ) -> None:
        lists = (parameters, grads, exp_avgs, exp_avg_sqs)
        members = None
        if torch.get_num_threads() > 1 and not amsgrad and sum(map(Tensor.numel, parameters)) >= fewest:
            members = _members(lists)
        lanes = None if members is None else lanes_of_torch()
        if members is None or lanes is None:
            given = {**options, "lr": lr, "amsgrad": amsgrad, "grad_scale": grad_scale, "found_inf": found_inf}
            otherwise(*lists, max_exp_avg_sqs, state_steps, **given)
        elif found_inf is None or found_inf.item() != 1:
            scale = None if grad_scale is None else grad_scale.item()
            steps = tuple([step.item() for step in state_steps])
            _call(members, _arguments(steps, scale, lr=float(lr), decoupled=decoupled, **options), lanes)
            written = lists if grad_scale is not None else (parameters, exp_avgs, exp_avg_sqs)
            torch.autograd.graph.increment_version(itertools.chain.from_iterable(written))

    functools.update_wrapper(update, cast(Any, operator), assigned=(), updated=())  # `__wrapped__`
    update.__name__ = str(operator).split(".")[1]  # what the generated program calls it
    return update


def _members(lists: Sequence[Sequence[Tensor]]) -> array[int] | None:
    """What the kernel reads of tensors; None if they are not such as it takes, but fake ones, for instance."""
    found = array("q")
    for tensors in zip(*lists, strict=True):
        for one in tensors:
            if type(one) not in _TENSORS or one.dtype is not torch.float32 or not one.is_contiguous():
                return None
            found.append(one.data_ptr())
        found.append(tensors[0].numel())
    return found


@functools.lru_cache(maxsize=16)  # calls of one step have the same
def _arguments(steps: tuple[float, ...], grad_scale: float | None, **options: Any) -> tuple[Any, ...]:
    """Of each parameter the numbers that its update computes with, and what the kernel is told besides."""
    taken = AdamOptions(**options)
    known = {step: taken.factors(step, grad_scale).values() for step in set(steps)}
    factors = array("f", [value for step in steps for value in known[step]])
    is_coupled = not taken.decoupled and taken.weight_decay != 0
    is_near = abs(array("f", [1 - taken.beta1])[0]) < 0.5
    return factors, len(steps), grad_scale is not None, is_coupled, is_near


def _call(members: array[int], arguments: tuple[Any, ...], lanes: int) -> None:
    """Update with torch.get_num_threads() threads."""
    factors, *others = arguments
    _kernel()(members.buffer_info()[0], factors.buffer_info()[0], *others, lanes, torch.get_num_threads())


@functools.cache
def lanes_of_torch() -> int | None:
    """Elements of the vectors with which this kernel yields the bits of torch's; None where it does not, or is not."""
    try:
        _kernel()
    except (RuntimeError, OSError):  # no compiler: torch's own kernel loses nothing but time
        return None
    return next((lanes for lanes in _LANES if all(agrees(lanes, **case) for case in _cases())), None)


def _cases() -> list[dict[str, bool]]:
    return [
        dict(zip(("decoupled", "decays", "near", "scaled"), case, strict=True))
        for case in itertools.product((True, False), repeat=4)
    ]


def agrees(lanes: int, *, decoupled: bool, decays: bool, near: bool, scaled: bool) -> bool:
    """Whether both kernels write the same bits: of sums whose terms are alike, so that each contraction shows.

    Args:
        lanes: elements of torch's vectors, as is assumed.
        decoupled: AdamW, not Adam.
        decays: by weight.
        near: first moments are moved by less than a half towards gradients.
        scaled: gradients are divided by a scale.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [[torch.rand(numel, generator=generator) + 0.1 for numel in _TRIED] for _ in range(4)]
    ours, theirs = ([[one.clone() for one in tensors] for tensors in drawn] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "beta1": 0.7 if near else 0.3, "beta2": 0.6, "eps": 0.1, "maximize": not near}
    options["weight_decay"] = 0.3 if decays else 0.0
    scale = 3.0 if scaled else None
    operator = aten._fused_adamw_.default if decoupled else aten._fused_adam_.default
    steps, given = [torch.tensor(2.0) for _ in _TRIED], None if scale is None else torch.tensor(scale)
    with torch.no_grad():
        operator(*theirs, [], steps, amsgrad=False, grad_scale=given, **options)
        members = _members(ours)
        assert members is not None
        _call(members, _arguments((2.0,) * len(_TRIED), scale, decoupled=decoupled, **options), lanes)
    pairs = zip(itertools.chain.from_iterable(ours), itertools.chain.from_iterable(theirs), strict=True)
    return all(torch.equal(our, their) for our, their in pairs)


@functools.cache
def _kernel() -> Any:
    source = resources.files("zgraph.codegen.kernels.cpu").joinpath("fused_adam.cpp").read_text()
    kernel = load_cpp(source).fused_adam_fp32
    pointers, flags = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), (ctypes.c_bool,) * 3
    kernel.argtypes, kernel.restype = (*pointers, *flags, ctypes.c_int64, ctypes.c_int32), None
    return kernel
