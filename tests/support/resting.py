"""Where parameters and optimizer state rest: settings for tables of tests, and a judge that asks the tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn, optim

import zgraph
from tests.support.memory.live_tensors import local
from zgraph.analysis.hardware import Link
from zgraph.sharding.scope import state_of

HOST = zgraph.Offload(params="host", optimizer="host")
STATE = zgraph.Offload(optimizer="host")
STREAMED = zgraph.Offload(params="host", optimizer="host", update="device")
SHARDS = zgraph.Offload(params="host")
DISK = zgraph.Offload(params="disk", optimizer="disk", path="given by `under`")
MIXED = zgraph.Offload(params="host", optimizer="disk", path="given by `under`")


def under(folder: Path, at_rest: zgraph.Offload | None) -> zgraph.Offload | None:
    """The same with a new folder in this one, if anything rests on disk."""
    return at_rest if at_rest is None or at_rest.path is None else replace(at_rest, path=folder / "rests")


def machine(copies: float, updates: float, *, gpu: bool = True) -> zgraph.Hardware:
    """With links to the host, and updates there, of so many bytes per microsecond, and fast in everything else."""
    link = Link(latency_us=1.0, bytes_per_us=copies)
    links: dict[str, Any] = {"host_to_device": link, "device_to_host": link}
    h100 = zgraph.Hardware.preset("h100")
    return replace(h100, backend="nccl" if gpu else "gloo", host_memory_bytes_per_us=updates, **links)


def check_rests(model: nn.Module, optimizers: Iterable[optim.Optimizer]) -> None:
    """Assert that each parameter, and all state of a parameter's shape, lies where the model's options say."""
    state = state_of(model)
    assert state is not None and state.scope.resting is not None
    resting, options = state.scope.resting, state.scope.resting.options

    def spaces(tensors: Iterable[object]) -> set[str]:
        parts = [local(one) for one in tensors if isinstance(one, Tensor) and one.ndim]
        return {resting.space_of(part).name for part in parts if part.numel()}

    entries = [value for one in optimizers for kept in one.state.values() for value in kept.values()]
    assert spaces(model.parameters()) == {str(options.params or "device")}
    assert spaces(entries) in ({str(options.optimizer or "device")}, set())
