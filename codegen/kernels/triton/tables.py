"""Tables for compression kernels: the address of each tensor of a bucket, and the tensor that each program processes.

With these tables, one compiled kernel works for any number and sizes of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

ENTRY = 8  # int64 numbers per tensor


def entries_of(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return `rows` as a table on `device`, padded with zeros: [tensors, ENTRY] int64.

    Args:
        rows: addresses and sizes of each tensor.
        device: device of the table; the copy is ordered by the stream and does not block the host.
    """
    filled = [[*row, *[0] * (ENTRY - len(row))] for row in rows]
    pinned = device.type == "cuda" and torch.cuda.is_available()
    return torch.tensor(filled, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)


@functools.lru_cache(maxsize=4096)
def programs_of(groups: tuple[int, ...], at_once: int, device: torch.device) -> Tensor:
    """Return a table [programs, 2] int32: index of each program's tensor, and index of its run of groups.

    Args:
        groups: number of groups in a chunk of each tensor.
        at_once: number of groups that a program processes.
        device: device of the table.
    """
    counts = torch.tensor([-(-count // at_once) for count in groups])
    members = torch.repeat_interleave(torch.arange(len(groups)), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    runs = torch.arange(members.numel()) - first
    return torch.stack([members, runs], 1).to(torch.int32).to(device)


def are_aligned(addresses: Sequence[int], sizes: Sequence[int], run: int) -> bool:
    """Return whether all addresses are multiples of 16 bytes, and all sizes multiples of `run` elements."""
    return all(address % 16 == 0 for address in addresses) and all(size % run == 0 for size in sizes)
