"""Fragments: groups of parameters that are exchanged together; each is a flat tensor on every rank.

A rank exchanges only a part of a site's parameters: its shards, and of each replicated parameter one slice, so that
the ranks of a site send each element once. Its flat tensor starts with the slices:

    [ slice of embed.scale | padding | slice of norm.weight | padding | shard of embed.weight | padding | ... ]

Each part is padded to a multiple of the codec's group, so that elements of two parameters never share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.runtime.exchanges.collectives import all_gather
from zgraph.runtime.groups import group_rank, group_size
from zgraph.tiers.copy_lanes import lanes_of
from zgraph.tiers.placement.resting import Resting
from zgraph.tiers.tier import DEVICE
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.groups import resolve_group


def pack(numels: Sequence[int], count: int) -> list[list[int]]:
    """Divide parameters into `count` fragments of about equal size; equal blocks of a model are spread over fragments.

    Args:
        numels: number of elements of each parameter.
        count: number of fragments, at most one for each parameter.

    Returns:
        Indices of each fragment's parameters, in increasing order.
    """
    packed: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for place in sorted(range(len(numels)), key=lambda place: -numels[place]):
        smallest = held.index(min(held))
        packed[smallest].append(place)
        held[smallest] += numels[place]
    return [sorted(places) for places in packed]


@dataclass(frozen=True)
class Part:
    """The elements of one parameter that this rank exchanges, and their place in the flat tensor.

    Attributes:
        parameter: the parameter.
        start, stop: range of elements in the parameter's local tensor.
        offset: first element in the flat tensor.
        capacity: number of elements in the flat tensor, with padding.
    """

    parameter: Tensor
    start: int
    stop: int
    offset: int
    capacity: int


@dataclass(frozen=True)
class _Section:
    """Consecutive parts of parameters that are replicated over the same groups.

    Attributes:
        groups: names of the groups, over which each parameter is sliced in this order; () for unreplicated shards.
        parts: the parts.
    """

    groups: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def copies(self) -> int:
        """Number of ranks of a site that have the same parameters."""
        return math.prod(map(group_size, self.groups))

    @property
    def range(self) -> slice:
        first, last = self.parts[0], self.parts[-1]
        return slice(first.offset, last.offset + last.capacity)


class Fragment:
    """A group of parameters, as this rank's flat tensor.

    Args:
        parameters: the parameters by name, sharded or not.
        align: number of elements to whose multiples parts are padded.
        resting: memory of offloaded parameters; None if there is no offload.

    Attributes:
        names: names of the parameters.
        align: the argument of this name.
        numel: number of elements of the flat tensor.
        dtype: dtype of the flat tensor: float32, or float64 if a parameter is.
        device: device of the flat tensor.
    """

    def __init__(self, parameters: Mapping[str, Tensor], align: int, resting: Resting | None) -> None:
        self.names, self.align = tuple(parameters), align
        self._resting = resting
        by_groups: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter in parameters.values():
            by_groups.setdefault(_replicated_over(parameter), []).append(parameter)
        self._sections: list[_Section] = []
        self.numel = 0
        for groups in sorted(by_groups, key=len, reverse=True):
            parts: list[Part] = []
            for parameter in by_groups[groups]:
                parts.append(_part(parameter, groups, self.numel, align))
                self.numel += parts[-1].capacity
            self._sections.append(_Section(groups, tuple(parts)))
        wide = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        self.dtype = torch.float64 if wide else torch.float32
        self.device = next(iter(parameters.values())).device if resting is None else resting.device

    def read(self) -> Tensor:
        """Return the parameters' values, [numel]."""
        flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for part, local in self._locals():
            flat[part.offset : part.offset + part.stop - part.start] = local[part.start : part.stop]
        return flat

    def at_rest(self, flat: Tensor) -> Tensor:
        """Return a tensor of this fragment where it is kept between rounds: in the tier of optimizer state."""
        return flat if self._resting is None else self._resting.place_state(flat, f"the fragment of {self.names[0]}")

    def fetched(self, flat: Tensor) -> Tensor:
        """Return the tensor of a fragment on the device."""
        return flat if self._resting is None else self._resting.fetched(flat)

    def any_copy(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank of this site that has copies of these parameters.

        `write` communicates with these ranks, so all of them must call it or none.
        """
        found = torch.tensor([int(flag)], device=self.device)
        for group in dict.fromkeys(group for section in self._sections for group in section.groups):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=resolve_group(group))
        return bool(found)

    def write(self, flat: Tensor) -> None:
        """Set the parameters' values, also on the ranks of this site that have copies: [numel]."""
        for section in self._sections:
            capacity = section.range.stop - section.range.start
            rows = flat[section.range]
            for group in reversed(section.groups):
                rows = all_gather(rows, group_size(group), group)
            rows = rows.view(section.copies, capacity)
            for part in section.parts:
                offset = part.offset - section.range.start
                self._write(part, rows[:, offset : offset + part.capacity], section)

    def _write(self, part: Part, rows: Tensor, section: _Section) -> None:
        local = local_tensor(part.parameter)
        taken = -(-local.numel() // section.copies)  # elements of each slice
        values = rows[:, :taken].reshape(-1)[: local.numel()].view(local.shape)
        if self._rests(local):
            new = values.to(local.dtype)
            lanes_of(self.device).store(new, local).wait()
        else:
            local.copy_(values)

    def _locals(self) -> list[tuple[Part, Tensor]]:
        found: list[tuple[Part, Tensor]] = []
        for section in self._sections:
            for part in section.parts:
                found.append((part, self.fetched(local_tensor(part.parameter)).reshape(-1)))
        return found

    def _rests(self, local: Tensor) -> bool:
        return self._resting is not None and self._resting.space_of(local) != DEVICE


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's values of a parameter, over the same storage."""
    return local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()


def _replicated_over(parameter: Tensor) -> tuple[str, ...]:
    """Return the names of the groups whose ranks have the same values of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis).group_name
        for axis, placement in enumerate(parameter.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    )


def _part(parameter: Tensor, groups: Sequence[str], offset: int, align: int) -> Part:
    numel, index, copies = local_tensor(parameter).numel(), 0, 1
    for group in groups:
        index, copies = index * group_size(group) + group_rank(group), copies * group_size(group)
    share = -(-numel // copies)
    start = min(index * share, numel)
    return Part(parameter, start, min(start + share, numel), offset, -(-share // align) * align)
