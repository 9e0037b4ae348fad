"""Run all micro-batches of a layer before the next layer, so that a step gathers and reduces each layer once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zgraph.analysis.cost import FREE
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs, UnshardArgs
from zgraph.passes.common.layer_order import Layers, MicroBatch, StepParts, by_layer, random_nodes, reductions_of
from zgraph.passes.common.repeat_in_backward import repeat_in_backward
from zgraph.passes.dedupe_gathers import plan_shared_gathers
from zgraph.scheduling.lifetimes.lifetime_model import Value
from zgraph.scheduling.lifetimes.whole_step_model import WholeStepModel
from zgraph.scheduling.timeline import Sharing

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class InterleaveMicroBatches(GraphPass):
    """Interleave the micro-batches of a whole training step layer by layer.

    A loop over k micro-batches gathers every layer 2k times at stage 3, and reduces it k times. Here all micro-batches
    run a layer before any of them runs the next, and in backward likewise: each layer is gathered once in forward and
    once in backward, and the sum of its gradients is reduced once. In the last layer, which computes the loss, the
    backward of a micro-batch follows its forward.

    Backward computes each layer again, one micro-batch at a time, from what the micro-batch has passed into it, as with
    activation checkpointing. With a budget in the target, `ChooseLifetimes` decides instead what backward computes
    again.

    Gradients are summed over micro-batches in their order, in the reduction's dtype, and reduced once, as the plain
    lines do at stages 0 and 1 under `zgraph.no_sync`; there, results are bitwise equal. The plain lines of stages 2 and
    3 reduce in each backward and sum the means: the same sum, rounded differently. So is the sum of a tied weight.

    Leaves alone: micro-batches that draw random numbers, as in dropout, because the draws would change; micro-batches
    between which parameters change, or a gradient is read; optional modules; results of attention, which are kept.

    Source: the order is that of layered gradient accumulation (Lamy-Poirier 2021, arXiv 2106.02679) and of the vertical
    schedule of GreedySnake (2025, arXiv 2512.17570).

    Attributes:
        recompute: whether backward computes layers again; None: yes, unless the target has a budget.
    """

    recompute: bool | None = None

    name: ClassVar[str] = "interleave_micro_batches"
    phase: ClassVar[Phase] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        parts = StepParts(gm.graph)
        recompute = ctx.plan_bytes is None if self.recompute is None else self.recompute
        found = [one for one in parts.windows() if self._may_interleave(one, ctx)]
        for window in found:
            layers, again = _interleave(gm.graph, window, parts, recompute)
            ctx.note(
                self,
                f"{len(window)} micro-batches run together through each of {layers} layers, and backward computes "
                f"{again} activations again",
                is_decision=True,
            )
        return bool(found)

    def _may_interleave(self, window: Sequence[MicroBatch], ctx: PassContext) -> bool:
        if len(window) == 1:
            return False
        drawing = random_nodes(window)
        if drawing:
            ctx.note(self, f"micro-batches run in turn: {drawing[0].name} draws random numbers", is_decision=True)
            return False
        if any(meta.is_tagged_skipped(node) for one in window for node in one.backward):
            ctx.note(self, "micro-batches run in turn: some modules are optional", is_decision=True)
            return False
        return True


def _interleave(
    graph: fx.Graph, window: Sequence[MicroBatch], parts: StepParts, recompute: bool
) -> tuple[int, int]:
    """Interleave the micro-batches of a window; return the number of layers, and of activations to recompute."""
    layers = Layers.of(window[0], parts, len(window))
    layer_of: dict[fx.Node, int] = {}
    for one in window:
        layer_of |= layers.of_nodes(one, parts)
    edits.relink(by_layer(graph, window, layer_of, layers.last))
    for one in window:
        for node in one.forward:
            meta.set_part(node, window[0].part)
        for node in one.backward:
            meta.set_part(node, window[0].part + 1)
    for duplicate, first in plan_shared_gathers(graph):
        duplicate.replace_all_uses_with(first)
        edits.erase_dead(graph, [duplicate])
    for markers in reductions_of(window):
        _reduce_once(graph, markers, layer_of)
    for marker in nodes.call_functions(graph, nodes.is_unshard):
        readers = [user for value in dataflow.reshaped_values(marker) for user in value.users]
        if all(layer_of.get(reader, layers.last) == layers.last for reader in readers):
            meta.tag_saved(marker)  # its forwards and backwards alternate
    if not recompute:
        return layers.last + 1, 0
    return layers.last + 1, _recompute(graph, window[0].part, layer_of, layers.last)


def _reduce_once(graph: fx.Graph, markers: Sequence[fx.Node], layer_of: Mapping[fx.Node, int]) -> None:
    """Replace the sum of the reductions `markers` by one reduction of their sum, unless something else reads them."""
    top = _top_of_sum(graph, markers)
    if top is None or len(markers) == 1:
        return
    dtype = ReduceArgs.of(markers[0]).dtype
    addends = sorted(one for marker in markers for one in _addends(ReduceArgs.of(marker).grad, layer_of))
    sums = [ReduceArgs.of(marker).grad for marker in markers]
    total: fx.Node | None = None
    for addend in addends:  # by position: each is added once it is there
        with graph.inserting_before(addend.next):
            if total is None:
                total = meta.create_cast(graph, addend, dtype, like=markers[0])
            else:
                total = meta.create(graph, aten.add.Tensor, (total, addend), like=markers[0])
    last = max(markers)
    with graph.inserting_before(last):
        reduced = meta.create(graph, last.target, (total, *last.args[1:]), like=last)
    top.replace_all_uses_with(reduced)
    edits.erase_dead(graph, [*sums, *_sum_of(graph, markers)])


def _addends(grad: fx.Node, layer_of: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return what a gradient is the sum of, if layers compute it together, as those of a tied weight do.

    Otherwise the gradient of the later layer would wait for that of the earlier one in all micro-batches at once.
    """
    parts = [one for one in grad.all_input_nodes if meta.same_layout(meta.value(one), meta.value(grad))]
    is_sum = grad.target is aten.add.Tensor and not grad.kwargs and len(parts) == 2 and len(grad.users) == 1
    if not is_sum or len({layer_of.get(one) for one in parts}) == 1:
        return [grad]
    return [addend for one in parts for addend in _addends(one, layer_of)]


def _top_of_sum(graph: fx.Graph, markers: Sequence[fx.Node]) -> fx.Node | None:
    """Return the node that adds up all of the reductions `markers`; None if other nodes read some of them, too."""
    found = _sum_of(graph, markers)
    *below, top = found
    return top if all(len(node.users) == 1 and found.keys() >= node.users.keys() for node in below) else None


def _sum_of(graph: fx.Graph, markers: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return reductions and the nodes that only add them to each other, in program order."""
    found = dict.fromkeys(markers[:1])
    pending = {*markers}
    for node in sorted({*markers, *_adding(markers)}):
        if node in pending or all(source in found for source in node.all_input_nodes):
            found[node] = None
    return found


def _adding(markers: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return all nodes that results of `markers` reach only through additions and views that change nothing."""
    found: dict[fx.Node, None] = {}
    pending = [*markers]
    for node in pending:
        for user in node.users:
            adds = user.target in (aten.add.Tensor, aten.add_.Tensor) and len(user.all_input_nodes) == 2
            if user not in found and not user.kwargs and (adds or dataflow.without_views(user) is not user):
                found[user] = None
                pending.append(user)
    return found


def _recompute(graph: fx.Graph, part: int, layer_of: Mapping[fx.Node, int], last: int) -> int:
    """Let the backward after forward `part` compute what its layers save, except in the last layer; return how many."""
    model = WholeStepModel(graph, cost_of=lambda node: FREE, sharing=Sharing())
    found = model.estimate(dict.fromkeys(_inside_layers(model, part, layer_of, last)))
    repeat_in_backward(graph, zip(found.recomputed, found.anchors, strict=True))
    return len(found.dropped)


def _inside_layers(
    model: WholeStepModel, part: int, layer_of: Mapping[fx.Node, int], last: int
) -> Iterator[Value]:
    """Yield the values that no later layer reads in forward, and that backward can compute from what it has."""
    values = {number: one for one in model.values if one.gather is None for number in model.lies_in[one.nodes[0]]}
    gone = {number for one in model.always for number in model.lies_in[one.nodes[0]]}
    makeable: set[fx.Node] = set()
    for node in model.calls:
        if model.part[node] != part:
            continue
        layer = layer_of.get(node, last)
        can_make = nodes.is_unshard(node) or (
            traits.is_repeatable(node)
            and node not in model.spoiled
            and all(source in makeable or _is_there(source, model) for source in model.reads[node])
        )
        for number in model.makes.get(node, ()) if can_make and layer < last else ():
            readers = [one for one in model.placed.storages[number].readers if model.part.get(one) == part]
            if number in values and all(layer_of.get(reader) == layer for reader in readers):
                gone.add(number)
                yield values[number]
        if can_make or model.is_alive(node, gone, part):
            makeable.add(node)


def _is_there(source: fx.Node, model: WholeStepModel) -> bool:
    """Whether backward can read a value that its forward has not made: an input, or a parameter gathered once."""
    if source.op != "call_function":
        return source not in model.spoiled
    return {*model.lies_in[source]} <= model.gathered_once
