"""Compile the frames of a planned step, and collect times and memory of their final graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from zgraph.analysis.cost import FREE, CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import Allocator, MemoryCurve, memory_curve, step_curve
from zgraph.analysis.workspace import remaining_bytes
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

    All byte counts leave out the values that the first half returns.

    Attributes:
        inputs_us, weights_us: time of the first and of the second half.
        left_bytes: bytes alive between the halves, without gathered parameters that the window keeps.
        kept_bytes: bytes of gathered parameters that the window keeps and the second half reads.
        inputs_peak_bytes: peak of the first half, without parameters that the window keeps.
        first_peak_bytes, later_peak_bytes, closing_peak_bytes: peaks of the second half, as in `PlannedFrame`.
    """

    inputs_us: float
    weights_us: float
    left_bytes: int
    kept_bytes: int
    inputs_peak_bytes: int
    first_peak_bytes: int
    later_peak_bytes: int
    closing_peak_bytes: int


@dataclass(frozen=True)
class PlannedFrame:
    """Graphs and memory of one compiled frame.

    Gradient sums are the gradients that wait until the last micro-batch's backward reduces them.

    Attributes:
        graphs: graphs by direction.
        later: the same graphs for later micro-batches, which do not gather the parameters that the window keeps.
        curve: memory over the frame, forward and backward together.
        kept_bytes: bytes of gathered parameters that the window keeps.
        saved_bytes: bytes alive between forward and backward, without kept parameters.
        kept_for_backward_bytes: the part of `kept_bytes` that backward reads.
        forward_peak_bytes: peak of a forward, without kept parameters.
        first_peak_bytes: peak of the first backward, without kept parameters, but with the gradient sums that it
            creates.
        later_peak_bytes: peak of a later backward, without kept parameters and gradient sums.
        closing_peak_bytes: peak of the last backward, with the kept parameters and gradient sums that it frees.
        halves: the backward in two halves; None: it is not split.
    """

    graphs: Graphs
    later: Graphs
    curve: MemoryCurve
    kept_bytes: int
    saved_bytes: int
    kept_for_backward_bytes: int
    forward_peak_bytes: int
    first_peak_bytes: int
    later_peak_bytes: int
    closing_peak_bytes: int
    halves: PlannedHalves | None = None


@dataclass
class FramePlanner:
    """Compiles models for a planned cluster, and keeps the plans of their frames.

    Attributes:
        machine: hardware of each rank.
        passes: list of passes, with a target.
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
        """Return a compiler for a frame that appends the plan to `frames`. It lowers to fx, because that is fast."""
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
        end = len(forward.nodes)
        kept = _kept_by_window(curve)
        during = list(map(operator.sub, curve.bytes_during, kept))
        made, found = _sums_that_wait(curve.nodes)
        graphs: Graphs = {direction: self._planned(direction, plan) for direction in plan.graphs}
        later: Graphs = graphs
        if any(kept):
            later = {direction: self._planned(direction, plan, is_kept=True) for direction in plan.graphs}
        frame = PlannedFrame(
            graphs=graphs,
            later=later,
            curve=curve,
            kept_bytes=max(kept, default=0),
            saved_bytes=curve.bytes_after[end - 1] - kept[end - 1],
            kept_for_backward_bytes=kept[end - 1],
            forward_peak_bytes=max(during[:end]),
            first_peak_bytes=max(during[end:], default=0),
            later_peak_bytes=max(map(operator.sub, during[end:], made[end:]), default=0),
            closing_peak_bytes=max(map(operator.add, curve.bytes_during[end:], found[end:]), default=0),
            halves=self._halves(plan, late) if late and "backward" in plan.graphs else None,
        )
        self.frames.append(frame)

    def _halves(self, plan: FramePlan, late: Sequence[int]) -> PlannedHalves | None:
        backward = plan.graphs["backward"]
        halves = split_graph(backward, late)
        if halves is None:
            return None
        split = edits.copy_of(backward)
        place = len(plan.graphs["forward"].graph.nodes) + early_first(split.graph, late)
        curve = self._curve(replace(plan, variants=(Variant(from_step=0, graphs={**plan.graphs, "backward": split}),)))
        kept = _kept_by_window(curve)
        during = list(map(operator.sub, curve.bytes_during, kept))
        made, found = _sums_that_wait(curve.nodes)
        results = nodes.returned_by(plan.graphs["forward"].graph)[: plan.ctx.user_outputs]
        results += [nodes.returned_by(halves.first.graph)[number] for number in range(len(halves.early))]
        returned = sum(meta.tensor_value(one).nbytes for one in results)
        inputs_us, weights_us = (
            simulate(order, {node: self._costs.cost(node) for node in order}, plan.ctx.sharing).step_us
            for order in (list(half.graph.nodes) for half in (halves.first, halves.second))
        )
        start = len(plan.graphs["forward"].graph.nodes)
        return PlannedHalves(
            inputs_us=inputs_us,
            weights_us=weights_us,
            left_bytes=curve.bytes_after[place - 1] - kept[place - 1] - returned,
            kept_bytes=kept[place - 1],
            inputs_peak_bytes=max(during[start:place]),
            first_peak_bytes=max(during[place:]) - returned,
            later_peak_bytes=max(map(operator.sub, during[place:], made[place:])) - returned,
            closing_peak_bytes=max(map(operator.add, curve.bytes_during[place:], found[place:])) - returned,
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


def peak_of(frames: Sequence[PlannedFrame], of_frame: Callable[[PlannedFrame], int], *, with_kept: bool = False) -> int:
    """Return the most bytes alive while a micro-batch runs one frame after another.

    Args:
        frames: frames, in the order in which they run.
        of_frame: returns the peak of one frame.
        with_kept: whether to count the gathered parameters that the window keeps for earlier frames.
    """
    peak, beside = 0, 0
    for frame in frames:
        peak = max(peak, beside + of_frame(frame))
        beside += frame.saved_bytes + (frame.kept_bytes if with_kept else 0)
    return peak


def _kept_by_window(curve: MemoryCurve) -> list[int]:
    """Return, for each node of a frame, the bytes of the gathered parameters that the window keeps alive."""
    kept = [0] * len(curve.nodes)
    for entry in curve.ranges:
        if nodes.is_kept_gather(entry.node) and not entry.held:
            for place in range(entry.first, entry.last + 1):
                kept[place] += entry.bytes
    return kept


def _sums_that_wait(order: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """Return, for each node of a frame, the bytes of gradient sums that wait for the last backward.

    Returns:
        Two lists: sums that the graph has created so far; and sums of earlier backwards that it will still read.
    """
    made, found = [0] * len(order), [0] * len(order)
    for place, node in enumerate(order):
        bytes_made = remaining_bytes(node)
        for later in range(place, len(order) if bytes_made else 0):
            made[later] += bytes_made
        if node.target is torch.ops.zgraph.add_accumulated.default:
            for earlier in range(place):
                found[earlier] += meta.tensor_value(node).nbytes
    return made, found


def _transfers(node: fx.Node) -> list[Transfer]:
    return list(transfers_of(node)) if nodes.is_collective(node) or nodes.is_marker(node) else []
