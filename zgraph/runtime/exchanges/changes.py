"""Records the training loop's changes to weights and gradients, so that differences between ranks raise an error.

The loop may change the shards of one rank differently from the shards of other ranks. Examples are
`p.grad.mul_(1 / tokens)` with a number of this rank, `if loss.isnan(): p.grad.zero_()`, and
`model.load_state_dict(best)` with another step's weights. No collective runs in such code that could detect the
difference. So each sharded tensor has two attributes:

- origin: a hash of the parameters, operators, numbers and step from which the tensor was computed;
- digest: a hash of the operators and numbers that have written to the tensor since the last step.

At the end of a step, ranks compare the origins and digests of all tensors that the optimizer reads. At every other
exchange (collective between ranks), they compare the digests of weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.fake_values import is_fake

ADVICE_ON_CHANGES = (
    "Change gradients and weights alike on all ranks: average numbers over the ranks first, and decide together to "
    "skip a step."
)
_NAN = 0.5  # hashed in place of NaN, because the hash of a NaN differs between objects
_DIGESTS = 1e9  # integers from this size on are digests, which are not shown
_MASK = 2**61 - 1


@dataclass(eq=False)
class Changes:
    """Record of the training loop's changes to one model's parameters and gradients since the last optimizer step.

    Attributes:
        are_noted: whether changes are recorded; False while an optimizer steps.
        last: the last recorded operators as text, for error messages.
        steps: number of ended steps.
        pending: sum of the hashes that ranks compare at every exchange until the step ends, such as digests of
            parameters.
    """

    are_noted: bool = True
    last: str = ""
    steps: int = 0
    pending: int = 0
    _last_numbers: str = ""

    def compare(self, number: int) -> None:
        """Add a hash to `pending`, so that ranks compare it at every exchange until the step ends."""
        self.pending = (self.pending + number) & _MASK

    def begin_anew(self, failures: int) -> None:
        """Reset the record after ranks have disagreed; `failures` is the number of disagreements so far."""
        self.steps, self.pending = failures << 32, 0  # differs from every earlier step's number

    def of_read(self, operator: int, name: object, args: Sequence[Any], results: Iterable[Any]) -> None:
        """Record an operator that has computed new sharded tensors: set the origin of each result."""
        results, numbers = list(results), list(_numbers_in(args))
        sources = [*map(origin_of, _sharded_in(args))]
        # Ranks may accumulate differently, so a sum that autograd makes has the origin of its first summand.
        accumulates = is_in_backward() and not numbers
        origin = sources[0] if accumulates and sources else hash((operator, self.steps, *sources, *numbers))
        for place, result in enumerate(results):
            result.origin = origin + place
        if numbers:
            self._note(operator, name, numbers, results)

    def of_write(self, operator: int, name: object, args: Sequence[Any], written: Sequence[Any]) -> None:
        """Record an operator that has written to tensors: update the digest of each sharded tensor among them.

        During a backward pass, only operators with numbers among their arguments are recorded, because ranks may
        accumulate gradients in different orders.
        """
        targets = frozenset(map(id, written))
        numbers = list(_numbers_in(args, targets))
        if numbers or not is_in_backward():
            sources = [origin_of(one) for one in _sharded_in(args) if id(one) not in targets]
            self._note(operator, name, numbers, [one for one in written if isinstance(one, DTensor)], sources)

    def _note(
        self,
        operator: int,
        name: object,
        numbers: Sequence[float],
        tensors: Iterable[Any],
        sources: Sequence[int] = (),
    ) -> None:
        for tensor in tensors:
            whole, viewed = _whole(tensor), getattr(tensor, "viewed", None)
            rows, before = 0 if viewed is None else viewed.number, getattr(whole, "digest", 0)
            # A hash of integers and floats is the same in each process.
            digest = whole.digest = hash((operator, before, rows, *sources, *numbers))
            if isinstance(whole, nn.Parameter):
                self.compare(digest)
        shown = ", ".join(f"{number:g}" for number in numbers if abs(number) < _DIGESTS)
        if shown:
            self.last = self._last_numbers = f"{name}({shown})"
        else:
            self.last = f"{self._last_numbers}, {name}" if self._last_numbers else f"{name}"

    def taken(self, tensors: Iterable[tuple[Tensor | None, int]]) -> int:
        """End a step: return a hash of the changes to all tensors that the step reads, and reset the record.

        Args:
            tensors: pairs (tensor, origin of its parameter) for parameters, gradients (or None) and the optimizer's
                state, in the same order on all ranks. A tensor with its parameter's origin is unchanged.

        Returns:
            The hash; 0 if all tensors exist and are unchanged.
        """
        found = [self.pending, *(_change_of(tensor, origin) for tensor, origin in tensors)]
        self.steps, self.pending, self.last, self._last_numbers = self.steps + 1, 0, "", ""
        return hash(tuple(found)) if any(found) else 0


def _change_of(tensor: Any, origin: int) -> int:
    if tensor is None:
        return -1
    viewed = getattr(tensor, "viewed", None)
    whole = tensor if viewed is None else viewed.whole
    found = getattr(whole, "digest", 0)
    if viewed is not None and viewed.number:
        return hash((found, origin_of(tensor)))
    own = getattr(whole, "origin", origin) or origin  # 0: zgraph made the tensor itself, by moving state
    if own != origin:
        found = hash((found, own))
        whole.origin = origin
    if found:
        whole.digest = 0
    return found


def origin_of(tensor: Any) -> int:
    """Return a hash of a sharded tensor's origin and digest; different views of one tensor have different hashes."""
    whole, viewed = _whole(tensor), getattr(tensor, "viewed", None)
    return hash((getattr(whole, "origin", 0), getattr(whole, "digest", 0), 0 if viewed is None else viewed.number))


def _sharded_in(args: Iterable[Any]) -> Iterator[DTensor]:
    for arg in args:
        if isinstance(arg, DTensor):
            yield arg
        elif type(arg) in (list, tuple):
            yield from _sharded_in(arg)


def _whole(tensor: Any) -> Any:
    """Return the base of a recorded view; for any other tensor, the tensor itself."""
    viewed = getattr(tensor, "viewed", None)
    return tensor if viewed is None else viewed.whole


def _numbers_in(args: Iterable[Any], written: Container[int] = ()) -> Iterator[float]:
    """Yield the numbers among an operator's arguments, and the digests of its sharded tensors.

    Values of 0-d CPU tensors are numbers, too; values on a device are skipped, because reading them would block the
    host.

    Args:
        args: arguments of the operator.
        written: ids of the tensors that the operator writes, which are skipped.
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


def hash_of(numbers: Iterable[float]) -> int:
    """Return a hash of numbers that is equal in all processes, even for NaN."""
    return hash(tuple(number if number == number else _NAN for number in numbers))


def note_origin(sharded: DTensor, whole: Tensor) -> None:
    """Set a sharded tensor's origin to a checksum of the unsharded tensor, which must be equal on all ranks."""
    sharded.origin = checksum([whole])  # pyright: ignore[reportAttributeAccessIssue]


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a CRC-32 of tensors' shapes, dtypes and values; the values of sparse tensors are left out."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(f"{list(tensor.shape)} {tensor.dtype}".encode(), found)
        if tensor.layout == torch.strided and tensor.numel():
            values = tensor.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(cast(Any, values.view(torch.uint8).numpy()), found)
    return found
