"""Refuse forwards that write to gathered parameters: the parameters themselves would not change.

In eager mode, writes are detected by version counters. They are compared at the end of a unit's forward; for parameters
gathered individually, at the end of the outermost forward. For graphs see `zgraph.driver.written_in_graphs`.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.torch_compat.dynamo import no_frames_inside
from zgraph.torch_compat.memory import version_of


class GatheredParameter(nn.Parameter):
    """Type of gathered parameters in forward; refuses assignments to `.data`, which change no version counter."""

    parameter_name: str

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse(self.parameter_name)


def as_gathered(tensor: Tensor, name: str) -> Tensor:
    """Return a gathered parameter as a `GatheredParameter`; tensors of other subclasses are returned unchanged."""
    if type(tensor) is not Tensor:
        return tensor
    gathered = tensor.as_subclass(GatheredParameter)
    gathered.parameter_name = name
    return gathered


class Gathered:
    """Names and tensors of the parameters that a forward has gathered, with their version counters at that time."""

    @no_frames_inside
    def __init__(self) -> None:
        self.entries: list[tuple[str, Tensor, int]] = []

    @no_frames_inside
    def add(self, name: str, tensor: Tensor) -> None:
        self.entries.append((name, tensor, version_of(tensor)))

    @no_frames_inside
    def add_read(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that may be freed before the check, by keeping its version counter but not its memory."""
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
