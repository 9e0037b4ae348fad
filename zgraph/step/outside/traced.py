"""Tensors of a trace, and Python objects that hold them: they have shapes but no values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, TypeGuard, cast

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import is_fake

MOST_ENTRIES = 1000  # of a container, that are looked into for tensors


def is_traced(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of the trace, whole or sharded."""
    return isinstance(value, Tensor) and is_fake(local_of(value) if isinstance(value, DTensor) else value)


def holds_traced(value: object, depth: int = 4) -> bool:
    """Whether a Python object holds tensors of the trace, which have no values.

    Looks into containers, attributes, closures and generators up to `depth`; also finds tensors printed into a string.
    """
    if isinstance(value, Tensor):
        return is_traced(value)
    if isinstance(value, str):
        return "FakeTensor(" in value
    if depth == 0 or value is None or isinstance(value, type | ModuleType | nn.Module | optim.Optimizer | int | float):
        return False
    inside: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        inside += [one for entry in islice(cast("Mapping[Any, Any]", value).items(), MOST_ENTRIES) for one in entry]
    elif isinstance(value, Collection) and not hasattr(value, "__array__"):  # arrays of numpy hold no tensors
        inside += islice(cast("Collection[Any]", value), MOST_ENTRIES)
    elif isinstance(value, FunctionType):
        inside += [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, GeneratorType):
        inside += [*value.gi_frame.f_locals.values()] if value.gi_frame is not None else []
    return any(holds_traced(one, depth - 1) for one in inside)
