"""What `torch.compile(model, backend="zgraph")` calls: trace, passes, partition, agreement, lowering."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import MemoryCurve, memory_curve, step_curve
from zgraph.codegen.inductor import InductorLowering
from zgraph.codegen.kernel_sources import sources_of
from zgraph.codegen.lower_fx import lower_fx
from zgraph.codegen.warm_up import switch_after
from zgraph.compiler.agreement import Signature, agree
from zgraph.compiler.fit_budget import agreed_peak, explain, fit, smallest_feasible
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext
from zgraph.compiler.partition import partition as split_joint_graph
from zgraph.compiler.pipeline import Pipeline
from zgraph.errors import ZgraphWarning
from zgraph.graph import edits, meta, nodes
from zgraph.graph.collective_dispatch import order_of_waits
from zgraph.graph.traffic import transfers
from zgraph.options import CompileOptions
from zgraph.passes import presets
from zgraph.reporting.collective_numbers import with_numbers
from zgraph.reporting.dump import Dumper
from zgraph.reporting.of_graph import describe
from zgraph.reporting.summary import Report
from zgraph.runtime.handle import name_of
from zgraph.runtime.profiler import GraphProfiler
from zgraph.sharding.local_shards import compile_on_local_shards
from zgraph.sharding.scope import Scope, scope_behind
from zgraph.torch_compat.aot import aot_autograd, aot_input_index
from zgraph.torch_compat.dynamo import compile_id, dynamo_example, raise_through_dynamo, recompile_reason
from zgraph.torch_compat.fake_values import without_fake_mode
from zgraph.torch_compat.groups import is_distributed_ready

Graphs = dict[Direction, fx.GraphModule]
ProfilerOf = Callable[[], GraphProfiler | None]


def zgraph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The Dynamo backend; torch finds it through the entry point `torch_dynamo_backends`.

    Args:
        gm: one frame's graph.
        example_inputs: its inputs in the call that is being compiled.
        options: see `zgraph.options.CompileOptions`.

    Raises:
        ValueError: an option is unknown or cannot be honoured.
    """
    try:
        parsed = CompileOptions.parse(options)
    except ValueError as error:
        raise_through_dynamo(str(error))
    return FrameCompiler(gm, parsed).compile(gm, example_inputs)


class FrameCompiler:
    """Compiles one frame; all state of that compile lives here."""

    def __init__(self, gm: fx.GraphModule, options: CompileOptions) -> None:
        self.options = options
        self.pipeline = options.pipeline or Pipeline(presets.default())
        self.frame = compile_id()
        self.reason = recompile_reason()
        self.ctx = PassContext(machine=_machine_of(gm), decomposed=options.lowering == "inductor")
        self.names = _handle_names(gm)
        self.report = _report_of(gm, options.report)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_distributed_ready() else (0, 1)
        self.dumper: Dumper | None = None
        if options.dump is not None:
            self.dumper = Dumper(directory=options.dump, rank=rank, frame=self.frame)
        self.inductor = InductorLowering(rank, ranks) if options.lowering == "inductor" else None
        self.warmup_steps = max((entry.counts_after for entry in self.pipeline.passes), default=0)
        self.warm_backward: fx.GraphModule | None = None  # for these steps
        if self.frame.endswith("/0"):  # not again for every recompile
            _warn_if_replicas_drift(gm)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with self.report.phase("tracing"):
            return compile_on_local_shards(gm, example_inputs, self._backend())

    def _backend(self) -> Callable[..., Any]:
        return aot_autograd(
            compile_forward=partial(self.lower, "forward"),
            compile_backward=partial(self.lower, "backward"),
            compile_inference=self.compile_inference,
            partition=self.partition,
            decompose=self.inductor is not None,
        )

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Joint passes, min-cut partition, then graph passes on forward and backward together."""

        def split(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            return split_joint_graph(gm, inputs, **kwargs)

        def plan(gm: fx.GraphModule) -> Graphs:
            self._run_passes({"joint": gm}, "joint")
            forward, backward = split(gm)
            if self.warmup_steps:
                self.warm_backward = self._plan_warm_backward({"forward": forward, "backward": backward})
            graphs: Graphs = {"forward": forward, "backward": backward}
            self._run_passes(graphs, "graph")
            return graphs

        self.ctx.user_outputs = kwargs["num_fwd_outputs"]
        self.ctx.split = split
        graphs = self._within_budget(joint, plan)
        return graphs["forward"], graphs["backward"]

    def _plan_warm_backward(self, graphs: Graphs) -> fx.GraphModule:
        """The backward without those passes that count only later; their pipeline plans copies of both graphs."""
        copies: Graphs = {direction: edits.copy_of(gm) for direction, gm in graphs.items()}
        ctx = replace(self.ctx, graphs=copies, notes=[])
        pipeline = self.pipeline.without(lambda entry: entry.counts_after > 0)
        for _ in pipeline.run("graph", ctx, copies, lambda *_: None):
            pass
        return copies["backward"]

    def compile_inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """All passes on the one graph."""

        def plan(gm: fx.GraphModule) -> Graphs:
            graphs: Graphs = {"inference": gm}
            self._run_passes(graphs, "joint")
            self._run_passes(graphs, "graph")
            return graphs

        return self.lower("inference", self._within_budget(gm, plan)["inference"], inputs)

    def _within_budget(self, captured: fx.GraphModule, plan: Callable[[fx.GraphModule], Graphs]) -> Graphs:
        """The final graphs. Where there is a budget they keep it, after some more tries if need be.

        Raises:
            ValueError: no try fits; says which budget would do.
        """
        self._name_markers(captured.graph)
        untouched = edits.copy_of(captured)  # passes rewrite what they are given
        before, recorded = self.ctx, len(self.report.passes)
        graphs = plan(captured)
        budget = self.ctx.budget_bytes
        if budget is None:
            self._finish(graphs)
            return graphs
        planned_for = budget
        peaks: dict[int, int] = {}
        explained: dict[int, str] = {}

        def peak_of(target: int) -> int:
            nonlocal planned_for, graphs
            if target != planned_for:
                planned_for = target
                self.ctx = replace(before, target_bytes=target, notes=[])
                del self.report.passes[recorded:]
                if self.dumper is not None:
                    self.dumper.begin_again()
                graphs = plan(edits.copy_of(untouched))
            curve = self._curve(graphs)
            peaks[target] = agreed_peak(curve)
            explained[peaks[target]] = explain(curve)
            return peaks[target]

        if fit(peak_of, budget) is None:
            least = smallest_feasible(peak_of, peaks)
            where = explained[max(peak for peak in explained if peak <= least)]
            raise_through_dynamo(
                f"zgraph: the step of frame {self.frame} does not fit into budget_bytes={budget}. The smallest budget "
                f"that it was found to fit into is {least} bytes, which are there {where}. Raise budget_bytes to it; "
                "or take smaller buckets (bucket_bytes), a smaller batch, zero_stage=3 or more ranks."
            )
        self._finish(graphs)
        return graphs

    def _curve(self, graphs: Graphs) -> MemoryCurve:
        """Memory curve of the step that holds most."""
        if "inference" in graphs:
            return memory_curve(graphs["inference"].graph)
        assert self.ctx.user_outputs is not None
        backwards = [graphs["backward"], *([] if self.warm_backward is None else [self.warm_backward])]
        curves = [
            step_curve(graphs["forward"].graph, backward.graph, user_outputs=self.ctx.user_outputs)
            for backward in backwards
        ]
        return max(curves, key=agreed_peak)

    def lower(self, direction: Direction, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        profiler_of = partial(self.report.profiler_of, self.frame, direction)
        with self.report.phase("lowering"):
            rank = dist.get_rank() if is_distributed_ready() else 0
            main = with_numbers(self._lowered(gm, profiler_of), gm.graph, f"{self.frame} {direction}", rank)
            if direction != "backward" or self.warm_backward is None:
                return main
            return switch_after(self.warmup_steps, self._lowered(self.warm_backward, None), main, gm)

    @property
    def _ranks_per_node(self) -> int:
        return 1 if self.ctx.hardware is None else self.ctx.hardware.ranks_per_host

    def _lowered(self, gm: fx.GraphModule, profiler_of: ProfilerOf | None) -> Callable[[list[Any]], Any]:
        if self.inductor is None:
            return lower_fx(gm, profiler_of, self._ranks_per_node)
        islands, distinct = self.inductor.islands, len(self.inductor.compiled)
        lowered = self.inductor.lower(gm, profiler_of, self._ranks_per_node)
        self.report.islands += self.inductor.islands - islands
        self.report.distinct_islands += len(self.inductor.compiled) - distinct
        return lowered

    def _run_passes(self, graphs: Graphs, phase: Any) -> None:
        self.ctx.graphs = graphs
        if self.dumper is not None and (phase == "joint" or "inference" not in graphs):
            for direction, gm in graphs.items():
                self.dumper.captured(direction, gm.graph)
        with self.report.phase("passes"):
            self.report.passes.extend(self.pipeline.run(phase, self.ctx, graphs, self._observe))

    def _observe(self, graph_pass: GraphPass, direction: Direction, graph: fx.Graph) -> None:
        if self.dumper is not None:
            notes = tuple(text for name, where, text in self.ctx.notes if (name, where) == (graph_pass.name, direction))
            self.dumper.after(graph_pass, direction, graph, notes)

    def _finish(self, graphs: Graphs) -> None:
        """Agree with the peers on what will be sent before anything is, and report on the graphs."""
        with self.report.phase("predicting"):
            found = describe(
                {direction: gm.graph for direction, gm in graphs.items()},
                self.ctx,
                frame=self.frame,
                parameters=tuple(self.names.values()),
                reason=self.reason,
            )
        signatures = [
            Signature.of(graph.direction, graph.transfers, order_of_waits(gm.graph, self._ranks_per_node))
            for graph, gm in zip(found, graphs.values(), strict=True)
        ]
        if self.warm_backward is not None:
            warm, graph = (
                f"backward of {self.warmup_steps} steps of warm-up",
                self.warm_backward.graph,
            )  # as many on all
            waits = order_of_waits(graph, self._ranks_per_node)
            signatures.append(Signature.of(warm, [*transfers(graph)], waits))
        with self.report.phase("agreement"):
            agree(signatures, self.options.agreement_timeout_s)
        if self.options.report is not None:  # somebody wants to read them
            self.report.notes.extend(f"{name} on {direction}: {text}" for name, direction, text in self.ctx.notes)
        self.report.graphs.extend(found)
        if self.dumper is not None:
            with without_fake_mode():  # they are emitted with torch's own roundings
                for gm in graphs.values():
                    self.dumper.kernels(sources_of(gm.graph))

    def _name_markers(self, graph: fx.Graph) -> None:
        """Leave each parameter's name on its markers, for dumps, reports and errors; no pass decides by it."""
        names: dict[str, str] = {}
        for node in graph.find_nodes(op="placeholder"):
            index = aot_input_index(node)
            if index in self.names:
                names[node.name] = self.names[index]
        self.ctx.parameters = names
        for marker in nodes.call_functions(graph, nodes.is_marker):
            handle = marker.args[1]
            assert isinstance(handle, fx.Node)
            meta.set_parameters(marker, [names.get(handle.name, "?")], [handle.name])


def _scopes_of(gm: fx.GraphModule) -> list[Scope]:
    """Scopes of the models whose parameters the frame reads."""
    handles = [dynamo_example(node) for node in gm.graph.find_nodes(op="placeholder")]
    return [scope for scope in map(scope_behind, handles) if scope is not None]


def _machine_of(gm: fx.GraphModule) -> Hardware | None:
    return next((scope.machine for scope in _scopes_of(gm) if scope.machine is not None), None)


def _report_of(gm: fx.GraphModule, given: Report | None) -> Report:
    """The one the user has given, else that of the model whose parameters the frame reads, which is told of it."""
    scopes = _scopes_of(gm)
    report = given or next((scope.report for scope in scopes if isinstance(scope.report, Report)), None) or Report()
    for scope in scopes:
        scope.report = report
    return report


def _handle_names(gm: fx.GraphModule) -> dict[int, str]:
    """Parameter names by the position of their handle among the frame's inputs."""
    found: dict[int, str] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        name = name_of(dynamo_example(node))
        if name != "?":
            found[position] = name
    return found


def _warn_if_replicas_drift(gm: fx.GraphModule) -> None:
    if not is_distributed_ready() or dist.get_world_size() == 1:
        return
    inputs = [dynamo_example(node) for node in gm.graph.find_nodes(op="placeholder")]
    trainable = [value for value in inputs if isinstance(value, nn.Parameter) and value.requires_grad]
    if trainable and not any(isinstance(value, DTensor) for value in trainable):
        warnings.warn(
            f"zgraph: {dist.get_world_size()} ranks train a model of which nothing is sharded, so nothing is "
            "communicated and the ranks drift apart; call zgraph.shard(model) before torch.compile.",
            ZgraphWarning,
            stacklevel=2,
        )
