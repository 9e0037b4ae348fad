"""Parts of gpu.py: the README's script beside plain PyTorch, and whole steps as CUDA graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_setting import (
    Row,
    Setting,
    alone,
    attempt,
    built,
    cast_to,
    config_of,
    local,
    peak_of,
    repeatable,
    same_bits,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from workload import ModelConfig, make_batch

import zgraph

STEPS = 5
FIRST, LATER = 1e-6, 1e-3  # by how much losses in fp32 may be off: Adam steps by the sign of gradients near 0


@dataclass(frozen=True)
class Precision:
    """How a model is trained; `first` and `later`: by how much its losses may be off plain PyTorch's, relative."""

    name: str
    first: float
    later: float
    param_dtype: torch.dtype | None = None
    autocast: bool = False
    scales: bool = False


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    weights: list[Tensor]
    figures: Row


FP32 = Precision("fp32", FIRST, LATER)
BF16 = Precision("bf16", 2e-2, 2e-2, torch.bfloat16)
PRECISIONS = {
    "fx": (
        *(FP32, BF16, Precision("autocast", 2e-2, 2e-2, autocast=True)),
        Precision("fp16 with a scaler", 2e-2, 2e-2, torch.float16, scales=True),
    ),
    "inductor": (FP32, BF16),
}


def train_bits(setting: Setting) -> Iterator[Row]:
    """The script of the README, against the same steps in plain PyTorch, which first repeats itself."""
    config = config_of(setting, vocabulary=8192, width=512, layers=4, heads=8, sequence=256, batch=8)
    plain: dict[str, Trained] = {}
    with alone(setting), repeatable():
        for lowering in setting.lowerings:
            for precision in PRECISIONS[lowering]:
                if precision.name not in plain:
                    plain[precision.name] = _trained(setting, config, precision, None)
                    again = _trained(setting, config, precision, None)
                    what = f"control: plain PyTorch twice, {precision.name}"
                    yield same_bits(what, again.weights, plain[precision.name].weights)
                expected = plain[precision.name]
                yield attempt(
                    f"{precision.name}, {lowering}",
                    lambda p=precision, by=lowering, e=expected: _compared(p, _trained(setting, config, p, by), e),
                )


def _compared(precision: Precision, found: Trained, expected: Trained) -> Row:
    off = [float(abs(one / other - 1)) for one, other in zip(found.losses, expected.losses, strict=True)]
    same = all(map(torch.equal, found.weights, expected.weights))
    held = off[0] <= precision.first and max(off) <= precision.later
    return {"first loss off by": f"{off[0]:.1e}", "all": f"{max(off):.1e}", "same bits": same, **found.figures} | {
        "ok": held
    }


def _trained(setting: Setting, config: ModelConfig, precision: Precision, lowering: str | None) -> Trained:
    """Some steps by zgraph, or for None by plain PyTorch."""
    model: nn.Module = built(setting, config)
    called: Callable[..., Tensor] = cast_to(precision.param_dtype, model)
    if lowering is not None:
        mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
        model = zgraph.shard(model, mesh, param_dtype=precision.param_dtype)
        called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    kind = zgraph.GradScaler if lowering else torch.amp.GradScaler
    scaler = kind(setting.device.type, 2.0**10, enabled=precision.scales)
    losses: list[Tensor] = []
    figures: Row = {}

    def forward_backward(tokens: Tensor) -> None:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=precision.autocast):
            loss = called(tokens)
        scaler.scale(loss).backward()
        losses.append(local(loss))

    for step in range(STEPS):
        tokens = make_batch(config, step, 0).to(setting.device)
        figures = peak_of(setting, lambda tokens=tokens: forward_backward(tokens))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if lowering is not None:
        peaks = [graph.peak.bytes for graph in zgraph.explain(model).graphs if graph.peak is not None]
        figures |= {
            "predicted MiB": round(max(peaks, default=0) / 2**20, 1),
            "islands": zgraph.summary(model).islands,
        }
    return Trained(losses, [local(parameter) for parameter in model.parameters()], figures if lowering else {})


# --- CUDA graphs ----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Layers with dropout, which draws from the GPU's generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x.square().mean()


def graph_bits(setting: Setting) -> Iterator[Row]:
    """Eight steps; eight with another learning rate; eight with optimizer state that was loaded."""
    with alone(setting), repeatable():
        for lowering in setting.lowerings:
            expected, _ = _graphed(setting, lowering, recorded=False)
            found, said = _graphed(setting, lowering, recorded=setting.on_cuda)
            names = ("dropout", "another learning rate", "loaded state")
            for name, one, other in zip(names, found, expected, strict=True):
                yield same_bits(f"{lowering}, as a CUDA graph: {name}", one, other)
            # A step that cannot be recorded runs on without.
            yield {"what": f"{lowering}, recorded without a warning", "said": said or None, "ok": not said}


def _graphed(setting: Setting, lowering: str, *, recorded: bool) -> tuple[list[list[Tensor]], str]:
    """What each eight steps leave, losses first; and what zgraph has warned of."""
    torch.compiler.reset()
    torch.manual_seed(0)
    width = 16 if setting.dry else 512
    mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
    model = zgraph.shard(Dropping(width).to(setting.device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options: dict[str, Any] = {"lowering": lowering, **({"cuda_graph": True} if recorded else {})}

    @zgraph.training_step(model, optimizer, options=options)
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    inputs = torch.randn(8, 8, width, generator=torch.Generator().manual_seed(1)).to(setting.device)
    torch.manual_seed(2)
    found: list[list[Tensor]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for change in (None, "rate", "state"):
            if change == "rate":
                optimizer.param_groups[0]["lr"] = 5e-4
            elif change == "state":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            losses = [local(step(x)) for x in inputs]
            found.append([*losses, *(local(parameter) for parameter in model.parameters())])
    said = [str(each.message) for each in caught if issubclass(each.category, zgraph.ZgraphWarning)]
    return found, "; ".join(said)
