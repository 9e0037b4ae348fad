"""Steps of `torch.optim.Muon` on local shards.

Momentum and weight decay are element-wise. The orthogonalization of the momentum needs whole matrices: DTensor computes
it on parts, on all ranks, with a collective for nearly every product, and rounds bf16 differently for each number of
ranks. Here one rank computes each matrix with torch's own function, so results are bitwise those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate, Shard

from zgraph import dialect as dialect  # registers the operators used here
from zgraph.runtime.exchanges.collectives import all_gather, all_to_all
from zgraph.runtime.groups import group_size, reduction_group
from zgraph.runtime.owned_matrices import OwnedMatrices, plan_buckets
from zgraph.sharding.tensors.tracked import model_of
from zgraph.torch_compat.modules import local_parameters, muon_rate

# The options that `step_matrices` implements. With others, a step runs on DTensors.
OPTIONS = frozenset(
    {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
)
TABLES = (nn.Embedding, nn.EmbeddingBag)
BUCKET_NUMEL = 2**21  # least elements of matrices that are exchanged together outside of captured steps
State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Matrix:
    """A matrix parameter on the ranks.

    Attributes:
        rows: number of rows of the whole matrix.
        is_sharded: whether each rank of the group holds a chunk of the rows, as by `Shard(0)`.
        group_name: name of the process group on which rows are exchanged; "" for this rank by itself.
    """

    rows: int
    is_sharded: bool
    group_name: str

    @classmethod
    def of(cls, parameter: Tensor, *, is_shared: bool) -> Matrix | None:
        """Describe a parameter; None for other placements, such as those of tensor parallelism.

        Args:
            parameter: a matrix.
            is_shared: whether all ranks have the same values and gradients of a matrix that is not sharded.
        """
        if not isinstance(parameter, DTensor):
            return cls(parameter.shape[0], False, "")
        mesh, placements = parameter.device_mesh, parameter.placements
        split = [axis for axis, placement in enumerate(placements) if placement != Replicate()]
        if len(split) > 1 or any(type(placements[axis]) is not Shard or placements[axis] != Shard(0) for axis in split):
            return None
        if not (split or is_shared):
            return cls(parameter.shape[0], False, "")
        axis = split[0] if split else mesh.ndim - 1
        return cls(parameter.shape[0], bool(split), reduction_group(mesh.get_group(axis).group_name))


@dataclass(frozen=True)
class Momentum:
    """A momentum to orthogonalize: this rank's rows, their matrix, and the options of the parameter's group."""

    rows: Tensor
    matrix: Matrix
    group: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of `zgraph::orthogonalize` and its kin."""
        return list(self.group["ns_coefficients"]), self.group["ns_steps"], self.group["eps"]


def matrices_of(optimizer: optim.Optimizer, shared: Container[int]) -> list[Matrix] | None:
    """Return all matrices of a Muon, group by group; None if it must step on DTensors.

    Args:
        optimizer: any optimizer.
        shared: ids of the parameters whose gradients are reduced, so that all ranks have the same of a whole one.
    """
    # A loaded state dict adds "differentiable" to the defaults.
    if type(optimizer) is not optim.Muon or OPTIONS.symmetric_difference(optimizer.defaults) - {"differentiable"}:
        return None
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    found = [Matrix.of(one, is_shared=id(one) in shared) for one in parameters]
    return None if any(one is None for one in found) else [one for one in found if one is not None]


def shared_of(optimizer: optim.Optimizer) -> set[int]:
    """Return the ids of the parameters whose gradients sharded models reduce, without ignored ones."""
    parameters = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    models = {model_of(one) for one in parameters.values() if isinstance(one, DTensor)} - {None}
    states = [state for model in models if model is not None for state in model.states]
    return {id(state.parameter) for state in states if state.is_among(parameters)}


def check_embeddings(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse embeddings and output heads among the parameters of a Muon, which torch documents for hidden layers only.

    An output head is the model's last matrix, if it has the shape of an embedding.

    Raises:
        ValueError: the optimizer steps one; the message names it.
    """
    weights = [local_parameters(part).get("weight") for part in model.modules() if isinstance(part, TABLES)]
    tables = [weight for weight in weights if weight is not None]
    matrices = [one for one in model.parameters() if one.ndim == 2]
    heads = [one for one in matrices[-1:] if any(one.shape == table.shape for table in tables)]
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    refused = {id(one) for one in (*tables, *heads)} & stepped
    names = [name for name, one in model.named_parameters() if id(one) in refused]
    if names:
        raise ValueError(
            f"zgraph.training_step: Muon steps {' and '.join(names)}, an embedding or output head, but it is meant for "
            "the matrices of hidden layers; give it to torch.optim.AdamW and pass both optimizers as a list, or "
            'write options={"embeddings_by_muon": True}.'
        )


@torch.no_grad()
def step_matrices(
    groups: Sequence[Mapping[str, Any]],
    state: State,
    matrices: Sequence[Matrix],
    orthogonalize: Callable[[Sequence[Momentum]], Sequence[Tensor]],
) -> None:
    """Take a step of `torch.optim.Muon` on local shards, whose gradients are in their `.grad`, as torch does.

    Args:
        groups: parameter groups with shards in place of parameters.
        state: state of each shard; gets "momentum_buffer" in the first step.
        matrices: the matrix of each shard, group by group.
        orthogonalize: returns the rows of each orthogonalized momentum.
    """
    of_shards = iter(matrices)
    stepped: list[tuple[Tensor, Momentum]] = []
    for group in groups:
        for shard in group["params"]:
            matrix, grad = next(of_shards), shard.grad
            if grad is None:
                continue
            entries = state[shard]
            if "momentum_buffer" not in entries:
                entries["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
            momentum = entries["momentum_buffer"]
            momentum.lerp_(grad, 1 - group["momentum"])
            rows = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            stepped.append((shard, Momentum(rows, matrix, group)))
    for (shard, one), update in zip(stepped, orthogonalize([one for _, one in stepped]), strict=True):
        lr, group = one.group["lr"], one.group
        rate = muon_rate(lr, group["adjust_lr_fn"], (one.matrix.rows, shard.shape[1]))
        shard.mul_(1 - lr * group["weight_decay"])
        shard.add_(update, alpha=-rate)


def marked(momenta: Sequence[Momentum]) -> list[Tensor]:
    """Orthogonalize by markers, which a pass replaces."""
    return [
        torch.ops.zgraph.orthogonalize(
            one.rows, one.matrix.rows, one.matrix.is_sharded, one.matrix.group_name, *one.arguments
        )
        for one in momenta
    ]


def on_owners(momenta: Sequence[Momentum]) -> list[Tensor]:
    """Orthogonalize each momentum on one rank, its owner; all ranks of a group must call this together."""
    found: list[Tensor | None] = [None] * len(momenta)
    alike: dict[Hashable, list[int]] = {}
    for number, one in enumerate(momenta):
        coefficients, *others = one.arguments
        kind = one.matrix.is_sharded, one.matrix.group_name, one.rows.device, *coefficients, *others
        alike.setdefault(kind, []).append(number)
    for members in alike.values():
        first = momenta[members[0]]
        world = group_size(first.matrix.group_name)
        if world == 1:
            for number, update in zip(members, marked([momenta[one] for one in members]), strict=True):
                found[number] = update
            continue
        shapes = [(momenta[one].matrix.rows, momenta[one].rows.shape[1]) for one in members]
        is_sharded, steps = first.matrix.is_sharded, first.group["ns_steps"]
        for bucket in plan_buckets(shapes, world, is_sharded=is_sharded, least_numel=BUCKET_NUMEL, steps=steps):
            chosen = [members[place] for place in bucket.members]
            for number, update in zip(chosen, _exchanged([momenta[one] for one in chosen], bucket.layout), strict=True):
                found[number] = update
    return [one for one in found if one is not None]


def _exchanged(momenta: Sequence[Momentum], layout: OwnedMatrices) -> list[Tensor]:
    operators, group_name, options = torch.ops.zgraph, momenta[0].matrix.group_name, momenta[0].arguments
    rows, columns, owners = list(layout.rows), list(layout.columns), list(layout.owners)
    updates = [one.rows for one in momenta]
    if layout.is_sharded:
        splits = [layout.part_numel] * layout.world
        parts = all_to_all(operators.send_to_owners(updates, rows, owners, layout.world), splits, group_name)
        parts = operators.orthogonalize_owned(parts, rows, columns, owners, group_name, *options)
        received = all_to_all(parts, splits, group_name)
    else:
        part = operators.orthogonalize_whole(updates, owners, group_name, *options)
        received = all_gather(part, layout.world, group_name)
    begins = map(layout.own_begin, range(len(momenta)))
    return [
        received[begin : begin + update.numel()].view(update.shape)
        for begin, update in zip(begins, updates, strict=True)
    ]
