"""Parts of gpu.py: the README's script beside plain PyTorch, and whole steps as CUDA graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from builders import adamw, cast_to, whole_step
from gpu_setting import Dropping, Row, Setting, attempt, local, peak_of, repeatable, same_bits
from torch import Tensor, nn
from workload import ModelConfig

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
    config = setting.config(vocabulary=8192, width=512, layers=4, heads=8, sequence=256, batch=8)
    plain: dict[str, Trained] = {}
    with setting.alone(), repeatable():
        for lowering in setting.lowerings:
            for precision in PRECISIONS[lowering]:
                name = precision.name
                if name not in plain:
                    plain[name], again = (_trained(setting, config, precision, None) for _ in range(2))
                    yield same_bits(f"control: plain PyTorch twice, {name}", again.weights, plain[name].weights)
                yield attempt(f"{name}, {lowering}", _compared, setting, config, precision, lowering, plain[name])
                if precision.autocast:  # torch's own tracing changes bits under autocast
                    traced, found = (_trained(setting, config, precision, how) for how in ("aot_eager", lowering))
                    yield same_bits(f"{name}, {lowering}, beside aot_eager", found.weights, traced.weights)


def _compared(setting: Setting, config: ModelConfig, precision: Precision, lowering: str, expected: Trained) -> Row:
    found = _trained(setting, config, precision, lowering)
    off = [float(abs(one / other - 1)) for one, other in zip(found.losses, expected.losses, strict=True)]
    same = all(map(torch.equal, found.weights, expected.weights))
    held = off[0] <= precision.first and max(off) <= precision.later
    row: Row = {"first loss off by": f"{off[0]:.1e}", "all": f"{max(off):.1e}", "same bits": same}
    return row | found.figures | {"ok": held}


def _trained(setting: Setting, config: ModelConfig, precision: Precision, lowering: str | None) -> Trained:
    """Some steps by zgraph; or for None by plain PyTorch, which "aot_eager" traces."""
    model: nn.Module = setting.model(config)
    called: Callable[..., Tensor] = cast_to(precision.param_dtype, model)
    sharded = lowering in setting.lowerings
    if lowering == "aot_eager":
        called = torch.compile(called, backend=lowering)
    elif lowering is not None:
        model = zgraph.shard(model, setting.mesh(), param_dtype=precision.param_dtype)
        called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    optimizer = adamw(model)
    kind = zgraph.GradScaler if sharded else torch.amp.GradScaler
    scaler = kind(setting.device.type, 2.0**10, enabled=precision.scales)
    losses: list[Tensor] = []
    figures: Row = {}

    def forward_backward(tokens: Tensor) -> None:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=precision.autocast):
            loss = called(tokens)
        scaler.scale(loss).backward()
        losses.append(local(loss))

    for step in range(STEPS):
        tokens = setting.tokens(config, step)
        figures = peak_of(setting, lambda tokens=tokens: forward_backward(tokens))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if sharded:
        peaks = [graph.peak.bytes for graph in zgraph.explain(model).graphs if graph.peak is not None]
        figures |= {
            "predicted MiB": round(max(peaks, default=0) / 2**20, 1),
            "islands": zgraph.summary(model).islands,
        }
    return Trained(losses, [local(parameter) for parameter in model.parameters()], figures)


# --- CUDA graphs ----------------------------------------------------------------------------------------------------


def graph_bits(setting: Setting) -> Iterator[Row]:
    """Eight steps each: the first; with another learning rate; with loaded state; with workspaces of cuBLAS freed."""
    with setting.alone(), repeatable():
        for lowering in setting.lowerings:
            expected, _ = _graphed(setting, lowering, recorded=False)
            found, said = _graphed(setting, lowering, recorded=setting.on_cuda)
            names = ("dropout", "another learning rate", "loaded state", "freed workspaces")
            for name, one, other in zip(names, found, expected, strict=True):
                yield same_bits(f"{lowering}, as a CUDA graph: {name}", one, other)
            # A step that cannot be recorded runs on without.
            yield {"what": f"{lowering}, recorded without a warning", "said": said or None, "ok": not said}


def _graphed(setting: Setting, lowering: str, *, recorded: bool) -> tuple[list[list[Tensor]], str]:
    """What each eight steps leave, losses first; and what zgraph has warned of."""
    torch.compiler.reset()
    torch.manual_seed(0)
    width = 16 if setting.dry else 512
    model = zgraph.shard(Dropping(width).to(setting.device), setting.mesh())
    optimizer = adamw(model)
    step = whole_step(model, optimizer, {"lowering": lowering, **({"cuda_graph": True} if recorded else {})})
    inputs = torch.randn(8, 8, width, generator=torch.Generator().manual_seed(1)).to(setting.device)
    torch.manual_seed(2)
    found: list[list[Tensor]] = []
    bystanders: list[Tensor] = []  # in memory that a recording must not write to
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for change in (None, "rate", "state", "workspaces"):
            if change == "rate":
                optimizer.param_groups[0]["lr"] = 5e-4
            elif change == "state":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif change == "workspaces" and recorded:  # torch.compile(mode="reduce-overhead") does so
                torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
                bystanders = [torch.zeros(2**20 * size, device=setting.device) for size in (2, 8, 32) for _ in range(4)]
            losses = [local(step(x)) for x in inputs]
            found.append([*losses, *(local(parameter) for parameter in model.parameters())])
    found[-1].append(torch.tensor(sum(int(one.count_nonzero()) for one in bystanders)))
    said = [str(each.message) for each in caught if issubclass(each.category, zgraph.ZgraphWarning)]
    return found, "; ".join(said)
