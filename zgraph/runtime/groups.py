"""Process groups by name: sizes and backends, and sibling groups for reductions, gathers and hosts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zgraph.tiers.devices import kind_of_backend
from zgraph.torch_compat.groups import (
    backend_of,
    find_group,
    is_distributed_ready,
    make_sibling_group,
    resolve_group,
)

OF_REDUCTIONS = ".reductions"  # suffix of the name of a group's twin for reductions
OF_GATHERS = ".gathers"  # suffix of the name of a group's twin for gathers


def group_size(group_name: str) -> int:
    """Number of ranks of a group; 1 for the group "", which contains only this rank."""
    return dist.get_world_size(resolve_group(group_name)) if group_name else 1


def group_rank(group_name: str) -> int:
    """This rank's number in a group; 0 for the group ""."""
    return dist.get_rank(resolve_group(group_name)) if group_name else 0


def rank_and_world() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed_ready() else (0, 1)


def reduction_group(group_name: str) -> str:
    """Name of the group for reductions of gradients, which has the same ranks as a given group for gathers.

    Collectives of one group run one after the other, so in a shared group a gather waits for earlier reductions.
    `zgraph.shard` makes a second group for the same ranks, the twin, whose name is the group's name with a suffix.
    """
    if group_name.endswith(OF_GATHERS):
        return group_name.removesuffix(OF_GATHERS)
    sibling = group_name + OF_REDUCTIONS
    return sibling if find_group(sibling) is not None else group_name


def separate_reductions(group: ProcessGroup, device: torch.device | None = None) -> str:
    """Make sure that gathers and reductions have one group each; called by all members.

    Makes a second group for the same ranks, the twin. On CPU backends, such as gloo, the twin is for reductions. On GPU
    backends it is for gathers, with a high-priority stream on NCCL, because compute waits for gathers. Both groups are
    then connected before they are used: a communicator that is set up at its first use, while the other group's gathers
    are outstanding, can deadlock ranks (torch 2.11 - 2.13: it is split off the default group's communicator, if that
    group is bound to a device).

    Args:
        group: the group that the ranks already have.
        device: device of this rank that the group uses; None: the CPU.

    Returns:
        Name of the group to gather on: the twin on GPU backends; otherwise, and for one rank, the given group.
    """
    if dist.get_world_size(group) == 1:
        return group.group_name
    device = device or torch.device("cpu")
    if not kind_of_backend(backend_of(group, device)).is_gpu:
        if find_group(group.group_name + OF_REDUCTIONS) is None:
            make_sibling_group(group, group.group_name + OF_REDUCTIONS)
        return group.group_name
    name = group.group_name + OF_GATHERS
    if find_group(name) is None:
        for each in (group, make_sibling_group(group, name, high_priority=True)):
            connect(each, device)
    return name


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Connect a group's ranks now, by summing one number and waiting for the result."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_host_groups(group_name: str, ranks_per_host: int) -> tuple[str, str]:
    """Split a group by host, and by position within the host; called by all members.

    Returns:
        Names of two groups: all ranks on this rank's host, and the ranks at this rank's position on every host.
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
            made = make_sibling_group(group, name, chosen)
            device = group.bound_device_id
            if device is not None and len(chosen) > 1:
                connect(made, device)
    return intra_host, inter_host


def group_backend(group_name: str, device: torch.device) -> str:
    """Backend of a group for tensors on a device: "gloo", "nccl", ...; "" for the group "", which sends nothing."""
    return backend_of(resolve_group(group_name), device) if group_name else ""


def group_stride(group_name: str) -> int:
    """Difference of the global ranks of a group's first two members; equal for all groups along one axis of a mesh."""
    members = dist.get_process_group_ranks(resolve_group(group_name)) if group_name else [0]
    return abs(members[1] - members[0]) if len(members) > 1 else 1
