"""How a kernel is launched: how many groups a program takes, and with how many warps."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.triton.source import stripes_of
from zgraph.compression.methods import BlockMethod

WARP = 32  # threads
ROUNDS = 7  # of trying every option in turn


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Changes the speed of a kernel, and none of its results.

    Attributes:
        warps: of a program; each thread takes a block of 32 elements.
        compile_only: the kernel is compiled, and does not run.
    """

    warps: int = 1
    compile_only: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def groups_at_once(self, method: BlockMethod) -> int:
        """Groups of a program."""
        return self.threads * stripes_of(method) // method.group

    def arguments(self) -> dict[str, int]:
        """Arguments of the kernel."""
        return {"THREADS": self.threads, "num_warps": self.warps}


# Threads do not wait for one another, so that the number of warps hardly matters; each is compiled.
OPTIONS = tuple(LaunchOptions(warps=warps) for warps in (1, 4))


def start(kernel: Any, grid: tuple[int, ...], options: LaunchOptions, *args: Any, contracts: bool) -> None:
    """Launch a kernel, or only compile it.

    Args:
        kernel: of Triton.
        grid: its programs.
        options: how.
        args: those before the options' own.
        contracts: whether multiplications may be contracted with additions.
    """
    more = {**options.arguments(), "enable_fp_fusion": contracts}
    if options.compile_only:
        kernel.warmup(*args, grid=grid, **more)
    else:
        kernel[grid](*args, **more)


def compile_all(run: Callable[[LaunchOptions], None]) -> None:
    """Compile a kernel with all options, side by side: most of it is done outside Python."""
    triton: Any = importlib.import_module("triton")
    with ThreadPoolExecutor(len(OPTIONS)) as pool, triton.AsyncCompileMode(pool):
        for options in OPTIONS:
            run(replace(options, compile_only=True))


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
        compile_all(run)
        for options in OPTIONS:
            run(options)
        for _ in range(ROUNDS):
            for options in OPTIONS:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run(options)
                end.record()
                end.synchronize()
                times[options].append(begin.elapsed_time(end))
    return min(OPTIONS, key=lambda options: statistics.median(times[options]) if times[options] else math.inf)
