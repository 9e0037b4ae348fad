"""Plans the graphs of a frame: names inputs, runs passes within the budget, and agrees with the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from zgraph.compiler.agreement import Signature, agree, places_of_updates
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan, plan_frame, plan_within_budget
from zgraph.compiler.graph_pass import PassContext
from zgraph.compiler.inputs_at_rest import check_only_copied, take_to_device
from zgraph.compiler.pass_list import PassList
from zgraph.driver.observe import Observation
from zgraph.driver.options import CompileOptions
from zgraph.graph import meta, nodes
from zgraph.graph.collective_dispatch import order_of_waits
from zgraph.graph.traffic import transfers
from zgraph.passes import presets
from zgraph.reporting.export.parameters import KnownParameter, known_parameters
from zgraph.torch_compat.aot import aot_input_index


class GraphPlanner:
    """Plans the graphs of one frame.

    Attributes:
        names: names of the frame's parameters, by the positions of their handles among the inputs.
        handles: names of the placeholders that are parameter handles, once `name_inputs` has run.
    """

    def __init__(self, frame: Frame, options: CompileOptions) -> None:
        # Only the name of the frame: its inputs, and with them the model, would live as long as the compiled code.
        self.passes = options.passes or PassList(presets.default())
        self.timeout_s = options.agreement_timeout_s
        self.frame, self.is_step = frame.name, frame.is_step
        self.names, self.handles = frame.handle_names(), tuple[str, ...]()
        self.spaces = {} if frame.is_step else frame.spaces()  # recorded in the graph of a step
        models = [model for scope in frame.scopes() for model in scope.models] if frame.is_step else []
        self.group_names = [name for model in models for name in model.group_names]  # all ranks of these run the step

    @property
    def ranks_per_host(self) -> int:
        return 1 if self.passes.target is None else self.passes.target.hardware.ranks_per_host

    def name_inputs(self, graph: fx.Graph) -> dict[str, KnownParameter]:
        """Record names, memory spaces and devices of a captured graph's inputs; return its parameters by name.

        Names are for dumps, reports and errors; passes make no decisions by names.
        """
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
        take_to_device(graph)
        return known_parameters(graph, self.names.values())

    def plan(
        self, captured: fx.GraphModule, ctx: PassContext, observation: Observation, *, keeps_windows: bool
    ) -> tuple[FramePlan, int | None]:
        """Run the passes, within the target's budget if it has one.

        Args:
            captured: graph with named inputs; not changed.
            ctx: context for the passes.
            observation: sees each graph after each pass.
            keeps_windows: whether the frame is a pipeline stage's, which has several micro-batches in flight. If so,
                the passes plan without a budget as long as one micro-batch fits; the rest of the budget is for
                gathered parameters kept between micro-batches (`keep_bytes`).

        Returns:
            The plan, and the budget in bytes or None.
        """
        target = self.passes.target
        if target is not None:
            ctx = target.known_to(ctx, captured.graph)
        budget_bytes = ctx.plan_bytes

        def plan_for(plan_bytes: int | None) -> FramePlan:
            return plan_frame(captured, self.passes, replace(ctx, plan_bytes=plan_bytes), observation.observer())

        plan = plan_for(None) if budget_bytes is None or keeps_windows else None
        if budget_bytes is not None and (plan is None or plan.peak_bytes > budget_bytes):
            plan = plan_within_budget(plan_for, budget_bytes, self.frame)
        assert plan is not None
        for gm in plan.graphs.values():
            check_only_copied(gm.graph)
        return plan, budget_bytes

    def agree(self, plan: FramePlan, changes: Sequence[str]) -> None:
        """Agree with the other ranks on all communication in the plan, before anything is sent.

        Args:
            plan: plan of the frame.
            changes: more lines that must be equal on all ranks.

        Raises:
            AgreementError: ranks planned different communication.
        """
        signatures = [self._signed(direction, gm.graph, changes) for direction, gm in plan.graphs.items()]
        for variant, following in pairwise(plan.variants):
            closing = "step" if "step" in variant.graphs else "backward"
            warm = f"{closing} of {following.from_step} steps of warm-up"  # as many on all
            signatures.append(self._signed(warm, variant.graphs[closing].graph, changes))
        agree(signatures, self.timeout_s)

    def _signed(self, direction: str, graph: fx.Graph, changes: Sequence[str]) -> Signature:
        others = [*order_of_waits(graph, self.ranks_per_host), *places_of_updates(graph), *changes]
        return Signature.of(direction, [*transfers(graph)], others, self.group_names)
