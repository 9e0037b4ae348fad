"""Writes to what a forward has gathered: the copy is thrown away, and the parameter stays as it was. They are refused.

In eager mode by the version that torch counts up with each write: at the end of a unit for what it has gathered, at the
end of the outermost forward for what a single read has gathered. `zgraph.sharding.written_in_graphs` looks at graphs.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.torch_compat.dynamo import no_frames_inside
from zgraph.torch_compat.memory import version_of


class GatheredParameter(nn.Parameter):
    """A gathered parameter as a forward reads it, whose `.data` counts writes as they are counted elsewhere."""

    parameter_name: str

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse(self.parameter_name)


def as_gathered(tensor: Tensor, name: str) -> Tensor:
    """An alias of a gathered parameter for a forward to read; a subclass, such as one that traces, stays as it is."""
    if type(tensor) is not Tensor:
        return tensor
    gathered = tensor.as_subclass(GatheredParameter)
    gathered.parameter_name = name
    return gathered


class Gathered:
    """What a forward has gathered so far: names, and tensors with the versions that they had."""

    @no_frames_inside
    def __init__(self) -> None:
        self.entries: list[tuple[str, Tensor, int]] = []

    @no_frames_inside
    def add(self, name: str, tensor: Tensor) -> None:
        self.entries.append((name, tensor, version_of(tensor)))

    @no_frames_inside
    def add_read(self, name: str, tensor: Tensor) -> None:
        """As `add`, of something that may be gone by then: its version is kept, its memory is not."""
        with torch.no_grad():
            counted = tensor.detach()
            counted.data = tensor.new_empty(0)
        self.entries.append((name, counted, version_of(counted)))

    @no_frames_inside
    def check(self) -> None:
        """Check that nothing was written to.

        Raises:
            ZgraphError: something was; names the parameter.
        """
        for name, tensor, version in self.entries:
            if version_of(tensor) != version:
                _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ZgraphError(written(name))


def written(name: str) -> str:
    """What an error says of a forward that writes to a parameter."""
    return (
        f"zgraph: forward writes to {name}, of which it has a gathered copy: the write would be lost, or differ from "
        "rank to rank. Write to the parameter itself, outside of forward and after the optimizer's step "
        f"(with torch.no_grad(): model.{name}.copy_(...)); or compute the changed weight in forward and leave the "
        "parameter as it is, as torch.nn.utils.parametrize does; or make it a buffer. In place of "
        "nn.Embedding(max_norm=...), clip what the embedding has returned."
    )
