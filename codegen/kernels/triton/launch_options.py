"""Launch options of a kernel: how many groups a program processes, and with how many warps."""

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
    """Options that change the speed of a kernel, but not its results.

    Attributes:
        warps: warps of a program; each thread processes a block of 32 elements.
        compile_only: compile the kernel without running it.
    """

    warps: int = 1
    compile_only: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def groups_at_once(self, method: BlockMethod) -> int:
        """Number of groups that a program processes."""
        return self.threads * stripes_of(method) // method.group

    def arguments(self) -> dict[str, int]:
        """Arguments of the kernel."""
        return {"THREADS": self.threads, "num_warps": self.warps}


# Threads do not wait for one another, so the number of warps hardly matters; each option is compiled.
OPTIONS = tuple(LaunchOptions(warps=warps) for warps in (1, 4))


def load(module: str, name: str = "") -> Any:
    """The kernel `name` (default: `module`) from `module`, imported only now: machines without GPU may lack Triton."""
    return getattr(importlib.import_module(f"zgraph.codegen.kernels.triton.{module}_kernel"), name or module)


def start(
    kernel: Any, grid: tuple[int, ...], options: LaunchOptions, case: BlockConstants, *args: Any, contracts: bool
) -> None:
    """Launch a kernel, or only compile it.

    Args:
        kernel: Triton kernel.
        grid: number of programs along each axis.
        options: launch options.
        case: constants that the kernel is compiled for.
        args: arguments before the constants.
        contracts: whether multiplications may be contracted with additions.
    """
    more = {"CASE": case, **options.arguments(), "enable_fp_fusion": contracts}
    if options.compile_only:
        kernel.warmup(*args, grid=grid, **more)
    else:
        kernel[grid](*args, **more)


def compile_all(run: Callable[[LaunchOptions], None]) -> None:
    """Compile a kernel with all options in parallel, in threads: most of the work is done outside of Python."""
    triton: Any = importlib.import_module("triton")
    with ThreadPoolExecutor(len(OPTIONS)) as pool, triton.AsyncCompileMode(pool):
        for options in OPTIONS:
            run(replace(options, compile_only=True))


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel runs on a device, rather than in Triton's interpreter."""
    return isinstance(kernel, importlib.import_module("triton").JITFunction)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches on the current GPU, regardless of the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def drawn(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal random numbers [numel] to try a kernel on; they do not change the state of the user's generator."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(numel, device=device, generator=generator).to(dtype)


def fastest(run: Callable[[LaunchOptions], None], device: torch.device) -> LaunchOptions:
    """The options with which a kernel runs fastest, by the median of a few rounds.

    A launch takes the host longer than the kernel takes the device, so the host gets a head start of `AHEAD_CYCLES`:
    the time between two events then consists of kernels only, without waits for the host.
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
