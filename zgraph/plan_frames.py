"""Compiles the frames of a planned step for ranks that do not exist, and keeps what becomes of their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import Allocator, MemoryCurve, memory_curve, step_curve
from zgraph.compile_frame import FrameCompiler
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.pipeline import Pipeline
from zgraph.graph.traffic import transfers
from zgraph.options import CompileOptions
from zgraph.planned_step import PlannedGraph
from zgraph.reporting.summary import Report
from zgraph.scheduling.cluster.axes import Axes, traffic_of
from zgraph.scheduling.simulate import simulate


@dataclass
class FramePlanner:
    """Compiles what it is given, and keeps the plans of its frames.

    Attributes:
        machine: of each rank.
        pipeline: with a target.
        allocator: how sizes are rounded.
        axes: of the cluster; None: data parallelism alone.
        report: of everything that was compiled.
        graphs, curves: of the frames, in the order in which these were compiled.
    """

    machine: Hardware
    pipeline: Pipeline
    allocator: Allocator
    axes: Axes | None
    report: Report = field(default_factory=lambda: Report(keep_passes=True))
    graphs: list[PlannedGraph] = field(default_factory=list[PlannedGraph])
    curves: list[MemoryCurve] = field(default_factory=list[MemoryCurve])

    def __post_init__(self) -> None:
        self._costs = CostModel(self.machine)

    def compiler_of(self, frame: Frame) -> FrameCompiler:
        """The compiler of a frame, whose plan is kept. No lowering is needed; fx costs nothing, without values."""
        options = CompileOptions(lowering="fx", report=self.report, pipeline=self.pipeline)
        known = PassContext(machine=self.machine, planned_backend=self.machine.backend)
        return FrameCompiler(frame, options, known=known, on_plan=self._keep)

    def compile(self, model: nn.Module, inputs: Sequence[Any]) -> Any:
        """Compile a model's forward, and with it the backward; returns what forward does, without values."""

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self.compiler_of(Frame.of_dynamo(gm)).compile(gm, example_inputs)

        compiled: Any = torch.compile(model, backend=backend, dynamic=False)
        try:
            return compiled(*inputs)
        finally:
            torch.compiler.reset()  # or the next plans of the same classes would meet the limit of recompiles

    def _keep(self, plan: FramePlan) -> None:
        """Look at the final graphs of a frame before they are lowered, which changes them."""
        self.graphs.extend(self._planned(direction, plan) for direction in plan.graphs)
        self.curves.append(self._curve(plan))

    def _planned(self, direction: Direction, plan: FramePlan) -> PlannedGraph:
        graph = plan.graphs[direction].graph
        order = list(graph.nodes)
        timeline = simulate(order, {node: self._costs.cost(node) for node in order}, plan.ctx.sharing)
        traffic = {} if self.axes is None else traffic_of(order, timeline, self.axes)
        sent = sum(transfer.sent_bytes for transfer in transfers(graph))
        return PlannedGraph(direction, len(order), sent, timeline, traffic)

    def _curve(self, plan: FramePlan) -> MemoryCurve:
        device_type = "cuda" if self.machine.backend == "nccl" else "cpu"
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
