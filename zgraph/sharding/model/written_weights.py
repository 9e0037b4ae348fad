"""Refuse writes of a forward to gathered parameters: gathered copies are discarded, and the parameter keeps its values.

In eager mode the tensors' version counters tell of writes: they are checked at the end of a unit for its parameters,
and at the end of the outermost forward for individual reads. `zgraph.sharding.written_in_graphs` checks graphs.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.torch_compat.dynamo import no_frames_inside
from zgraph.torch_compat.memory import version_of


class GatheredParameter(nn.Parameter):
    """A gathered parameter as a forward reads it; writes through its `.data` count like any other write."""

    parameter_name: str

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse(self.parameter_name)


def as_gathered(tensor: Tensor, name: str) -> Tensor:
    """Return an alias of a gathered parameter for forward to read; a subclass, such as a tracing one, is kept."""
    if type(tensor) is not Tensor:
        return tensor
    gathered = tensor.as_subclass(GatheredParameter)
    gathered.parameter_name = name
    return gathered


class Gathered:
    """Parameters that a forward has gathered so far: names, and tensors with their versions at that time."""

    @no_frames_inside
    def __init__(self) -> None:
        self.entries: list[tuple[str, Tensor, int]] = []

    @no_frames_inside
    def add(self, name: str, tensor: Tensor) -> None:
        self.entries.append((name, tensor, version_of(tensor)))

    @no_frames_inside
    def add_read(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that may be freed before the check: keep its version counter, not its memory."""
        with torch.no_grad():
            counted = tensor.detach()
            counted.data = tensor.new_empty(0)
        self.entries.append((name, counted, version_of(counted)))

    @no_frames_inside
    def check(self) -> None:
        """Check that no gathered parameter was written to.

        Raises:
            ZgraphError: a gathered parameter was written to; the message names it.
        """
        for name, tensor, version in self.entries:
            if version_of(tensor) != version:
                _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ZgraphError(written(name))


def written(name: str) -> str:
    """Return the error message for a forward that writes to a parameter."""
    return (
        f"zgraph: forward writes to {name}, of which it has a gathered copy: the write would be lost, or differ from "
        "rank to rank. Write to the parameter itself, outside forward and after the optimizer's step "
        f"(with torch.no_grad(): model.{name}.copy_(...)); or compute the changed weight in forward and leave the "
        "parameter as it is, as torch.nn.utils.parametrize does; or make it a buffer. In place of "
        "nn.Embedding(max_norm=...), clip what the embedding has returned."
    )
