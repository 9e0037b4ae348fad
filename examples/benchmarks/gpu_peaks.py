"""Part of gpu.py: what zgraph says a step takes, and what the allocator says that it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from gpu_setting import RANKS, Row, Setting, alone, attempt, built, config_of, host_mib, peak_of
from loopback import Wire, loopback
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from workload import ModelConfig, make_batch

import zgraph
from zgraph.analysis.hardware import Hardware
from zgraph.passes import presets


@dataclass(frozen=True)
class Case:
    """How a step is compiled; `budget`: share of what it takes without one."""

    stage: int = 3
    lowering: str = "fx"
    whole: bool = False
    budget: float | None = None
    offload: dict[str, Any] | None = None
    activations: bool = False
    ranks: int = RANKS


CASES = {
    **{f"stage {stage}": Case(stage=stage) for stage in (0, 1, 2, 3)},
    "stage 3, Inductor": Case(lowering="inductor"),
    "stage 3, 0.8 of it": Case(budget=0.8),
    "stage 3, 0.6 of it": Case(budget=0.6),
    "activations on the host": Case(activations=True, ranks=1),
    "whole step": Case(whole=True, ranks=1),
    "whole step, 0.7 of it": Case(whole=True, budget=0.7, ranks=1),
    "whole step, state on the host": Case(whole=True, offload={"optimizer": "host", "update": "device"}, ranks=1),
    "whole step, all on the host": Case(
        whole=True, offload={"params": "host", "optimizer": "host", "update": "device"}, ranks=1
    ),
}


def peaks(setting: Setting) -> Iterator[Row]:
    """The third step of each: kernels are tuned, and the optimizer's state made, in the ones before."""
    config = config_of(setting, vocabulary=8192, width=512, layers=4, heads=8, sequence=512, batch=8)
    taken: dict[tuple[int, bool], int] = {}  # bytes predicted without a budget, by stage and kind of step
    for name, case in CASES.items():
        if case.lowering not in setting.lowerings:
            continue
        row = attempt(name, lambda case=case: _measured(setting, config, case, taken))
        # Who asks for less than can be had is told what would do: nothing is wrong with that.
        refused = case.budget is not None and "smallest budget" in row.get("said", "")
        yield row | {"what": f"{name}: refused", "ok": None} if refused else row


def _measured(setting: Setting, config: ModelConfig, case: Case, taken: dict[tuple[int, bool], int]) -> Row:
    budget = None if case.budget is None else int(case.budget * taken[case.stage, case.whole])
    with _world(setting, case):
        step, predicted = _step(setting, config, case, budget)
        for _ in range(2):
            step()
        found = peak_of(setting, step)
        promised = predicted()
    if budget is None and case.offload is None and case.lowering == "fx" and not case.activations:
        taken[case.stage, case.whole] = promised
    row: Row = {"predicted MiB": round(promised / 2**20, 1), **found, **host_mib()}
    if budget is not None:
        row["asked MiB"] = round(budget / 2**20, 1)
        row["ok"] = promised <= budget
    if found:
        row["measured of predicted"] = round(found["rise MiB"] * 2**20 / promised, 3)
    return row


def _world(setting: Setting, case: Case) -> AbstractContextManager[None]:
    if case.ranks == 1:
        return alone(setting)
    return loopback(case.ranks, Wire(backend="nccl", when="started", poisons=False))


def _step(
    setting: Setting, config: ModelConfig, case: Case, budget: int | None
) -> tuple[Callable[[], object], Callable[[], int]]:
    """A step, and what it is said to take, in bytes."""
    mesh = init_device_mesh(setting.device.type, (case.ranks,), mesh_dim_names=("dp",))
    offload = None if case.offload is None else zgraph.Offload(**case.offload)
    dtype = torch.bfloat16 if setting.on_cuda else None
    model = zgraph.shard(built(setting, config), mesh, zero_stage=case.stage, param_dtype=dtype, offload=offload)
    target = zgraph.Target(hardware=Hardware.preset("h100"), budget_bytes=budget)
    passes = (presets.planned if budget is not None else presets.default)(offload_activations=case.activations)
    report = zgraph.Report()
    pipeline = zgraph.PassList(passes, target=target)
    options: dict[str, Any] = {"lowering": case.lowering, "passes": pipeline, "report": report}
    tokens = make_batch(config, 0, 0).to(setting.device)

    def predicted() -> int:
        return max((graph.peak.bytes for graph in report.graphs if graph.peak is not None), default=0)

    if not case.whole:
        called: Any = torch.compile(model, backend="zgraph", options=options)

        def forward_backward() -> None:
            called(tokens).backward()
            model.zero_grad()

        return forward_backward, predicted
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    @zgraph.training_step(model, optimizer, options=options)
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step.function(tokens)  # makes the optimizer's state
    return lambda: step(tokens), predicted
