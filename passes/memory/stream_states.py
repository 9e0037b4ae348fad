"""Bring parameters and optimizer state that are offloaded to the host or disk to the device and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar, Literal, cast

import torch
from torch import fx

from zgraph.analysis.liveness import Placements, placements
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.dialect.copies import offload_op, reload_op, spill_op, store_op, wait_copy_op
from zgraph.errors import check_bytes, check_choice, check_least
from zgraph.graph import edits, meta, nodes, traits
from zgraph.passes.common.updates import split_call
from zgraph.passes.common.visits import (
    Visit,
    bytes_of,
    is_computing,
    most_bytes_of,
    plan_split,
    plan_visits,
)
from zgraph.passes.memory.host_updates import (
    HostUpdate,
    bring_to_host,
    can_run_on_host,
    on_gpu,
    plan_host_updates,
    return_to_device,
    split_apart,
    unscale_ahead,
)
from zgraph.passes.memory.updates_at_rest import Outcome, choose_updates, may_run_beside, predicted, update_beside
from zgraph.runtime.chunks import MIB
from zgraph.tiers.tier import DEVICE, HOST, is_offloaded
from zgraph.torch_compat.operators import written_arguments

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class StreamStates(GraphPass):
    """Copy offloaded parameters and optimizer state to the device before each use, and written values back afterwards.

    Each input of a whole training step is marked with the memory where it is kept (`zgraph.Offload`). A gather or an
    update reads a copy that was started a few uses earlier. Copies that were only read are dropped; copies that an
    update has written are stored over the input. A store is awaited when later stores have started, or at the end of
    the step. If the copy for an update must start before backward has read the tensor, backward and the update share
    one copy. State created by the optimizer's first step is moved to its tier at the end. Results are bitwise equal.

    In forward, backward and inference graphs without an optimizer, this pass copies the inputs of gathers. Put it after
    the passes that order updates and gathers; with costs, put `ScheduleCopies` after it.
    Leaves alone: inputs on the device, and the order of everything else.

    Attributes:
        prefetch: number of uses whose copies are in flight besides the awaited one.
        ahead_bytes: bytes of copies in flight besides the awaited ones up to which inference graphs without a budget
            start copies of later uses, too. Weights of 4 bits are small, and a disk with little in flight is idle
            between requests.
        in_flight_bytes: maximum bytes of copies in flight, including the awaited ones. The copies for one use are
            always prefetched, so the limit has no effect with prefetch 0 or 1. The default holds three updates of
            `update_bytes`: one awaited, two prefetched.
        update_bytes: maximum bytes of offloaded tensors that one call of a fused update reads; larger calls are split
            by parameters.
        stores_in_flight: number of later stores that may start before a store is awaited. The same limit applies to
            updates that run concurrently with compute.
        updates: where offloaded state is updated. State on disk is always copied to the device.
            "at_rest": on the host, for state kept there. Fused updates run in a thread, concurrently with compute,
            bucket by bucket. On a GPU, gradients and the parameters kept on the GPU are copied to the host; these
            parameters are copied back after the update. Updates that are not fused run on the device.
            "streamed": on the device; all offloaded state is copied.
            "planned": whichever makes the simulated step faster, on the target's hardware and within the budgets of
            device and host. The first fused updates of a step run on the host, the others on the device. All run on
            the host unless another choice is faster by more than 1 %.

    Source: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, and Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv
    2104.07857; here as a pass over the graph of the step, in which every copy is a node.
    """

    prefetch: int = 1
    ahead_bytes: int = 32 * MIB
    in_flight_bytes: int = 192 * MIB
    update_bytes: int = 64 * MIB
    stores_in_flight: int = 1
    updates: Literal["at_rest", "streamed", "planned"] = "at_rest"

    name: ClassVar[str] = "stream_states"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.STATES_STREAMED})

    def __post_init__(self) -> None:
        check_least("stream_states", 0, "0 (none), 1 or more", " is negative", prefetch=self.prefetch)
        check_least("stream_states", 0, "0 (none) or more bytes", " is negative", ahead_bytes=self.ahead_bytes)
        check_choice("stream_states", ("at_rest", "streamed", "planned"), updates=self.updates)
        check_least("stream_states", 1, "1 or more", stores_in_flight=self.stores_in_flight)
        check_bytes("stream_states", ", or prefetch=0", in_flight_bytes=self.in_flight_bytes)
        nothing_fits = " holds no parameter"
        check_least("stream_states", 1, "a positive number of bytes", nothing_fits, update_bytes=self.update_bytes)

    @property
    def needs_target(self) -> bool:
        return self.updates == "planned"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.update is not None:
            chosen = replace(self, updates="at_rest" if ctx.update == "host" else "streamed")
            return chosen.run(gm, replace(ctx, update=None))
        graph = gm.graph
        if all(map(_is_on_device, graph.nodes)):  # most steps: spares them the analysis
            ctx.note(self, "everything rests on the device")
            return False
        is_elsewhere = computes_elsewhere(list(graph.nodes), ctx)
        for node in list(graph.nodes) if self.updates != "streamed" and is_elsewhere else ():
            split_call(node, split_apart(node))
        for node in list(graph.nodes):
            split_call(node, plan_split(node, self.update_bytes))
        streamed = self._choose_streamed(gm, ctx, is_elsewhere) if self.updates == "planned" else []
        return self._stream(graph, ctx, streamed, is_elsewhere)

    def _choose_streamed(self, gm: fx.GraphModule, ctx: PassContext, is_elsewhere: bool) -> list[fx.Node]:
        """Return the updates that could run on the host but are faster on the device: the last ones, or none."""
        order = list(gm.graph.nodes)
        able = _able(order, is_elsewhere)
        if not able:
            return []
        places = {node: place for place, node in enumerate(order)}

        def outcome_of(on_host: int, *, by_costs: bool) -> Outcome:
            trial = edits.copy_of(gm)
            copies = list(trial.graph.nodes)
            streamed = [copies[places[update]] for update in able[on_host:]]
            self._stream(trial.graph, replace(ctx, notes=[], decisions=[]), streamed, is_elsewhere)
            return predicted(trial.graph, ctx, on_host, by_costs=by_costs)

        by_rules, by_costs = partial(outcome_of, by_costs=False), partial(outcome_of, by_costs=True)
        choice = choose_updates(len(able), by_rules, by_costs)
        ctx.note(self, str(choice), is_decision=True)
        return able[choice.best.on_host :]

    def _stream(self, graph: fx.Graph, ctx: PassContext, streamed: Sequence[fx.Node], is_elsewhere: bool) -> bool:
        """Insert copies of offloaded tensors, and run updates on the host except those in `streamed`."""
        stays = self.updates != "streamed"
        on_device = dict.fromkeys(streamed)
        for node in list(graph.nodes) if stays and is_elsewhere else ():
            if node not in on_device:
                unscale_ahead(graph, node)
        order = list(graph.nodes)
        placed = placements(graph)
        able = plan_host_updates(order) if stays and is_elsewhere else []
        on_host = [one for one in able if one.update not in on_device]
        apart = dict.fromkeys(one.update for one in on_host) if is_elsewhere else on_device
        planned = plan_visits(order, placed, apart)
        in_place = [] if is_elsewhere else [visit for visit in planned if _reads_codes(visit)]
        visits = [visit for visit in planned if not (stays and _stays(visit, on_host, on_device, is_elsewhere))]
        visits = [visit for visit in visits if visit not in in_place]
        joined = _join_updates(order, visits, self.prefetch, self.in_flight_bytes)
        visits, planned = ([visit for visit in some if visit not in joined] for some in (visits, planned))
        made = plan_new_state(order, placed)
        if not planned and not made:
            ctx.note(self, "everything rests on the device")
            return False
        for visit in visits:
            _visit(graph, visit, placed)
        outgoing = [(visit.last_write, visit.store) for visit in visits if visit.last_write and visit.store]
        for value, last in made:
            outgoing.append((last, _move_out(graph, value, last, placed)))
        # With a budget only plans by costs read further ahead; in training, gradients need the memory.
        ahead_bytes = self.ahead_bytes if ctx.direction == "inference" and ctx.plan_bytes is None else 0
        _prefetch(order, visits, joined, self.prefetch, ahead_bytes, self.in_flight_bytes)
        _write_behind(graph, outgoing, planned, self.stores_in_flight)
        edits.erase_dead(graph, [node for node in order if _is_only_view(node, placed)])
        bring_to_host(graph, on_host)
        return_to_device(graph, on_host, self.stores_in_flight)
        unmoved = (visit for visit in planned if visit not in visits and visit not in in_place)
        at_rest = dict.fromkeys(use for visit in unmoved for use in visit.uses)
        # A program for a GPU that waits issues nothing meanwhile.
        unlimited = dict.fromkeys(one.update for one in on_host)
        beside = update_beside(graph, [use for use in at_rest if may_run_beside(use)], self.stores_in_flight, unlimited)
        brought = sum(bytes_of(visit.resting) for visit in visits)
        stored = sum(bytes_of(visit.resting) for visit in visits if visit.store)
        ctx.note(self, f"{brought} bytes are brought to the device in {len(visits)} copies, {stored} bytes go back")
        if at_rest:
            ctx.note(self, f"{len(at_rest)} calls update where their tensors rest, {beside} of them beside compute")
        if in_place:
            ctx.note(
                self, f"{sum(bytes_of(visit.resting) for visit in in_place)} bytes of codes are read where they rest"
            )
        if on_host:
            sent = sum(bytes_of(source) for one in on_host for source in one.brought)
            ctx.note(self, f"{sent} bytes go to the host for {len(on_host)} updates there")
        return bool(visits or made or beside)


def computes_elsewhere(order: Sequence[fx.Node], ctx: PassContext) -> bool:
    """Return whether the graph is for a GPU, even if it was planned with CPU tensors."""
    return ctx.planned_device is not None or on_gpu(order)


def _able(order: Sequence[fx.Node], is_elsewhere: bool) -> list[fx.Node]:
    """Return the fused updates, in order, that can run on the host because their state is kept there."""
    if is_elsewhere:
        return [one.update for one in plan_host_updates(order)]
    return [node for node in order if can_run_on_host(node)]


def _stays(visit: Visit, on_host: Sequence[HostUpdate], on_device: Container[fx.Node], is_elsewhere: bool) -> bool:
    """Return whether the update of a visit (a period on the device) runs on the host, so that no copy is needed."""
    tier = meta.space(visit.resting)
    if tier is None or not tier.updates or not visit.is_update or any(use in on_device for use in visit.uses):
        return False
    there = {one.update for one in on_host}
    return not is_elsewhere or all(use in there or meta.beside(use) is not None for use in visit.uses)


def _reads_codes(visit: Visit) -> bool:
    """Return whether all uses of a visit read codes in the host's memory, which a CPU reads as well as its own."""
    tier = meta.space(visit.resting)
    return tier == HOST and all(nodes.reads_codes(use) for use in visit.uses)


def _is_on_device(node: fx.Node) -> bool:
    return not is_offloaded(meta.space(node)) and meta.rests_in(node) == DEVICE


def plan_new_state(order: Sequence[fx.Node], placed: Placements) -> list[tuple[fx.Node, fx.Node]]:
    """Return the state that a step creates and that must be offloaded, each with the last node that uses it."""
    found: list[tuple[fx.Node, fx.Node]] = []
    for value in dict.fromkeys(order[-1].all_input_nodes):
        for number in placed.lies_in.get(value, ()):
            storage = placed.storages[number]
            if meta.rests_in(storage.first) != DEVICE:
                readers = [node for node in storage.readers if node.op != "output"]
                found.append((value, max([value, *readers])))
    return sorted(found, key=lambda entry: entry[1])


def _is_only_view(node: fx.Node, placed: Placements) -> bool:
    """Return whether a node only makes a view of an offloaded input."""
    if node.op != "call_function" or written_arguments(node) or not traits.is_view(node):
        return False
    firsts = [placed.storages[number].first for number in placed.lies_in.get(node, ())]
    return any(first.op == "placeholder" and meta.space(first) is not None for first in firsts)


def _visit(graph: fx.Graph, visit: Visit, placed: Placements) -> None:
    """Insert the copies of a visit (a period on the device): one to the device and, if its uses write, one back."""
    resting, first = visit.resting, visit.uses[0]
    tier = meta.space(resting) or DEVICE
    device = meta.tensor_value(resting).device
    with graph.inserting_before(first):
        visit.reload = meta.create(graph, reload_op(), (resting, device), like=first, name=f"reload_{resting.name}")
        meta.set_transit(visit.reload, tier, to_device=True)
        meta.set_space(visit.reload, DEVICE)
        longest = meta.longest_bytes(resting)
        if longest is not None:
            meta.set_longest_bytes(visit.reload, longest)
        visit.ready = meta.create(graph, wait_copy_op(), (visit.reload,), like=first, name=f"here_{resting.name}")
    visit.copies[resting] = visit.ready
    for use in visit.uses:
        for source in use.all_input_nodes:
            if source in visit.aliases and source not in visit.uses:
                use.replace_input_with(source, _copy_of(graph, source, visit, use))
    if visit.last_write is not None:
        with graph.inserting_after(visit.last_write):
            visit.store = meta.create(
                graph, store_op(), (visit.ready, resting), like=visit.last_write, name=f"store_{resting.name}"
            )
        meta.set_transit(visit.store, tier, to_device=False)


def _copy_of(graph: fx.Graph, alias: fx.Node, visit: Visit, use: fx.Node) -> fx.Node:
    """Return the value in the device's copy that replaces `alias`, a value in the offloaded input's storage."""
    if alias not in visit.copies:
        source = visit.aliases[alias]
        behind = _copy_of(graph, source, visit, use)
        if written_arguments(alias):  # a write of an earlier visit, whose result is the input's value by now
            visit.copies[alias] = behind
        else:
            with graph.inserting_before(use):
                visit.copies[alias] = graph.node_copy(alias, lambda node: behind if node is source else node)
    return visit.copies[alias]


def _move_out(graph: fx.Graph, value: fx.Node, last: fx.Node, placed: Placements) -> fx.Node:
    """Offload new state after its last use `last`; the graph returns the copy. Return the node that starts the copy."""
    output = nodes.output_of(graph)
    firsts = [placed.storages[number].first for number in placed.lies_in[value]]
    tier = meta.rests_in(firsts[0])
    operator, key = (offload_op(), ()) if tier == HOST else (spill_op(), (tier.key,))
    with graph.inserting_after(last):
        start = meta.create(graph, operator, (value, *key), like=last, name=f"offload_{value.name}")
    meta.set_transit(start, tier, to_device=False)
    meta.set_space(start, tier)
    meta.set_kept(start, "state")
    longest = meta.longest_bytes(firsts[0])
    if longest is not None:
        meta.set_longest_bytes(start, longest)
    with graph.inserting_before(output):
        kept = meta.create(graph, wait_copy_op(), (start,), like=last, name=f"kept_{value.name}")
    meta.set_space(kept, tier)
    for first in firsts:
        meta.clear_at_rest(first)
    output.replace_input_with(value, kept)
    return start


def _prefetch(
    order: Sequence[fx.Node],
    visits: Sequence[Visit],
    joined: Sequence[Visit],
    prefetch: int,
    ahead_bytes: int,
    in_flight_bytes: int,
) -> None:
    """Move each start of a copy to the device up, to just before the wait for the copies of an earlier use."""
    batches = list(_batches(order, visits))
    held: Counter[fx.Node] = Counter()  # bytes of copies that an update shares with backward
    for visit in joined:
        held[visit.uses[0]] += most_bytes_of(visit.resting)
    sizes = [
        sum(most_bytes_of(visit.resting) for visit in batch) + sum(held[use] for use in {one.uses[0] for one in batch})
        for batch in batches
    ]
    anchors = [min(cast(fx.Node, visit.ready) for visit in batch) for batch in batches]
    top = next(node for node in order if node.op != "placeholder")
    top = min(top, anchors[0]) if anchors else top
    reductions = _last_reductions(order, {batch[0].uses[0] for batch in batches})
    oldest = 0
    for number, batch in enumerate(batches):
        while _is_too_far(sizes[oldest : number + 1], prefetch, ahead_bytes, in_flight_bytes):
            oldest += 1
        anchor = top if oldest == 0 and number < prefetch else anchors[oldest]
        floor = reductions[batch[0].uses[0]] if any(visit.is_update for visit in batch) else None
        if floor is not None:  # otherwise an update's copies would be held from the last gather on
            anchor = max(anchor, floor)
        for visit in batch:
            reload = cast(fx.Node, visit.reload)
            # A value that was stored before is read again just before its use, after the wait for that store.
            if visit.is_first and anchor < reload:
                edits.move_before(reload, anchor)


def _is_too_far(sizes: Sequence[int], prefetch: int, ahead_bytes: int, in_flight_bytes: int) -> bool:
    """Return whether the last copies of a window, given by the bytes of each use, must not start at its first use."""
    later = len(sizes) - 1  # uses after the awaited one
    return (later > prefetch and sum(sizes[1:]) > ahead_bytes) or (later > 1 and sum(sizes) > in_flight_bytes)


def _join_updates(
    order: Sequence[fx.Node], visits: Sequence[Visit], prefetch: int, in_flight_bytes: int
) -> list[Visit]:
    """Let an update share backward's copy of a tensor if a copy for the update would start before backward's read.

    Returns:
        The updates' visits (periods on the device) that were merged into earlier visits.
    """
    batches = list(_batches(order, visits))
    sizes = [sum(most_bytes_of(visit.resting) for visit in batch) for batch in batches]
    reductions = _last_reductions(order, {batch[0].uses[0] for batch in batches})
    place = {visit: number for number, batch in enumerate(batches) for visit in batch}
    joined: list[Visit] = []
    for number, batch in enumerate(batches):
        floor = reductions[batch[0].uses[0]]
        for visit in batch:
            read = visit.previous
            if not visit.is_update or read is None or read.is_update or read not in place:
                continue
            is_ahead = number - place[read] <= 1 or sum(sizes[place[read] : number + 1]) <= in_flight_bytes
            # With a reduction in between, the copy would be held while that is in flight.
            if number - place[read] <= prefetch and is_ahead and not (floor and floor > read.uses[0]):
                read.uses += visit.uses
                read.last_write = visit.last_write or read.last_write
                joined.append(visit)
    return joined


def _last_reductions(order: Iterable[fx.Node], uses: Container[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """Map each node in `uses` to the start of the last reduction before it, or None."""
    found: dict[fx.Node, fx.Node | None] = {}
    last: fx.Node | None = None
    for node in order:
        if node in uses:
            found[node] = last
        if nodes.is_exchange(node):
            last = node
    return found


def _batches(order: Sequence[fx.Node], visits: Sequence[Visit]) -> Iterator[list[Visit]]:
    """Group consecutive visits (periods on the device) that begin without compute in between."""
    position = {node: place for place, node in enumerate(order)}
    before = [0, *accumulate(map(is_computing, order))]  # computing nodes before each position
    batch: list[Visit] = []
    known = (-1, False)
    for visit in visits:
        begun = (before[position[visit.uses[0]]], visit.is_update)
        if batch and begun != known:
            yield batch
            batch = []
        batch.append(visit)
        known = begun
    if batch:
        yield batch


def _write_behind(
    graph: fx.Graph, outgoing: Iterable[tuple[fx.Node, fx.Node]], visits: Sequence[Visit], in_flight: int
) -> None:
    """Wait for each copy back after `in_flight` later batches of copies have started.

    If the offloaded input is read again earlier, the wait comes just before that read.
    """
    read_again: dict[fx.Node, fx.Node] = {}  # from the start of each store to the first read after it
    last_store: dict[fx.Node, fx.Node] = {}
    for visit in visits:
        if visit.resting in last_store:  # read by a copy, or by an update at rest
            read_again.setdefault(last_store[visit.resting], visit.reload or visit.uses[0])
        if visit.store is not None:
            last_store[visit.resting] = visit.store
    batches: dict[fx.Node, list[fx.Node]] = {}
    for writer, start in sorted(outgoing, key=lambda entry: entry[1]):
        batches.setdefault(writer, []).append(start)
    starts = list(batches.values())
    for number, batch in enumerate(starts):
        later = starts[number + in_flight][0] if number + in_flight < len(starts) else nodes.output_of(graph)
        for start in batch:
            anchor = min(later, read_again.get(start, later))
            wait = nodes.wait_of(start)
            if wait is None:
                with graph.inserting_before(anchor):
                    meta.create(graph, wait_copy_op(), (start,), like=start, name=f"stored_{start.name}")
            else:
                edits.move_before(wait, anchor)
