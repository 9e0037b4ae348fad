"""What the parts of gpu.py share: where they run, one-rank groups, sizes and timing."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from workload import ModelConfig

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
RANKS = 8  # of a loopback group


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        device: cuda or cpu.
        tiny: with toy sizes.
        out: directory that it may write to.
    """

    device: torch.device
    tiny: bool
    out: Path

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def lowerings(self) -> tuple[str, ...]:
        """On CPU Inductor needs a minute for each model."""
        return ("fx",) if self.tiny else ("fx", "inductor")


@dataclass(frozen=True)
class Part:
    """What `--list` says of it, and what runs."""

    about: str
    run: Callable[[Setting], Iterator[Row]]


@contextlib.contextmanager
def alone(setting: Setting, **options: Any) -> Generator[None]:
    """This process as the only rank."""
    backend = "nccl" if setting.on_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def config_of(setting: Setting, **sizes: int) -> ModelConfig:
    if setting.tiny:
        return ModelConfig(vocabulary=32, width=16, layers=1, heads=2, sequence=8, batch=2)
    return ModelConfig(**sizes)


def cast_to(dtype: torch.dtype, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model as it computes with parameters and inputs of that dtype."""

    def called(x: Tensor) -> Tensor:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return functional_call(model, cast, (x.to(dtype) if x.is_floating_point() else x,))

    return called


def median_ms(setting: Setting, step: Callable[[], object], repeats: int | None = None) -> float:
    found: list[float] = []
    for _ in range(repeats or (3 if setting.tiny else 15)):
        started = time.perf_counter()
        step()
        if setting.on_cuda:
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found[1:])
