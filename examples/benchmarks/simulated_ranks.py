"""Data-parallel ranks in one process: their gradients, quantized and summed as on N machines, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from zgraph.compression.methods import BlockMethod, CompressionMethod, RngKey, TwoHop
from zgraph.compression.payload import BucketLayout

States = list[dict[str, Tensor]]


@dataclass
class Hop:
    """One all_to_all within each of several groups of ranks that run side by side.

    Attributes:
        kernels: the module whose quantize_bucket and dequantize_sum_bucket do the work.
        layout: of the bucket.
        states: of each group and rank, what it keeps for each gradient.
    """

    kernels: ModuleType
    layout: BucketLayout
    groups: int = 1
    states: list[list[States]] = field(init=False)

    def __post_init__(self) -> None:
        chunks, world = self.layout.stretches * self.layout.world, self.layout.world
        kinds = [self.layout.method.state(numel, chunks) for numel in self.layout.numels]
        self.states = [
            [
                [{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kind.items()} for kind in kinds]
                for _ in range(world)
            ]
            for _ in range(self.groups)
        ]

    def run(self, grads: Sequence[Sequence[Tensor]], step: int, group: int, divisor: int) -> list[list[Tensor]]:
        """The chunks of the sum that each rank receives.

        Args:
            grads: of each rank of the group, the gradients of the bucket.
            step: how many reductions came before.
            group: which of the groups; its salt.
            divisor: of the sum.

        Returns:
            of each rank, [stretches * numel] fp32 for each gradient.
        """
        layout, draw = self.layout, RngKey(step, group)
        reset_interval = layout.method.reset_interval
        if reset_interval and step % reset_interval == 0:
            for kept in (value for rank in self.states[group] for state in rank for value in state.values()):
                kept.zero_()
        payloads = torch.zeros(layout.world, layout.world, layout.payload_bytes, dtype=torch.uint8)
        for rank, (bucket, states) in enumerate(zip(grads, self.states[group], strict=True)):
            self.kernels.quantize_bucket(bucket, states, layout, draw, rank, payloads[rank])
        received = payloads.transpose(0, 1).contiguous()
        outputs = [[torch.empty(layout.stretches * numel) for numel in layout.numels] for _ in grads]
        for payload, sums in zip(received, outputs, strict=True):
            self.kernels.dequantize_sum_bucket(payload, layout, draw, 0, divisor, sums)
        return outputs


class CompressedMean:
    """The mean of N ranks' gradients under a compression method, with what each rank keeps between steps.

    Args:
        method: with one hop, or two.
        numels: elements of each gradient.
        world: N.
        kernels: `zgraph.codegen.kernels.reference`, or a module that equals it.
    """

    def __init__(
        self, method: CompressionMethod | TwoHop, numels: Sequence[int], world: int, kernels: ModuleType
    ) -> None:
        self.numels, self.world = tuple(numels), world
        chunks = tuple(-(-numel // world) for numel in numels)
        if isinstance(method, TwoHop):
            self.local = method.ranks_per_host or 1
            if world % self.local:
                raise ValueError(
                    f"simulated_ranks: {world} ranks do not fill hosts of {self.local}; write a divisor of {world}."
                )
            hosts = world // self.local
            self.hops = [
                Hop(kernels, BucketLayout(method.intra_host, chunks, self.local, hosts), groups=hosts),
                Hop(kernels, BucketLayout(method.inter_host, chunks, hosts), groups=self.local),
            ]
        else:
            self.local = 1
            self.hops = [Hop(kernels, BucketLayout(method, chunks, world))]

    def __call__(self, grads: Sequence[Sequence[Tensor]], step: int) -> list[Tensor]:
        """The mean of each gradient, fp32 in its shape.

        Args:
            grads: of each rank, its gradients, contiguous.
            step: how many reductions came before.
        """
        one_hop = len(self.hops) == 1
        shards = self.hops[0].run(grads, step, 0, self.world) if one_hop else self._two_hops(grads, step)
        means: list[Tensor] = []
        for place, (numel, grad) in enumerate(zip(self.numels, grads[0], strict=True)):
            means.append(torch.cat([shard[place] for shard in shards])[:numel].view_as(grad))
        return means

    def _two_hops(self, grads: Sequence[Sequence[Tensor]], step: int) -> list[list[Tensor]]:
        """By chunk: host n's rank d keeps chunk n * local + d."""
        inside, across = self.hops
        local, hosts = self.local, self.world // self.local
        sums = [inside.run(grads[host * local : (host + 1) * local], step, host, 1) for host in range(hosts)]
        shards: list[list[Tensor]] = [[] for _ in range(self.world)]
        for place in range(local):
            found = across.run([sums[host][place] for host in range(hosts)], step, place, self.world)
            for host in range(hosts):
                shards[host * local + place] = found[host]
        return shards

    @property
    def bits_per_element(self) -> tuple[float, ...]:
        """Handed to the all_to_all of each hop, by element that a rank puts in."""
        return tuple(
            8 * hop.layout.world * hop.layout.payload_bytes * (self.local if place else 1) / sum(self.numels)
            for place, hop in enumerate(self.hops)
        )


def wire_bits(method: BlockMethod) -> float:
    """Bits per element of a large gradient."""
    numel = 1 << 20
    return 8 * sum(method.sections(numel)) / numel
