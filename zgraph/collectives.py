"""How the collectives of zgraph are started: on gloo as messages between pairs of ranks, elsewhere by the backend.

Results are the same, bit for bit. What messages are better at, on gloo (2.11 - 2.13):

- Both directions of a link are used. In gloo's own all_to_all and all_gather a rank sends before it says that it is
  ready to receive. Who comes late queues that word behind its data, and its peer sends nothing meanwhile: four ranks
  got 94 MB/s through links of which TCP gets 119 (`examples/benchmarks/shaped_link.py`), and get 117 with messages.
- Nothing is staged. ProcessGroupGloo gathers into a buffer of its own and copies the result out of it.
- Nothing is held. Each of its threads keeps the tensors of its last collective until its next one, up to four buckets.

Messages between two ranks arrive in the order in which they were started, so ranks have to start collectives of a group
in one order, as with the backend's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.torch_compat import (
    all_gather_into,
    all_to_all_op,
    grouped_gather_op,
    register_work,
    resolve_group,
)

_TAG = 0x7A67  # of messages; "zg", so that those of the user's own calls are others
_PASSED_ON = _TAG + 1  # of those that a gather by node sends when it is waited for


def start_all_gather(shard: Tensor, world: int, group_name: str) -> Tensor:
    """[n, ...] of every rank -> [world * n, ...], usable after a wait."""
    group = resolve_group(group_name)
    whole = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    if not uses_messages(group, shard.device):
        return all_gather_into(whole, shard, group_name)
    _start(whole.chunk(world), [shard.contiguous()] * world, group, whole)
    return whole


def start_gather_by_node(shard: Tensor, world: int, group_name: str, ranks_per_node: int) -> Tensor:
    """The same for a group with several ranks on each of several nodes: a part crosses to another node once.

    Four ranks on two nodes, of which 0 and 2 have the first place and 1 and 3 the second:

        start    each sends its part to its own node and to its place on other nodes    0 -> 1, 2    1 -> 0, 3    ...
        wait     each passes on what came from other nodes to its own                   0 -> 1: 2's  1 -> 0: 3's  ...
    """
    group = resolve_group(group_name)
    nodes = nodes_of(group, ranks_per_node)
    whole = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    parts, rank, own = whole.chunk(world), dist.get_rank(group), shard.contiguous()
    if not own.numel():
        return whole
    home = next(members for members in nodes if rank in members)
    place = home.index(rank)
    away = [members[place] for members in nodes if members is not home]
    here = [peer for peer in home if peer != rank]
    peers = [*here, *away]
    arriving = [group.recv([parts[peer]], peer, _TAG) for peer in peers]
    arriving += [group.send([own], peer, _TAG) for peer in peers]
    parts[rank].copy_(own)
    theirs = [[members[home.index(peer)] for members in nodes if members is not home] for peer in here]
    register_work(whole, _PassOn(group, arriving, parts, away, dict(zip(here, theirs, strict=True))))
    return whole


class _PassOn(dist.Work):
    """The second half of a gather by node, which runs when its result is waited for.

    Ranks wait for the collectives of a group in one order, as they start them, so these messages find one another too.
    """

    def __init__(
        self,
        group: ProcessGroup,
        arriving: Sequence[dist.Work],
        parts: Sequence[Tensor],
        away: Sequence[int],
        theirs: Mapping[int, Sequence[int]],
    ) -> None:
        super().__init__()
        self.group, self.arriving, self.parts, self.away, self.theirs = group, arriving, parts, away, theirs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        group, parts = self.group, self.parts
        passed = [
            group.recv([parts[origin]], peer, _PASSED_ON) for peer, origins in self.theirs.items() for origin in origins
        ]
        for work in self.arriving:
            work.wait()
        passed += [group.send([parts[origin]], peer, _PASSED_ON) for peer in self.theirs for origin in self.away]
        for work in passed:
            work.wait()
        return True


def start_grouped_gather(shards: Sequence[Tensor], world: int, group_name: str) -> list[Tensor]:
    """Several all_gathers: one launch on NCCL, one after the other elsewhere, where each is waited for alone.

    gloo's own (2.11 - 2.13) runs as ALLGATHER_COALESCED, which is not safe with several in flight (`all_gather_into`).
    """
    if dist.get_backend(resolve_group(group_name)) == "nccl":
        return grouped_gather_op()(list(shards), world, group_name)
    return [start_all_gather(shard, world, group_name) for shard in shards]


def start_all_to_all(
    pieces: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str
) -> Tensor:
    """Rows for each rank -> [sum of output_splits, ...] rows of each rank, usable after a wait."""
    group = resolve_group(group_name)
    if not uses_messages(group, pieces.device):
        return all_to_all_op()(pieces, list(output_splits), list(input_splits), group_name)
    received = pieces.new_empty((sum(output_splits), *pieces.shape[1:]))
    parts, own = received.split(list(output_splits)), pieces.contiguous().split(list(input_splits))
    _start(parts, own, group, received)
    return received


def uses_messages(group: ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of a group are sent as messages: by gloo, from host memory."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo"


def nodes_of(group: ProcessGroup, ranks_per_node: int) -> list[list[int]]:
    """The ranks of a group, by the node that they are on."""
    found: dict[int, list[int]] = {}
    for rank, member in enumerate(dist.get_process_group_ranks(group)):
        found.setdefault(member // ranks_per_node, []).append(rank)
    return list(found.values())


def goes_by_node(group: ProcessGroup, ranks_per_node: int) -> bool:
    """Whether a gather of this group is better started by `start_gather_by_node`.

    As messages from each rank to each, a part would cross to another node as often as that has ranks. Nodes of unequal
    numbers of ranks are treated as if each rank were a node.
    """
    nodes = nodes_of(group, ranks_per_node)
    return len(nodes) > 1 and len(nodes[0]) > 1 and len({len(members) for members in nodes}) == 1


def _start(to_fill: Sequence[Tensor], to_send: Sequence[Tensor], group: ProcessGroup, result: Tensor) -> None:
    """Exchange parts with every rank; the wait of `result` waits for all of it, what was sent included."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + step) % world for step in range(1, world)]
    # The receives first: what is announced before anything is sent waits behind nothing.
    started = [group.recv([to_fill[peer]], peer, _TAG) for peer in reversed(others) if to_fill[peer].numel()]
    started += [group.send([to_send[peer]], peer, _TAG) for peer in others if to_send[peer].numel()]
    to_fill[rank].copy_(to_send[rank])
    for work in started:
        register_work(result, work)
