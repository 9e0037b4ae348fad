"""Merge the small calls of an optimizer that updates parameters one by one."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor, fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_least
from zgraph.graph import edits, meta
from zgraph.graph.sizes import size_hint
from zgraph.passes.common.list_calls import ListCall, call_over_lists
from zgraph.passes.common.updates import Updates
from zgraph.torch_compat.operators import OpOverload, returns_alias


@dataclass(frozen=True, kw_only=True)
class FuseUpdates(GraphPass):
    """Merge the operator calls that update small parameters whose gradients arrive together into `_foreach` calls.

    An optimizer that is neither fused nor foreach, the default on CPUs, makes about ten calls per parameter. On a CPU,
    a `_foreach` call runs the same kernels one after another, so results are bitwise equal.
    Leaves alone: large tensors, for which the overhead of a call is negligible and merged calls keep more temporaries
    alive; devices other than CPUs, where optimizers are foreach by default; graphs compiled by Inductor.

    Attributes:
        most_numel: maximum number of elements of a tensor in a merged call.
    """

    most_numel: int = 2**16

    name: ClassVar[str] = "fuse_updates"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.UPDATES_SPLIT})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK, Fact.OVERLAP_SCHEDULED})

    def __post_init__(self) -> None:
        instead = "a positive number, or leave the pass out of the pipeline"
        check_least("fuse_updates", 1, instead, " is smaller than any tensor", most_numel=self.most_numel)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        if ctx.decomposed:
            ctx.note(self, "a compiler fuses the updates")
            return False
        before = list(gm.graph.nodes)
        updates = Updates.of(before)
        if not updates.reading or not updates.may_come_last(before):
            return False
        shares_numbers = _share_numbers(gm.graph, updates)
        if shares_numbers:
            before = list(gm.graph.nodes)
            updates = Updates.of(before)
        calls = plan_calls(before, updates, self.most_numel)
        merged = [members for members in calls if len(members) > 1]
        if not merged:
            ctx.note(self, "no two small updates can share a call")
            return shares_numbers
        edits.relink([*_others(before, updates), *(node for members in calls for node in members), before[-1]])
        for members in merged:
            _merge(gm.graph, members)
        ctx.note(self, f"{sum(map(len, merged))} calls became {len(merged)}")
        return True


def plan_calls(order: Sequence[fx.Node], updates: Updates, most_numel: int) -> list[list[fx.Node]]:
    """Return the nodes of the updates in execution order, grouped by the merged call that replaces them.

    Merged nodes have equal depth in the dependency graph, so that none depends on another.
    """
    position = {node: place for place, node in enumerate(order)}
    region = [node for node in order if node in updates]
    levels: dict[fx.Node, int] = {}
    for node in region:
        levels[node] = 1 + max((levels[source] for source in updates.needs(node) if source in updates), default=0)
    homes = _homes(region, updates)
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in region:
        call = _call(node, most_numel)
        key = node if call is None else (updates.arrival.get(node), homes[node], levels[node], call.key)
        groups.setdefault(key, []).append(node)
    group_of = {node: members for members in groups.values() for node in members}

    def arrives(members: list[fx.Node]) -> tuple[float, ...]:
        first = members[0]
        return updates.arrival[first], homes[first], levels[first], position[first]

    placed: dict[fx.Node, None] = {}
    found: list[list[fx.Node]] = []
    reading = [members for members in groups.values() if members[0] in updates.reading]
    rest = [members for members in groups.values() if members[0] not in updates.reading]
    for members in [*sorted(reading, key=arrives), *rest]:
        pending = [members]
        while pending:
            needed = (source for node in pending[-1] for source in updates.needs(node) if source in updates)
            missing = [source for source in needed if source not in placed]
            if missing:
                pending.append(group_of[min(missing, key=position.__getitem__)])
                continue
            done = pending.pop()
            if done[0] not in placed:
                found.append(done)
            placed |= dict.fromkeys(done)
    return found


def _homes(region: Sequence[fx.Node], updates: Updates) -> dict[fx.Node, float]:
    """Map each node to where its parameter's gradient, or the first gradient of its parameters, arrives."""
    known = updates.homes()
    followers: dict[fx.Node, list[fx.Node]] = {}
    for node in region:
        for source in updates.needs(node):
            followers.setdefault(source, []).append(node)
    found: dict[fx.Node, float] = {}
    for node in reversed(region):
        later = (found[one] for one in followers.get(node, ()))
        found[node] = known[node] if node in known else min(later, default=float("inf"))
    return found


def _others(order: Sequence[fx.Node], updates: Updates) -> list[fx.Node]:
    return [node for node in order if node not in updates and node.op != "output"]


def _share_numbers(graph: fx.Graph, updates: Updates) -> bool:
    """Let equal computations on scalars, such as learning rate times weight decay, share one node."""
    known: dict[Hashable, fx.Node] = {}
    shared = False
    for node in [node for node in graph.nodes if node in updates]:
        if isinstance(node.target, OpOverload) or isinstance(meta.value(node), Tensor | list | tuple) or node.kwargs:
            continue
        first = known.setdefault((node.target, node.args), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            shared = True
    return shared


def _call(node: fx.Node, most_numel: int) -> ListCall | None:
    """Return a node's call if it can be merged into a call over lists; None also for large tensors."""
    value = meta.value(node)
    if not isinstance(value, Tensor) or value.device.type != "cpu" or size_hint(value.numel()) > most_numel:
        return None
    return ListCall.of(node)


def _merge(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace adjacent calls with one call over lists of tensors."""
    target, arguments, options = call_over_lists([cast(ListCall, ListCall.of(node)) for node in members])
    with graph.inserting_before(members[0]):
        merged = meta.create(graph, target, arguments, options, name=f"each_{members[0].name}")
        if not returns_alias(members[0].target):
            results = [meta.create(graph, operator.getitem, (merged, place)) for place in range(len(members))]
        else:  # each has written to its first argument
            results = [cast(fx.Node, node.args[0]) for node in members]
    for node, result in zip(members, results, strict=True):
        node.replace_all_uses_with(result)
        graph.erase_node(node)
