"""Decide which gathered parameters and activations live from forward to backward, under one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.graph import dataflow, edits, meta, nodes
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.passes.common.gathers_per_part import repeat_gathers
from zgraph.passes.common.repeat_in_backward import repeat_in_backward
from zgraph.scheduling.lifetimes.lifetime_model import HostLinks, StepEstimate
from zgraph.scheduling.lifetimes.partitioned_model import PartitionedModel
from zgraph.scheduling.lifetimes.plan_lifetimes import greedy_frontier
from zgraph.scheduling.lifetimes.whole_step_model import WholeStepModel
from zgraph.scheduling.timeline import Sharing


@dataclass(frozen=True, kw_only=True)
class ChooseLifetimes(GraphPass):
    """Choose which values forward saves for backward within a memory budget; recompute or offload the others.

    With a budget in the target, one plan covers parameters of ZeRO stage 3, which backward can gather again, and
    activations, which it can recompute. Without a budget, backward gathers stage 3 parameters again, and torch's
    partitioner chooses the activations. Replicated parameters are never saved: backward repeats their cast, and sends
    nothing. A repeated gather is tagged for recomputation together with the views and casts of its result, so that
    the partitioner cannot save unsharded weights through a view.

    The graph of a whole training step is not partitioned. There, each node that backward repeats is copied to just
    before its readers in backward. Without a budget, activations are kept as in eager torch.

    If offloading is allowed, each value is kept, recomputed or offloaded, whichever costs the least time per byte
    saved at the peak. `OffloadActivations` then inserts the copies.

    Leaves alone: parameters of stages 1 and 2, which are gathered once per `no_sync` window; parameters that the graph
    returns, for example before a graph break; random operators, operators that write to their inputs, and the model's
    own collectives; values that activation checkpointing has tagged.

    Attributes:
        offload_least_bytes: minimum size of activations that may be offloaded under a budget; None: no offloading.
    """

    offload_least_bytes: int | None = None

    name: ClassVar[str] = "choose_lifetimes"
    phase: ClassVar[Phase] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction == "inference":
            ctx.note(self, "inference saves nothing")
            return False
        for node in nodes.call_functions(gm.graph, nodes.is_unshard):
            if UnshardArgs.of(node).layout.zero_stage in (1, 2):
                meta.tag_saved(node)
                if meta.is_tagged_by_others(node):  # read in a checkpointed region, which would gather it again
                    meta.tag_must_save(node)
        if ctx.direction == "step":
            return self._run_on_step(gm, ctx)
        before = [meta.lifetime(node) for node in gm.graph.nodes]
        for node in plan_regathers(gm.graph, ctx.user_outputs):
            for part in dataflow.reshaped_values(node):
                meta.tag_recompute(part)
        self._plan(gm, ctx)
        return before != [meta.lifetime(node) for node in gm.graph.nodes]

    def _run_on_step(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        kept = dict.fromkeys(
            nodes.call_functions(gm.graph, lambda one: nodes.is_unshard(one) and meta.is_tagged_saved(one))
        )
        repeated: tuple[tuple[fx.Node, fx.Node], ...] = ()
        if ctx.plan_bytes is not None and ctx.cost_of is not None:
            model = WholeStepModel(gm.graph, cost_of=ctx.cost_of, sharing=ctx.sharing, copies=self._copies(ctx))
            path = greedy_frontier(model)
            found = path.choose(ctx.plan_bytes)
            for value in found.offloaded:
                meta.tag_offload(cast(fx.Node, model.base_of(value)))
            self._note(found, path.estimates[0], ctx)
            kept |= dict.fromkeys(
                value.gather for value in found.gaps if value.gather is not None and value not in found.dropped
            )
            for gather in kept:
                meta.tag_saved(gather)
            repeated = tuple(zip(found.recomputed, found.anchors, strict=True))
            repeat_in_backward(gm.graph, repeated)
        gathers = repeat_gathers(gm.graph, kept)
        gathers += sum(nodes.is_unshard(node) for node, _ in repeated)
        ctx.note(self, f"{gathers} gathers are repeated in backward")
        return gathers > 0 or bool(repeated)

    def _plan(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        if ctx.plan_bytes is None or ctx.cost_of is None or ctx.split is None or ctx.user_outputs is None:
            return
        # Only values that the partitioner would save, as tried on a copy, are candidates.
        tried = edits.copy_of(gm)
        forward, backward = ctx.split.of(tried)
        found, fastest = plan_lifetimes(
            tried.graph,
            forward.graph,
            backward.graph,
            user_outputs=ctx.user_outputs,
            cost_of=ctx.cost_of,
            sharing=ctx.sharing,
            target_bytes=ctx.plan_bytes,
            copies=self._copies(ctx),
        )
        apply(found, {node.name: node for node in gm.graph.nodes})
        self._note(found, fastest, ctx)

    def _copies(self, ctx: PassContext) -> HostLinks | None:
        if self.offload_least_bytes is None or ctx.hardware is None:
            return None
        return HostLinks(
            device_to_host=ctx.hardware.device_to_host,
            host_to_device=ctx.hardware.host_to_device,
            least_bytes=self.offload_least_bytes,
        )

    def _note(self, found: StepEstimate, fastest: StepEstimate, ctx: PassContext) -> None:
        parameters = [value for value in found.gaps if value.gather is not None]
        kept = [value.name for value in parameters if value not in found.dropped]
        activations = [value.name for value in found.dropped if value.gather is None]
        ctx.note(
            self,
            f"predicted peak {found.peak_bytes} bytes of {ctx.plan_bytes}, {found.step_us:.0f} us; everything kept: "
            f"{fastest.peak_bytes} bytes, {fastest.step_us:.0f} us",
        )
        ctx.note(self, f"keeps {len(kept)} of {len(parameters)} gathered parameters: {', '.join(kept) or 'none'}")
        ctx.note(self, f"recomputes {len(activations)} activations: {', '.join(activations) or 'none'}")
        if self.offload_least_bytes is not None:
            offloaded = [value.name for value in found.offloaded]
            ctx.note(self, f"offloads {len(offloaded)} activations: {', '.join(offloaded) or 'none'}")


def plan_regathers(graph: fx.Graph, user_outputs: int | None) -> list[fx.Node]:
    """Return the gathers that backward repeats: stage 0 and 3 parameters, unless forward returns them to the user."""
    returned = nodes.returned_by(graph)[:user_outputs]
    return [
        node
        for node in nodes.call_functions(graph, nodes.is_unshard)
        if UnshardArgs.of(node).layout.zero_stage in (0, 3)
        and not any(part in returned for part in dataflow.reshaped_values(node))
    ]


def plan_lifetimes(
    joint: fx.Graph,
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    user_outputs: int,
    cost_of: Callable[[fx.Node], NodeCost],
    sharing: Sharing,
    target_bytes: int,
    copies: HostLinks | None = None,
) -> tuple[StepEstimate, StepEstimate]:
    """Choose what to save for backward; return two estimates, of the chosen step and of the one that saves everything.

    The chosen step is the fastest within `target_bytes` or, if no step fits, the one with the least memory.
    """
    model = PartitionedModel(
        joint, forward, backward, user_outputs=user_outputs, cost_of=cost_of, sharing=sharing, copies=copies
    )
    path = greedy_frontier(model)
    return path.choose(target_bytes), path.estimates[0]


def apply(found: StepEstimate, joint: Mapping[str, fx.Node]) -> None:
    """Tag the nodes of a joint graph so that torch's partitioner saves exactly the values in `found.saved`."""
    for node in found.saved:
        saved = joint[node.name]
        if saved.op != "call_function" or meta.is_tagged_by_others(saved):
            continue
        meta.tag_must_save(saved)
        if nodes.is_getitem(saved):  # the partitioner asks the call itself
            meta.tag_must_save(saved.all_input_nodes[0])
    for value in found.gaps:
        if value.gather is not None and value not in found.dropped:
            meta.tag_saved(joint[value.gather.name])
    for value in found.offloaded:
        meta.tag_offload(joint[value.nodes[0].name])
    for node in found.recomputed:
        activation = joint[node.name]
        if not meta.is_tagged_by_others(activation) and not meta.is_tagged_recompute(activation):
            meta.tag_recomputed_activation(activation)
