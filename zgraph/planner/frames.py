"""Compile the frames of a planned step, and collect times and memory of their final graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from zgraph.analysis.cost import FREE, CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import Allocator, MemoryCurve, memory_curve, step_curve
from zgraph.analysis.micro_batches import MicroBatchMemory
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan, Variant
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.pass_list import PassList
from zgraph.driver.compile_frame import FrameCompiler
from zgraph.driver.options import CompileOptions
from zgraph.graph import edits, meta, nodes
from zgraph.graph.split_graph import early_first, split_graph
from zgraph.graph.traffic import Transfer, transfers_of
from zgraph.planner.planned_step import PlannedGraph
from zgraph.planner.schedules.axes import Axes, traffic_of
from zgraph.reporting.summary import Report
from zgraph.scheduling.simulate import simulate
from zgraph.tiers.devices import kind_of_backend

Graphs = dict[Direction, PlannedGraph]


@dataclass(frozen=True)
class PlannedHalves:
    """Times and memory of a backward in two halves: first the gradients of inputs, then those of weights.

    Attributes:
        inputs_us, weights_us: time of the first and of the second half.
        memory: memory of the halves, without the results of forward and the gradients that the first half returns.
    """

    inputs_us: float
    weights_us: float
    memory: MicroBatchMemory


@dataclass(frozen=True)
class PlannedFrame:
    """Graphs and memory of one compiled frame.

    Attributes:
        graphs: graphs by direction.
        later: the same graphs as later micro-batches run them, without gathers whose results the window keeps.
        curve: memory over the frame, forward and backward together.
        memory: memory of micro-batches; each runs the frame's forward, then its backward.
        halves: halves of the frame's backward; None: backward is not split.
    """

    graphs: Graphs
    later: Graphs
    curve: MemoryCurve
    memory: MicroBatchMemory
    halves: PlannedHalves | None = None


@dataclass
class FramePlanner:
    """Compiles models for a planned cluster, and keeps the plans of their frames.

    Attributes:
        machine: hardware of each rank.
        passes: list of passes, whose `target` is set.
        allocator: how sizes are rounded.
        axes: axes of the cluster; None: only data parallelism.
        host_budget_bytes: most bytes that a rank may keep on the host; None: no limit.
        update: where parameters with state on the host are updated, "host" or "device"; None: the passes decide.
        prefix: prefix of the frames' names.
        report: report of all compiled graphs.
        frames: planned frames, in the order of compilation.
    """

    machine: Hardware
    passes: PassList
    allocator: Allocator
    axes: Axes | None
    host_budget_bytes: int | None = None
    update: Literal["host", "device"] | None = None
    prefix: str = ""
    report: Report = field(default_factory=lambda: Report(keep_passes=True))
    frames: list[PlannedFrame] = field(default_factory=list[PlannedFrame])

    def __post_init__(self) -> None:
        self._costs = CostModel(self.machine)

    def compiler_of(self, frame: Frame) -> FrameCompiler:
        """Return a compiler for a frame; it appends its plan to `frames`, and lowers to fx, which is fast."""
        options = CompileOptions(lowering="fx", report=self.report, passes=self.passes)
        known = PassContext(
            machine=self.machine,
            planned_backend=self.machine.backend,
            host_budget_bytes=self.host_budget_bytes,
            update=self.update,
        )

        return FrameCompiler(frame, options, known=known, on_plan=self._keep)

    def compile(self, model: nn.Module, inputs: Sequence[Any]) -> Any:
        """Compile a model's forward and backward; return the result of forward as fake tensors."""

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            frame = Frame.of_dynamo(gm)
            return self.compiler_of(replace(frame, name=self.prefix + frame.name)).compile(gm, example_inputs)

        compiled: Any = torch.compile(model, backend=backend, dynamic=False)
        try:
            return compiled(*inputs)
        finally:
            torch.compiler.reset()  # else later plans of the same classes would reach the recompile limit

    @property
    def graphs(self) -> list[PlannedGraph]:
        """Graphs of all frames."""
        return [graph for frame in self.frames for graph in frame.graphs.values()]

    @property
    def curves(self) -> list[MemoryCurve]:
        """Memory curve of each frame."""
        return [frame.curve for frame in self.frames]

    def _keep(self, plan: FramePlan, late: Sequence[int]) -> None:
        """Append a `PlannedFrame` to `frames`; called before lowering changes the final graphs.

        Args:
            plan: plan of the frame.
            late: indices of the weight gradients among the outputs of a backward that may be split.
        """
        curve = self._curve(plan)
        forward = next(iter(plan.graphs.values())).graph
        memory = MicroBatchMemory.of(curve, 0, len(forward.nodes))
        graphs: Graphs = {direction: self._planned(direction, plan) for direction in plan.graphs}
        later: Graphs = graphs
        if memory.kept_bytes:
            later = {direction: self._planned(direction, plan, is_kept=True) for direction in plan.graphs}
        frame = PlannedFrame(
            graphs=graphs,
            later=later,
            curve=curve,
            memory=memory,
            halves=self._halves(plan, late) if late and "backward" in plan.graphs else None,
        )
        self.frames.append(frame)

    def _halves(self, plan: FramePlan, late: Sequence[int]) -> PlannedHalves | None:
        backward = plan.graphs["backward"]
        halves = split_graph(backward, late)
        if halves is None:
            return None
        split = edits.copy_of(backward)
        start = len(plan.graphs["forward"].graph.nodes)
        place = start + early_first(split.graph, late)
        curve = self._curve(replace(plan, variants=(Variant(from_step=0, graphs={**plan.graphs, "backward": split}),)))
        results = nodes.returned_by(plan.graphs["forward"].graph)[: plan.ctx.user_outputs]
        results += [nodes.returned_by(halves.first.graph)[number] for number in range(len(halves.early))]
        returned = sum(meta.tensor_value(one).nbytes for one in results)
        inputs_us, weights_us = (
            simulate(order, {node: self._costs.cost(node) for node in order}, plan.ctx.sharing).step_us
            for order in (list(half.graph.nodes) for half in (halves.first, halves.second))
        )
        return PlannedHalves(
            inputs_us=inputs_us,
            weights_us=weights_us,
            memory=MicroBatchMemory.of(curve, start, place).without(returned),
        )

    def _planned(self, direction: Direction, plan: FramePlan, *, is_kept: bool = False) -> PlannedGraph:
        graph = plan.graphs[direction].graph
        order = list(graph.nodes)
        found = {node for node in order if is_kept and nodes.is_kept_gather(node)}
        costs = {node: FREE if node in found else self._costs.cost(node) for node in order}
        timeline = simulate(order, costs, plan.ctx.sharing)
        sending = [node for node in order if node not in found]
        traffic = {} if self.axes is None else traffic_of(sending, timeline, self.axes)
        sent = sum(transfer.sent_bytes for node in sending for transfer in _transfers(node))
        return PlannedGraph(direction, len(order), sent, timeline, traffic)

    def _curve(self, plan: FramePlan) -> MemoryCurve:
        device_type = kind_of_backend(self.machine.backend).type
        if "forward" not in plan.graphs:
            (whole,) = plan.graphs.values()
            return memory_curve(whole.graph, allocator=self.allocator, device_type=device_type)
        forward, backward = (plan.graphs[direction].graph for direction in ("forward", "backward"))
        assert plan.ctx.user_outputs is not None
        return step_curve(
            forward,
            backward,
            user_outputs=plan.ctx.user_outputs,
            allocator=self.allocator,
            device_type=device_type,
        )


def _transfers(node: fx.Node) -> list[Transfer]:
    return list(transfers_of(node)) if nodes.is_collective(node) or nodes.is_marker(node) else []
