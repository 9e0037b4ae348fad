"""Run all micro-batches of a layer before the next layer, so that a step gathers and reduces each layer once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import fx

from zgraph.analysis.cost import FREE
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.errors import ZgraphError, check_choice
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.gathers_per_part import share_gathers
from zgraph.passes.common.repeat_in_backward import repeat_in_backward
from zgraph.scheduling.layer_order import (
    Layers,
    MicroBatch,
    StepParts,
    by_layer,
    drawn_in_another_order,
    reductions_by_parameter,
)
from zgraph.scheduling.lifetimes.lifetime_model import StepEstimate, Value
from zgraph.scheduling.lifetimes.plan_lifetimes import first_within
from zgraph.scheduling.lifetimes.whole_step_model import WholeStepModel
from zgraph.scheduling.timeline import Sharing

aten = torch.ops.aten

LEAST_GAIN = 0.03  # of a step's time: the estimate of a step is a lower bound, and no better than this
MOST_MEMORY = 1.25  # of the plain order's peak, without a budget: for another layer, and for inputs of all layers
When = Literal["always", "faster"]


@dataclass(frozen=True, kw_only=True)
class InterleaveMicroBatches(GraphPass):
    """Interleave the micro-batches of a whole training step layer by layer.

    A loop over k micro-batches gathers every layer 2k times at stage 3, and reduces its gradients k times. With this
    pass all micro-batches run a layer before any of them runs the next, in forward and in backward: a layer is gathered
    once for each, and the sum of its gradients is reduced once. In the last layer, where the loss is computed, the
    backward of each micro-batch follows its forward.

    Backward recomputes a layer for one micro-batch after the other, from what the micro-batch has passed into it, as
    activation checkpointing does. With a target, costs decide what is recomputed: as little as fits the budget or,
    without a budget, a quarter more memory than the plain order needs.

    Gradients are summed in the order of the micro-batches, in the dtype in which the reduction sums, and then reduced.
    The plain lines do the same at stages 0 and 1 under `zgraph.no_sync`, with equal bits. At stages 2 and 3 they reduce
    in each backward and sum the means, which rounds differently. So does the gradient of a tied weight, whose addends
    come from two layers.

    Leaves alone: micro-batches with an update between them, or with a forward that reads an earlier gradient; results
    of attention, which are kept; reductions with another reader than the sum of a parameter's gradients.

    Source: layered gradient accumulation (Lamy-Poirier 2021, arXiv 2106.02679), which GreedySnake (2025, arXiv
    2512.17570) calls the vertical schedule.

    Attributes:
        recompute: whether backward recomputes layers; False keeps the activations of all micro-batches. None: as above.
        when: "always", or "faster": only if the step is then predicted to be faster and to fit this memory.

    Raises:
        ZgraphError: with when="always", layers of the micro-batches draw random numbers, as in dropout.
    """

    recompute: bool | None = None
    when: When = "always"

    name: ClassVar[str] = "interleave_micro_batches"
    phase: ClassVar[Phase] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})

    def __post_init__(self) -> None:
        check_choice("interleave_micro_batches", ("always", "faster"), when=self.when)

    @property
    def needs_target(self) -> bool:
        return self.when == "faster"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step" or not self._has_windows(gm.graph, ctx):
            return False
        by_costs = self.recompute is None and ctx.cost_of is not None
        again: StepEstimate | None = None
        if self.when == "faster" or (by_costs and ctx.plan_bytes is None):
            before, again = self._estimates(gm, ctx)
            if self.when == "faster" and not self._pays(before, again, ctx):
                return False
        found = interleave(gm.graph, recompute=not by_costs if self.recompute is None else self.recompute)
        if again is not None and by_costs and ctx.plan_bytes is None:  # with a budget, ChooseLifetimes does it
            by_name = {node.name: node for node in gm.graph.nodes}
            named = ([by_name[node.name] for node in of] for of in (again.recomputed, again.anchors))
            repeat_in_backward(gm.graph, zip(*named, strict=True))
        for text in found:
            ctx.note(self, text, is_decision=True)
        return True

    def _has_windows(self, graph: fx.Graph, ctx: PassContext) -> bool:
        """Whether there are micro-batches that can be interleaved.

        Raises:
            ZgraphError: there are some that cannot, although they should be.
        """
        parts = StepParts(graph)
        windows = [one for one in parts.windows() if len(one) > 1]
        for window in windows:
            draws = drawn_in_another_order(window, _layers_of(window, parts))
            if draws is None:
                continue
            what = f"their layers draw random numbers ({meta.label(draws)}), which would be drawn in another order"
            if self.when == "always":
                raise ZgraphError(
                    f"interleave_micro_batches: {len(window)} micro-batches cannot run layer by layer, because {what}. "
                    "Set dropout to 0, draw before the first layer, or leave out the pass."
                )
            ctx.note(self, f"micro-batches run one after the other, because {what}", is_decision=True)
            return False
        if not windows:
            ctx.note(self, "no two micro-batches come between updates")
        return bool(windows)

    def _estimates(self, gm: fx.GraphModule, ctx: PassContext) -> tuple[StepEstimate, StepEstimate]:
        """Estimate the plain step, and the interleaved one within the memory that it may use."""
        before = _within(gm.graph, ctx, ctx.plan_bytes)
        tried = edits.copy_of(gm)
        interleave(tried.graph, recompute=self.recompute is True)
        return before, _within(tried.graph, ctx, _limit(before, ctx) if self.recompute is None else ctx.plan_bytes)

    def _pays(self, before: StepEstimate, after: StepEstimate, ctx: PassContext) -> bool:
        limit = _limit(before, ctx)
        is_faster = after.step_us < (1 - LEAST_GAIN) * before.step_us
        chosen = after.peak_bytes <= limit and (is_faster or before.peak_bytes > limit)
        ctx.note(
            self,
            f"micro-batches run {'layer by layer' if chosen else 'one after the other'}: {after.step_us:.0f} us and "
            f"{after.peak_bytes} bytes layer by layer, {before.step_us:.0f} us and {before.peak_bytes} bytes otherwise",
        )
        return chosen


def _limit(before: StepEstimate, ctx: PassContext) -> int:
    return int(MOST_MEMORY * before.peak_bytes) if ctx.plan_bytes is None else ctx.plan_bytes


def _within(graph: fx.Graph, ctx: PassContext, limit_bytes: int | None) -> StepEstimate:
    """Estimate a step whose backward gathers parameters again, and recomputes what the limit demands."""
    assert ctx.cost_of is not None, "the caller has asked"
    model = WholeStepModel(graph, cost_of=ctx.cost_of, sharing=ctx.sharing)
    gathers = ((value, value.gather) for value in model.values if value.gather is not None)
    start = model.estimate(dict.fromkeys(value for value, gather in gathers if not meta.is_tagged_saved(gather)))
    return start if limit_bytes is None else first_within(model, start, limit_bytes)


def interleave(graph: fx.Graph, *, recompute: bool) -> list[str]:
    """Interleave all micro-batches of a step that can be; return a line of text for each window of micro-batches."""
    done: list[str] = []
    parts = StepParts(graph)
    for window in parts.windows():
        if len(window) < 2:
            continue
        layer_of = _layers_of(window, parts)
        last = max(layer_of.values())
        edits.relink(by_layer(list(graph.nodes), window, layer_of))
        _join_parts(graph, window)
        for markers in reductions_by_parameter(window):
            _reduce_once(graph, markers, layer_of)
        _keep_in_last_layer(graph, layer_of, last)
        again = _recompute(graph, window[0].part, layer_of, last) if recompute else 0
        recomputed = f"; backward recomputes {again} activations" if again else ""
        done.append(f"{len(window)} micro-batches run each of {last + 1} layers together{recomputed}")
    return done


def _layers_of(window: Sequence[MicroBatch], parts: StepParts) -> dict[fx.Node, int]:
    """Return the layer of each node of a window; layers are those of its first micro-batch."""
    layers = Layers.of(window[0], parts)
    return {node: layer for one in window for node, layer in layers.of_nodes(one, parts).items()}


def _join_parts(graph: fx.Graph, window: Sequence[MicroBatch]) -> None:
    """Make the forwards of a window one part of the step, and its backwards another, which gather a parameter once."""
    for one in window:
        for node in one.forward:
            meta.set_part(node, window[0].part)
        for node in one.backward():
            meta.set_part(node, window[0].part + 1)
    share_gathers(graph)


def _keep_in_last_layer(graph: fx.Graph, layer_of: Mapping[fx.Node, int], last: int) -> None:
    """Let backward read what forward has gathered in the last layer, where forwards and backwards alternate."""
    for marker in nodes.call_functions(graph, nodes.is_unshard):
        values = dict.fromkeys(dataflow.reshaped_values(marker))
        readers = (user for value in values for user in value.users if user not in values)
        if all(layer_of.get(reader) == last for reader in readers):
            meta.tag_saved(marker)


# --- one reduction ----------------------------------------------------------------------------------------------------


def _reduce_once(graph: fx.Graph, markers: Sequence[fx.Node], layer_of: Mapping[fx.Node, int]) -> None:
    """Replace the sum of the reductions `markers` by one reduction of their sum, unless another node reads one."""
    added = _sum_of(markers)
    *below, top = added
    if len(markers) == 1 or not all(len(node.users) == 1 and added.keys() >= node.users.keys() for node in below):
        return
    grads = [ReduceArgs.of(marker).grad for marker in markers]
    first, *others = sorted(one for grad in grads for one in _addends(grad, layer_of))  # nodes compare by position
    last = max(markers)
    with graph.inserting_before(first.next):
        total = meta.create_cast(graph, first, ReduceArgs.of(last).dtype, like=last)
    for addend in others:
        with graph.inserting_before(addend.next):
            total = meta.create(graph, aten.add.Tensor, (total, addend), like=last)
    with graph.inserting_before(last):
        reduced = meta.create(graph, last.target, (total, *last.args[1:]), like=last)
    top.replace_all_uses_with(reduced)
    edits.erase_dead(graph, [*grads, *added])


def _sum_of(markers: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return reductions, and the nodes that only add them to each other or view them unchanged, in program order."""
    reached = dict.fromkeys(markers)
    pending = [*markers]
    for node in pending:
        for user in node.users:
            adds = user.target in (aten.add.Tensor, aten.add_.Tensor) and len(user.all_input_nodes) == 2
            if user not in reached and not user.kwargs and (adds or dataflow.without_views(user) is not user):
                reached[user] = None
                pending.append(user)
    found: dict[fx.Node, None] = {}
    for node in sorted(reached):
        if node in markers or all(source in found for source in node.all_input_nodes):
            found[node] = None
    return found


def _addends(grad: fx.Node, layer_of: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the addends of a gradient that are computed in different layers, as those of a tied weight are.

    Each is added as soon as it is there. Otherwise all micro-batches would keep the addend of the later layer until
    the earlier one has run.
    """
    addends = [one for one in grad.all_input_nodes if meta.same_layout(meta.value(one), meta.value(grad))]
    adds = grad.target is aten.add.Tensor and not grad.kwargs and len(addends) == 2 and len(grad.users) == 1
    if not adds or len({layer_of.get(one) for one in addends}) == 1:
        return [grad]
    return [addend for one in addends for addend in _addends(one, layer_of)]


# --- recomputation ----------------------------------------------------------------------------------------------------


def _recompute(graph: fx.Graph, part: int, layer_of: Mapping[fx.Node, int], last: int) -> int:
    """Let the backward after forward `part` recompute all layers but the last; return the number of activations."""
    model = WholeStepModel(graph, cost_of=lambda node: FREE, sharing=Sharing())
    found = model.estimate(dict.fromkeys(_inside_layers(model, part, layer_of, last)))
    repeat_in_backward(graph, zip(found.recomputed, found.anchors, strict=True))
    return len(found.dropped)


def _inside_layers(model: WholeStepModel, part: int, layer_of: Mapping[fx.Node, int], last: int) -> Iterator[Value]:
    """Yield the values that no later layer reads in forward, and that backward can compute from what it has."""
    values = {number: one for one in model.values if one.gather is None for number in model.lies_in[one.nodes[0]]}
    gone = {number for one in model.always for number in model.lies_in[one.nodes[0]]}
    there: set[fx.Node] = set()  # in backward, kept or recomputed
    for node in model.calls:
        if model.part[node] != part:
            continue
        layer = layer_of.get(node, last)
        can_make = nodes.is_unshard(node) or (
            traits.is_repeatable(node)
            and node not in model.spoiled
            and model.spoiled.isdisjoint(model.reads[node])  # what they held in forward has been overwritten
            and all(source in there or _comes_from_outside(source, model) for source in model.reads[node])
        )
        for number in model.makes.get(node, ()) if can_make and layer < last else ():
            readers = [one for one in model.placed.storages[number].readers if model.part.get(one) == part]
            if number in values and all(layer_of.get(reader) == layer for reader in readers):
                gone.add(number)
                yield values[number]
        if can_make or model.is_alive(node, gone, part):
            there.add(node)


def _comes_from_outside(source: fx.Node, model: WholeStepModel) -> bool:
    """Whether backward can read a value that is an input, or a parameter that is gathered once."""
    return source.op != "call_function" or {*model.lies_in[source]} <= model.gathered_once
