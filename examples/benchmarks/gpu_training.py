"""Parts of gpu.py: the README's script beside plain PyTorch, and NCCL with one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_setting import Row, Setting, alone, cast_to, config_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from workload import LanguageModel, ModelConfig, make_batch

import zgraph
from zgraph.runtime.exchanges.collectives import start_all_gather, start_all_to_all, start_grouped_gather
from zgraph.torch_compat.collectives import reduce_scatter_op, wait


@dataclass(frozen=True)
class Precision:
    """How a model is trained; `tolerance` of its losses beside plain PyTorch's, relative."""

    name: str
    tolerance: float
    param_dtype: torch.dtype | None = None
    autocast: bool = False
    scales: bool = False


PRECISIONS = (
    Precision("fp32", 1e-4),
    Precision("bf16", 2e-2, torch.bfloat16),
    Precision("autocast", 2e-2, autocast=True),
    Precision("fp16 with a scaler", 2e-2, torch.float16, scales=True),
)


def run_train(setting: Setting) -> Iterator[Row]:
    """The script of the README, against the same steps in plain PyTorch."""
    config = config_of(setting, vocabulary=8192, width=512, layers=4, heads=8, sequence=256, batch=8)
    with alone(setting):
        for precision in PRECISIONS:
            expected, _ = _losses(setting, config, precision, None)
            for lowering in setting.lowerings:
                row: Row = {"what": f"{precision.name}, {lowering}"}
                try:
                    found, figures = _losses(setting, config, precision, lowering)
                except Exception as error:
                    yield {**row, "ok": False, "said": f"{type(error).__name__}: {str(error)[-500:]}"}
                    continue
                off = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
                yield {**row, "loss off by": f"{off:.1e}", **figures, "ok": off <= precision.tolerance}


def _losses(
    setting: Setting, config: ModelConfig, precision: Precision, lowering: str | None
) -> tuple[list[float], Row]:
    """Some steps by zgraph, or for None by plain PyTorch; with zgraph, the measured peak beside the predicted one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model: nn.Module = LanguageModel(config).to(setting.device)
    called: Callable[..., Tensor] = model
    if lowering is None:
        if precision.param_dtype is not None:
            called = cast_to(precision.param_dtype, model)
    else:
        mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
        model = zgraph.shard(model, mesh, param_dtype=precision.param_dtype)
        called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaling = precision.scales
    scaler = (zgraph.GradScaler if lowering else torch.amp.GradScaler)(setting.device.type, 2.0**10, enabled=scaling)
    losses: list[float] = []
    peaks: list[int] = []
    for step in range(5):
        tokens = make_batch(config, step, 0).to(setting.device)
        with requested(setting, peaks):
            with torch.autocast(setting.device.type, torch.bfloat16, enabled=precision.autocast):
                loss = called(tokens)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if lowering is None:
        return losses, {}
    predicted = max((graph.peak.bytes for graph in zgraph.explain(model).graphs if graph.peak is not None), default=0)
    figures: Row = {"predicted peak MiB": round(predicted / 2**20, 2)}
    if peaks:
        figures |= {"peak MiB": round(peaks[-1] / 2**20, 2), "of predicted": round(peaks[-1] / predicted, 3)}
    return losses, figures


@contextlib.contextmanager
def requested(setting: Setting, peaks: list[int]) -> Generator[None]:
    """Append by how much what was asked of the CUDA allocator rises inside."""
    if not setting.on_cuda:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    yield
    torch.cuda.synchronize()
    peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def run_nccl(setting: Setting) -> Iterator[Row]:
    """One rank with `device_id`, as torchrun starts it on a machine with one GPU; gloo where there is none."""
    options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if setting.on_cuda else {}
    config = config_of(setting, vocabulary=1024, width=256, layers=2, heads=4, sequence=128, batch=4)
    with alone(setting, **options):
        mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
        found: list[list[float]] = []
        for lowering in (None, *setting.lowerings):
            torch.compiler.reset()
            torch.manual_seed(0)
            model = zgraph.shard(LanguageModel(config).to(setting.device), mesh, zero_stage=3)
            called: Any = model
            if lowering is not None:
                called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            losses: list[float] = []
            for step in range(3):
                loss = called(make_batch(config, step, 0).to(setting.device))
                loss.backward()
                zgraph.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append(losses)
            off = max(abs(one - other) / other for one, other in zip(losses, found[0], strict=True))
            yield {"what": f"one rank, {lowering or 'eager'}", "loss off by": f"{off:.1e}", "ok": off < 1e-3}
        x = torch.arange(8.0, device=setting.device)
        gathered = _collectives(x)
        yield {"what": "collectives with oneself", "ok": all(torch.equal(one, x) for one in gathered)}


def _collectives(x: Tensor) -> list[Tensor]:

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    started = [start_all_gather(x, 1, name), *start_grouped_gather([x, x], 1, name)]
    started += [start_all_to_all(x, [8], [8], name), reduce_scatter_op()(x, "sum", 1, name)]
    return [wait(one) for one in started]
