"""Process groups by name: their sizes and backends, and groups derived from them."""

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

OF_REDUCTIONS = ".reductions"  # name suffix of a second group with the same ranks, for reductions
OF_GATHERS = ".gathers"  # name suffix of a second group with the same ranks, for gathers


def group_size(group_name: str) -> int:
    """Return the number of ranks in a group; 1 for the name "", which stands for this rank by itself."""
    return dist.get_world_size(resolve_group(group_name)) if group_name else 1


def group_rank(group_name: str) -> int:
    """Return this rank's number in a group; 0 for the name "", which stands for this rank by itself."""
    return dist.get_rank(resolve_group(group_name)) if group_name else 0


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed_ready() else (0, 1)


def reduction_group(group_name: str) -> str:
    """Return the name of the group on which gradients are reduced, given the group on which parameters are gathered.

    Both groups have the same ranks. They are separate because the collectives of one group run one after the other: on
    a shared group, gathers would wait for reductions. See `separate_reductions`.
    """
    if group_name.endswith(OF_GATHERS):
        return group_name.removesuffix(OF_GATHERS)
    sibling = group_name + OF_REDUCTIONS
    return sibling if find_group(sibling) is not None else group_name


def separate_reductions(group: ProcessGroup, device: torch.device | None = None) -> str:
    """Create a second group with the same ranks, so that gathers and reductions run on separate groups.

    All members call this. On CPU backends the new group is for reductions. On GPU backends the new group is for
    gathers, with a high-priority stream on NCCL, because compute waits for gathers. There both groups are also
    connected immediately: connecting one group while collectives of the other run can deadlock (torch 2.11 - 2.13).

    Args:
        group: the existing group.
        device: device of this rank on which the group communicates; None: the CPU.

    Returns:
        Name of the group for gathers.
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
    """Connect a group's ranks now instead of at the group's first collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_host_groups(group_name: str, ranks_per_host: int) -> tuple[str, str]:
    """Create two groups for this rank: the ranks of its host, and the ranks with its position on every host.

    All members of the given group call this.

    Returns:
        Names of the two groups.
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
    """Return a group's backend for tensors on a device, such as "gloo"; "" for the group name ""."""
    return backend_of(resolve_group(group_name), device) if group_name else ""


def group_stride(group_name: str) -> int:
    """Return the difference between the global ranks of a group's first two members; 1 for a group of one rank.

    Groups along the same axis of a mesh have equal strides.
    """
    members = dist.get_process_group_ranks(resolve_group(group_name)) if group_name else [0]
    return abs(members[1] - members[0]) if len(members) > 1 else 1
