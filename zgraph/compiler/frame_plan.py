"""The plan of a frame: its final graphs, and the optimizer step from which each graph runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from zgraph.analysis.liveness import MemoryCurve, memory_curve, step_curve
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.inputs_at_rest import check_only_copied
from zgraph.compiler.pass_list import Observer, PassList, PassRun
from zgraph.errors import PreconditionError
from zgraph.graph import edits
from zgraph.scheduling.problem import Limits

Graphs = dict[Direction, fx.GraphModule]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Final graphs of a frame, by direction, that run from optimizer step `from_step` on."""

    from_step: int
    graphs: Graphs


@dataclass(frozen=True, kw_only=True)
class FramePlan:
    """The result of planning a frame.

    Attributes:
        variants: graphs for successive ranges of optimizer steps; a single one unless passes start at later steps.
            Variants have equal forward graphs.
        ctx: context of the passes, with their notes and decisions.
        runs: runs of each pass on each graph of the last variant.
        limits: memory limits within which graphs were ordered by costs; None: they were ordered by rules.
    """

    variants: tuple[Variant, ...]
    ctx: PassContext
    runs: tuple[PassRun, ...]
    limits: Limits | None

    @property
    def graphs(self) -> Graphs:
        """Final graphs of the last variant, which runs for the rest of training. Lowering changes these graphs."""
        return self.variants[-1].graphs

    @cached_property
    def curve(self) -> MemoryCurve:
        """Memory curve of the variant with the highest peak."""
        return max(map(self._curve_of, reversed(self.variants)), key=lambda curve: curve.peak_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """Maximum bytes that a step allocates at any moment, equal on all ranks."""
        return self.curve.peak_bytes

    def _curve_of(self, variant: Variant) -> MemoryCurve:
        if "forward" not in variant.graphs:
            (whole,) = variant.graphs.values()
            return memory_curve(whole.graph, agreed=True, device_type=self.ctx.planned_device)
        forward, backward = (variant.graphs[direction].graph for direction in ("forward", "backward"))
        assert self.ctx.user_outputs is not None
        return step_curve(
            forward,
            backward,
            user_outputs=self.ctx.user_outputs,
            agreed=True,
            device_type=self.ctx.planned_device,
        )


def plan_frame(captured: fx.GraphModule, pipeline: PassList, ctx: PassContext, observe: Observer) -> FramePlan:
    """Run all passes of a pipeline; a joint graph is split into forward and backward before the phase "graph".

    Args:
        captured: a joint graph, an inference graph, or the graph of a whole training step; not changed.
        pipeline: passes of the frame.
        ctx: context for the passes, not changed; it has a `split` if `captured` is a joint graph.
        observe: called for dumps: with each captured graph, and after each pass of the last variant.

    Raises:
        PreconditionError: a pass that starts at a later step has changed a forward.
        ZgraphError: a graph for a GPU computes with an input that is stored elsewhere.
    """
    ctx = replace(ctx, notes=[], decisions=[])
    limits = next((found for entry in pipeline.passes if (found := entry.limits(ctx)) is not None), None)
    gm = edits.copy_of(captured)
    if ctx.split is None:
        graphs: Graphs = {"step" if ctx.direction == "step" else "inference": gm}
        _show(graphs, ctx, observe)
        runs = [*pipeline.run("joint", ctx, graphs, observe)]
        steps = pipeline.steps if "step" in graphs else (0,)  # inference reduces nothing
        earlier = [_earlier(step, graphs, pipeline, ctx) for step in steps[:-1]]
        runs += pipeline.run("graph", ctx, graphs, observe)
        last = Variant(from_step=steps[-1], graphs=graphs)
        return _checked(FramePlan(variants=(*earlier, last), ctx=ctx, runs=tuple(runs), limits=limits))
    joint: Graphs = {"joint": gm}
    _show(joint, ctx, observe)
    runs = [*pipeline.run("joint", ctx, joint, observe)]
    forward, backward = ctx.split.of(gm)
    graphs = {"forward": forward, "backward": backward}
    earlier = [_earlier(step, graphs, pipeline, ctx) for step in pipeline.steps[:-1]]
    _show(graphs, ctx, observe)
    runs += pipeline.run("graph", ctx, graphs, observe)
    last = Variant(from_step=pipeline.steps[-1], graphs=graphs)
    _check_forward(runs, pipeline)
    return _checked(FramePlan(variants=(*earlier, last), ctx=ctx, runs=tuple(runs), limits=limits))


def _checked(plan: FramePlan) -> FramePlan:
    for variant in plan.variants:
        for gm in variant.graphs.values():
            check_only_copied(gm.graph)
    return plan


def _show(graphs: Graphs, ctx: PassContext, observe: Observer) -> None:
    for direction, gm in graphs.items():
        observe(None, replace(ctx, direction=direction), gm.graph)


def _earlier(step: int, graphs: Graphs, pipeline: PassList, ctx: PassContext) -> Variant:
    """Return the variant for an earlier step: only passes that start by this step run, without notes."""
    copies: Graphs = {direction: edits.copy_of(gm) for direction, gm in graphs.items()}
    list(pipeline.at(step).run("graph", replace(ctx, notes=[], decisions=[]), copies, lambda *_: None))
    return Variant(from_step=step, graphs=copies)


def _check_forward(runs: Iterable[PassRun], pipeline: PassList) -> None:
    later = {entry.name: entry.from_step for entry in pipeline.passes if entry.from_step}
    for run in runs:
        if run.name in later and run.direction == "forward" and run.changed:
            raise PreconditionError(
                f"{run.name} starts at step {later[run.name]} and has changed the forward graph, which is the same for "
                "all steps; its run must not change forward graphs."
            )
