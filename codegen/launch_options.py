"""How a kernel is launched: how many groups a program takes, and with how many warps."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.triton_source import stripes_of
from zgraph.compression import BlockMethod

WARP = 32  # threads
ROUNDS = 7  # of trying every option in turn


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Changes the speed of a kernel, and none of its results.

    Attributes:
        warps: of a program.
        blocks_per_thread: places of a stripe that a thread takes: 1 lets it keep all elements in registers.
    """

    warps: int = 1
    blocks_per_thread: int = 1

    def arguments(self, method: BlockMethod) -> dict[str, int]:
        """Of the function that starts the kernel."""
        places = method.group // stripes_of(method)
        groups = max(1, WARP * self.warps * self.blocks_per_thread // places)
        return {"GROUPS": groups, "num_warps": self.warps}


OPTIONS = tuple(LaunchOptions(warps=warps) for warps in (1, 2, 4, 8))


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel runs on a device, rather than in Triton's interpreter."""
    return isinstance(kernel, importlib.import_module("triton").JITFunction)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: Triton launches there, whichever holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def drawn(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[numel] normal numbers to try a kernel on, from a generator of their own: the user's would go on elsewhere."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(numel, device=device, generator=generator).to(dtype)


def fastest(run: Callable[[LaunchOptions], None], device: torch.device) -> LaunchOptions:
    """The options with which a kernel runs fastest, by the median of a few rounds."""
    times: dict[LaunchOptions, list[float]] = {options: [] for options in OPTIONS}
    with on_device(device):
        for options in OPTIONS:
            run(options)  # compiles
        for _ in range(ROUNDS):
            for options in OPTIONS:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run(options)
                end.record()
                end.synchronize()
                times[options].append(begin.elapsed_time(end))
    return min(OPTIONS, key=lambda options: statistics.median(times[options]) if times[options] else math.inf)
