"""Process groups by name: their sizes and backends, and those made beside them for reductions, gathers and hosts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zgraph.torch_compat.groups import backend_of, find_group, make_beside, resolve_group

OF_REDUCTIONS = ".reductions"  # behind the name of a group: that of the group on which it reduces


OF_GATHERS = ".gathers"  # likewise, where it is the gathers that have one of their own


def group_size(group_name: str) -> int:
    """Ranks of a group; the group "" is this rank alone."""
    return dist.get_world_size(resolve_group(group_name)) if group_name else 1


def reduction_group(group_name: str) -> str:
    """The group on which gradients are reduced over the ranks of a group on which parameters are gathered.

    Collectives of one group run one after the other: a gather behind a reduction would wait for it. `zgraph.shard`
    makes the other one, once for each group. Its name says whose it is, so nobody has to remember it.
    """
    if group_name.endswith(OF_GATHERS):
        return group_name.removesuffix(OF_GATHERS)
    beside = group_name + OF_REDUCTIONS
    return beside if find_group(beside) is not None else group_name


def separate_reductions(group: ProcessGroup, device: torch.device | None = None) -> str:
    """The group on which to gather, when reductions run on another; called by all members.

    The one that is missing is made: for reductions; on NCCL for gathers, on a stream of high priority, for compute
    waits for them. There both are connected before anything else is sent over either. Left to its first use, the second
    communicator would be set up while gathers are outstanding on the first (torch 2.11 - 2.13: split off the default
    group's, where that is bound to a device), and ranks may wait for one another.

    Args:
        group: of these ranks.
        device: of this rank, on which the group works.

    Returns:
        Its name; the group's own where it is to reduce elsewhere, or has one rank.
    """
    if dist.get_world_size(group) == 1:
        return group.group_name
    device = device or torch.device("cpu")
    if backend_of(group, device) != "nccl":
        if find_group(group.group_name + OF_REDUCTIONS) is None:
            make_beside(group, group.group_name + OF_REDUCTIONS)
        return group.group_name
    name = group.group_name + OF_GATHERS
    if find_group(name) is None:
        for each in (group, make_beside(group, name, high_priority=True)):
            connect(each, device)
    return name


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Let a group's ranks find one another now: a sum of one number, to whose end each rank waits."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_host_groups(group_name: str, ranks_per_host: int) -> tuple[str, str]:
    """The groups of each host's ranks of a group, and of ranks of equal place in their hosts; called by all members.

    Returns:
        Names of the two that this rank is in.
    """
    group = resolve_group(group_name)
    host, place = divmod(dist.get_rank(group), ranks_per_host)
    members = list(range(dist.get_world_size(group)))
    intra_host = f"{group_name}.host{host}_of_{ranks_per_host}"
    inter_host = f"{group_name}.place{place}_of_{ranks_per_host}"
    for name, chosen in (
        (intra_host, members[host * ranks_per_host : (host + 1) * ranks_per_host]),
        (inter_host, members[place::ranks_per_host]),
    ):
        if find_group(name) is None:
            made = make_beside(group, name, chosen)
            device = group.bound_device_id
            if device is not None and len(chosen) > 1:
                connect(made, device)
    return intra_host, inter_host


def group_backend(group_name: str, device: torch.device) -> str:
    """What moves a group's tensors of a device: "gloo", "nccl", ...; "" of the group "", which sends nothing."""
    return backend_of(resolve_group(group_name), device) if group_name else ""


def group_stride(group_name: str) -> int:
    """Distance of a group's first two members in global ranks: the same for all groups along one axis of a mesh."""
    members = dist.get_process_group_ranks(resolve_group(group_name)) if group_name else [0]
    return abs(members[1] - members[0]) if len(members) > 1 else 1
