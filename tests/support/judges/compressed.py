"""Compressed training on paper: what every rank of a run should hold, from the gradients of all ranks.

Each process computes the gradients of all ranks itself, on plain unsharded models, and lets the reference kernels send
them: nothing of the passes, their graphs or their operators takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zgraph.codegen.kernels import reference
from zgraph.compression.methods import BlockMethod, RngKey, TwoHop


@dataclass
class Codec:
    """One reduction of one parameter among some ranks, whose errors it keeps."""

    method: BlockMethod
    errors: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])

    def alone(self, values: Tensor, draw: RngKey, rank: int) -> Tensor:
        """What everybody decodes of one rank's own values."""
        (numel,) = values.shape
        error = self._error(rank, numel, 1)
        codes, scales = reference.quantize(values.view(1, -1), error, self.method, draw, rank)
        return reference.dequantize_sum(codes, scales, numel, self.method, draw, rank)

    def sums(self, grads: Sequence[Tensor], numel: int, draw: RngKey) -> list[Tensor]:
        """What each rank receives of the sum: [numel] fp32 of consecutive stretches of the flat gradients.

        Args:
            grads: flat, of each rank.
            numel: of a rank's part; what the gradients lack to as many parts as there are ranks is zero.
            draw: of the signs.
        """
        chunks = len(grads)
        sent = []
        for rank, grad in enumerate(grads):
            error = self._error(rank, numel, chunks)
            padded = torch.cat([grad, grad.new_zeros(chunks * numel - grad.numel())]).view(chunks, numel)
            sent.append(reference.quantize(padded, error, self.method, draw, rank))
        return [
            reference.dequantize_sum(
                torch.stack([codes[place] for codes, _ in sent]),
                torch.stack([scales[place] for _, scales in sent]),
                numel,
                self.method,
                draw,
            )
            for place in range(chunks)
        ]

    def _error(self, rank: int, numel: int, chunks: int) -> dict[str, Tensor]:
        spec = self.method.state(numel, chunks)
        if rank not in self.errors:
            self.errors[rank] = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
        return self.errors[rank]


def part_numel(shape: Sequence[int], zero_stage: int, ranks: int) -> int:
    """Elements of one rank's part: of the rows, or of all elements where every rank holds the whole."""
    numel = math.prod(shape)
    return -(-numel // ranks) if zero_stage == 0 else -(-shape[0] // ranks) * (numel // shape[0])


@dataclass
class OneHop:
    """The mean gradient of one parameter, sent straight to where it is kept."""

    method: BlockMethod
    zero_stage: int

    def __post_init__(self) -> None:
        self.codec = Codec(self.method)

    def mean(self, grads: Sequence[Tensor], step: int) -> Tensor:
        ranks, shape = len(grads), grads[0].shape
        sums = self.codec.sums(
            [grad.reshape(-1) for grad in grads], part_numel(shape, self.zero_stage, ranks), RngKey(step)
        )
        whole = (torch.cat(sums) / ranks)[: math.prod(shape)].view(shape)
        return whole.to(torch.bfloat16).float() if self.zero_stage == 0 else whole


@dataclass
class TwoHops:
    """The mean gradient of one parameter, summed inside nodes of neighbouring ranks and then across them."""

    method: TwoHop
    zero_stage: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        self.inside: dict[int, Codec] = {}
        self.across: dict[int, Codec] = {}

    def mean(self, grads: Sequence[Tensor], step: int) -> Tensor:
        ranks, shape, per_host = len(grads), grads[0].shape, self.ranks_per_host
        nodes = ranks // per_host
        numel = part_numel(shape, self.zero_stage, ranks)
        flat = [torch.cat([grad.reshape(-1), grad.new_zeros(ranks * numel - grad.numel())]) for grad in grads]
        # Rank p of a node sums the parts that ranks p of all nodes will keep.
        partial: dict[tuple[int, int], list[Tensor]] = {}
        for node in range(nodes):
            codec = self.inside.setdefault(node, Codec(self.method.intra_host))
            for stretch in range(nodes):
                own = [
                    one.view(nodes, per_host, numel)[stretch].reshape(-1)
                    for one in flat[node * per_host : (node + 1) * per_host]
                ]
                for place, total in enumerate(codec.sums(own, numel, RngKey(step, node))):
                    partial.setdefault((node, place), []).append(total)
        whole: dict[int, Tensor] = {}
        for place in range(per_host):
            codec = self.across.setdefault(place, Codec(self.method.inter_host))
            own = [torch.cat(partial[node, place]) for node in range(nodes)]
            for node, total in enumerate(codec.sums(own, numel, RngKey(step, ranks + place))):
                whole[node * per_host + place] = total / ranks
        mean = torch.cat([whole[rank] for rank in range(ranks)])[: math.prod(shape)].view(shape)
        return mean.to(torch.bfloat16).float() if self.zero_stage == 0 else mean


@dataclass
class Hybrid:
    """The mean gradient of one parameter whose shards are replicated: summed over shards, then over replicas."""

    method: TwoHop
    zero_stage: int
    replicas: int

    def __post_init__(self) -> None:
        self.inside: dict[int, Codec] = {}
        self.across: dict[int, Codec] = {}

    def mean(self, grads: Sequence[Tensor], step: int) -> Tensor:
        ranks, shape, replicas = len(grads), grads[0].shape, self.replicas
        shards = ranks // replicas
        numel = part_numel(shape, self.zero_stage, shards)
        partial: dict[tuple[int, int], Tensor] = {}
        for replica in range(replicas):
            codec = self.inside.setdefault(replica, Codec(self.method.intra_host))
            own = [grad.reshape(-1) for grad in grads[replica * shards : (replica + 1) * shards]]
            for shard, total in enumerate(codec.sums(own, numel, RngKey(step, replica))):
                partial[replica, shard] = total
        whole: list[Tensor] = []
        for shard in range(shards):
            codec = self.across.setdefault(shard, Codec(self.method.inter_host))
            own = [partial[replica, shard] for replica in range(replicas)]
            totals = codec.sums(own, -(-numel // replicas), RngKey(step, replicas + shard))
            whole.append((torch.cat(totals)[:numel] / ranks).to(torch.bfloat16).float())
        return torch.cat(whole)[: math.prod(shape)].view(shape)


def local_gradients(
    model: nn.Module, inputs: Tensor, loss_of: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The gradients of one rank's batch in the dtype that the model computes in."""
    leaves = {
        name: parameter.detach().to(dtype or parameter.dtype).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    loss = loss_of(torch.func.functional_call(model, leaves, (inputs.to(dtype or inputs.dtype),)))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))
