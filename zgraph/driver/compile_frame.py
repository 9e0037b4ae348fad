"""Compiles one frame: plans its graphs, waits until all ranks agree on them, and lowers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from zgraph.codegen.cuda_graph import RecordedSteps
from zgraph.compiler.agreement import changes_of
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.partition import JointSplit
from zgraph.driver.lower import Decided, Lowering, Program
from zgraph.driver.observe import Observation
from zgraph.driver.options import CompileOptions
from zgraph.driver.plan_graphs import GraphPlanner
from zgraph.graph.split_graph import weight_gradients
from zgraph.sharding.local_shards import compile_on_local_shards
from zgraph.torch_compat.aot import aot_autograd


class FrameCompiler:
    """Compiles one frame, and keeps all state of that compile.

    Args:
        frame: frame to compile.
        options: options of the backend.
        known: context for planning a cluster that is not there, so that nothing is sent. None: this process's cluster.
        on_plan: called with the plan, and the positions of the weight gradients among the outputs of its backward.
    """

    def __init__(
        self,
        frame: Frame,
        options: CompileOptions,
        *,
        known: PassContext | None = None,
        on_plan: Callable[[FramePlan, Sequence[int]], None] = lambda plan, late: None,
    ) -> None:
        scopes = frame.scopes()
        known = known or PassContext(machine=frame.machine)
        self.ctx = replace(known, decomposed=options.lowering == "inductor")
        self.observation = Observation(frame.name, frame.reason, options, scopes)
        self.planner = GraphPlanner(frame, options)
        self.lowering = Lowering(self.observation, options.lowering, self.planner.ranks_per_host)
        self.on_plan = on_plan
        self.is_staged = any(scope.is_staged for scope in scopes)
        self.decided: Decided | None = None
        if frame.name.endswith("/0"):  # not again for every recompile
            frame.warn_if_replicas_drift()

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the forward of the frame as a callable; its backward is compiled when it is first called."""
        backend = aot_autograd(
            compile_forward=partial(self.lower, "forward"),
            compile_backward=partial(self.lower, "backward"),
            compile_inference=self.compile_inference,
            partition=self.plan_joint,
            decompose=self.ctx.decomposed,
        )
        with self.observation.report.phase("tracing"):
            return compile_on_local_shards(gm, example_inputs, backend)

    def plan_joint(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run all passes on a joint graph, and split it; return the final forward and backward graphs."""
        outputs: int = kwargs["num_fwd_outputs"]
        late = weight_gradients(joint.graph, outputs) if self.is_staged else None
        split = JointSplit(inputs, kwargs, partial(self.observation.report.phase, "tracing"))
        graphs = self._decide(joint, replace(self.ctx, user_outputs=outputs, split=split), late=late).graphs
        return graphs["forward"], graphs["backward"]

    def compile_inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        """Return the forward of a frame without gradients as a callable."""
        return self.lower("inference", self._decide(gm, self.ctx).graphs["inference"], inputs)

    def compile_step(self, gm: fx.GraphModule, recorded: RecordedSteps | None = None) -> Program:
        """Return a whole training step as a callable; with `recorded`, it is recorded and replayed as a CUDA graph."""
        changes = changes_of(gm.graph)
        planned = self._decide(gm, replace(self.ctx, direction="step"), changes=changes).graphs["step"]
        if recorded is not None:
            recorded.check(planned)
        return self.lower("step", planned, (), recorded=recorded)

    def lower(
        self,
        direction: Direction,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        recorded: RecordedSteps | None = None,
    ) -> Program:
        """Return a final graph of the plan as a callable."""
        assert self.decided is not None, "torch lowers after it has partitioned"
        return self.lowering.lower(direction, gm, self.decided, recorded)

    def _decide(
        self,
        captured: fx.GraphModule,
        ctx: PassContext,
        *,
        late: tuple[tuple[int, ...], tuple[int | None, ...]] | None = None,
        changes: Sequence[str] = (),
    ) -> FramePlan:
        """Plan the frame, agree on the plan with the other ranks, and report it.

        Args:
            captured: joint graph, inference graph or graph of a whole step.
            ctx: context for the passes.
            late: for a stage of a pipeline, the positions of weight gradients, as `weight_gradients` returns them.
            changes: lines of text that describe what a step does to parameters and gradients; equal on all ranks.
        """
        observation, planner = self.observation, self.planner
        known = planner.name_inputs(captured.graph)
        with observation.report.phase("passes"):
            plan, budget_bytes = planner.plan(captured, ctx, observation, keeps_windows=self.is_staged)
        described = observation.describe(plan, planner.names, known, budget_bytes)
        with observation.report.phase("agreement"):
            planner.agree(plan, changes)
        observation.record(plan, described)
        self.decided = Decided.of(plan, described.called, planner.handles, late)
        self.on_plan(plan, () if late is None else late[0])
        return plan
