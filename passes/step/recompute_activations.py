"""Recomputes cheap activations in backward, instead of keeping them alive."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.analysis.cost import FREE
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.graph import nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.graph.sizes import tensor_bytes, tensors_of
from zgraph.passes.common.repeat_in_backward import repeat_in_backward
from zgraph.scheduling.lifetimes.lifetime_model import StepEstimate, Value
from zgraph.scheduling.lifetimes.whole_step_model import WholeStepModel
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.aot import fusible_operators
from zgraph.torch_compat.operators import OpOverload

REDUCES = 4  # a reduction reads this many times its output's bytes; same limit as in the partitioner


@dataclass(frozen=True, kw_only=True)
class RecomputeActivations(GraphPass):
    """Recompute pointwise activations of a whole training step in backward, where they fuse with their readers.

    This is the rule of torch's partitioner, which does not process whole steps. A pointwise operator runs again if its
    inputs are alive in backward anyway, and if only pointwise operators read its result in backward, as between the
    products of a gated layer. Results that a matrix product reads must be in memory, and are kept.
    Leaves alone: reductions, whose results are small; random operators, operators that write to their inputs, and
    collectives; values that are overwritten before backward ends; gathered parameters, which `ChooseLifetimes` handles;
    values that activation checkpointing recomputes.

    Attributes:
        longest: maximum number of consecutive operators to recompute an activation. Activations that need more are
            kept, because the results of a long sequence of operators are all alive together.
        least_bytes: minimum size of an activation to recompute.
    """

    longest: int = 16
    least_bytes: int = 4096

    name: ClassVar[str] = "recompute_activations"
    phase: ClassVar[Phase] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        found = plan_recomputation(gm.graph, longest=self.longest, least_bytes=self.least_bytes)
        if not found.dropped:
            ctx.note(self, "backward finds no activation that it could compute at no cost")
            return False
        repeat_in_backward(gm.graph, zip(found.recomputed, found.anchors, strict=True))
        names = [value.name for value in found.dropped]
        ctx.note(self, f"computes {len(names)} activations again: {', '.join(names)}")
        return True


def plan_recomputation(graph: fx.Graph, *, longest: int, least_bytes: int) -> StepEstimate:
    """Estimate the step in which backward recomputes all activations that fuse; arguments as for the pass."""
    model = WholeStepModel(graph, cost_of=lambda node: FREE, sharing=Sharing())
    return model.estimate(dict.fromkeys(_free_values(model, longest, least_bytes)))


def _free_values(model: WholeStepModel, longest: int, least_bytes: int) -> Iterator[Value]:
    fusible = fusible_operators()
    values = {number: one for one in model.values if one.gather is None for number in model.lies_in[one.nodes[0]]}
    gone = {number for one in model.always for number in model.lies_in[one.nodes[0]]}
    # Number of consecutive calls with which backward can recompute a node's result; 0 if the result is alive there.
    # Nodes not listed cannot be recomputed.
    calls: dict[fx.Node, int] = {}
    for node in model.calls:
        forward = model.part[node]
        if forward % 2:
            continue
        made = _calls_to_make(node, model, calls, fusible)
        if made is not None and made <= longest:
            calls[node] = made
            for number in model.makes.get(node, ()):
                value = values.get(number)
                if value and model.sizes[number] >= least_bytes and _is_fused(value, number, model, fusible):
                    gone.add(number)
                    yield value
        if model.is_alive(node, gone, forward):
            calls[node] = 0


def _calls_to_make(
    node: fx.Node, model: WholeStepModel, calls: Mapping[fx.Node, int], fusible: Collection[object]
) -> int | None:
    """Return the number of consecutive calls that recompute a node in backward; None if it must not be recomputed."""
    if nodes.is_unshard(node):
        return 0 if UnshardArgs.of(node).layout.zero_stage == 0 else None  # nothing is sent
    if node in model.spoiled or not traits.is_repeatable(node) or not _is_one_of(fusible, node) or _reduces(node):
        return None
    longest = 0
    for source in model.reads[node]:
        if source in model.spoiled:
            return None
        if source.op == "call_function":
            is_near = model.part[source] == model.part[node] or {*model.lies_in[source]} <= model.gathered_once
            if source not in calls or not is_near:
                return None
            longest = max(longest, calls[source])
    return longest if traits.is_free(node) else longest + 1


def _is_fused(value: Value, number: int, model: WholeStepModel, fusible: Collection[object]) -> bool:
    """Return whether a storage holds a single value, and only operators that Inductor can fuse read it in backward."""
    storage = model.placed.storages[number]
    forward = model.part[storage.first]
    return all(node is storage.first or _is_selected(node) for node in value.nodes) and all(
        _is_selected(reader) or _is_one_of(fusible, reader)
        for reader in storage.readers
        if model.part[reader] == forward + 1
    )


def _is_selected(node: fx.Node) -> bool:
    return nodes.is_getitem(node) or traits.is_view(node)


def _is_one_of(operators: Collection[object], node: fx.Node) -> bool:
    target = node.target
    return nodes.is_getitem(node) or (isinstance(target, OpOverload) and target.overloadpacket in operators)


def _reduces(node: fx.Node) -> bool:
    read = sum(tensor_bytes(tensor) for source in node.all_input_nodes for tensor in tensors_of(source))
    return sum(map(tensor_bytes, tensors_of(node))) * REDUCES < read
