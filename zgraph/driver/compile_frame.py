"""Compilation of one frame: trace, plan, agreement between ranks, report, lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import fx

from zgraph.codegen.backward_variants import (
    WeightGradients,
    in_halves,
    saying_that_it_splits,
    switch_by_step,
)
from zgraph.codegen.cuda_graph import RecordedSteps
from zgraph.codegen.inductor import InductorLowering
from zgraph.codegen.kernel_sources import sources_of
from zgraph.codegen.lower_fx import lower_fx
from zgraph.compiler.agreement import Signature, agree, changes_of, places_of_updates
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan, Variant, plan_frame, plan_within_budget
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext
from zgraph.compiler.inputs_at_rest import check_only_copied, take_to_device
from zgraph.compiler.partition import partition
from zgraph.compiler.pipeline import Observer, Pipeline
from zgraph.driver.options import CompileOptions
from zgraph.graph import meta, nodes
from zgraph.graph.collective_dispatch import order_of_waits
from zgraph.graph.split_graph import Halves, split_graph, weight_gradients
from zgraph.graph.traffic import transfers
from zgraph.passes import presets
from zgraph.reporting.collective_numbers import with_numbers
from zgraph.reporting.dump import Dumper
from zgraph.reporting.export.build_frame import build_frame
from zgraph.reporting.export.folder import trace_graphs, write_frame
from zgraph.reporting.export.parameters import KnownParameter, known_parameters
from zgraph.reporting.export.record_passes import PassRecorder
from zgraph.reporting.metrics.called_graph import called_graph, called_in_warm_up
from zgraph.reporting.metrics.step_clock import CalledGraph, GraphWatch
from zgraph.reporting.of_graph import describe, predict
from zgraph.reporting.summary import Report
from zgraph.runtime.groups import rank_and_world
from zgraph.sharding.local_shards import compile_on_local_shards
from zgraph.sharding.scope import Scope
from zgraph.torch_compat.aot import aot_autograd, aot_input_index
from zgraph.torch_compat.fake_values import without_fake_mode

Program = Callable[[list[Any]], Any]


class FrameCompiler:
    """Compiles one frame; holds all state of that compilation.

    Args:
        frame: frame to compile.
        options: options of the backend.
        known: facts about the planned cluster; None: those of this process.
        on_plan: called with the finished plan.
    """

    def __init__(
        self,
        frame: Frame,
        options: CompileOptions,
        *,
        known: PassContext | None = None,
        on_plan: Callable[[FramePlan], None] = lambda plan: None,
    ) -> None:
        self.options = options
        self.on_plan = on_plan
        self.pipeline = options.pipeline or Pipeline(presets.default())
        # Not the frame itself: it would keep its inputs, and with them the model, alive as long as the compiled code.
        self.frame = frame.name
        self.reason = frame.reason
        self.is_step = frame.is_step
        known = known or PassContext(machine=frame.machine)
        self.ctx = replace(known, decomposed=options.lowering == "inductor")
        self.names = frame.handle_names()
        self.spaces = {} if frame.is_step else frame.spaces()  # a step's graph carries them
        scopes = frame.scopes()
        self.report = _report_of(scopes, options.report)
        self.clocks = [scope.clocks for scope in scopes]
        models = [model for scope in scopes for model in scope.models] if frame.is_step else []
        self.group_names = [name for model in models for name in model.group_names]  # all their ranks run the step
        self.called: dict[Direction, CalledGraph] = {}
        self.rank, ranks = rank_and_world()
        self.inductor = InductorLowering(self.rank, ranks) if options.lowering == "inductor" else None
        self.variants: tuple[Variant, ...] = ()  # of the current plan
        self.is_staged = any(scope.is_staged for scope in scopes)
        self.late: tuple[tuple[int, ...], tuple[int | None, ...]] | None = None  # result of weight_gradients
        self.weights: WeightGradients | None = None  # set if backward may run in halves
        self.halves: list[Halves] = []  # one per variant, if `weights` is set
        self.handles: tuple[str, ...] = ()  # names of the placeholders that are parameter handles
        self.recorded: RecordedSteps | None = None  # whole steps only
        self.changes: list[str] = []  # whole steps only: changes to parameters and gradients
        self.dumper: Dumper | None = None  # of the last planning attempt, as is the recorder
        self.recorder: PassRecorder | None = None
        self.known: dict[str, KnownParameter] = {}
        if self.frame.endswith("/0"):  # not again for every recompile
            frame.warn_if_replicas_drift()

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        backend = aot_autograd(
            compile_forward=partial(self.lower, "forward"),
            compile_backward=partial(self.lower, "backward"),
            compile_inference=self.compile_inference,
            partition=self.partition,
            decompose=self.inductor is not None,
        )
        with self.report.phase("tracing"):
            return compile_on_local_shards(gm, example_inputs, backend)

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the final forward and backward graphs of a joint graph."""

        def split(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            with self.report.phase("tracing"):
                return partition(gm, inputs, **kwargs)

        if self.is_staged:
            self.late = weight_gradients(joint.graph, kwargs["num_fwd_outputs"])
        graphs = self._plan(joint, replace(self.ctx, user_outputs=kwargs["num_fwd_outputs"], split=split)).graphs
        if self.late is not None:
            self._split(graphs["backward"].graph, *self.late)
        return graphs["forward"], graphs["backward"]

    def compile_inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        return self.lower("inference", self._plan(gm, self.ctx).graphs["inference"], inputs)

    def compile_step(self, gm: fx.GraphModule, recorded: RecordedSteps | None = None) -> Program:
        """Return the whole training step as a callable; with `recorded`, it is recorded and replayed."""
        self.changes = changes_of(gm.graph)
        planned = self._plan(gm, replace(self.ctx, direction="step")).graphs["step"]
        if recorded is not None:
            recorded.check(planned)
        self.recorded = recorded
        return self.lower("step", planned, ())

    def lower(self, direction: Direction, gm: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        """Lower a final graph to a callable."""
        with self.report.phase("lowering"):
            profiler_of = partial(self.report.profiler_of, self.frame, direction)
            watch = GraphWatch(self.called[direction], self.clocks, profiler_of)
            title = f"{self.frame} {direction}"
            main = with_numbers(self._lowered(gm, watch, title, self.recorded), gm.graph, title, self.rank)
            if direction == "forward" and self.weights is not None:
                return saying_that_it_splits(main, self._handle_in(gm.graph))
            if direction not in ("backward", "step"):
                return main
            programs = [
                (each.from_step, self._lowered_warm_up(place, direction, title))
                for place, each in enumerate(self.variants[:-1])
            ]
            last = self._in_halves(main, len(self.variants) - 1, title)
            return switch_by_step([*programs, (self.variants[-1].from_step, last)], gm, self.weights)

    def _lowered_warm_up(self, place: int, direction: Direction, title: str) -> Program:
        gm = self.variants[place].graphs[direction]
        about = called_in_warm_up(gm.graph, self.called[direction])
        whole = self._lowered(gm, GraphWatch(about, self.clocks), f"{title} of warm-up")
        return self._in_halves(whole, place, f"{title} of warm-up")

    def _split(self, backward: fx.Graph, late: tuple[int, ...], tensors: tuple[int | None, ...]) -> None:
        """Split the backward of each variant in two halves, which a pipeline stage may run separately."""
        halves = [split_graph(variant.graphs["backward"], late) for variant in self.variants]
        self.halves = [one for one in halves if one is not None]
        if len(self.halves) == len(halves):
            self.weights = WeightGradients(self._handle_in(backward), late, tensors)

    def _handle_in(self, graph: fx.Graph) -> int:
        """Return the input position of any parameter's handle in a graph that reads or reduces parameters."""
        places = {node.name: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        return next(places[name] for name in self.handles if name in places)

    def _in_halves(self, whole: Program, place: int, title: str) -> Program:
        """Let a lowered backward run in halves too, if it was split; the halves are lowered at their first call."""
        if self.weights is None:
            return whole

        def lower(half: fx.GraphModule) -> Program:
            with self.report.phase("lowering"):
                about = called_in_warm_up(half.graph, self.called["backward"])
                lowered = self._lowered(half, GraphWatch(about, self.clocks), f"{title}, in halves")
                return with_numbers(lowered, half.graph, f"{title}, in halves", self.rank)

        return in_halves(whole, self.weights, self.halves[place], lower)

    def _lowered(
        self, gm: fx.GraphModule, watch: GraphWatch, title: str, recorded: RecordedSteps | None = None
    ) -> Program:
        if self.inductor is None:
            return lower_fx(gm, watch, self._ranks_per_host, recorded)
        islands, distinct = self.inductor.islands, len(self.inductor.compiled)
        lowered = self.inductor.lower(gm, watch, self._ranks_per_host, f"frame {title}", recorded)
        self.report.islands += self.inductor.islands - islands
        self.report.distinct_islands += len(self.inductor.compiled) - distinct
        return lowered

    @property
    def _ranks_per_host(self) -> int:
        return 1 if self.pipeline.target is None else self.pipeline.target.hardware.ranks_per_host

    def _plan(self, captured: fx.GraphModule, ctx: PassContext) -> FramePlan:
        """Plan the frame within the budget, if any; agree on the plan with the other ranks, and report it."""
        self._name_markers(captured.graph)
        take_to_device(captured.graph)
        self.known = known_parameters(captured.graph, self.names.values())
        target = self.pipeline.target
        if target is not None:
            ctx = target.known_to(ctx, captured.graph)
        budget_bytes = ctx.plan_bytes

        def plan_for(plan_bytes: int | None) -> FramePlan:
            return plan_frame(captured, self.pipeline, replace(ctx, plan_bytes=plan_bytes), self._observer())

        with self.report.phase("passes"):
            # A stage first plans without the budget, since every micro-batch in flight holds its saved tensors; the
            # rest of the budget is for keep_bytes. Only a frame that does not fit by itself is planned within it.
            plan = plan_for(None) if budget_bytes is None or self.is_staged else None
            if budget_bytes is not None and (plan is None or plan.peak_bytes > budget_bytes):
                plan = plan_within_budget(plan_for, budget_bytes, self.frame)
        assert plan is not None
        self.variants = plan.variants
        for gm in plan.graphs.values():
            check_only_copied(gm.graph)
        self._finish(plan, budget_bytes)
        self.on_plan(plan)
        return plan

    def _observer(self) -> Observer:
        """Return an observer that records passes and writes a dump, as requested; a later attempt replaces the dump."""
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

    def _finish(self, plan: FramePlan, budget_bytes: int | None) -> None:
        """Agree with the peers on all communication before any starts, and report on the graphs."""
        with self.report.phase("predicting"):
            graphs: dict[Direction, fx.Graph] = {direction: gm.graph for direction, gm in plan.graphs.items()}
            predictions = predict(graphs, plan.ctx, self.frame)
            found = describe(
                graphs,
                plan.ctx,
                predictions,
                limits=plan.limits,
                frame=self.frame,
                parameters=tuple(self.names.values()),
                reason=self.reason,
                keep_graphs=self.report.keep_graphs,
            )
            data = build_frame(
                plan, predictions, found, self.known, lowering=self.options.lowering, recorder=self.recorder
            )
        self.called = {graph.direction: called_graph(graph, plan, budget_bytes) for graph in found}
        signatures = [self._signed(direction, gm.graph) for direction, gm in plan.graphs.items()]
        for variant, following in pairwise(plan.variants):
            closing = "step" if "step" in variant.graphs else "backward"
            warm = f"{closing} of {following.from_step} steps of warm-up"  # the same number on all ranks
            signatures.append(self._signed(warm, variant.graphs[closing].graph))
        with self.report.phase("agreement"):
            agree(signatures, self.options.agreement_timeout_s)
        if self.options.report is not None:  # the user will read them
            self.report.notes.extend(f"{name} on {direction}: {text}" for name, direction, text in plan.ctx.notes)
        self.report.passes.extend(plan.runs)
        self.report.graphs.extend(found)
        if data is not None:
            self.report.frames.append(data)
            if self.dumper is not None:
                failed = self.dumper.failed or not write_frame(self.dumper.directory, data, self.report)
                self.report.dump_failed = self.report.dump_failed or failed
            trace_graphs(data)
        if self.dumper is not None:
            with without_fake_mode():  # constants in kernels use torch's own rounding
                for gm in plan.graphs.values():
                    self.dumper.kernels(sources_of(gm.graph))

    def _signed(self, direction: str, graph: fx.Graph) -> Signature:
        others = [*order_of_waits(graph, self._ranks_per_host), *places_of_updates(graph), *self.changes]
        return Signature.of(direction, [*transfers(graph)], others, self.group_names)

    def _name_markers(self, graph: fx.Graph) -> None:
        """Put each parameter's name on its markers, for dumps, reports and errors; no pass depends on it."""
        names: dict[str, str] = {}
        for place, node in enumerate(graph.find_nodes(op="placeholder")):
            index = place if self.is_step else aot_input_index(node)
            if index in self.spaces:
                meta.set_space(node, self.spaces[index])
            if index in self.names:
                names[node.name] = self.names[index]
        self.handles = tuple(names)
        for marker in nodes.call_functions(graph, nodes.is_marker):
            handle = marker.args[1]
            assert isinstance(handle, fx.Node)
            meta.set_parameters(marker, [names.get(handle.name, "?")], [handle.name])


def _report_of(scopes: Sequence[Scope], given: Report | None) -> Report:
    """Return the user's report, else the model's or a new one; attach it to every scope."""
    report = given or next((scope.report for scope in scopes if isinstance(scope.report, Report)), None) or Report()
    for scope in scopes:
        scope.report = report
    return report
