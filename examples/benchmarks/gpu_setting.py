"""What the parts of gpu.py share: where they run, what they build from, and timing on a busy device."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.nn.functional as F
from builders import adamw, cast_to, plain_step, shard_fully, whole_step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import LanguageModel, ModelConfig, make_batch

import zgraph

Row = dict[str, Any]
Step = Callable[[], object]
RANKS = 8  # of a loopback group
SLEEP_CYCLES = 20_000_000  # about 10 ms of a GPU: the host is ahead of it for as long


@dataclass(frozen=True)
class Setting:
    """Where a part runs: on the device, with toy sizes where it is `dry`, and with a scratch folder of its own."""

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
    def compiler(self) -> str:
        """Of peers, as torch.compile names it: what zgraph's last lowering uses."""
        return "aot_eager" if self.dry else "inductor"

    @property
    def dtype(self) -> torch.dtype | None:
        """In which models compute; None: as their parameters are."""
        return torch.bfloat16 if self.on_cuda else None

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """This process as the only rank."""
        return ranks.alone("nccl" if self.on_cuda else "gloo")

    def mesh(self, world: int = 1) -> DeviceMesh:
        return init_device_mesh(self.device.type, (world,), mesh_dim_names=("dp",))

    def config(self, **sizes: int) -> ModelConfig:
        toy = ModelConfig(vocabulary=32, width=16, layers=1, heads=2, sequence=8, batch=2)
        return toy if self.dry else ModelConfig(**sizes)

    def model(self, config: ModelConfig) -> LanguageModel:
        """The same weights each time, in fp32, on the device; what was compiled before is forgotten."""
        torch.compiler.reset()
        torch.manual_seed(0)
        return LanguageModel(config).to(self.device)

    def tokens(self, config: ModelConfig, step: int = 0) -> Tensor:
        return make_batch(config, step, 0).to(self.device)

    def calibrated(self, **options: Any) -> zgraph.Hardware:
        """This machine, measured once for all parts."""
        return zgraph.calibrate(cache=self.scratch.parent / "calibrated", **options)


class Dropping(nn.Module):
    """Layers with dropout, which draws from the device's generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x.square().mean()


# --- steps over the same inputs ---------------------------------------------------------------------------------------


def whole_zgraph(setting: Setting, model: nn.Module, x: Tensor, options: dict[str, Any], **of_shard: Any) -> Step:
    """A whole step by zgraph; the optimizer's state is made already."""
    model = zgraph.shard(model, setting.mesh(), param_dtype=setting.dtype, **of_shard)
    step = whole_step(model, adamw(model), {"lowering": setting.lowerings[-1], **options})
    step.function(x)
    return lambda: step(x)


def by_torch(setting: Setting, model: nn.Module, x: Tensor, optimizer: Any = None) -> Step:
    """By torch.compile."""
    called: Any = torch.compile(cast_to(setting.dtype, model), backend=setting.compiler)
    return looped(called, model, x, optimizer)


def by_fsdp2(setting: Setting, model: nn.Module, blocks: Sequence[nn.Module], x: Tensor, **options: Any) -> Step:
    """By FSDP2 with compiled blocks; without blocks the model is compiled whole."""
    if not blocks:
        model.compile(backend=setting.compiler)
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype)
    shard_fully(model, blocks, setting.compiler, mesh=setting.mesh(), mp_policy=policy, **options)
    return looped(model, model, x)


def looped(called: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, optimizer: Any = None) -> Step:
    step = plain_step(called, optimizer or adamw(model))
    return lambda: step(x)


# --- bits -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def repeatable() -> Generator[None]:
    """Attention as plain products: other kernels add what they have split in the order in which it comes."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def local(tensor: Tensor) -> Tensor:
    """A copy on the host of what this rank has of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def differing(one: Iterable[Tensor], other: Iterable[Tensor]) -> int:
    """How many tensors of two equally long lists differ in a bit; NaNs equal those of the same bits."""
    return sum(not torch.equal(_bytes(left), _bytes(right)) for left, right in zip(one, other, strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    return local(tensor).contiguous().view(-1).view(torch.uint8)


def same_bits(what: str, one: Sequence[Tensor], other: Sequence[Tensor], **figures: Any) -> Row:
    """A row that holds if two runs have left the same."""
    wrong = differing(one, other)
    return {"what": what, "tensors": len(one), "that differ": wrong, **figures, "ok": not wrong and bool(one)}


def attempt(what: str, run: Callable[..., Row], *given: Any, **options: Any) -> Row:
    """A row, also where it cannot be had: the next one may."""
    try:
        return {**run(*given, **options), "what": what}
    except Exception as error:
        return {"what": what, "said": f"{type(error).__name__}: {str(error)[-600:]}", "ok": False}


def peak_of(setting: Setting, step: Step) -> dict[str, float]:
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
    held = before["requested_bytes.all.current"]
    found = {"held MiB": held, "rise MiB": after["requested_bytes.all.peak"] - held}
    found["reserved MiB"] = after["reserved_bytes.all.peak"]
    return {name: round(value / 2**20, 1) for name, value in found.items()}


def host_mib() -> dict[str, float]:
    """What torch's allocator of pinned memory holds, and of it what was asked for; empty where it does not say."""
    ask = getattr(torch.cuda, "host_memory_stats", None)
    stats: Mapping[str, int] = ask() if ask is not None and torch.cuda.is_available() else {}
    names = {"pinned MiB": "allocated_bytes.current", "pinned in use MiB": "active_bytes.current"}
    return {name: round(stats[key] / 2**20, 1) for name, key in names.items() if key in stats}


# --- time -----------------------------------------------------------------------------------------------------------


def span_ms(setting: Setting, run: Step) -> float:
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


def launches_ms(setting: Setting, *calls: Step, launches: int = 10) -> float:
    """Milliseconds of one of these calls, which take turns, while the host is ahead of the device."""
    calls[0]()
    _sleep(setting)
    return span_ms(setting, lambda: [calls[number % len(calls)]() for number in range(launches)]) / launches


def host_us(setting: Setting, call: Step, calls: int = 10) -> float:
    """Microseconds of the host that a call takes before it returns."""
    _sleep(setting)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - started
    setting.synchronize()
    return 1e6 * spent / calls


def _sleep(setting: Setting) -> None:
    setting.synchronize()
    if setting.on_cuda:
        torch.cuda._sleep(SLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]


def steps_ms(setting: Setting, step: Step, steps: int = 5) -> float:
    """Milliseconds of a step among others, each of which begins while the device is busy with the one before."""
    count = 1 if setting.dry else steps
    return span_ms(setting, lambda: [step() for _ in range(count)]) / count


def lone_ms(setting: Setting, step: Step, repeats: int = 7) -> float:
    """Median milliseconds of a step that begins and ends with an idle device."""
    found: list[float] = []
    for _ in range(2 if setting.dry else repeats):
        setting.synchronize()
        started = time.perf_counter()
        step()
        setting.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found)


def interleaved(setting: Setting, steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step of each contender, who take turns, after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(2 if setting.dry else rounds + 1):
        for name, step in steps.items():
            found[name].append(steps_ms(setting, step))
    return {name: times[1:] for name, times in found.items()}


# --- what a profiler saw ----------------------------------------------------------------------------------------------


def profiled(setting: Setting, step: Step, steps: int = 3) -> Row:
    """Of a step: kernels, how long any runs, and how long none does in between."""
    if not setting.on_cuda:
        return {}
    events = _seen(setting, step, steps)
    return {key: round(value / steps, 3) for key, value in gaps_of(kernel_spans(events)).items()}


def lanes(setting: Setting, step: Step, steps: int = 2) -> Row:
    """Milliseconds of a step in which copies to the device run, copies to the host, both at once, and kernels."""
    if not setting.on_cuda:
        return {}
    events = _seen(setting, step, steps)
    to_device, to_host = (kernel_spans(one for one in events if way in one.name) for way in ("HtoD", "DtoH"))
    kernels = kernel_spans(one for one in events if "Memcpy" not in one.name and "Memset" not in one.name)
    into, out, either, rest = (
        gaps_of(sorted(spans))["busy ms"] / steps for spans in (to_device, to_host, to_device + to_host, kernels)
    )
    found = {"to device": into, "to host": out, "both ways at once": into + out - either, "kernels": rest}
    return {f"{name} ms": round(value, 2) for name, value in found.items()}


def _seen(setting: Setting, step: Step, steps: int) -> list[Any]:
    """Events of steps, after one that is not looked at."""
    from torch.profiler import ProfilerActivity, profile

    step()
    setting.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        for _ in range(steps):
            step()
        setting.synchronize()
    return list(taken.events() or [])


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
    wide, end = 0, spans[0][0] if spans else 0.0
    for begin, finish in spans:
        gap = max(0.0, begin - end)
        gaps, wide = gaps + gap, wide + (gap > 5)
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return {"kernels": len(spans), "busy ms": busy / 1e3, "gaps ms": gaps / 1e3, "gaps above 5 us": wide}
