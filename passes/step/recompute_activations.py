"""Let backward compute again what costs next to nothing, instead of finding it alive."""

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

REDUCES = 4  # times; the partitioner's limit too


@dataclass(frozen=True, kw_only=True)
class RecomputeActivations(GraphPass):
    """Compute activations of a whole step again in backward, where this fuses with what reads them there.

    The rule is that of torch's partitioner, which decides on the graphs of `torch.compile`: pointwise operators run
    again, such as those between the products of a gated layer, if what they read is alive in backward anyway, and if
    only pointwise operators read the result there. For a matrix product it would have to be written to memory again.
    Leaves alone: reductions, whose results are small; operators that are random, write or communicate; what is
    overwritten before backward ends; gathered parameters, which `ChooseLifetimes` decides on; and what activation
    checkpointing computes again.

    Attributes:
        longest: operators that may run one after the other for an activation. Beyond, it is kept, because a long
            sequence of results, computed at once, would be alive at once.
        least_bytes: smaller activations are kept.
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
    """The step in which backward computes what costs nothing; arguments as for the pass."""
    model = WholeStepModel(graph, cost_of=lambda node: FREE, sharing=Sharing())
    return model.estimate(dict.fromkeys(_free_values(model, longest, least_bytes)))


def _free_values(model: WholeStepModel, longest: int, least_bytes: int) -> Iterator[Value]:
    fusible = fusible_operators()
    values = {number: one for one in model.values if one.gather is None for number in model.lies_in[one.nodes[0]]}
    gone = {number for one in model.always for number in model.lies_in[one.nodes[0]]}
    # How many calls, one after the other, bring backward a node's result: none where it finds it alive. Nodes that are
    # not in here are out of its reach.
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
    """The calls that end with a second one of this node; None if backward cannot make it, or had better not."""
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
    """Whether backward reads a storage of one node, and views of it, in operators that a compiler fuses."""
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
