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

from collections.abc import Sequence

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


def start_all_gather(shard: Tensor, world: int, group_name: str) -> Tensor:
    """[n, ...] of every rank -> [world * n, ...], usable after a wait."""
    group = resolve_group(group_name)
    if not uses_messages(group, shard.device):
        return start_ring_gather(shard, world, group_name)
    whole = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    _start(whole.chunk(world), [shard.contiguous()] * world, group, whole)
    return whole


def start_ring_gather(shard: Tensor, world: int, group_name: str) -> Tensor:
    """The same by the backend itself, which on gloo passes parts on around a ring of ranks."""
    whole = shard.new_empty((world * shard.shape[0], *shard.shape[1:]))
    return all_gather_into(whole, shard, group_name)


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


def wants_ring(group: ProcessGroup, ranks_per_node: int) -> bool:
    """Whether a group has several ranks on each of several nodes, whose link a ring enters and leaves once.

    As messages, what a rank sends to all ranks of another node goes through that link as often as there are ranks.
    """
    members = dist.get_process_group_ranks(group)
    on_nodes = len({member // ranks_per_node for member in members})
    return 1 < on_nodes < len(members)


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
