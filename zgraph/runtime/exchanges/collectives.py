"""Starts collectives: as sends between pairs of ranks on gloo, and as the backend's own collectives elsewhere.

Both ways give bitwise equal results. On gloo, point-to-point sends have these advantages (torch 2.11 - 2.13):

- They use both directions of a link at once. In gloo's all_to_all and all_gather, a rank sends its data before it
  announces that it is ready to receive, so its peer sends nothing meanwhile. Four ranks got 94 MB/s with gloo's
  collectives, 117 MB/s with point-to-point sends, and 119 MB/s with plain TCP
  (`examples/benchmarks/shaped_link.py`).
- They need no staging buffer. ProcessGroupGloo gathers into an internal buffer, from which it copies the result.
- They free tensors early. Each of gloo's threads keeps the tensors of its last collective alive until its next
  collective: up to four buckets.

All ranks must start the collectives of a group in the same order, as with the backend's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.runtime.exchanges.identity import About, tag_of
from zgraph.runtime.exchanges.watch import Exchange
from zgraph.tiers.devices import kind_of_backend
from zgraph.torch_compat.collectives import (
    all_gather_into,
    all_gather_op,
    all_reduce_op,
    all_to_all_op,
    gather_group,
    reduce_scatter,
    reduce_scatter_op,
    register_work,
    wait,
)
from zgraph.torch_compat.groups import backend_of, resolve_group

_NUMBERS = 4096
# First tags of two ranges: for sends, and for parts that hierarchical gathers forward. Far from tags of users.
_TAGS = (0x7A670000, 0x7A670000 + _NUMBERS)


class Route(NamedTuple):
    """Facts about a process group that are looked up once and reused by every call of a collective.

    Attributes:
        group: the process group.
        backend: the group's backend for the device of the collective's tensors; "" if there is none.
        point_to_point: whether collectives run as sends between pairs of ranks: on gloo, with tensors on the CPU.
        rank: this rank's number in the group.
        others: the group's other ranks, starting after this rank; empty unless `point_to_point`.
    """

    group: ProcessGroup
    backend: str
    point_to_point: bool
    rank: int
    others: tuple[int, ...]

    @classmethod
    def of(cls, group: ProcessGroup, device: torch.device) -> Route:
        backend, rank, world = backend_of(group, device), group.rank(), group.size()
        point_to_point = backend == "gloo" and device.type == "cpu"
        others = tuple((rank + step) % world for step in range(1, world)) if point_to_point else ()
        return cls(group, backend, point_to_point, rank, others)


def bind(
    function: Callable[..., Any], *more: Any, about: Callable[[], About | None] | None = None
) -> Callable[..., Any]:
    """Specialize a function of this module for one node of a compiled program, so that its `Route` is found once.

    Args:
        function: function with the parameters (tensors, *others, group_name, *more, route=, about=).
        more: values of the parameters after group_name, the same in every call.
        about: returns the identity of the collective, before each call of the function; None if the function has no
            parameter `about`.

    Returns:
        A function with the parameters (tensors, *others, group_name). If the group's name later belongs to another
        group, the route is looked up again.
    """
    known: Route | None = None

    def run(tensors: Any, *others: Any) -> Any:
        nonlocal known
        group = resolve_group(others[-1])
        if known is None or known.group is not group:
            known = Route.of(group, (tensors if isinstance(tensors, Tensor) else tensors[0]).device)
        if about is None:
            return function(tensors, *others, *more, route=known)
        return function(tensors, *others, *more, route=known, about=about())

    run.__name__ = function.__name__  # its name in the generated program
    return run


def start_all_gather(
    shard: Tensor,
    world: int,
    group_name: str,
    number: int = 0,
    *,
    route: Route | None = None,
    about: About | None = None,
) -> Tensor:
    """Start an all_gather: [n, ...] -> [world * n, ...], readable after a wait.

    Args:
        shard: part of this rank.
        world: number of ranks in the group.
        group_name: name of the group.
        number, about: as for `_start`.
    """
    route = route or Route.of(resolve_group(group_name), shard.device)
    if route.backend != "gloo":
        return all_gather_op()(shard.contiguous(), world, group_name)
    unsharded = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    if not route.point_to_point:
        return all_gather_into(unsharded, shard, group_name)
    _start(unsharded.chunk(world), [shard.contiguous()] * world, route, unsharded, number, about)
    return unsharded


def all_gather(shard: Tensor, world: int, group_name: str, *, about: About | None = None) -> Tensor:
    """Run an all_gather and wait for it; cheaper than a start and a wait, because torch need not register the work."""
    route = Route.of(resolve_group(group_name), shard.device)
    if not route.point_to_point:
        return wait(start_all_gather(shard, world, group_name, route=route))
    unsharded = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    _start(unsharded.chunk(world), [shard.contiguous()] * world, route, None, 0, about)
    return unsharded


def start_hierarchical_gather(shard: Tensor, world: int, group_name: str, number: int, ranks_per_host: int) -> Tensor:
    """Start an all_gather over several hosts with several ranks each, which sends each part to every host only once.

    A rank sends its part to the other ranks of its host, and to the rank with the same position on each other host.
    During the wait, ranks forward the parts from other hosts to the other ranks of their host. With ranks 0 and 1 on
    one host, and ranks 2 and 3 on another:

        start    rank 0 sends its part to 1 and 2, rank 1 to 0 and 3, ...
        wait     rank 0 forwards the part of 2 to 1, rank 1 forwards the part of 3 to 0, ...
    """
    group = resolve_group(group_name)
    hosts = hosts_of(group, ranks_per_host)
    unsharded = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    parts, rank, own = unsharded.chunk(world), dist.get_rank(group), shard.contiguous()
    if not own.numel():
        return unsharded
    home = next(members for members in hosts if rank in members)
    place = home.index(rank)
    away = [members[place] for members in hosts if members is not home]
    here = [peer for peer in home if peer != rank]
    peers = [*here, *away]
    tag, passed_on = (first + number % _NUMBERS for first in _TAGS)
    arriving = [group.recv([parts[peer]], peer, tag) for peer in peers]
    arriving += [group.send([own], peer, tag) for peer in peers]
    parts[rank].copy_(own)
    theirs = [[members[home.index(peer)] for members in hosts if members is not home] for peer in here]
    register_work(unsharded, _PassOn(group, arriving, parts, away, dict(zip(here, theirs, strict=True)), passed_on))
    return unsharded


class _PassOn(dist.Work):
    """Second half of a hierarchical gather: its `wait` forwards parts from other hosts to the other ranks of this host.

    The wait ends only when the other ranks of the host wait for the same gather. So all ranks must wait for their
    collectives in the same order: see `zgraph.graph.collective_dispatch.order_of_waits`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        arriving: Sequence[dist.Work],
        parts: Sequence[Tensor],
        away: Sequence[int],
        theirs: Mapping[int, Sequence[int]],
        tag: int,
    ) -> None:
        super().__init__()
        self.group, self.arriving, self.parts, self.away, self.theirs = group, arriving, parts, away, theirs
        self.tag = tag

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        group, parts, tag = self.group, self.parts, self.tag
        passed = [group.recv([parts[origin]], peer, tag) for peer, origins in self.theirs.items() for origin in origins]
        for work in self.arriving:
            work.wait()
        passed += [group.send([parts[origin]], peer, tag) for peer in self.theirs for origin in self.away]
        for work in passed:
            work.wait()
        return True


def start_grouped_gather(
    shards: Sequence[Tensor],
    world: int,
    group_name: str,
    number: int = 0,
    *,
    route: Route | None = None,
    about: About | None = None,
) -> list[Tensor]:
    """Start several all_gathers: in one launch on NCCL, one by one on other backends. `finish_group` waits for them.

    On gloo, torch's own grouped gather is not used, because several at a time are unsafe: see `all_gather_into`.

    Args:
        shards: at least one shard; [n, ...] each.
        world, group_name, number, about: as for `start_all_gather`.
    """
    route = route or Route.of(resolve_group(group_name), shards[0].device)
    together = kind_of_backend(route.backend).groups_launches
    if not together and route.backend != "gloo":
        return [start_all_gather(shard, world, group_name, route=route) for shard in shards]
    every = [shard.new_empty((world * shard.shape[0], *shard.shape[1:])) for shard in shards]
    if together:
        register_work(every[0], gather_group(every, shards, route.group))
        return every
    for unsharded, shard in zip(every, shards, strict=True):
        if route.point_to_point:
            _start(unsharded.chunk(world), [shard.contiguous()] * world, route, every[0], number, about)
        else:
            all_gather_into(unsharded, shard, group_name)
    return every


def finish_group(started: Sequence[Tensor], group_name: str, *, route: Route | None = None) -> list[Tensor]:
    """Wait for the gathers of `start_grouped_gather`, and return their results."""
    route = route or Route.of(resolve_group(group_name), started[0].device)
    for one in started[: 1 if route.point_to_point or kind_of_backend(route.backend).groups_launches else None]:
        wait(one)
    return list(started)


def start_all_to_all(
    pieces: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group_name: str,
    number: int = 0,
    *,
    route: Route | None = None,
    about: About | None = None,
) -> Tensor:
    """Start an all_to_all of rows; the result has the shape [sum(output_splits), ...] and is readable after a wait.

    Args:
        pieces: rows for all ranks, in rank order.
        output_splits: number of rows received from each rank.
        input_splits: number of rows sent to each rank.
        number, about: as for `_start`.
    """
    route = route or Route.of(resolve_group(group_name), pieces.device)
    if not route.point_to_point:
        return all_to_all_op()(pieces, list(output_splits), list(input_splits), group_name)
    received = pieces.new_empty((sum(output_splits), *pieces.shape[1:]))
    parts, own = received.split(list(output_splits)), pieces.contiguous().split(list(input_splits))
    _start(parts, own, route, received, number, about)
    return received


def all_to_all(pieces: Tensor, splits: Sequence[int], group_name: str, *, about: About | None = None) -> Tensor:
    """Run an all_to_all that sends `splits[r]` rows to rank r and receives as many, and wait for it."""
    route = Route.of(resolve_group(group_name), pieces.device)
    if not route.point_to_point:
        return wait(start_all_to_all(pieces, splits, splits, group_name, route=route))
    received = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    _start(received.split(list(splits)), pieces.contiguous().split(list(splits)), route, None, 0, about)
    return received


def start_all_reduce(
    sent: Tensor,
    reduction: str,
    group_name: str,
    number: int = 0,
    in_place: bool = False,
    *,
    route: Route | None = None,
    about: About | None = None,
) -> Tensor:
    """Start an all_reduce: [n, ...] -> [n, ...], readable after a wait; sums are added in the backend's order.

    On gloo, one-byte messages carry the identity of the collective ahead of the data. If identities differ between
    ranks, the wait raises an AgreementError.

    Args:
        in_place: whether the result overwrites the input.
        number, about: as for `_start`.
    """
    route = route or Route.of(resolve_group(group_name), sent.device)
    if not route.point_to_point or reduction != "sum":
        return all_reduce_op()(sent, reduction, group_name)
    result = sent if in_place else sent.clone(memory_format=torch.contiguous_format)
    return _identified(result, lambda: dist.all_reduce(result, group=route.group, async_op=True), route, number, about)


def start_reduce_scatter(
    pieces: Tensor,
    reduction: str,
    world: int,
    group_name: str,
    number: int = 0,
    *,
    route: Route | None = None,
    about: About | None = None,
) -> Tensor:
    """Start a reduce_scatter: [world * n, ...] -> [n, ...]; apart from the shapes, as `start_all_reduce`."""
    route = route or Route.of(resolve_group(group_name), pieces.device)
    if not route.point_to_point or reduction != "sum":
        return reduce_scatter_op()(pieces, reduction, world, group_name)
    result = pieces.new_empty((pieces.shape[0] // world, *pieces.shape[1:]))
    return _identified(result, lambda: reduce_scatter(result, pieces.contiguous(), route.group), route, number, about)


def end_together(group_name: str, about: About) -> None:
    """Wait until all ranks of a gloo group have made this call with an equal identity; do nothing on other backends."""
    route = Route.of(resolve_group(group_name), torch.device("cpu"))
    if route.point_to_point:
        parts = [torch.zeros(1, dtype=torch.uint8)] * route.group.size()  # one shared byte: it is never read
        _start(parts, parts, route, None, 0, about)


def uses_point_to_point(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether collectives of a group run as sends between pairs of ranks: on gloo, with tensors on the CPU."""
    return device.type == "cpu" and backend_of(group, device) == "gloo"


def hosts_of(group: ProcessGroup, ranks_per_host: int) -> list[list[int]]:
    """Return the group's ranks on each host, as one list per host."""
    found: dict[int, list[int]] = {}
    for rank, member in enumerate(dist.get_process_group_ranks(group)):
        found.setdefault(member // ranks_per_host, []).append(rank)
    return list(found.values())


def is_hierarchical(group: ProcessGroup, ranks_per_host: int) -> bool:
    """Return whether a group has several hosts with several, equally many ranks each.

    Only such groups can use `start_hierarchical_gather`.
    """
    hosts = hosts_of(group, ranks_per_host)
    return len(hosts) > 1 and len(hosts[0]) > 1 and len({len(members) for members in hosts}) == 1


def _start(
    to_fill: Sequence[Tensor],
    to_send: Sequence[Tensor],
    route: Route,
    result: Tensor | None,
    number: int,
    about: About | None,
) -> None:
    """Start the sends and receives of a collective between this rank and all others.

    Args:
        to_fill, to_send: parts to receive and to send, one for each rank of the group.
        route: the process group, and this rank's number in the group.
        result: tensor; a wait for it then also waits for these messages. None: this call waits for them.
        number: number of the collective in its graph, the same on all ranks. It is part of the message tag, by which
            gloo chooses one of several network interfaces.
        about: identity of the collective, whose messages then match only those of the same collective on other ranks.
            None: messages match in the order of their start.
    """
    sends, receives = [part.nbytes for part in to_send], [part.nbytes for part in to_fill]
    works = _messages(to_fill, to_send, route, number, about)
    to_fill[route.rank].copy_(to_send[route.rank])
    _register(works, route, result, number, about, sends, receives)


def _messages(
    to_fill: Sequence[Tensor], to_send: Sequence[Tensor], route: Route, number: int, about: About | None
) -> list[dist.Work]:
    group, others = route.group, route.others
    sends, receives = [part.nbytes for part in to_send], [part.nbytes for part in to_fill]
    sizes = {*sends, *receives}  # mostly one
    if about is None:
        tags = dict.fromkeys(sizes, _TAGS[0] + number % _NUMBERS)
    else:
        tags = {nbytes: tag_of(about.key, number, nbytes) for nbytes in sizes}

    # Receives first, so that this rank's announcements of readiness do not queue after its data.
    works = [group.recv([to_fill[peer]], peer, tags[receives[peer]]) for peer in reversed(others) if receives[peer]]
    return works + [group.send([to_send[peer]], peer, tags[sends[peer]]) for peer in others if sends[peer]]


def _identified(
    result: Tensor, start: Callable[[], dist.Work | None], route: Route, number: int, about: About | None
) -> Tensor:
    """Start a collective of the backend after one-byte messages that carry its identity; return `result`."""
    parts = [torch.zeros(1, dtype=torch.uint8)] * route.group.size()
    works = [] if about is None else _messages(parts, parts, route, number, about)
    work = start()
    assert work is not None  # this rank is in the group
    sizes = [part.nbytes for part in parts]
    _register([*works, work], route, result, number, about, sizes, sizes)
    return result


def _register(
    works: Sequence[dist.Work],
    route: Route,
    result: Tensor | None,
    number: int,
    about: About | None,
    sends: Sequence[int],
    receives: Sequence[int],
) -> None:
    """Make `wait(result)` wait for these works; if `result` is None, wait for them now."""
    if about is not None and works:
        works = [Exchange(works, about, number, route.group, sends, receives)]
    for work in works:
        if result is None:
            work.wait()
        else:
            register_work(result, work)
