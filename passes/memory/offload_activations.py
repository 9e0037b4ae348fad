"""Copy saved activations to the host in forward, and back in backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, fx

from zgraph.analysis.cost import FREE
from zgraph.analysis.liveness import placements
from zgraph.analysis.storages import storage_bytes
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.dialect.copies import offload_op, reload_op, wait_copy_op
from zgraph.errors import check_least
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.runtime.chunks import MIB
from zgraph.scheduling.lifetimes.whole_step_model import WholeStepModel
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.tier import DEVICE, HOST


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(GraphPass):
    """Keep activations in host memory between forward and backward.

    With a budget in the target, offloads the activations chosen by `ChooseLifetimes(offload_least_bytes=...)`; without
    one, all saved activations of at least `least_bytes`. A copy to the host starts where the activation is computed,
    and is awaited before the activation is freed. The copy back starts before the first reader in backward; later
    passes move it earlier. Nothing is recomputed, and results are bitwise equal.
    Leaves alone: parameters, inputs and values returned to the user, which stay alive anyway; views; values that are
    written to; storages of which backward reads more than one value.

    Attributes:
        least_bytes: minimum size of an activation to offload without a budget.

    Source: Rhu et al. 2016, "vDNN", arXiv 1602.08124; here as a pass over one graph, not a hook on each tensor.
    """

    least_bytes: int = MIB // 4

    name: ClassVar[str] = "offload_activations"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.ACTIVATIONS_OFFLOADED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED})

    def __post_init__(self) -> None:
        instead = "the minimum size in bytes, at least 1, of an activation to offload"
        check_least("offload_activations", 1, instead, least_bytes=self.least_bytes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        least_bytes = self.least_bytes if ctx.plan_bytes is None else None
        if ctx.direction == "inference":
            ctx.note(self, "inference saves nothing")
            return False
        if ctx.direction == "backward":
            return _reload_inputs(gm.graph, ctx.graphs["forward"].graph)
        if ctx.direction == "step":
            found = list(plan_in_step(gm.graph, least_bytes))
            for base, readers in found:
                _offload_in_step(gm.graph, base, readers)
        else:
            assert ctx.user_outputs is not None
            found = [(base, ()) for base in plan_saved(gm.graph, ctx.user_outputs, least_bytes)]
            for base, _ in found:
                _offload_saved(gm.graph, base, ctx.user_outputs)
        size = sum(storage_bytes(meta.tensor_value(base)) or 0 for base, _ in found)
        ctx.note(self, f"{len(found)} activations, {size} bytes, are kept on the host")
        return bool(found)


def plan_saved(forward: fx.Graph, user_outputs: int, least_bytes: int | None) -> list[fx.Node]:
    """Return the activations that a forward graph saves for backward and that nothing else keeps alive.

    Args:
        forward: the forward graph, before gathers are lowered.
        user_outputs: number of outputs returned to the user.
        least_bytes: minimum size; None: only activations that `ChooseLifetimes` has tagged.
    """
    placed = placements(forward)
    outputs = nodes.returned_by(forward)
    saved = [node for node in outputs[user_outputs:] if isinstance(node, fx.Node)]
    taken = {number for node in outputs[:user_outputs] if isinstance(node, fx.Node) for number in placed.lies_in[node]}
    gathered = _gathered(forward)
    found: list[fx.Node] = []
    for node in dict.fromkeys(saved):
        numbers = {*placed.lies_in[node]}
        others = {number for other in saved if other is not node for number in placed.lies_in[other]}
        if (
            node.op == "call_function"
            and node not in gathered
            and numbers.isdisjoint(taken | others)
            and not any(placed.storages[number].held or placed.storages[number].space != DEVICE for number in numbers)
            and _is_wanted(node, least_bytes)
        ):
            found.append(node)
    return found


def plan_in_step(graph: fx.Graph, least_bytes: int | None) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield the activations of a training step to offload, each with its readers in backward.

    Args:
        graph: graph of a whole training step, before gathers are lowered.
        least_bytes: as for `plan_saved`.
    """
    model = WholeStepModel(graph, cost_of=lambda node: FREE, sharing=Sharing())
    gathered = _gathered(graph)
    for value in model.values:
        base = model.base_of(value)
        if base is None or base in gathered or not _is_wanted(base, least_bytes):
            continue
        readers = [node for node in model.backward if not {*value.nodes}.isdisjoint(node.all_input_nodes)]
        yield base, readers


def _is_wanted(node: fx.Node, least_bytes: int | None) -> bool:
    value = meta.value(node)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if least_bytes is None:
        return meta.is_tagged_offload(node)
    # Offloading a value that does not fill its storage would free less than it copies.
    own, whole = value.numel() * value.dtype.itemsize, storage_bytes(value)
    return own == whole and own >= least_bytes


def _gathered(graph: fx.Graph) -> set[fx.Node]:
    """Return the gathered parameters, with their views and casts."""
    markers = nodes.call_functions(graph, nodes.is_unshard)
    return {node for marker in markers for node in dataflow.reshaped_values(marker)}


def _offload(graph: fx.Graph, node: fx.Node, wait_before: fx.Node) -> fx.Node:
    """Start copying `node` to the host where it is computed; return the copy's wait, placed before `wait_before`."""
    with graph.inserting_after(node):
        start = meta.create(graph, offload_op(), (node,), like=node, name=f"offload_{node.name}")
    meta.set_transit(start, HOST, to_device=False)
    with graph.inserting_before(wait_before):
        kept = meta.create(graph, wait_copy_op(), (start,), like=node, name=f"kept_{node.name}")
    meta.set_space(kept, HOST)
    return kept


def _reload(graph: fx.Graph, kept: fx.Node, device: torch.device, reader: fx.Node, name: str) -> fx.Node:
    """Copy `kept`, a tensor on the host, back to the device just before `reader`; return the copy's wait."""
    with graph.inserting_before(reader):
        start = meta.create(graph, reload_op(), (kept, device), like=reader, name=f"reload_{name}")
        meta.set_transit(start, HOST, to_device=True)
        return meta.create(graph, wait_copy_op(), (start,), like=reader, name=f"again_{name}")


def _offload_saved(forward: fx.Graph, node: fx.Node, user_outputs: int) -> None:
    output = nodes.output_of(forward)
    kept = _offload(forward, node, output)
    outputs = nodes.returned_by(forward)
    saved = [kept if value is node else value for value in outputs[user_outputs:]]
    output.args = ((*outputs[:user_outputs], *saved),)


def _reload_inputs(backward: fx.Graph, forward: fx.Graph) -> bool:
    offloaded = {start.all_input_nodes[0].name: start for start in nodes.call_functions(forward, nodes.is_offload)}
    changed = False
    for given in backward.find_nodes(op="placeholder"):
        start = offloaded.get(given.name)
        if start is None:
            continue
        device = meta.tensor_value(given).device
        given.meta = dict(given.meta)  # shared with the node of the joint graph
        meta.set_value(given, meta.value(start))
        meta.set_space(given, HOST)
        readers = sorted(given.users)  # nodes compare by their place in the graph
        if readers:
            back = _reload(backward, given, device, readers[0], given.name)
            for reader in readers:
                reader.replace_input_with(given, back)
            changed = True
    return changed


def _offload_in_step(graph: fx.Graph, base: fx.Node, readers: Iterable[fx.Node]) -> None:
    """Offload an activation; let its `readers` in backward read the tensor copied back, or views of this tensor."""
    first = min(readers)
    kept = _offload(graph, base, first)
    back = _reload(graph, kept, meta.tensor_value(base).device, first, base.name)
    copies = {base: back}

    def of_copy(view: fx.Node) -> fx.Node:
        if view not in copies:
            source = of_copy(cast(fx.Node, view.args[0]))
            with graph.inserting_before(first):
                copies[view] = graph.node_copy(view, lambda argument: source if argument is view.args[0] else argument)
            meta.set_part(copies[view], meta.part(first) or 0)
        return copies[view]

    for reader in readers:
        for source in reader.all_input_nodes:
            if _lies_in(source, base):
                reader.replace_input_with(source, of_copy(source))


def _lies_in(node: fx.Node, base: fx.Node) -> bool:
    while node is not base and traits.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node is base
