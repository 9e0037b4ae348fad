"""Launch options of a Triton kernel, and the search for the fastest."""

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

from zgraph.codegen.kernels.triton.constants import BlockConstants, stripes_of
from zgraph.compression.methods import BlockMethod
from zgraph.torch_compat.memory import keep_busy

WARP = 32  # threads
ROUNDS = 5  # rounds of trying every option in turn
LAUNCHES = 4  # launches between two events
AHEAD_CYCLES = 4_000_000  # GPU cycles, 2 ms: longer than the host needs for these launches


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options that change the speed of a Triton kernel, but not its results.

    Attributes:
        warps: number of warps of a program; each thread processes a block of 32 elements.
        compile_only: compile the kernel without running it.
    """

    warps: int = 1
    compile_only: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def groups_at_once(self, method: BlockMethod) -> int:
        """Return the number of groups that a program processes."""
        return self.threads * stripes_of(method) // method.group

    def arguments(self) -> dict[str, int]:
        """Return the kernel arguments THREADS and num_warps."""
        return {"THREADS": self.threads, "num_warps": self.warps}


# Threads do not wait for one another, so the number of warps hardly matters; each option is compiled.
OPTIONS = tuple(LaunchOptions(warps=warps) for warps in (1, 4))


def load(module: str, name: str = "") -> Any:
    """Import a kernel's module when it is needed, because machines without a GPU may lack Triton; return the kernel.

    Args:
        module: name of the module, without "_kernel".
        name: name of the kernel; "": the same as `module`.
    """
    return getattr(importlib.import_module(f"zgraph.codegen.kernels.triton.{module}_kernel"), name or module)


def start(
    kernel: Any, grid: tuple[int, ...], options: LaunchOptions, case: BlockConstants, *args: Any, contracts: bool
) -> None:
    """Launch a kernel, or only compile it.

    Args:
        kernel: Triton kernel.
        grid: number of programs along each axis.
        options: launch options.
        case: compile-time constants.
        args: arguments before the constants.
        contracts: whether multiply-adds may be fused.
    """
    more = {"CASE": case, **options.arguments(), "enable_fp_fusion": contracts}
    if options.compile_only:
        kernel.warmup(*args, grid=grid, **more)
    else:
        kernel[grid](*args, **more)


def compile_all(run: Callable[[LaunchOptions], None]) -> None:
    """Compile a kernel with all candidate options in parallel threads."""
    triton: Any = importlib.import_module("triton")
    with ThreadPoolExecutor(len(OPTIONS)) as pool, triton.AsyncCompileMode(pool):
        for options in OPTIONS:
            run(replace(options, compile_only=True))


def is_compiled(kernel: Any) -> bool:
    """Return whether a kernel runs on a GPU rather than in Triton's interpreter."""
    return isinstance(kernel, importlib.import_module("triton").JITFunction)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current GPU, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def drawn(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal random numbers [numel] for timing; the global generator's state does not change."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(numel, device=device, generator=generator).to(dtype)


def fastest(run: Callable[[LaunchOptions], None], device: torch.device) -> LaunchOptions:
    """Return the options with which a kernel runs fastest, by the median of a few rounds.

    Before each round, the GPU is kept busy for `AHEAD_CYCLES`, so that the host has issued all launches when the first
    one starts. The measured time then has no waits for the host.
    """
    times: dict[LaunchOptions, list[float]] = {options: [] for options in OPTIONS}
    with on_device(device):
        compile_all(run)
        for options in OPTIONS:
            run(options)
        for _ in range(ROUNDS):
            for options in OPTIONS:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                keep_busy(AHEAD_CYCLES)
                begin.record()
                for _ in range(LAUNCHES):
                    run(options)
                end.record()
                end.synchronize()
                times[options].append(begin.elapsed_time(end))
    return min(OPTIONS, key=lambda options: statistics.median(times[options]) if times[options] else math.inf)
