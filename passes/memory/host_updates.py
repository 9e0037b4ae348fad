"""Optimizer updates on the host of a GPU: gradients are copied to the host, updated parameters back to the GPU.

backward    [reduce a]......[reduce b]......
to host            [= a =]         [= b =]
host                      [update a]      [update b]
to device                           [= a =]         [= b =]     parameters kept on the GPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, fx

from zgraph.analysis.hazards import hazards
from zgraph.dialect.copies import offload_op, return_op, wait_copy_op
from zgraph.graph import edits, meta, nodes, traits
from zgraph.passes.common.updates import lists_of
from zgraph.passes.common.visits import is_fused
from zgraph.tiers.devices import is_gpu
from zgraph.tiers.tier import DEVICE, HOST
from zgraph.torch_compat.operators import argument_of, overwritten, written_arguments

aten = torch.ops.aten


@dataclass(eq=False)
class HostUpdate:
    """A fused update that runs on the host, where the optimizer state is kept, concurrently with compute on the GPU.

    Attributes:
        update: the call of the fused update.
        brought: inputs kept on the GPU, which are copied to the host: gradients, step counts, parameters.
        returned: the inputs in `brought` that the update writes to.
        on_host: for each input in `brought`, its copy on the host; filled when copies are inserted.
        counts: one tensor with all step counts, copied to the host instead of each count; None: at most one step count.
        prepared: nodes just before the update: waits for the copies to the host, and views of these copies.
        deadline: the first later node that uses the update's tensors, else the output; None until copies are inserted.
    """

    update: fx.Node
    brought: list[fx.Node]
    returned: list[fx.Node]
    on_host: dict[fx.Node, fx.Node] = field(default_factory=dict["fx.Node", "fx.Node"])
    counts: fx.Node | None = None
    prepared: list[fx.Node] = field(default_factory=list["fx.Node"])
    deadline: fx.Node | None = None


def split_apart(update: fx.Node) -> list[list[int]]:
    """Group the list indices of a fused update: those that can be updated on the host, and those that cannot.

    State that the step creates, and scalar parameters with their state, are updated on the device.
    """
    groups: dict[bool, list[int]] = {}
    written = frozenset(_updated(update)) if is_fused(update) else frozenset[fx.Node]()
    for place, members in enumerate(zip(*lists_of(update), strict=True) if written else ()):
        groups.setdefault(_can_leave([one for one in members if one in written]), []).append(place)
    return list(groups.values())


def unscale_ahead(graph: fx.Graph, update: fx.Node) -> None:
    """Divide gradients by the loss scale on the device, before the update, because the step returns these gradients.

    As in the update itself, gradients stay unchanged if the step is skipped because of an inf.
    """
    scale, found_inf = (argument_of(update, name) for name in ("grad_scale", "found_inf"))
    if scale is None or not can_run_on_host(update):
        return
    with graph.inserting_before(update):
        if found_inf is not None:
            skips = meta.create(graph, aten.eq.Scalar, (found_inf, 1), like=update)
            scale = meta.create(graph, aten.where.self, (skips, found_inf, scale), like=update)
        for grad in _list_of(update, "grads"):
            meta.create(graph, aten.div_.Tensor, (grad, scale), like=update)
    update.kwargs = {name: value for name, value in update.kwargs.items() if name != "grad_scale"}


def plan_host_updates(order: Sequence[fx.Node]) -> list[HostUpdate]:
    """Return the fused updates of a step that can run on the host, in order."""
    able = {node: frozenset(overwritten(node)) for node in order if can_run_on_host(node)}
    followers = _first_followers(order, able)
    found: list[HostUpdate] = []
    for update, written in able.items():
        if followers[update] in able:  # the next step of the same parameters would need the results immediately
            continue
        tensors = [node for node in update.all_input_nodes if isinstance(meta.value(node), Tensor)]
        brought = [node for node in tensors if meta.space(node) != HOST and not _is_on_host(node, order)]
        found.append(HostUpdate(update, brought, [node for node in brought if node in written]))
    return found


def _first_followers(order: Sequence[fx.Node], updates: Mapping[fx.Node, frozenset[fx.Node]]) -> dict[fx.Node, fx.Node]:
    """Map each update to the first later node that uses the update's tensors, or else to the graph's output.

    Args:
        order: nodes of the graph.
        updates: the tensors that each update writes to.
    """
    found = dict.fromkeys(updates, order[-1])
    for node, earlier in hazards(order).items() if updates else ():
        for one in earlier:
            # By its schema an update writes to gradients, and gradients of a bucket share a storage.
            if one in found and (node not in updates or not updates[one].isdisjoint(updates[node])):
                found[one] = min(node, found[one])
    return found


def can_run_on_host(node: fx.Node) -> bool:
    """Return whether a node is a fused update of existing parameters and state, some or all of them on the host."""
    return is_fused(node) and not node.users and meta.beside(node) is None and _can_leave(_updated(node))


def _updated(update: fx.Node) -> list[fx.Node]:
    """Return the parameters and state that an update writes to, but no gradients (which an update may unscale)."""
    grads = _list_of(update, "grads")
    return [one for one in overwritten(update) if one not in grads]


def _can_leave(written: Sequence[object]) -> bool:
    given = [one for one in written if isinstance(one, fx.Node) and one.op == "placeholder" and _may_leave(one)]
    return len(given) == len(written) and any(meta.space(one) == HOST for one in given)


def _may_leave(given: fx.Node) -> bool:
    space = meta.space(given) or DEVICE
    return space == HOST or (space == DEVICE and meta.kept_as(given) == "parameters")


def _is_on_host(node: fx.Node, order: Sequence[fx.Node]) -> bool:
    """Return whether a node is a scalar tensor, such as a learning rate, on the CPU in a graph for a GPU."""
    value = meta.tensor_value(node)
    return not value.ndim and value.device.type == "cpu" and on_gpu(order)


def on_gpu(order: Sequence[fx.Node]) -> bool:
    """Return whether any input of a graph is on a GPU or offloaded from a GPU."""
    values = (meta.value(node) for node in order if node.op == "placeholder")
    return any(isinstance(value, Tensor) and is_gpu(value.device) for value in values)


def bring_to_host(graph: fx.Graph, found: Sequence[HostUpdate]) -> None:
    """Let each update in `found` read copies on the host, each started when its source has been computed.

    An update starts after the copies for the next update have started, so that the device never waits for a copy that
    has just begun. Copies of parameters that are kept on the device start one update earlier.
    """
    updates = {one.update: frozenset(overwritten(one.update)) for one in found}
    deadlines = _first_followers(list(graph.nodes), updates)
    for number, one in enumerate(found):
        one.deadline = deadlines[one.update]
        longest = _longest_numel(one.update)
        written = _last_write(one)
        starts: dict[fx.Node, fx.Node] = {}
        for source in _with_stacked_counts(graph, one):
            anchor = one.update
            if source in one.returned and number and (written is None or written < found[number - 1].update):
                anchor = found[number - 1].update
            with graph.inserting_before(anchor):
                start = meta.create(graph, offload_op(), (source,), like=one.update, name=f"offload_{source.name}")
            meta.set_transit(start, HOST, to_device=False)
            meta.set_space(start, HOST)
            if source in longest:
                meta.set_longest_bytes(start, longest[source] * meta.tensor_value(source).dtype.itemsize)
            starts[source] = start
        for source, start in starts.items():
            with graph.inserting_before(one.update):
                kept = meta.create(graph, wait_copy_op(), (start,), like=one.update, name=f"kept_{source.name}")
            meta.set_space(kept, HOST)
            one.on_host[source] = kept
    for one in found:
        _read_on_host(graph, one)
    for one, following in pairwise(found):
        anchor = min([following.update, *following.prepared, one.deadline or following.update])
        for node in (*one.prepared, one.update):
            edits.move_before(node, anchor)


def _with_stacked_counts(graph: fx.Graph, found: HostUpdate) -> list[fx.Node]:
    """Return the tensors to copy to the host for an update; its step counts are stacked into one tensor."""
    counts = _counts(found)
    if len(counts) < 2:
        return found.brought
    with graph.inserting_before(found.update):
        stacked = meta.create(graph, aten.stack.default, (counts,), like=found.update, name="counts")
    found.counts = stacked
    return [*(node for node in found.brought if node not in counts), stacked]


def _counts(found: HostUpdate) -> list[fx.Node]:
    steps = dict.fromkeys(_list_of(found.update, "state_steps"))
    return [node for node in steps if node in found.brought and not meta.tensor_value(node).ndim]


def _read_on_host(graph: fx.Graph, found: HostUpdate) -> None:
    """Replace the inputs of an update by their copies on the host."""
    update = found.update
    found.prepared = list(found.on_host.values())
    if found.counts is not None:
        kept = found.on_host.pop(found.counts)
        for number, count in enumerate(_counts(found)):
            with graph.inserting_before(update):
                view = meta.create(graph, aten.select.int, (kept, 0, number), like=update, name=f"kept_{count.name}")
            meta.set_space(view, HOST)
            found.prepared.append(view)
            found.on_host[count] = view
    for source, kept in found.on_host.items():
        update.replace_input_with(source, kept)
    for given in update.all_input_nodes:
        value = meta.value(given)
        if given.op == "placeholder" and meta.space(given) == HOST and value.device.type != "cpu":
            meta.set_value(given, torch.empty_like(cast(Tensor, value), device="cpu"))


def return_to_device(graph: fx.Graph, found: Sequence[HostUpdate], in_flight: int) -> None:
    """Copy updated parameters from the host back to the device, once `in_flight` later updates have started."""
    output = nodes.output_of(graph)
    anchors: list[fx.Node] = []
    for number, one in enumerate(found):
        is_last = number + in_flight >= len(found)
        anchors.append(min(one.deadline or output, output if is_last else found[number + in_flight].update.next))
    for number, one in enumerate(found):
        landed = min([one.deadline or output, *anchors[number + 1 : number + 2]])
        starts: list[fx.Node] = []
        for source in one.returned:
            with graph.inserting_before(anchors[number]):
                given = one.on_host[source], source
                start = meta.create(graph, return_op(), given, like=one.update, name=f"return_{source.name}")
            meta.set_transit(start, HOST, to_device=True)
            starts.append(start)
        for source, start in zip(one.returned, starts, strict=True):
            with graph.inserting_before(max(landed, anchors[number])):
                meta.create(graph, wait_copy_op(), (start,), like=start, name=f"returned_{source.name}")


def _list_of(update: fx.Node, name: str) -> Sequence[fx.Node]:
    return cast("Sequence[fx.Node]", argument_of(update, name) or ())


def _longest_numel(update: fx.Node) -> dict[fx.Node, int]:
    """Map each tensor in a call's lists to its number of elements on the rank that has the most of its rows."""
    found: dict[fx.Node, int] = {}
    for members in zip(*lists_of(update), strict=True):
        ours = [one for one in members if isinstance(one, fx.Node)]
        sizes = [(meta.longest_bytes(one) or 0) // meta.tensor_value(one).dtype.itemsize for one in ours]
        found |= {one: max(sizes) for one in ours if max(sizes) and meta.tensor_value(one).ndim}
    return found


def _last_write(one: HostUpdate) -> fx.Node | None:
    """Return the last node before an update that writes to a parameter copied for the update; None if there is none."""
    found: fx.Node | None = None
    for node in one.update.graph.nodes if one.returned else ():
        if node is one.update:
            break
        if any(_input_of(written) in one.returned for written in written_arguments(node)):
            found = node
    return found


def _input_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and traits.is_view(node):
        node = node.all_input_nodes[0]
    return node
