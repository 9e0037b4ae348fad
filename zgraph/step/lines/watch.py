"""Watch a step while it is traced, and refuse unsupported operations at the user's line."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.graph import meta
from zgraph.runtime.window_state import OPEN
from zgraph.step.lines.gathered_memory import GatheredMemory
from zgraph.step.lines.refusals import is_library, refusal
from zgraph.torch_compat.aot import forget_constant, let_stand_for, newest_node, nodes_after, without_graph
from zgraph.torch_compat.autograd import backward_number, forward_number, is_in_backward
from zgraph.torch_compat.dtensor import local_of, on_local_parts
from zgraph.torch_compat.fake_values import fake_number, is_fake, without_fake_mode
from zgraph.torch_compat.memory import DispatchMode
from zgraph.torch_compat.modules import tree_flatten
from zgraph.torch_compat.operators import OpOverload, is_tagged_random, written_tensors

aten = torch.ops.aten
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})
_LITERALS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})


class Watch(DispatchMode):
    """Checks each operator of a step while the step is traced, and refuses operators that a graph would get wrong.

    Attributes:
        accumulates: function that returns whether `zgraph.no_sync` is active. While it is, markers of reduced gradients
            get the window position OPEN, which tells error feedback that no optimizer step follows.
        known: values of step counts and similar numbers.
        gathered: memory of gathered parameters, which must not be written.
        stand_ins: traced tensors, by ids of the real tensors that they replace.
        part: number of the running part: 0 is the first forward, 1 its backward, 2 the next forward, ...
        reader: the optimizer that is running its own step, and may therefore read numbers, such as step counts, from
            tensors. None: no optimizer is.
    """

    def __init__(self, mode: Any, asks: bool, modules: Mapping[int, str]) -> None:
        super().__init__()
        self.origins = Origins(modules)
        self.stand_ins: Mapping[int, Tensor] = {}
        self.accumulates: Callable[[], bool] = lambda: False
        self.known = KnownValues(mode, asks)
        self.gathered = GatheredMemory()
        self.part = 0
        self.reader: object = None

    @contextlib.contextmanager
    def reading_values(self, reader: object) -> Generator[None]:
        """Allow the optimizer `reader` to read numbers from tensors inside the `with`."""
        self.reader = reader
        yield
        self.reader = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_backward = is_in_backward()
        if in_backward != bool(self.part % 2):
            self.part += 1
        args = self._instead(args)
        kwargs = {key: self._instead(value) for key, value in (kwargs or {}).items()}
        if func in _READS and (decided := self.known.decide(args[0])) is not None:
            return decided
        self._check(func, args, kwargs, in_backward)
        self.gathered.check(func, written_tensors(func, args, kwargs))
        if func is torch.ops.zgraph.reduce_grad.default and self.accumulates():
            args = [*args[:-3], OPEN, *args[-2:]]
        before = newest_node()
        result = on_local_parts(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self.known.number(args[0], result)
        self.known.follow(func, args, kwargs, result)
        self.gathered.follow(func, args, result)
        if func in _LITERALS:
            forget_constant(result)
        made = list(nodes_after(before))
        origin = self.origins.of_this_call(in_backward) if made else None
        for node in made:
            meta.set_part(node, self.part)
            if origin is not None:
                meta.set_origin(node, *origin)
        return result

    def _check(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], in_backward: bool) -> None:
        if func in _READS and self.reader is None:
            raise refusal(
                "reads a tensor's value in Python (item(), float(), bool(), an `if` on a tensor), which is known only "
                "when the step runs",
                "return the tensor and read it outside the step; choose with torch.where, not with `if`",
            )
        if torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_numbers(func, args):
            raise refusal(
                f"calls {func}, whose result has a shape that depends on the data",
                "use a fixed shape (torch.where, masks), or call the three lines of the loop without training_step",
            )
        if func.namespace == "c10d":
            raise refusal(
                f"uses the collective {func}, which a captured step does not support",
                "use torch.distributed's functional collectives, or call it outside the step",
            )
        if in_backward and is_tagged_random(func) and not _draws_nothing(func, args, kwargs):
            raise refusal(
                f"draws random numbers in its backward ({func}), as activation checkpointing of a module with dropout "
                "does",
                "leave out dropout or checkpointing in the captured step",
            )
        if is_tagged_random(func) and kwargs.get("generator") is not None:
            raise refusal(
                f"draws from a torch.Generator of its own ({func})", "draw from the default generator, or outside"
            )
        if func not in _LITERALS and any(map(_is_foreign, _tensors(args, kwargs))):
            raise refusal(
                f"reads a tensor ({func}) that is neither an argument of the step, nor a parameter or buffer of its "
                "model, nor a variable that the function names, or that shares the memory of one of these; it would be "
                "a constant in the graph",
                "pass it as an argument, or register it as a buffer (persistent=False keeps it out of checkpoints)",
            )

    def _instead(self, given: Any) -> Any:
        """Return an operator's argument with real tensors replaced by traced ones."""
        if isinstance(given, Tensor):
            return self.stand_ins.get(id(given), given)
        if type(given) in (list, tuple):
            return type(given)(map(self._instead, given))
        return given


Origin = tuple[str, str, int, str]  # path of the module, file, line, function


class Origins:
    """Finds the module and the user's line that each operator comes from.

    Operators of a backward have the module and line of the forward operator.

    Args:
        modules: paths of the model's modules by their ids.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self.modules = modules
        self._recorded: dict[int, Origin] = {}

    def of_this_call(self, in_backward: bool) -> Origin | None:
        """Return the origin of the operator being called; None if unknown."""
        path, place = self._on_the_stack()
        if in_backward and path is None:  # a checkpointed forward that runs again has its modules on the stack
            return self._recorded.get(backward_number())
        origin = None if place is None else (path or "", *place)
        if origin is not None:
            self._recorded.setdefault(forward_number(), origin)
        return origin

    def _on_the_stack(self) -> tuple[str | None, tuple[str, int, str] | None]:
        """Return the path of the innermost module whose forward runs, and the innermost line of the user's code."""
        path: str | None = None
        place: tuple[str, int, str] | None = None
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and (path is None or place is None):
            code = frame.f_code
            if path is None and code.co_name == "forward":
                path = self.modules.get(id(frame.f_locals.get("self")))
            if place is None and not is_library(code.co_filename):
                place = code.co_filename, frame.f_lineno, code.co_name
            frame = frame.f_back
        return path, place


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten((list(args), dict(kwargs)))[0] if isinstance(leaf, Tensor))


def _is_foreign(tensor: Tensor) -> bool:
    """Return whether a tensor existed before the trace and is not an input of the trace."""
    return not is_fake(local_of(tensor) if isinstance(tensor, DTensor) else tensor)


def _indexes_by_numbers(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an operator indexes by position, not by mask, so that the shape of its result is known."""
    return func is aten.index.Tensor and all(index is None or not _is_mask(index) for index in args[1])


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _draws_nothing(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]  # pyright: ignore[reportPrivateUsage]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


@dataclass(frozen=True)
class _Known:
    """A 0-d tensor with a known value: graph input `place` plus `added`; just `added` if `place` is None."""

    tensor: Tensor  # kept alive, so that its id is not reused
    place: int | None
    added: float


class KnownValues:
    """0-d tensors on the CPU, such as step counts, whose values Python may compare during a trace.

    A value is known if the tensor is a constant, or an input of the graph to which the step has added only constants.
    The outcome of a comparison becomes a guard, which is checked on the inputs of later calls.

    Args:
        mode: result of `step_mode`.
        asks: whether Python may also branch on numbers that it reads with `item()`; each branch adds a guard.

    Attributes:
        read: for each symbolic number, by name: (index of a graph input, constant that the step adds to the input).
        numbers: the symbolic numbers, by name.
    """

    def __init__(self, mode: Any, asks: bool) -> None:
        self._mode, self._asks = mode, asks
        self._known: dict[int, _Known] = {}
        self._compared: dict[int, tuple[Tensor, Any, _Known, float]] = {}
        self._present: list[Tensor] = []
        self.read: dict[str, tuple[int, float]] = {}
        self.numbers: dict[str, Any] = {}

    def begin(self, present: Sequence[Tensor], traced: Sequence[Tensor]) -> None:
        """Register the real input tensors of the step, and the traced tensors that replace them."""
        self._present = list(present)
        for place, (real, one) in enumerate(zip(present, traced, strict=True)):
            if real.ndim == 0 and real.device.type == "cpu" and not is_fake(real):
                self._known[id(one)] = _Known(one, place, 0.0)

    def follow(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Update the known numbers after an operator has run."""
        value = _literal(func, args)
        if value is not None and isinstance(result, Tensor):
            self._known[id(result)] = _Known(result, None, value)
        elif func in _COPIES and isinstance(result, Tensor) and id(args[0]) in self._known:
            self._known[id(result)] = replace(self._known[id(args[0])], tensor=result)
        elif func in _COMPARISONS and id(args[0]) in self._known and isinstance(args[1], int | float):
            self._compared[id(result)] = (result, _COMPARISONS[func], self._known[id(args[0])], args[1])
        elif func._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
            added = self._added(func, args, kwargs)
            for one in _tensors(args[:1], {}):
                known = self._known.pop(id(one), None)
                if known is not None and added is not None:
                    self._known[id(one)] = replace(known, added=known.added + added)

    def _added(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        """Return the number that an operator adds in place to its first argument; None if it does anything else."""
        if func not in _ADDITIONS or len(args) < 2:
            return None
        other, factor = args[1], kwargs.get("alpha", 1)
        if isinstance(other, Tensor):
            known = self._known.get(id(other))
            other = known.added if known is not None and known.place is None else None
        return other * factor if isinstance(other, int | float) and isinstance(factor, int | float) else None

    def decide(self, tensor: Any) -> bool | None:
        """Return the outcome if `tensor` compares a known number, and add a guard for it; else return None."""
        if id(tensor) not in self._compared:
            return None
        _, compare, known, other = self._compared[id(tensor)]
        with without_graph():
            return bool(compare(self._number(known), other))

    def number(self, tensor: Tensor, number: Any) -> Any:
        """Return the number in a tensor: a symbolic number if the tensor's value is known, else `number` unchanged."""
        known = self._known.get(id(tensor))
        if not self._asks or known is None or not isinstance(number, torch.SymFloat):
            return number
        found = self._number(known)
        if isinstance(found, torch.SymFloat):
            let_stand_for(found, number)
        return found

    def _number(self, known: _Known) -> Any:
        if known.place is None:
            return known.added
        name = f"value_{len(self.numbers)}"
        with without_fake_mode():
            value = float(self._present[known.place]) + known.added
        self.read[name] = (known.place, known.added)
        self.numbers[name] = fake_number(self._mode, value, name)
        return self.numbers[name]


_COPIES = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})
_ADDITIONS = frozenset({aten.add_.Tensor, aten.add_.Scalar, aten._foreach_add_.Scalar, aten._foreach_add_.Tensor})
_COMPARISONS = MappingProxyType(
    {
        aten.eq.Scalar: operator.eq,
        aten.ne.Scalar: operator.ne,
        aten.gt.Scalar: operator.gt,
        aten.ge.Scalar: operator.ge,
        aten.lt.Scalar: operator.lt,
        aten.le.Scalar: operator.le,
    }
)


def _literal(func: OpOverload, args: Sequence[Any]) -> float | None:
    """Return the number that an operator puts into a new 0-d tensor; None for other operators."""
    if func in _LITERALS and args[0].ndim == 0 and not is_fake(args[0]):
        with without_fake_mode():
            return float(args[0])
    if func in (aten.ones.default, aten.zeros.default) and not list(args[0]):
        return float(func is aten.ones.default)
    return None
