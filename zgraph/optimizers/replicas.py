"""Replicas of a module on several pipeline stages: keeps their gradients, norms and values equal.

With the module `timestep` in each of four chunks on two ranks, whose gradients are a, b, c and d, every replica steps
with the gradient (a + b) + (c + d):

rank 0   chunk 0 [ timestep | blocks ]   chunk 2 [ timestep | blocks ]    gradients a, b
rank 1   chunk 1 [ timestep | blocks ]   chunk 3 [ timestep | blocks ]    gradients c, d
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.optimizers.gradients import clip_by_stages
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.exchanges.collectives import start_all_gather, start_all_to_all
from zgraph.sharding.tensors.sharded_tensor import sharded_like
from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.dtensor import local_of


@dataclass(frozen=True, eq=False)
class _Replicated:
    """A parameter with replicas.

    Attributes:
        name: name given by the user, followed by the name of the parameter in its module.
        copies: replicas on this rank, chunk by chunk.
        holders: ranks of the pipeline's group that have replicas.
    """

    name: str
    copies: tuple[nn.Parameter, ...]
    holders: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Parameters whose replicas are on the same ranks; their gradients are summed together.

    Attributes:
        group: process group of these ranks.
        members: the parameters.
    """

    group: ProcessGroup
    members: tuple[_Replicated, ...]


class Replicas:
    """Modules or parameters that several stages of a pipeline, or several chunks of one stage, have in common.

    Examples are the timestep embedder of a diffusion transformer, which every block needs, and an embedding tied to the
    output layer on the last stage. The backward of each replica computes a part of the gradient. Every rank of the
    group must create this object and call the same methods:

        replicas = zgraph.Replicas(mesh["pp"], {"timestep": [chunk.timestep for chunk in chunks]})
        schedule.step(x, target=y)
        replicas.all_reduce_grads()
        replicas.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    Args:
        group: ranks of one pipeline: a mesh with one axis, or its process group.
        replicas: for each name, the modules or parameters of this rank's chunks in chunk order; [] if this rank has
            none. Names are the same on all ranks. All replicas must be sharded over equally many ranks.
        copy_first: whether to copy the first replica of the first rank that has one into all others. False: unequal
            replicas are an error.

    Raises:
        ValueError: the mesh has several axes, or a name has a single module or parameter instead of a list.
        ZgraphError: on all ranks, if replicas differ in names, parameters or layouts, if parameters have no values
            yet, or if values differ and `copy_first` is False.

    Source: Megatron-LM, megatron/core/distributed/finalize_model_grads.py:
    `_allreduce_conditional_embedding_grads` for conditioning embedders, `_allreduce_word_embedding_grads` for tied
    embeddings.
    """

    def __init__(
        self,
        group: DeviceMesh | ProcessGroup,
        replicas: Mapping[str, Sequence[nn.Module | nn.Parameter]],
        *,
        copy_first: bool = False,
    ) -> None:
        _check_arguments(group, replicas)
        self._group = group.get_group() if isinstance(group, DeviceMesh) else group
        parts = {name: [_parameters_of(part) for part in copies] for name, copies in replicas.items()}
        described = self._on_all_ranks(_described(parts))
        _check(described)
        found = [
            _Replicated(
                f"{name}.{inner}" if inner else name,
                tuple(copy[inner] for copy in parts[name]),
                tuple(rank for rank, all_parts in enumerate(described) if all_parts[name]),
            )
            for name in parts
            for inner in next(all_parts[name][0] for all_parts in described if all_parts[name])
        ]
        self._buckets = [
            _Bucket(self._group_of(holders), tuple(one for one in found if one.holders == holders))
            for holders in sorted({one.holders for one in found})
            if dist.get_rank(self._group) in holders
        ]
        rank = dist.get_rank(self._group)
        # The first copy on the first rank counts in norms.
        first = {id(one.copies[0]) for one in found if one.copies and one.holders[0] == rank}
        self._again = frozenset(id(copy) for one in found for copy in one.copies if id(copy) not in first)
        if copy_first:
            self._copy_first()
        self.check_equal()

    @torch.no_grad()
    def all_reduce_grads(self) -> None:
        """Set the gradient of each replica to the sum over all replicas.

        Call this once per step, after this rank's last backward. Sums are computed in fp32 (fp64 if a parameter is
        fp64), first over the chunks of a rank and then in rank order, so that all replicas get bitwise equal gradients.
        A missing gradient counts as zeros; if all are missing, `.grad` stays None.

        Raises:
            CollectiveError: a collective failed.
        """
        for bucket in self._buckets:
            self._all_reduce(bucket)

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages by the norm of the whole model, in which each replica counts once.

        Otherwise, stages would clip by different norms, and replicas would become unequal.

        Args:
            parameters: parameters of all of this rank's chunks, including replicas.
            max_norm, norm_type: as for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping, [], equal on all ranks of the pipeline.

        Raises:
            CollectiveError: a collective failed.
        """
        everything = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        counted = [parameter for parameter in everything if id(parameter) not in self._again]
        return clip_by_stages(everything, counted, self._group, max_norm, norm_type)

    def check_equal(self) -> None:
        """Check that all replicas have bitwise equal values.

        Raises:
            ZgraphError: on all ranks, with the name of a parameter that differs, and the ranks on which it differs.
        """
        own = [
            one.name for one, first in self._first_copies() if not all(_same_bits(copy, first) for copy in one.copies)
        ]
        everywhere = self._on_all_ranks(own)
        for name in sorted({name for names in everywhere for name in names}):
            others = [rank for rank, names in enumerate(everywhere) if name in names]
            raise ZgraphError(
                f"zgraph.Replicas: {name} on {_ranks(others)} of the pipeline differs from its first replica; load or "
                "seed them alike, or pass copy_first=True, and call all_reduce_grads before every step."
            )

    def _all_reduce(self, bucket: _Bucket) -> None:
        members = bucket.members
        sizes = [_local(one.copies[0]).numel() for one in members]
        world = dist.get_world_size(bucket.group)
        wide = any(one.copies[0].dtype == torch.float64 for one in members)
        rows = math.ceil((sum(sizes) + len(sizes)) / world)
        device = _local(members[0].copies[0]).device
        summed = torch.zeros(world * rows, dtype=torch.float64 if wide else torch.float32, device=device)
        *parts, counts, _ = summed.split([*sizes, len(sizes), world * rows - sum(sizes) - len(sizes)])
        for number, (one, part) in enumerate(zip(members, parts, strict=True)):
            for copy in one.copies:
                if copy.grad is not None:
                    part += _local(copy.grad).flatten()
                    counts[number] += 1
        if world > 1:
            summed.copy_(self._sum_in_order(summed, world, bucket))
        known = all(copy.grad is not None for one in members for copy in one.copies)
        for one, part, count in zip(members, parts, [1.0] * len(sizes) if known else counts.tolist(), strict=True):
            for copy in one.copies if count else ():
                _set_gradient(copy, part)

    def _sum_in_order(self, own: Tensor, world: int, bucket: _Bucket) -> Tensor:
        name, rows = bucket.group.group_name, own.numel() // world
        try:
            pieces = wait(start_all_to_all(own, [rows] * world, [rows] * world, name)).view(world, rows)
            total = pieces[0].clone()
            for piece in pieces[1:]:
                total += piece
            return wait(start_all_gather(total, world, name))
        except RuntimeError as error:
            raise collective_error("all_reduce", [one.name for one in bucket.members], name, error) from error

    @torch.no_grad()
    def _copy_first(self) -> None:
        for one, first in self._first_copies():
            for copy in one.copies:
                _local(copy).copy_(first)

    def _first_copies(self) -> Iterator[tuple[_Replicated, Tensor]]:
        """Yield each replicated parameter with the values of its first replica, received by broadcast."""
        for bucket in self._buckets:
            for one in bucket.members:
                first = _local(one.copies[0]).clone(memory_format=torch.contiguous_format)
                dist.broadcast(first, group=bucket.group, group_src=0)
                yield one, first

    def _group_of(self, holders: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of the ranks `holders`, created if needed.

        Only these ranks create it. All other ranks get the pipeline's whole group, and do not use it.
        """
        if len(holders) == dist.get_world_size(self._group):
            return self._group
        members = dist.get_process_group_ranks(self._group)
        if dist.get_rank(self._group) not in holders:
            return self._group  # never used
        found = dist.new_group([members[rank] for rank in holders], use_local_synchronization=True)
        assert isinstance(found, ProcessGroup)
        return found

    def _on_all_ranks(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, own, group=self._group)
        return found


def _check_arguments(group: DeviceMesh | ProcessGroup, replicas: Mapping[str, object]) -> None:
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(
            f"zgraph.Replicas: the mesh has {group.ndim} axes {group.mesh_dim_names}; pass the axis of the "
            'pipeline stages, such as mesh["pp"].'
        )
    for name, copies in replicas.items():
        # Iterating a Sequential would treat its layers as replicas of one another, and make them equal.
        if isinstance(copies, nn.Module | Tensor) and not isinstance(copies, nn.ModuleList | nn.ParameterList):
            raise ValueError(
                f"zgraph.Replicas: {name!r} is a {type(copies).__name__}, and not a list of this rank's replicas; "
                f"write {{{name!r}: [...]}}, with one for each chunk."
            )


def _parameters_of(part: nn.Module | nn.Parameter) -> dict[str, nn.Parameter]:
    if isinstance(part, nn.Module):
        return dict(part.named_parameters())
    return {"": part}


def _described(parts: Mapping[str, Sequence[Mapping[str, nn.Parameter]]]) -> dict[str, list[dict[str, str]]]:
    """Describe the layout of each parameter of each replica as text, for comparison between ranks."""
    return {
        name: [{inner: _layout(parameter) for inner, parameter in copy.items()} for copy in copies]
        for name, copies in parts.items()
    }


def _layout(parameter: nn.Parameter) -> str:
    shape = "x".join(map(str, parameter.shape)) or "a scalar"
    facts = [shape, str(parameter.dtype).removeprefix("torch.")]
    facts += [] if parameter.requires_grad else ["frozen"]
    facts += ["without values"] if _local(parameter).is_meta else []
    if isinstance(parameter, DTensor):
        facts.append(f"{parameter.placements} on a mesh of {tuple(parameter.device_mesh.shape)}")
    return ", ".join(facts)


def _check(described: Sequence[Mapping[str, Sequence[Mapping[str, str]]]]) -> None:
    """Check that all ranks describe equal replicas; all ranks come to the same result.

    Args:
        described: descriptions of all ranks' replicas.

    Raises:
        ZgraphError: a replica differs, is missing, or has no values; the message names it.
    """
    for rank, parts in enumerate(described):
        if list(parts) != list(described[0]):
            raise ZgraphError(
                f"zgraph.Replicas: rank {rank} of the pipeline names {list(parts)}, rank 0 {list(described[0])}; give "
                "every rank the same names in the same order, with [] where a rank has no replica."
            )
    for name in described[0]:
        copies = [(rank, copy) for rank, parts in enumerate(described) for copy in parts[name]]
        if not copies:
            raise ZgraphError(f"zgraph.Replicas: no rank of the pipeline has a replica of {name!r}; leave it out.")
        first_rank, first = copies[0]
        for rank, copy in copies:
            if copy != first:
                inner = next(inner for inner in [*first, *copy] if first.get(inner) != copy.get(inner))
                raise ZgraphError(
                    f"zgraph.Replicas: {name}.{inner} is {copy.get(inner, 'missing')} on rank {rank} of the pipeline, "
                    f"and {first.get(inner, 'missing')} on rank {first_rank}; replicas have equal parameters."
                )
        for inner, layout in first.items():
            if "without values" in layout:
                raise ZgraphError(
                    f"zgraph.Replicas: {name}.{inner} has no values yet; call zgraph.materialize before, or load them."
                )


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _set_gradient(parameter: nn.Parameter, summed: Tensor) -> None:
    """Write a sum into a parameter's `.grad`, in the dtype of `.grad`; if `.grad` is None, create it.

    Args:
        parameter: the parameter.
        summed: [local numel], sum of this rank's shard of the gradients.
    """
    if parameter.grad is not None:
        _local(parameter.grad).copy_(summed.view(_local(parameter.grad).shape))
        return
    local = _local(parameter)
    grad = torch.empty_like(local).copy_(summed.view(local.shape))
    parameter.grad = sharded_like(grad, parameter) if isinstance(parameter, DTensor) else grad


def _same_bits(parameter: nn.Parameter, values: Tensor) -> bool:
    found = _local(parameter).contiguous()
    return torch.equal(found.flatten().view(torch.uint8), values.flatten().view(torch.uint8))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
