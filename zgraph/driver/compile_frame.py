"""Compiles one frame: plans its graphs, waits until all ranks agree on them, and lowers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from zgraph.codegen.cuda_graph import RecordedSteps
from zgraph.compiler.agreement import agree, changes_of, signatures_of
from zgraph.compiler.fit_budget import plan_within_budget
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan, plan_frame
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.inputs_at_rest import take_to_device
from zgraph.compiler.partition import JointSplit
from zgraph.compiler.pass_list import PassList
from zgraph.driver.garbage import rarely_collected
from zgraph.driver.late_markers import LateMarkers
from zgraph.driver.lower import Decided, Lowering, Program
from zgraph.driver.observe import Described, Observation
from zgraph.driver.options import CompileOptions
from zgraph.driver.saved_plans.folder import PlanFolder
from zgraph.driver.saved_plans.frame_cache import FrameCache
from zgraph.driver.saved_plans.saved_plan import Late, SavedPlan
from zgraph.graph import meta, nodes
from zgraph.graph.split_graph import weight_gradients
from zgraph.passes import presets
from zgraph.sharding.local_shards import compile_on_local_shards
from zgraph.torch_compat.aot import aot_autograd, aot_input_index
from zgraph.torch_compat.groups import is_fake_world


class FrameCompiler:
    """Compiles one frame, and keeps all state of that compile.

    Args:
        frame: frame to compile.
        options: options of the backend.
        known: facts about a cluster that is only planned for; nothing is sent. None: use this process's cluster.
        on_plan: called with the plan, and the positions of the weight gradients among the outputs of its backward.
    """

    markers: LateMarkers  # of a frame of Dynamo's, while it is traced

    def __init__(
        self,
        frame: Frame,
        options: CompileOptions,
        *,
        known: PassContext | None = None,
        on_plan: Callable[[FramePlan, Sequence[int]], None] = lambda plan, late: None,
    ) -> None:
        # Not the frame itself: its inputs would live as long as what was compiled, and the model with them.
        scopes, machine, self.is_step = frame.scopes(), frame.machine, frame.is_step
        self.names = frame.handle_names()  # of the frame's parameters, by the positions of their handles
        self.spaces = {} if frame.is_step else frame.spaces()  # the graph of a step knows
        if frame.name.endswith("/0"):  # not again for every recompile
            frame.warn_if_replicas_drift()
        self.is_staged = any(scope.is_staged for scope in scopes)
        models = [model for scope in scopes for model in scope.models] if frame.is_step else []
        self.group_names = [name for model in models for name in model.group_names]  # whose ranks all have the step
        self.ctx = replace(known or PassContext(machine=machine), decomposed=options.lowering == "inductor")
        self.passes = options.passes or PassList(presets.default())
        self.ranks_per_host = 1 if self.passes.target is None else self.passes.target.hardware.ranks_per_host
        self.timeout_s, self.on_plan = options.agreement_timeout_s, on_plan
        self.observation = Observation(frame.name, frame.reason, options, scopes)
        self.lowering = Lowering(self.observation, options.lowering, self.ranks_per_host, options.compile_helpers)
        is_timed = self.passes.target is not None and self.passes.target.time_kernels  # by ranks together
        uncached = self.observation.watches_passes or is_timed or is_fake_world()
        self.cache = FrameCache(None if uncached else PlanFolder.default())
        self.facts = {  # that the plan depends on, in addition to graph and inputs
            "lowering": options.lowering,
            "passes": self.passes,
            "machine": (self.ctx.machine, self.ctx.host_budget_bytes, self.ctx.update, self.ctx.planned_backend),
            "names": self.names,
            "spaces": self.spaces,
            "groups": self.group_names,
            "kind": (self.is_step, self.is_staged),
        }

    # --- torch's calls ---

    @rarely_collected()
    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the forward of the frame as a callable; its backward is compiled when it is first called."""
        backend = aot_autograd(
            compile_forward=partial(self.lower, "forward"),
            compile_backward=partial(self.lower, "backward"),
            compile_inference=self.compile_inference,
            partition=self.plan_joint,
            decompose=self.ctx.decomposed,
        )

        def compile_unmarked(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.markers = LateMarkers(gm, inputs, self.spaces)
            try:
                if self._find(gm, self.markers.inputs, {"markers": self.markers.facts()}):
                    try:
                        return backend(self.cache.stand_in(len(inputs)), self.markers.inputs)
                    except Exception as error:
                        if self.cache.found is None:  # the plan was adopted
                            raise
                        self.cache.refuse(error)
                return backend(gm, self.markers.inputs)
            finally:
                del self.markers  # which has inputs of the frame

        with self.observation.report.phase("tracing"):
            return compile_on_local_shards(gm, example_inputs, compile_unmarked)

    def plan_joint(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run all passes on a joint graph, and split it; return the final forward and backward graphs."""
        if self.cache.found is not None:
            graphs = self.cache.found.variants[-1].graphs
            return graphs["forward"], graphs["backward"]
        outputs: int = kwargs["num_fwd_outputs"]
        self.markers.insert(joint.graph)
        late = weight_gradients(joint.graph, outputs) if self.is_staged else None
        split = JointSplit(inputs, kwargs, partial(self.observation.report.phase, "tracing"))
        graphs = self._decide(joint, replace(self.ctx, user_outputs=outputs, split=split), late=late).graphs
        return graphs["forward"], graphs["backward"]

    def compile_inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        """Return the forward of a frame without gradients as a callable."""
        if self.cache.found is None:
            self.markers.insert(gm.graph)
            gm = self._decide(gm, self.ctx).graphs["inference"]
        else:
            gm = self.cache.found.variants[-1].graphs["inference"]
        return self.lower("inference", gm, inputs)

    @rarely_collected()
    def compile_step(self, gm: fx.GraphModule, recorded: RecordedSteps | None = None) -> Program:
        """Return a whole training step as a callable; with `recorded`, it is recorded and replayed as a CUDA graph."""
        changes, ctx = changes_of(gm.graph), replace(self.ctx, direction="step")
        if self._find(gm, [meta.value(node) for node in gm.graph.find_nodes(op="placeholder")], {}):
            planned = self._adopt(ctx, changes).graphs["step"]
        else:
            planned = self._decide(gm, ctx, changes=changes).graphs["step"]
            self._save()
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
        if direction in ("forward", "inference"):  # AOTAutograd's findings are known
            if self.cache.found is None:
                self._save()
            else:
                self.cache.check()
                self._adopt(self.ctx)
        return self.lowering.lower(direction, gm, recorded)

    # --- the plan of the frame ---

    def _decide(
        self,
        captured: fx.GraphModule,
        ctx: PassContext,
        *,
        late: Late | None = None,
        changes: Sequence[str] = (),
    ) -> FramePlan:
        """Plan the frame, agree on the plan with the other ranks, and report it.

        Args:
            captured: joint graph, inference graph or graph of a whole step.
            ctx: context for the passes.
            late: for a stage of a pipeline, the positions of weight gradients, as `weight_gradients` returns them.
            changes: lines of text that describe what a step does to parameters and gradients; equal on all ranks.
        """
        handles = self._name_inputs(captured.graph)
        take_to_device(captured.graph)
        with self.observation.report.phase("passes"):
            if self.passes.target is not None:
                ctx = self.passes.target.known_to(ctx, captured.graph)
            plan = self._plan(captured, ctx)
        described = self.observation.describe(plan, captured.graph, self.names, ctx.plan_bytes)
        with self.observation.report.phase("cache"):
            outputs = nodes.returned_by(captured.graph)[: ctx.user_outputs]
            values = [meta.value(node) if isinstance(node, fx.Node) else node for node in outputs]
            saved = SavedPlan.of(plan, described.graphs, described.called, described.data, handles, late)
            self.cache.keep(saved, values)
        self._announce(plan, described, handles, late, changes)
        self.lowering.lower_ahead()
        return plan

    def _find(self, gm: fx.GraphModule, inputs: Sequence[Any], facts: dict[str, object]) -> bool:
        """Return whether the frame's plan was saved by this run or an earlier one."""
        with self.observation.report.phase("cache"):
            return self.cache.find(gm, inputs, self.facts | facts) is not None

    def _save(self) -> None:
        with self.observation.report.phase("cache"):
            self.cache.write(is_step=self.is_step)
        if self.cache.reason:
            self.observation.report.unsaved[self.observation.frame] = self.cache.reason

    def _adopt(self, ctx: PassContext, changes: Sequence[str] = ()) -> FramePlan:
        """Use the saved plan of the frame, if all ranks agree on it."""
        saved = self.cache.found
        assert saved is not None
        self.cache.forget()  # from here on, an error is not about the plan on disk
        if self.passes.target is not None:
            ctx = replace(ctx, hardware=self.passes.target.hardware)
        saved.make_groups()
        plan = saved.plan(ctx)
        reports, called, data = saved.described(self.observation.frame, self.observation.reason)
        described = Described(graphs=reports, data=data, called=called)
        self._announce(plan, described, saved.handles, saved.late, changes)
        self.observation.report.cached_plans += 1
        return plan

    def _announce(
        self,
        plan: FramePlan,
        described: Described,
        handles: tuple[str, ...],
        late: Late | None,
        changes: Sequence[str],
    ) -> None:
        """Agree on a plan with the other ranks, then report it, and hand it to lowering."""
        with self.observation.report.phase("agreement"):
            agree(signatures_of(plan, changes, self.group_names, self.ranks_per_host), self.timeout_s)
        self.observation.record(plan, described)
        self.lowering.decided = Decided.of(plan, described.called, handles, late)
        self.on_plan(plan, () if late is None else late[0])

    def _name_inputs(self, graph: fx.Graph) -> tuple[str, ...]:
        """Record names and tiers (memory spaces) of a captured graph's inputs; return the placeholders of handles.

        Names are for dumps, reports and errors; no pass makes decisions by names.
        """
        names: dict[str, str] = {}
        for place, node in enumerate(graph.find_nodes(op="placeholder")):
            index = place if self.is_step else aot_input_index(node)
            if index in self.spaces:
                meta.set_space(node, self.spaces[index])
            if index in self.names:
                names[node.name] = self.names[index]
        for marker in nodes.call_functions(graph, nodes.is_marker):
            handle = marker.args[1]
            assert isinstance(handle, fx.Node)
            meta.set_parameters(marker, [names.get(handle.name, "?")], [handle.name])
        return tuple(names)

    def _plan(self, captured: fx.GraphModule, ctx: PassContext) -> FramePlan:
        """Run the passes on a copy of the captured graph, within the context's budget if it has one.

        A pipeline stage, which has several micro-batches in flight, is planned without a budget if one micro-batch then
        fits into the budget: the rest of the budget is for `keep_bytes`.
        """

        def plan_for(plan_bytes: int | None) -> FramePlan:
            return plan_frame(captured, self.passes, replace(ctx, plan_bytes=plan_bytes), self.observation.observer())

        budget_bytes = ctx.plan_bytes
        if budget_bytes is None or self.is_staged:
            plan = plan_for(None)
            if budget_bytes is None or plan.peak_bytes <= budget_bytes:
                return plan
        return plan_within_budget(plan_for, budget_bytes, self.observation.frame)
