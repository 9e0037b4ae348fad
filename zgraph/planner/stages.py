"""Plan the stages of a pipeline, each as the rank that holds the stage compiles it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import MemoryCurve
from zgraph.analysis.micro_batches import MicroBatchMemory
from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.memory_ledger import SpaceUse
from zgraph.errors import BudgetError, ZgraphError
from zgraph.planner.frames import FramePlanner, PlannedFrame
from zgraph.planner.memory import plan_ledger, rest_on_paper
from zgraph.planner.planned_step import PlannedGraph
from zgraph.planner.schedules.axes import PIPELINE, Axes, AxisTraffic
from zgraph.planner.schedules.keep_gathered import keep_within
from zgraph.planner.schedules.layer_time import likeness
from zgraph.planner.schedules.pipeline_plan import PipelinePlan, PlannedStage, added, check_schedule
from zgraph.planner.schedules.pipeline_run import Gradients, Messages, SplitCost, StageCost
from zgraph.planner.split_stages import split_stages
from zgraph.reporting.summary import Report
from zgraph.runtime.window_state import CLOSING, OPEN
from zgraph.sharding.pipeline.kept_parameters import gathered_bytes, keep_gathered, may_be_kept
from zgraph.sharding.scope import sharded_parameters, state_of
from zgraph.tiers.tier import DEVICE, NAMES
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import fake_on_cpu
from zgraph.torch_compat.groups import stages_hold_messages


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """A compiled pipeline stage: `closing` are the frames for a step's last micro-batch, `frames` for all others."""

    module: nn.Module
    frames: Sequence[PlannedFrame]
    closing: Sequence[PlannedFrame]
    report: Report
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedPipeline:
    """The plan of a pipeline, with all compiled graphs and their memory curves."""

    plan: PipelinePlan
    graphs: tuple[PlannedGraph, ...]
    curves: tuple[MemoryCurve, ...]

    @property
    def ledger(self) -> tuple[SpaceUse, ...]:
        """Bytes in each memory space on the rank with the highest peak."""
        peaks = self.plan.run.peak_bytes
        rank = peaks.index(max(peaks))
        parameters = sum(stage.parameter_bytes for stage in self.plan.stages_of(rank))
        state = sum(stage.state_bytes for stage in self.plan.stages_of(rank))
        step = peaks[rank] - parameters - state
        device = SpaceUse(space=DEVICE.name, parameters=parameters, state=state, step=step)
        return device, *(SpaceUse(space=name) for name in NAMES)


def plan_stages(
    model: nn.Module | Sequence[nn.Module],
    inputs: Sequence[Any],
    planner: FramePlanner,
    axes: Axes,
    *,
    mode: Any,
    shard_stage: Callable[[nn.Module], None],
    micro_batches: int,
    schedule: str | None,
    chunks: int | None,
) -> PlannedPipeline:
    """Compile the stages of a model, and simulate the schedules.

    Args:
        model: an `nn.Sequential` to cut into stages, or the stages.
        inputs: inputs of the first stage for one micro-batch.
        planner: planner with the machine, passes and report for all stages.
        axes: axes of the cluster; the default process group has its size.
        mode: fake mode of the model's and the inputs' tensors.
        shard_stage: function that shards a stage.
        micro_batches, schedule, chunks: as for `zgraph.plan_pipeline`.

    Raises:
        ValueError: the model cannot be cut into the stages, a stage returns anything but tensors or is offloaded,
            torch has no such schedule for the stages, or the step does not fit into the target's budget.
        ZgraphError: a stage has no compiled graph.
    """
    stages = _stages(model, axes.stages, chunks, inputs, planner.machine)
    chosen = check_schedule(schedule, axes.stages, len(stages), micro_batches)
    known: dict[Any, _Stage] = {}
    like: list[_Stage] = []  # for each stage, the compiled stage that equals it
    entering: list[Sequence[Any]] = []
    for number, stage in enumerate(stages):
        key = likeness(stage, inputs)
        if key not in known:
            shard_stage(stage)
            known[key] = _Stage(stage, number, inputs, planner, micro_batches, mode)
        like.append(known[key])
        entering.append(inputs)
        inputs = known[key].keeping(0).outputs

    def planned(number: int, keep_bytes: int = 0) -> PlannedStage:
        is_last = number + 1 == len(stages)
        compiled = like[number].keeping(keep_bytes)
        return _planned(compiled, number, entering[number], micro_batches, axes, planner.machine, is_last=is_last)

    def cost_of(number: int, keep_bytes: int) -> StageCost | None:
        try:
            return planned(number, keep_bytes).cost
        except BudgetError:
            return None

    plan = PipelinePlan.of([planned(number) for number in range(len(stages))], axes.stages, micro_batches, chosen)
    kept = [0] * len(stages)
    budget_bytes = None if planner.passes.target is None else planner.passes.target.budget_bytes
    if budget_bytes is not None:
        kept = keep_within(budget_bytes, chosen, axes.stages, [one.sizes for one in like], cost_of)
        found = [replace(planned(number, count), keep_bytes=count) for number, count in enumerate(kept)]
        plan = PipelinePlan.of(found, axes.stages, micro_batches, chosen, budget_bytes=budget_bytes, unkept=plan.run)
        plan.check_budget()
    final = [one.keeping(count) for one, count in zip(like, kept, strict=True)]
    distinct = list({id(one): one for one in final}.values())
    for one in distinct:
        planner.report.add(one.report)
    return PlannedPipeline(
        plan=plan,
        graphs=tuple(graph for number, one in enumerate(final) for graph in _graphs(one, number, micro_batches)),
        curves=tuple(frame.curve for one in distinct for frame in one.frames),
    )


class _Stage:
    """A stage, compiled once for each `keep_bytes` (bytes of gathered parameters to keep during a step)."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        inputs: Sequence[Any],
        template: FramePlanner,
        micro_batches: int,
        mode: Any,
    ) -> None:
        self._compile = partial(_compiled, module, number, inputs, template, micro_batches, mode)
        self._params = sharded_parameters(module).values()
        self._known: dict[int, _Compiled] = {}
        # A single micro-batch keeps nothing for a next one.
        self.sizes = [gathered_bytes(param) for param in may_be_kept(self._params)] if micro_batches > 1 else []
        self.keeping(0)

    def keeping(self, keep_bytes: int) -> _Compiled:
        """Return the stage, compiled as `zgraph.PipelineStage(..., keep_bytes=keep_bytes)` runs it."""
        if keep_bytes not in self._known:
            keep_gathered(self._params, keep_bytes)
            self._known[keep_bytes] = self._compile(name=f"keep{keep_bytes}." if keep_bytes else "")
        return self._known[keep_bytes]


def _stages(
    model: nn.Module | Sequence[nn.Module], ranks: int, chunks: int | None, inputs: Sequence[Any], machine: Hardware
) -> list[nn.Module]:
    """Return the stages of a model: cut from an `nn.Sequential`, or the modules of a list."""
    if isinstance(model, nn.Sequential):
        return list(split_stages(model, ranks * (chunks or 1), batch=lambda: tuple(inputs), hardware=machine))
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        raise ValueError(
            "zgraph.plan_pipeline: "
            f"model_fn returned a {type(model).__name__}, which has no stages for a pipeline of {ranks} "
            "ranks; return a list of modules, one for each stage, or an nn.Sequential, which zgraph.split_stages cuts."
        )
    stages = list(model)
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"zgraph.plan_pipeline: stage {number} is a {type(stage).__name__}, not an nn.Module.")
    wanted = "a multiple of" if chunks is None else f"chunks={chunks} for each of"
    if not stages or len(stages) % ranks or (chunks is not None and len(stages) != chunks * ranks):
        raise ValueError(
            "zgraph.plan_pipeline: "
            f"model_fn returned {len(stages)} stages, and a pipeline needs {wanted} its {ranks} ranks; "
            "zgraph.split_stages makes stages from a list of layers."
        )
    return stages


def _compiled(
    stage: nn.Module,
    number: int,
    inputs: Sequence[Any],
    template: FramePlanner,
    micro_batches: int,
    mode: Any,
    *,
    name: str,
) -> _Compiled:
    """Compile a stage for the last micro-batch of a step, and for all others, as `zgraph.PipelineStage` runs it."""
    if rest_on_paper(stage, None) is not None:
        raise ValueError(
            "zgraph.plan_pipeline: "
            "shard_fn offloads, which is not supported with pipeline parallelism: only whole steps can "
            "stream offloaded tensors; leave the offload out."
        )
    scopes = dict.fromkeys(state.scope for part in stage.modules() if (state := state_of(part)) is not None)
    for scope in scopes:
        scope.is_staged = True
    windows = [scope for scope in scopes if scope.has_windows]
    report = Report(keep_passes=True)  # not every compiled variant becomes part of the plan

    def at(position: str | None, prefix: str) -> tuple[list[PlannedFrame], Any]:
        planner = replace(template, prefix=f"stage{number}.{name}{prefix}", report=report, frames=[])
        for scope in windows:
            scope.given = position
        try:
            returned = planner.compile(stage, inputs)
        finally:
            for scope in windows:
                scope.given = None
        if not planner.frames:
            raise ZgraphError(
                "zgraph.plan_pipeline: "
                f"nothing was compiled of stage {number}; its forward is disabled for torch.compile."
            )
        return planner.frames, returned

    if windows and micro_batches > 1:
        frames, returned = at(OPEN, "open.")
        closing, _ = at(CLOSING, "closing.")
    else:
        frames, returned = at(None, "")
        closing = frames
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(outputs, tuple) or not all(
        isinstance(one, Tensor) and not isinstance(one, DTensor)
        for one in outputs  # pyright: ignore[reportUnknownVariableType]
    ):
        raise ValueError(
            "zgraph.plan_pipeline: "
            f"stage {number} returns a {type(returned).__name__}; stages hand on plain tensors: return "
            "one, or a tuple of them."
        )
    handed: list[Tensor] = [fake_on_cpu(mode, one.detach()) for one in outputs]
    return _Compiled(
        module=stage,
        frames=frames,
        closing=closing,
        report=report,
        outputs=tuple(one.requires_grad_(one.is_floating_point()) for one in handed),
    )


def _planned(
    compiled: _Compiled,
    number: int,
    inputs: Sequence[Any],
    micro_batches: int,
    axes: Axes,
    machine: Hardware,
    *,
    is_last: bool,
) -> PlannedStage:
    parts = _parts(compiled, micro_batches)
    traffic: dict[str, AxisTraffic] = {}
    for graphs, runs in parts:
        for graph in graphs:
            traffic = added(traffic, dict(graph.traffic), runs)
    device, *_ = plan_ledger(compiled.module, None, None, [])
    received = [value for value in inputs if isinstance(value, Tensor)] if number else []
    entering = sum(value.nbytes for value in received)
    returned = sum(value.nbytes for value in received if value.requires_grad)
    leaving = sum(value.nbytes for value in compiled.outputs)
    created = _placeholder_bytes(compiled.module) if micro_batches > 1 else 0
    memory = MicroBatchMemory.in_turn(
        [frame.memory for frame in compiled.frames], [frame.memory for frame in compiled.closing], created
    )
    if is_last:  # its outputs stay until the step ends, so they do not count as in flight
        memory = replace(memory, saved_bytes=memory.saved_bytes - leaving)
    backward_us = _times(parts, ("backward",))
    if number:
        split = _split_cost(compiled, micro_batches, created)
    else:  # without gradients of inputs, the whole backward runs as the second half
        halves = replace(memory.without(leaving), peak_bytes=0)
        split = SplitCost(inputs_us=(0.0,) * micro_batches, weights_us=backward_us, memory=halves)
    cost = StageCost(
        forward_us=_times(parts, ("forward", "inference")),
        backward_us=backward_us,
        send_us=machine.link_along(axes.stride(PIPELINE)).us(leaving),
        resting_bytes=device.parameters + device.state,
        memory=memory,
        gradients=Gradients(
            grad_bytes=_gradient_bytes(compiled.module),
            own_bytes=_waiting_bytes(compiled.module, 0) if micro_batches > 1 else 0,
            waiting_bytes=_waiting_bytes(compiled.module, 1) if micro_batches > 1 else 0,
        ),
        messages=Messages(
            activation_bytes=0 if is_last else leaving,
            gradient_bytes=returned,
            # torch's stage has a buffer for each micro-batch's activations; for gradients one for each, or for all.
            received_bytes=micro_batches * entering
            + (micro_batches if is_last or stages_hold_messages() else 1) * leaving,
        ),
        split=split,
    )
    return PlannedStage(
        cost=cost,
        parameter_bytes=device.parameters,
        state_bytes=device.state,
        traffic=traffic,
        activation_bytes=leaving,
        input_gradient_bytes=returned,
        stage_3_bytes=sum(map(gathered_bytes, may_be_kept(sharded_parameters(compiled.module).values()))),
    )


def _split_cost(compiled: _Compiled, micro_batches: int, created: int) -> SplitCost | None:
    """Return the cost of a backward in two halves; None if it cannot be split.

    Args:
        compiled: the stage, which is not the first one.
        micro_batches: number of micro-batches in a step.
        created: bytes of gradients that the first backward creates.
    """
    usual, last = compiled.frames[0].halves, compiled.closing[0].halves
    if len(compiled.frames) > 1 or usual is None or last is None:
        return None
    return SplitCost(
        inputs_us=(usual.inputs_us,) * (micro_batches - 1) + (last.inputs_us,),
        weights_us=(usual.weights_us,) * (micro_batches - 1) + (last.weights_us,),
        memory=MicroBatchMemory.in_turn([usual.memory], [last.memory], created),
    )


def _parts(compiled: _Compiled, micro_batches: int) -> list[tuple[list[PlannedGraph], int]]:
    """Return (graphs, number of micro-batches that run them) for the first, the middle and the last micro-batches."""
    first = [
        (frame.later if direction == "backward" else frame.graphs)[direction]
        for frame in compiled.frames
        for direction in frame.graphs
    ]
    between = [graph for frame in compiled.frames for graph in frame.later.values()]
    last = [graph for frame in compiled.closing for graph in frame.later.values()]
    return [(first, 1), (between, max(0, micro_batches - 2)), (last, min(1, micro_batches - 1))]


def _times(parts: Sequence[tuple[list[PlannedGraph], int]], directions: tuple[Direction, ...]) -> tuple[float, ...]:
    """Return the time of each micro-batch in microseconds, in the order in which micro-batches run."""
    return tuple(
        us
        for graphs, runs in parts
        for us in [sum(graph.timeline.step_us for graph in graphs if graph.direction in directions)] * runs
    )


def _gradient_bytes(stage: nn.Module) -> int:
    """Return the bytes of a rank's `.grad` tensors."""
    return sum(
        (local_of(value) if isinstance(value, DTensor) else value).nbytes
        for value in stage.parameters()
        if value.requires_grad
    )


def _waiting_bytes(stage: nn.Module, zero_stage: int) -> int:
    """Return the bytes of unsharded gradients, at one ZeRO stage, that wait for the last backward."""
    layouts = [(param.spec.layout, param.spec.dtype) for param in sharded_parameters(stage).values()]
    return sum(
        math.prod(layout.shape) * dtype.itemsize
        for layout, dtype in layouts
        if layout.zero_stage == zero_stage and layout.is_reduced
    )


def _placeholder_bytes(stage: nn.Module) -> int:
    """Return the bytes of `.grad` placeholders at ZeRO stage 1; each has a shard's size."""
    params = sharded_parameters(stage).values()
    waiting = [param.sharded for param in params if param.spec.layout.zero_stage == 1 and param.spec.layout.is_reduced]
    return sum(local_of(one).nbytes for one in waiting if one.requires_grad)


def _graphs(compiled: _Compiled, number: int, micro_batches: int) -> list[PlannedGraph]:
    """Return the graphs of a stage, each with its number of runs in a step."""
    return [
        replace(graph, stage=number, runs=runs)
        for graphs, runs in _parts(compiled, micro_batches)
        for graph in graphs
        if runs
    ]
