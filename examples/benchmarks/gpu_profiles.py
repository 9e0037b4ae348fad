"""Parts of gpu.py: how long the device idles between islands, beside one Inductor graph."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gpu_setting import RANKS, Row, Setting, alone, cast_to, config_of, median_ms
from loopback import Wire, loopback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from workload import LanguageModel, make_batch

import zgraph


class LlamaLayer(nn.Module):
    """One decoder layer with the shapes of Llama 3 8B: grouped attention, gated feed-forward, RMS norms."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> a scalar to start backward from."""
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.head).transpose(1, 2)
        k, v = (one(h).view(batch, length, self.kv_heads, self.head).transpose(1, 2) for one in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x.float().square().mean()


def run_profile_gpt(setting: Setting) -> Iterator[Row]:
    config = config_of(setting, vocabulary=50304, width=768, layers=12, heads=12, sequence=1024, batch=8)
    yield from _profiles(setting, lambda: LanguageModel(config), make_batch(config, 0, 0).to(setting.device))


def run_profile_llama(setting: Setting) -> Iterator[Row]:
    width, heads, kv_heads, inner, length = (32, 4, 2, 48, 8) if setting.tiny else (4096, 32, 8, 14336, 4096)
    torch.manual_seed(0)
    x = torch.randn(1, length, width, device=setting.device)
    yield from _profiles(setting, lambda: LlamaLayer(width, heads, kv_heads, inner), x)


def _profiles(setting: Setting, build: Callable[[], nn.Module], x: Tensor) -> Iterator[Row]:
    """One Inductor graph, and zgraph's islands: on one rank, and as one of eight whose collectives take no time."""
    dtype = torch.bfloat16 if setting.on_cuda else None
    torch.manual_seed(0)
    plain = build().to(setting.device)
    lowering = setting.lowerings[-1]

    backend = "inductor" if lowering == "inductor" else "aot_eager"
    called = torch.compile(plain if dtype is None else cast_to(dtype, plain), backend=backend)
    yield {"what": f"one {backend} graph", **_profiled(setting, called, plain, x)}
    initial = copy.deepcopy(plain.state_dict())
    plain.zero_grad()
    for ranks in (1, RANKS):
        torch.compiler.reset()
        world = alone(setting) if ranks == 1 else loopback(ranks, Wire(backend="nccl", when="started", poisons=False))
        with world:
            mesh = init_device_mesh(setting.device.type, (ranks,), mesh_dim_names=("dp",))
            model = build().to(setting.device)
            model.load_state_dict(initial)
            model = zgraph.shard(model, mesh, param_dtype=dtype)
            called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
            figures = _profiled(setting, called, model, x)
            islands = zgraph.summary(model).islands
            yield {"what": f"zgraph, {ranks} ranks, {lowering}", "islands": islands, **figures}
            del model, called


def _profiled(setting: Setting, called: Callable[..., Tensor], model: nn.Module, x: Tensor) -> Row:
    """Milliseconds of a step: in all, of kernels, and of the gaps between these."""

    def step() -> None:
        called(x).backward()
        model.zero_grad()

    for _ in range(2):
        step()
    row: Row = {"step ms": round(median_ms(setting, step), 3)}
    if not setting.on_cuda:
        return row
    from torch.profiler import ProfilerActivity, profile

    steps = 3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return row | {key: round(value / steps, 3) for key, value in gaps_of(_kernel_spans(taken)).items()}


def _kernel_spans(taken: Any) -> list[tuple[float, float]]:
    """Begin and end, in microseconds, of what ran on the device."""
    events = [event for event in taken.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((event.time_range.start, event.time_range.end) for event in events)


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
