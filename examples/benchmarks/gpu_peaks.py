"""Part of gpu.py: what zgraph says a step takes, and what the allocator says that it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_setting import RANKS, Row, Setting, Step, attempt, host_mib, peak_of, whole_zgraph
from loopback import Wire, loopback
from workload import ModelConfig

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
    config = setting.config(vocabulary=8192, width=512, layers=4, heads=8, sequence=512, batch=8)
    taken: dict[tuple[int, bool], int] = {}  # bytes predicted without a budget, by stage and kind of step
    for name, case in CASES.items():
        if case.lowering not in setting.lowerings:
            continue
        row = attempt(name, _measured, setting, config, case, taken)
        # Who asks for less than can be had is told what would do: nothing is wrong with that.
        refused = case.budget is not None and "smallest budget" in row.get("said", "")
        yield row | {"what": f"{name}: refused", "ok": None} if refused else row


def _measured(setting: Setting, config: ModelConfig, case: Case, taken: dict[tuple[int, bool], int]) -> Row:
    budget = None if case.budget is None else int(case.budget * taken[case.stage, case.whole])
    wire = Wire(backend="nccl", when="started", poisons=False)
    with setting.alone() if case.ranks == 1 else loopback(case.ranks, wire):
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


def _step(setting: Setting, config: ModelConfig, case: Case, budget: int | None) -> tuple[Step, Callable[[], int]]:
    """A step, and what it is said to take, in bytes."""
    offload = None if case.offload is None else zgraph.Offload(**case.offload)
    of_shard: dict[str, Any] = {"zero_stage": case.stage, "offload": offload}
    model = setting.model(config)
    target = zgraph.Target(hardware=Hardware.preset("h100"), budget_bytes=budget)
    passes = (presets.planned if budget is not None else presets.default)(offload_activations=case.activations)
    report = zgraph.Report()
    pipeline = zgraph.PassList(passes, target=target)
    options: dict[str, Any] = {"lowering": case.lowering, "passes": pipeline, "report": report}
    tokens = setting.tokens(config)

    def predicted() -> int:
        return max((graph.peak.bytes for graph in report.graphs if graph.peak is not None), default=0)

    if case.whole:
        return whole_zgraph(setting, model, tokens, options, **of_shard), predicted
    model = zgraph.shard(model, setting.mesh(case.ranks), param_dtype=setting.dtype, **of_shard)
    called: Any = torch.compile(model, backend="zgraph", options=options)

    def forward_backward() -> None:
        called(tokens).backward()
        model.zero_grad()

    return forward_backward, predicted
