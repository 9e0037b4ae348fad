"""By which numbers the lines of a loop change weights and gradients: the same on all ranks, or a step is refused.

`p.grad.mul_(1 / tokens)` scales each shard by its own rank's number, `if loss.isnan(): p.grad.zero_()` clears those of
one rank. Nobody would notice, as such operators communicate nothing. So each sharded tensor carries a digest of the
numbers that it was computed from and of the operators that have written to it; and the exchange that ends a step
carries the digests of what the optimizer steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.fake_values import is_fake

ADVICE_ON_CHANGES = (
    "Change gradients and weights alike on all ranks: average numbers over the ranks first, and decide together to "
    "skip a step."
)
_NAN = 0.5  # whose own hash is that of the object
_DIGESTS = 1e9  # integers as large as these are digests, which are not shown


@dataclass(eq=False)
class Changes:
    """The record of one model's changes between two steps.

    Attributes:
        are_noted: not while an optimizer steps, whose options are compared.
        last: for people: the last operator with numbers.
    """

    are_noted: bool = True
    last: str = ""

    def of_read(self, operator: int, name: object, args: Sequence[Any], results: Iterable[Any]) -> None:
        """An operator has computed sharded tensors of arguments."""
        results, numbers = list(results), list(_numbers_in(args))
        origin = hash((operator, *map(origin_of, _sharded_in(args)), *numbers))
        for place, result in enumerate(results):
            result.origin = origin + place
        if numbers:
            self._note(operator, name, numbers, results)

    def of_write(self, operator: int, name: object, args: Sequence[Any], written: Sequence[Any]) -> None:
        """An operator has written to tensors, some of them sharded.

        What autograd adds to a gradient counts only if numbers have gone into it: ranks may accumulate otherwise.
        """
        numbers = list(_numbers_in(args, frozenset(map(id, written))))
        if numbers or not is_in_backward():
            self._note(operator, name, numbers, [one for one in written if isinstance(one, DTensor)])

    def _note(self, operator: int, name: object, numbers: Sequence[float], tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            whole, viewed = _whole(tensor), getattr(tensor, "viewed", None)
            rows, before = 0 if viewed is None else viewed.number, getattr(whole, "digest", 0)
            whole.digest = hash((operator, before, rows, *numbers))  # of numbers: the same in each process
        shown = ", ".join(f"{number:g}" for number in numbers if abs(number) < _DIGESTS)
        self.last = f"{name}({shown})"


def origin_of(tensor: Any) -> int:
    """Hash of the parameters, operators and numbers that a sharded tensor was computed from; the same on all ranks."""
    whole, viewed = _whole(tensor), getattr(tensor, "viewed", None)
    return hash((getattr(whole, "origin", 0), getattr(whole, "digest", 0), 0 if viewed is None else viewed.number))


def _sharded_in(args: Iterable[Any]) -> Iterator[DTensor]:
    for arg in args:
        if isinstance(arg, DTensor):
            yield arg
        elif type(arg) in (list, tuple):
            yield from _sharded_in(arg)


def _whole(tensor: Any) -> Any:
    """The tensor itself, or what it is a view of."""
    viewed = getattr(tensor, "viewed", None)
    return tensor if viewed is None else viewed.whole


def _numbers_in(args: Iterable[Any], written: Container[int] = ()) -> Iterator[float]:
    """Numbers, also those in plain tensors on the CPU, as to read others would wait; and digests of sharded tensors.

    Args:
        written: ids of tensors that are results: a GradScaler's flag, say, is each rank's own.
    """
    for arg in args:
        if isinstance(arg, int | float):
            yield arg if arg == arg else _NAN
        elif type(arg) in (list, tuple):
            yield from _numbers_in(arg, written)
        elif id(arg) in written:
            continue
        elif isinstance(arg, DTensor):
            if found := getattr(_whole(arg), "digest", 0):
                yield found
        elif isinstance(arg, Tensor) and arg.ndim == 0 and arg.device.type == "cpu" and not is_fake(arg):
            yield from _numbers_in((arg.item(),))


def taken(tensors: Sequence[Tensor | None]) -> int:
    """Combine the digests of parameters, gradients and an optimizer's state into one, and reset them.

    Args:
        tensors: in the same order on all ranks; None for parameters without gradients.

    Returns:
        0 if nothing has changed and nothing is None.
    """
    digests = [-1 if one is None else getattr(_whole(one), "digest", 0) for one in tensors]
    if not any(digests):
        return 0
    for tensor, digest in zip(tensors, digests, strict=True):
        if tensor is not None and digest:
            _whole(tensor).digest = 0
    return hash(tuple(digests))


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of shapes, dtypes and values."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(f"{list(tensor.shape)} {tensor.dtype}".encode(), found)
        if tensor.layout == torch.strided and tensor.numel():
            values = tensor.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(cast(Any, values.view(torch.uint8).numpy()), found)
    return found
