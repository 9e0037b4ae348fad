"""Reports, dumps, clocks and profilers of a frame's compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zgraph.codegen.kernel_sources import sources_of
from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext
from zgraph.compiler.pass_list import Observer
from zgraph.driver.options import CompileOptions
from zgraph.reporting.data.frame import FrameData
from zgraph.reporting.dump import Dumper
from zgraph.reporting.export.build_frame import build_frame
from zgraph.reporting.export.folder import trace_graphs, write_frame
from zgraph.reporting.export.parameters import known_parameters
from zgraph.reporting.export.record_passes import PassRecorder
from zgraph.reporting.metrics.called_graph import called_graph
from zgraph.reporting.metrics.step_clock import CalledGraph
from zgraph.reporting.of_graph import GraphReport, describe, predict
from zgraph.reporting.summary import Report
from zgraph.runtime.groups import rank_and_world
from zgraph.sharding.scope import Scope
from zgraph.torch_compat.fake_values import without_fake_mode


@dataclass(frozen=True, kw_only=True)
class Described:
    """Descriptions of a plan for reports, clocks and profilers.

    Attributes:
        graphs: one report for each graph.
        data: content of report.json for this frame; None if it cannot be described.
        called: descriptions of the graphs for clocks and profilers, by direction.
    """

    graphs: Sequence[GraphReport]
    data: FrameData | None
    called: Mapping[str, CalledGraph]


class Observation:
    """Writes reports and dumps of one frame's compile.

    Attributes:
        report: the report passed as an option, or else the model's.
        rank: this rank.
    """

    def __init__(self, frame: str, reason: str, options: CompileOptions, scopes: Sequence[Scope]) -> None:
        self.frame, self.reason, self.options = frame, reason, options
        self.report = _report_of(scopes, options.report)
        self.clocks = [scope.clocks for scope in scopes]
        self.rank, _ = rank_and_world()
        self.dumper: Dumper | None = None
        self.recorder: PassRecorder | None = None

    @property
    def watches_passes(self) -> bool:
        """Whether a dump or report shows the graphs between passes, which a saved plan does not have."""
        return self.options.dump is not None or self.report.keep_passes or self.report.keep_graphs

    def observer(self) -> Observer:
        """Return a function to call after each pass, which records the pass and writes the dump, if requested.

        A dump replaces the dump of an earlier try.
        """
        if self.dumper is not None and self.dumper.failed:
            self.report.dump_failed = True
        self.recorder = None
        dumps = self.options.dump is not None and not self.report.dump_failed
        if not dumps and not self.report.keep_passes:
            return lambda graph_pass, ctx, graph: None
        self.recorder = recorder = PassRecorder()
        if self.options.dump is None or not dumps:
            return recorder.observe
        self.dumper = dumper = Dumper(directory=self.options.dump, rank=self.rank, frame=self.frame)

        def observe(graph_pass: GraphPass | None, ctx: PassContext, graph: fx.Graph) -> None:
            recorder.observe(graph_pass, ctx, graph)
            if graph_pass is None:
                dumper.captured(ctx.direction, graph)
                return
            notes = [text for name, where, text in ctx.notes if (name, where) == (graph_pass.name, ctx.direction)]
            dumper.after(graph_pass, ctx.direction, graph, tuple(notes))

        return observe

    def describe(
        self,
        plan: FramePlan,
        captured: fx.Graph,
        names: Mapping[int, str],
        budget_bytes: int | None,
    ) -> Described:
        """Predict time and memory of a plan's graphs.

        Args:
            plan: plan of the frame.
            captured: graph of the frame before any pass.
            names: names of the frame's parameters, by the positions of their handles among the inputs.
            budget_bytes: budget of the step; None: no limit.
        """
        with self.report.phase("predicting"):
            graphs: dict[Direction, fx.Graph] = {direction: gm.graph for direction, gm in plan.graphs.items()}
            predictions = predict(graphs, plan.ctx, self.frame)
            found = describe(
                graphs,
                plan.ctx,
                predictions,
                limits=plan.limits,
                frame=self.frame,
                parameters=tuple(names.values()),
                reason=self.reason,
                keep_graphs=self.report.keep_graphs,
            )
            known, lowering = known_parameters(captured, names.values()), self.options.lowering
            data = build_frame(plan, predictions, found, known, lowering=lowering, recorder=self.recorder)
        called = {graph.direction: called_graph(graph, plan, budget_bytes) for graph in found}
        return Described(graphs=found, data=data, called=called)

    def record(self, plan: FramePlan, described: Described) -> None:
        """Add a plan that all ranks have agreed on to the report and the dump."""
        report, data = self.report, described.data
        if self.options.report is not None:  # the user will read them
            report.notes.extend(f"{name} on {direction}: {text}" for name, direction, text in plan.ctx.notes)
        report.passes.extend(plan.runs)
        report.graphs.extend(described.graphs)
        if data is not None:
            report.frames.append(data)
            if self.dumper is not None:
                failed = self.dumper.failed or not write_frame(self.dumper.directory, data, report)
                report.dump_failed = report.dump_failed or failed
            trace_graphs(data)
        if self.dumper is not None:
            with without_fake_mode():  # they are emitted with torch's own roundings
                for gm in plan.graphs.values():
                    self.dumper.kernels(sources_of(gm.graph))


def _report_of(scopes: Sequence[Scope], given: Report | None) -> Report:
    """Return the report passed as an option, or else the model's, or a new one; attach it to the models."""
    report = given or next((scope.report for scope in scopes if isinstance(scope.report, Report)), None) or Report()
    for scope in scopes:
        scope.report = report
    return report
