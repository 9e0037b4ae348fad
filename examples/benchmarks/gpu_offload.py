"""Part of gpu.py: parameters and optimizer state on host and disk, beside the same steps with all on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_setting import Row, Setting, alone, config_of, median_ms
from gpu_training import requested
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from workload import LanguageModel, ModelConfig, make_batch

import zgraph

STEPS = 5
ALL = zgraph.Offload(params="host", optimizer="host")
ON_DEVICE = {
    "state": zgraph.Offload(optimizer="host", update="device"),
    "all": zgraph.Offload(params="host", optimizer="host", update="device"),
}
ROUNDED: dict[str, Any] = {"moments_dtype": torch.bfloat16}
CLOSE = 1e-3  # of losses, where an update rounds as another device does


@dataclass(frozen=True)
class Found:
    """What some steps left, and took.

    Attributes:
        tensors: parameters and state, on the host.
        losses: of the steps.
        figures: memory and time.
    """

    tensors: list[Tensor]
    losses: list[float]
    figures: Row


def run_offload(setting: Setting) -> Iterator[Row]:
    """Whole steps of AdamW at two stages, then forward and backward alone: the same bits wherever tensors rest.

    A GPU's update rounds otherwise than a CPU's. What is updated on the host is therefore compared with a plain loop
    whose parameters rest there, and which steps there; parameters that rest on the GPU with losses alone. What rests on
    disk is updated on the GPU. Moments of bf16 are updated to the same bits everywhere.
    """
    config = config_of(setting, vocabulary=8192, width=1024, layers=8, heads=16, sequence=256, batch=4)
    on_disk = zgraph.Offload(params="disk", optimizer="disk", path=setting.out / "rests")
    with alone(setting):
        for stage in (3, 1):
            plain = _steps(setting, config, stage, None)
            yield {"what": f"stage {stage}, on the host: nothing", **plain.figures}
            for name, offload in ON_DEVICE.items():
                found = _steps(setting, config, stage, offload)
                yield _row(f"stage {stage}, on the host: {name}, updated on the device", plain, found)
            on_host = _steps(setting, config, stage, ALL, plain=STEPS)
            found = _steps(setting, config, stage, ALL, plain=1)
            yield _row(f"stage {stage}, on the host: all, updated there", on_host, found)
            found = _steps(setting, config, stage, zgraph.Offload(optimizer="host"))
            off = max(abs(one / other - 1) for one, other in zip(found.losses, plain.losses, strict=True))
            what = f"stage {stage}, on the host: state, updated there"
            yield {"what": what, "losses differ by": off, **found.figures, "ok": off < CLOSE}
            yield _row(f"stage {stage}, on disk: all", plain, _steps(setting, config, stage, on_disk))
            expected = _steps(setting, config, stage, replace(ON_DEVICE["all"], **ROUNDED))
            off = max(abs(one / other - 1) for one, other in zip(expected.losses, plain.losses, strict=True))
            what = f"stage {stage}, bf16 moments, on the host: all, updated on the device"
            yield {"what": what, "losses differ by": off, **expected.figures, "ok": off < CLOSE}
            found = _steps(setting, config, stage, replace(ALL, **ROUNDED))
            yield _row(f"stage {stage}, bf16 moments, on the host: all, updated there", expected, found)
            found = _steps(setting, config, stage, replace(on_disk, **ROUNDED))
            yield _row(f"stage {stage}, bf16 moments, on disk: all", expected, found)
        plain = _three_calls(setting, config, None)
        yield _row("in three calls, on the host: all", plain, _three_calls(setting, config, ALL))


def _row(what: str, plain: Found, found: Found) -> Row:
    same = found.losses == plain.losses and len(found.tensors) == len(plain.tensors)
    same = same and all(map(torch.equal, found.tensors, plain.tensors))
    return {"what": what, "same bits": same, **found.figures, "ok": same}


def _steps(setting: Setting, config: ModelConfig, stage: int, offload: zgraph.Offload | None, plain: int = 0) -> Found:
    """Captured steps, of which the first makes the optimizer's state, behind so many plain ones."""
    model = _model(setting, config, stage, offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    report = zgraph.Report()

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", "report": report})
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[float] = []
    peaks: list[int] = []
    for number in range(STEPS):
        tokens = make_batch(config, number, 0).to(setting.device)
        with requested(setting, peaks):
            losses.append((step.function if number < plain else step)(tokens).item())
    kept = _kept(model, optimizer)
    again = make_batch(config, 0, 0).to(setting.device)
    figures: Row = {"ms": round(median_ms(setting, lambda: step(again)), 2)}
    peak = report.graphs[-1].peak
    if peak is not None:
        figures |= {
            "predicted peak MiB": round(peak.bytes / 2**20, 1),
            "predicted host MiB": round(peak.host_bytes / 2**20, 1),
        }
    if peaks:
        figures["rise MiB"] = round(peaks[-1] / 2**20, 1)
        figures["held MiB"] = round(torch.cuda.memory_stats()["requested_bytes.all.current"] / 2**20, 1)
    return Found(kept, losses, figures)


def _three_calls(setting: Setting, config: ModelConfig, offload: zgraph.Offload | None) -> Found:
    """Compiled forwards and backwards with gradients on the host; no step, which would be another device's."""
    model = _model(setting, config, 3, offload)
    called: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    losses: list[float] = []
    grads: list[Tensor] = []
    for number in range(2):
        loss = called(make_batch(config, number, 0).to(setting.device))
        loss.backward()
        losses.append(loss.item())
        grads += [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    return Found(grads, losses, {})


def _model(setting: Setting, config: ModelConfig, stage: int, offload: zgraph.Offload | None) -> nn.Module:
    torch.compiler.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
    return zgraph.shard(LanguageModel(config).to(setting.device), mesh, zero_stage=stage, offload=offload)


def _kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return [_local(one) for one in (*model.parameters(), *state)]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
