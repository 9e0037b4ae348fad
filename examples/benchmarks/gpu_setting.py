"""What the parts of gpu.py share: where they run, groups of one rank, sizes, and timing on a busy device."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import LanguageModel, ModelConfig

Row = dict[str, Any]
RANKS = 8  # of a loopback group
SLEEP_CYCLES = 20_000_000  # about 10 ms of a GPU: the host is ahead of it for as long


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        device: cuda or cpu.
        dry: with toy sizes.
        scratch: folder of its own.
    """

    device: torch.device
    dry: bool
    scratch: Path

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def lowerings(self) -> tuple[str, ...]:
        """On CPU Inductor needs a minute for each model."""
        return ("fx",) if self.dry else ("fx", "inductor")

    @property
    def backend(self) -> str:
        """Of groups of one rank."""
        return "nccl" if self.on_cuda else "gloo"

    @property
    def compiler(self) -> str:
        """Of peers, as torch.compile names it: what zgraph's last lowering uses."""
        return "aot_eager" if self.dry else "inductor"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()


@contextlib.contextmanager
def alone(setting: Setting, **options: Any) -> Generator[None]:
    """This process as the only rank."""
    dist.init_process_group(setting.backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def repeatable() -> Generator[None]:
    """Attention as plain products: other kernels add what they have split in the order in which it comes."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def config_of(setting: Setting, **sizes: int) -> ModelConfig:
    if setting.dry:
        return ModelConfig(vocabulary=32, width=16, layers=1, heads=2, sequence=8, batch=2)
    return ModelConfig(**sizes)


def built(setting: Setting, config: ModelConfig) -> LanguageModel:
    """The same weights each time, in fp32, on the device; what was compiled before is forgotten."""
    torch.compiler.reset()
    torch.manual_seed(0)
    return LanguageModel(config).to(setting.device)


def cast_to(dtype: torch.dtype | None, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model as it computes with parameters and inputs of that dtype."""
    if dtype is None:
        return model

    def called(x: Tensor) -> Tensor:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return functional_call(model, cast, (x.to(dtype) if x.is_floating_point() else x,))

    return called


def local(tensor: Tensor) -> Tensor:
    """A copy on the host of what this rank has of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def differing(one: Iterable[Tensor], other: Iterable[Tensor]) -> int:
    """How many tensors of two equally long lists differ in a bit; NaNs equal those of the same bits."""
    pairs = zip(map(_bytes, one), map(_bytes, other), strict=True)
    return sum(not torch.equal(left, right) for left, right in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return local(tensor).contiguous().view(-1).view(torch.uint8)


def same_bits(what: str, one: Sequence[Tensor], other: Sequence[Tensor], **figures: Any) -> Row:
    """A row that holds if two runs have left the same."""
    wrong = differing(one, other)
    return {"what": what, "tensors": len(one), "that differ": wrong, **figures, "ok": not wrong and bool(one)}


def attempt(what: str, run: Callable[[], Row]) -> Row:
    """A row, also where it cannot be had: the next one may."""
    try:
        return {"what": what, **run()}
    except Exception as error:
        return {"what": what, "said": f"{type(error).__name__}: {str(error)[-600:]}", "ok": False}


def requested_mib(setting: Setting) -> float:
    """MiB that tensors ask for on the GPU."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"] / 2**20 if setting.on_cuda else 0.0


def peak_of(setting: Setting, step: Callable[[], object]) -> dict[str, float]:
    """How far a step rises above what is there before, in MiB asked for and reserved; nothing on a CPU."""
    if not setting.on_cuda:
        step()
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    rise = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"]
    return {
        "held MiB": round(before["requested_bytes.all.current"] / 2**20, 1),
        "rise MiB": round(rise / 2**20, 1),
        "reserved MiB": round(after["reserved_bytes.all.peak"] / 2**20, 1),
    }


def host_mib() -> dict[str, float]:
    """What torch's allocator of pinned memory holds, and of it what was asked for; empty where it does not say."""
    ask = getattr(torch.cuda, "host_memory_stats", None)
    stats: Mapping[str, int] = ask() if ask is not None and torch.cuda.is_available() else {}
    names = {"pinned MiB": "allocated_bytes.current", "pinned in use MiB": "active_bytes.current"}
    return {name: round(stats[key] / 2**20, 1) for name, key in names.items() if key in stats}


# --- time -----------------------------------------------------------------------------------------------------------


def span_ms(setting: Setting, run: Callable[[], object]) -> float:
    """Milliseconds of the device from the first operator of a run to the end of its last one."""
    if not setting.on_cuda:
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def launches_ms(setting: Setting, calls: Sequence[Callable[[], object]], launches: int = 10) -> float:
    """Milliseconds of one of these calls, which take turns, while the host is ahead of the device."""

    def run() -> None:
        for number in range(launches):
            calls[number % len(calls)]()

    calls[0]()
    setting.synchronize()
    if setting.on_cuda:
        torch.cuda._sleep(SLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]
    return span_ms(setting, run) / launches


def host_us(setting: Setting, call: Callable[[], object], calls: int = 10) -> float:
    """Microseconds of the host that a call takes before it returns."""
    setting.synchronize()
    if setting.on_cuda:
        torch.cuda._sleep(SLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]
    started = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - started
    setting.synchronize()
    return 1e6 * spent / calls


def steps_ms(setting: Setting, step: Callable[[], object], steps: int = 5) -> float:
    """Milliseconds of a step among others, each of which begins while the device is busy with the one before."""

    def run() -> None:
        for _ in range(1 if setting.dry else steps):
            step()

    return span_ms(setting, run) / (1 if setting.dry else steps)


def lone_ms(setting: Setting, step: Callable[[], object], repeats: int = 7) -> float:
    """Median milliseconds of a step that begins and ends with an idle device."""
    found: list[float] = []
    for _ in range(2 if setting.dry else repeats):
        setting.synchronize()
        started = time.perf_counter()
        step()
        setting.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found)


def quartiles(times: Sequence[float]) -> Row:
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"ms": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def interleaved(setting: Setting, steps: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, list[float]]:
    """Milliseconds of a step of each contender, who take turns, after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(2 if setting.dry else rounds + 1):
        for name, step in steps.items():
            spent = steps_ms(setting, step)
            if round_number:
                found[name].append(spent)
    return found


# --- what a profiler saw ----------------------------------------------------------------------------------------------


def profiled(setting: Setting, step: Callable[[], object], steps: int = 3) -> Row:
    """Of a step: kernels, how long any runs, and how long none does in between."""
    if not setting.on_cuda:
        return {}
    from torch.profiler import ProfilerActivity, profile

    step()
    setting.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        for _ in range(steps):
            step()
        setting.synchronize()
    return {key: round(value / steps, 3) for key, value in gaps_of(kernel_spans(taken.events() or [])).items()}


def kernel_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Begin and end, in microseconds, of what ran on the device.

    Annotations of users span it as well, and Inductor's call of a graph is one: gaps within would vanish.
    """
    on_device = (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA)
    kernels = (event for event in on_device if not getattr(event, "is_user_annotation", False))
    return sorted((event.time_range.start, event.time_range.end) for event in kernels)


def gaps_of(spans: list[tuple[float, float]]) -> Mapping[str, float]:
    """From sorted [(begin, end)] in microseconds: how many, how long anything runs, and how long nothing does."""
    busy = gaps = 0.0
    wide = 0
    end = -math.inf
    for begin, finish in spans:
        if begin > end:
            if end > -math.inf:
                gaps += begin - end
                wide += begin - end > 5
            busy += finish - begin
        else:
            busy += max(0.0, finish - end)
        end = max(end, finish)
    return {"kernels": len(spans), "busy ms": busy / 1e3, "gaps ms": gaps / 1e3, "gaps above 5 us": wide}
