"""What a captured step may not do, refused at the line that does it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.graph import meta
from zgraph.step.user_line import user_line
from zgraph.torch_compat.aot import newest_node, nodes_after
from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.memory import DispatchMode
from zgraph.torch_compat.modules import tree_flatten
from zgraph.torch_compat.operators import OpOverload, is_tagged_random

aten = torch.ops.aten
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})
_LITERALS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})


class Watch(DispatchMode):
    """Sees each operator of a step while it is traced, and refuses what a graph would get wrong.

    Attributes:
        stand_ins: traced tensors, by id of the real ones, of which autograd may have saved some.
        part: number of the forward or backward that is running: 0 a forward, 1 its backward, 2 the next forward, ...;
            nodes are marked with it.
        reads_values: whether numbers may be read from tensors: only in the optimizer's own step, whose bias correction
            reads step counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stand_ins: Mapping[int, Tensor] = {}
        self.part = 0
        self.reads_values = False

    @contextlib.contextmanager
    def reading_values(self) -> Generator[None]:
        """Let the optimizer read its step counts."""
        self.reads_values = True
        try:
            yield
        finally:
            self.reads_values = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_backward = is_in_backward()
        if in_backward != bool(self.part % 2):
            self.part += 1
        args = self._instead(args)
        kwargs = {key: self._instead(value) for key, value in (kwargs or {}).items()}
        self._check(func, args, kwargs, in_backward)
        before = newest_node()
        result = func(*args, **kwargs)
        for node in nodes_after(before):
            meta.set_part(node, self.part)
        return result

    def _check(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], in_backward: bool) -> None:
        if func in _READS and not self.reads_values:
            raise refusal(
                "reads a tensor's value in Python (item(), float(), bool(), an `if` on a tensor), which is known only "
                "when the step runs",
                "return the tensor and read it outside of the step; choose with torch.where, not with `if`",
            )
        if torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_numbers(func, args):
            raise refusal(
                f"calls {func}, whose result has a shape that depends on the data",
                "use a fixed shape (torch.where, masks), or call the three lines of the loop without training_step",
            )
        if func.namespace == "c10d":
            raise refusal(
                f"uses the collective {func}, which a captured step does not support",
                "use torch.distributed's functional collectives, or call it outside of the step",
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
                "model, nor a variable that the function names, or lies in the memory of one of these; it would be "
                "a constant in the graph",
                "pass it as an argument, or register it as a buffer (persistent=False keeps it out of checkpoints)",
            )

    def _instead(self, given: Any) -> Any:
        """The same with traced tensors for real ones."""
        if isinstance(given, Tensor):
            return self.stand_ins.get(id(given), given)
        if type(given) in (list, tuple):
            return type(given)(map(self._instead, given))
        return given


def refusal(what: str, instead: str) -> ZgraphError:
    """The error for what a captured step cannot contain, with the user's line."""
    return ZgraphError(f"zgraph.training_step: {user_line() or 'the step'} {what}; {instead}.")


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten((list(args), dict(kwargs)))[0] if isinstance(leaf, Tensor))


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor was there before the trace and is not one of its inputs."""
    return not is_fake(local_of(tensor) if isinstance(tensor, DTensor) else tensor)


def _indexes_by_numbers(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether elements are selected by their positions, as many as there are positions, and not by a mask."""
    return func is aten.index.Tensor and all(index is None or not _is_mask(index) for index in args[1])


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _draws_nothing(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]  # pyright: ignore[reportPrivateUsage]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" in names and not given.get("dropout_p", 0.0)
