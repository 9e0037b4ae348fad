"""Part of gpu.py: a step of GPT-2 small, head not tied, and of a Llama 3 8B layer, beside torch.compile and FSDP2."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from builders import cast_to
from gpu_setting import (
    Row,
    Setting,
    Step,
    attempt,
    by_fsdp2,
    by_torch,
    interleaved,
    launches_ms,
    lone_ms,
    looped,
    peak_of,
    profiled,
    whole_zgraph,
)
from record import quartiles
from torch import Tensor, nn

import zgraph

MOST_VARIANTS = 64  # contenders compile the same code


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


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of the model.
        model: on the device, in fp32; each contender trains a copy.
        inputs: of every step.
        tokens: in them.
        attention_flops: of a forward, the part that is not products with weights.
        parts: modules that FSDP2 shards and compiles one by one; none: the model is compiled whole.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    tokens: int
    attention_flops: float
    parts: Callable[[Any], list[nn.Module]]

    @property
    def flops(self) -> float:
        """Of a step: six for each weight that is multiplied and token, and attention three times."""
        looked_up = sum(part.weight.numel() for part in self.model.modules() if isinstance(part, nn.Embedding))
        weights = sum(one.numel() for one in self.model.parameters() if one.ndim > 1) - looked_up
        return 6.0 * weights * self.tokens + 3 * self.attention_flops


def _gpt(setting: Setting) -> Task:
    config = setting.config(vocabulary=50304, width=768, layers=12, heads=12, sequence=1024, batch=8)
    tokens = config.batch * config.sequence
    flops = 4.0 * config.layers * tokens * config.sequence * config.width / 2  # causal
    model, inputs = setting.model(config), setting.tokens(config)
    return Task("GPT-2 small", model, inputs, tokens, flops, lambda model: [*model.blocks])


def _llama(setting: Setting) -> Task:
    width, heads, kv_heads, inner, length = (32, 4, 2, 48, 8) if setting.dry else (4096, 32, 8, 14336, 4096)
    torch.manual_seed(0)
    model = LlamaLayer(width, heads, kv_heads, inner).to(setting.device)
    x = torch.randn(1, length, width, device=setting.device)
    return Task("a layer of Llama 3 8B", model, x, length, 4.0 * length * length * width / 2, lambda model: [])


@dataclass
class Contenders:
    """Steps by name, ready to be timed, and what the measured peak of products is."""

    setting: Setting
    task: Task
    peak_flops: float
    steps: dict[str, Step] = field(default_factory=dict[str, Step])

    def add(self, name: str, build: Callable[[Setting, Task, Any], Step]) -> Row:
        """A row of its compile, and of a step alone."""
        started = time.perf_counter()
        step = build(self.setting, self.task, copy.deepcopy(self.task.model))
        for _ in range(5):  # a CUDA graph is recorded in the fourth
            step()
        self.setting.synchronize()
        row: Row = {"first steps s": round(time.perf_counter() - started, 1)}
        row |= {"alone ms": round(lone_ms(self.setting, step), 3)} | peak_of(self.setting, step)
        self.steps[name] = step
        return row | profiled(self.setting, step)

    def compared(self) -> Iterator[Row]:
        """Rows of steps that begin while the one before still runs; contenders take turns."""
        for name, times in interleaved(self.setting, self.steps, rounds=5).items():
            low, ms, high = quartiles(times)
            yield {
                "what": f"{self.task.name}, {name}, in turns",
                "ms": round(ms, 3),
                "quartiles": [round(low, 3), round(high, 3)],
                "tokens/s": round(1e3 * self.task.tokens / ms),
                "share of the product's FLOP/s": round(1e3 * self.task.flops / ms / self.peak_flops, 3),
            }


def gpt_steps(setting: Setting) -> Iterator[Row]:
    """Forward, backward and AdamW of GPT-2 small."""
    yield from _steps(setting, _gpt)


def llama_steps(setting: Setting) -> Iterator[Row]:
    """The same of a layer of Llama 3 8B."""
    yield from _steps(setting, _llama)


def _steps(setting: Setting, task_of: Callable[[Setting], Task]) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = MOST_VARIANTS  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    size = 64 if setting.dry else 8192
    product = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    peak_flops = 1e3 * 2 * size**3 / launches_ms(setting, lambda: product @ product, launches=20)
    with setting.alone():
        task = task_of(setting)
        found = Contenders(setting, task, peak_flops)
        for name, build in WAYS.items():
            row = attempt(f"{task.name}, {name}", found.add, name, build)
            yield row if name.startswith("zgraph") else row | {"ok": None}  # a peer's
        yield from found.compared()


# --- contenders -------------------------------------------------------------------------------------------------------


def _reduce_overhead(setting: Setting, task: Task, model: nn.Module) -> Step:
    called: Any = cast_to(setting.dtype, model)
    step = looped(torch.compile(called, mode="reduce-overhead") if setting.on_cuda else called, model, task.inputs)

    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step()

    return marked


def _zgraph(setting: Setting, task: Task, model: nn.Module) -> Step:
    model = zgraph.shard(model, setting.mesh(), param_dtype=setting.dtype)
    called: Any = torch.compile(model, backend="zgraph", options={"lowering": setting.lowerings[-1]})
    return looped(called, model, task.inputs)


def _recorded(setting: Setting, task: Task, model: nn.Module) -> Step:
    return whole_zgraph(setting, model, task.inputs, {"cuda_graph": True} if setting.on_cuda else {})


WAYS: dict[str, Callable[[Setting, Task, Any], Step]] = {
    "torch.compile": lambda setting, task, model: by_torch(setting, model, task.inputs),
    "zgraph": _zgraph,
    "zgraph, whole step": lambda setting, task, model: whole_zgraph(setting, model, task.inputs, {}),
    "FSDP2, compiled blocks": lambda setting, task, model: by_fsdp2(setting, model, task.parts(model), task.inputs),
    "zgraph, whole step as a CUDA graph": _recorded,
    'torch.compile, mode="reduce-overhead"': _reduce_overhead,
}
