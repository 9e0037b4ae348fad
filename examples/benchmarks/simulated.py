"""Data-parallel ranks in one process: what N machines compress, sum and average, with no network.

Each mean is called with the gradients of every rank, contiguous, and with the number of the step, counted from 0, and
returns the mean of each gradient, fp32 in its shape. `OuterSites` are sites that train by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType

import torch
from low_rank_twin import low_rank_mean
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from zgraph.codegen.low_rank_kernels import first_right
from zgraph.compression.low_rank import LowRank, matrix_shape, state_of_matrix
from zgraph.compression.methods import BlockMethod, CompressionMethod, RngKey, TwoHop
from zgraph.compression.payload import BucketLayout
from zgraph.compression.sign_momentum import SignMomentum
from zgraph.step.outer.fragments import Fragment, pack
from zgraph.step.outer.rounds import Anchor, OuterOptimizer, State
from zgraph.step.outer.turns import Timetable

Grads = Sequence[Sequence[Tensor]]  # of each rank
Mean = Callable[[Grads, int], list[Tensor]]


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
    states: list[list[list[dict[str, Tensor]]]] = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        kinds = [layout.method.state(numel, layout.stretches * layout.world) for numel in layout.numels]

        def empty() -> list[dict[str, Tensor]]:
            return [{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kind.items()} for kind in kinds]

        self.states = [[empty() for _ in range(layout.world)] for _ in range(self.groups)]

    def run(self, grads: Grads, step: int, group: int, divisor: int) -> list[list[Tensor]]:
        """The chunks of the sum, divided, that each rank of a group receives: [stretches * numel] fp32 a gradient."""
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
    """The mean under a compression method, with what each rank keeps between steps.

    Args:
        method: with one hop, or two.
        numels: elements of each gradient.
        world: number of ranks; for two hops a multiple of the ranks of a host.
        kernels: `zgraph.codegen.kernels.reference`, or a module that equals it.
    """

    def __init__(
        self, method: CompressionMethod | TwoHop, numels: Sequence[int], world: int, kernels: ModuleType
    ) -> None:
        self.numels, self.world, self.local = tuple(numels), world, 1
        chunks = tuple(-(-numel // world) for numel in numels)
        if not isinstance(method, TwoHop):
            self.hops = [Hop(kernels, BucketLayout(method, chunks, world))]
            return
        self.local = method.ranks_per_host or 1
        hosts = world // self.local
        self.hops = [
            Hop(kernels, BucketLayout(method.intra_host, chunks, self.local, hosts), groups=hosts),
            Hop(kernels, BucketLayout(method.inter_host, chunks, hosts), groups=self.local),
        ]

    def __call__(self, grads: Grads, step: int) -> list[Tensor]:
        one_hop = len(self.hops) == 1
        shards = self.hops[0].run(grads, step, 0, self.world) if one_hop else self._two_hops(grads, step)
        return [
            torch.cat([shard[place] for shard in shards])[:numel].view_as(grad)
            for place, (numel, grad) in enumerate(zip(self.numels, grads[0], strict=True))
        ]

    def _two_hops(self, grads: Grads, step: int) -> list[list[Tensor]]:
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


@dataclass
class SignMean:
    """The mean momenta of 1-bit Adam, which travel as signs to the rank that averages them, and back.

    Attributes:
        method: with its group and beta1.
        world: number of ranks.
        states: for each gradient, the state of each rank, then the state of each rank for the way back.
    """

    method: SignMomentum
    world: int
    states: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict[int, list[dict[str, Tensor]]])

    def __call__(self, grads: Grads, step: int) -> list[Tensor]:
        return [self._mean(place, parts) for place, parts in enumerate(zip(*grads, strict=True))]

    def _mean(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        numel, back, key = -(-parts[0].numel() // self.world), self.method.without_momentum, RngKey(0)
        if place not in self.states:
            kinds = [self.method.state(numel, self.world)] * self.world + [back.state(numel, 1)] * self.world
            self.states[place] = [
                {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kind.items()} for kind in kinds
            ]
        flat = [nn.functional.pad(part.flatten(), (0, self.world * numel - part.numel())) for part in parts]
        sent = [
            self.method.quantize(one.view(self.world, numel), state, key, rank)
            for rank, (one, state) in enumerate(zip(flat, self.states[place], strict=False))
        ]
        chunks: list[Tensor] = []
        for rank, state in enumerate(self.states[place][self.world :]):
            received = [torch.stack([sections[number][rank] for sections in sent]) for number in range(2)]
            mean = self.method.dequantize_sum(received, numel, key) / self.world
            chunks.append(back.dequantize_sum(back.quantize(mean[None], state, key, rank), numel, key))
        return torch.cat(chunks)[: parts[0].numel()].view(parts[0].shape)


@dataclass
class FactorsMean:
    """The mean of gradients that travel as low-rank factors.

    Attributes:
        world: number of ranks.
        errors: of each gradient and rank.
        rights: of each gradient, the right factor of the last step.
    """

    world: int
    errors: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    rights: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __call__(self, grads: Grads, step: int) -> list[Tensor]:
        return [self._mean(place, parts, step) for place, parts in enumerate(zip(*grads, strict=True))]

    def _mean(self, place: int, parts: Sequence[Tensor], step: int) -> Tensor:
        raise NotImplementedError


@dataclass
class LowRankMean(FactorsMean):
    """As zgraph's operators compute it."""

    method: LowRank = field(kw_only=True)

    def _mean(self, place: int, parts: Sequence[Tensor], step: int) -> Tensor:
        shape = parts[0].shape
        if not self.method.pays(shape, 2 * parts[0].nbytes):
            return torch.stack(list(parts)).mean(0)
        size = matrix_shape(shape)
        if place not in self.errors:
            self.errors[place] = [torch.zeros(size) for _ in parts]
            kept, dtype = state_of_matrix(*size, self.method.rank)["right"]
            self.rights[place] = first_right(f"parameter {place}", torch.empty(kept, dtype=dtype))
        mean, self.errors[place], self.rights[place] = low_rank_mean(
            [part.view(size) for part in parts], self.errors[place], self.rights[place], self.world
        )
        return mean.view(shape)


@dataclass
class HookMean(FactorsMean):
    """As `powerSGD_hook` of torch 2.13 computes it, with a warm start and error feedback.

    Its lines, for ranks that lie side by side instead of in processes, with its own orthogonalization.

    Attributes:
        rank: `matrix_approximation_rank`.
        start: `start_powerSGD_iter`: steps in which gradients travel as they are.
    """

    rank: int = field(kw_only=True)
    start: int = 2

    def _mean(self, place: int, parts: Sequence[Tensor], step: int) -> Tensor:
        matrices = [part.reshape(1, part.shape[0], -1) for part in parts]
        _, rows, columns = matrices[0].shape
        if step < self.start or 2 * (rows + columns) * self.rank >= rows * columns:
            return torch.stack(list(parts)).mean(0)
        if place not in self.errors:
            self.errors[place] = [torch.zeros_like(matrix) for matrix in matrices]
            random = torch.Generator().manual_seed(place)
            self.rights[place] = torch.randn(1, columns, self.rank, generator=random)
        right = self.rights[place]
        powerSGD_hook._orthogonalize(right)  # pyright: ignore[reportPrivateUsage]
        deltas = [matrix + error for matrix, error in zip(matrices, self.errors[place], strict=True)]
        left = torch.stack([delta @ right for delta in deltas]).sum(0)
        powerSGD_hook._orthogonalize(left)  # pyright: ignore[reportPrivateUsage]
        self.rights[place] = torch.stack([delta.transpose(1, 2) @ left for delta in deltas]).sum(0) / self.world
        mean = left @ self.rights[place].transpose(1, 2)
        self.errors[place] = [delta - mean for delta in deltas]
        return mean.view(parts[0].shape)


class _Links:
    """Exchanges between sites that run in one thread each: `zgraph.step.outer.rounds.Links`."""

    def __init__(self, rank: int, rows: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.count, self._rows, self._barrier = rank, len(rows), rows, barrier

    def all_to_all(self, rows: Tensor) -> Tensor:
        return torch.stack([one[self.rank] for one in self._swapped(rows)])

    def all_gather(self, row: Tensor) -> Tensor:
        return torch.stack(self._swapped(row))

    def _swapped(self, own: Tensor) -> list[Tensor]:
        self._rows[self.rank] = own
        self._barrier.wait()
        found = [one for one in self._rows if one is not None]
        self._barrier.wait()
        return found


class OuterSites:
    """`zgraph.OuterSteps` of sites that train in turn.

    Args:
        models: the model of each site, with equal values.
        optimizer: the outer optimizer.
        table: when rounds begin and end.
        codec: as for `zgraph.OuterSteps`.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizer: OuterOptimizer, table: Timetable, codec: BlockMethod | None
    ) -> None:
        self.optimizer, self.table, self.steps = optimizer, table, 0
        align = 1 if codec is None else codec.group
        named = [dict(model.named_parameters()) for model in models]
        names = list(named[0])
        packed = pack([named[0][name].numel() for name in names], table.fragments)

        def anchor_of(site: int, places: Sequence[int]) -> Anchor:
            parameters = {names[place]: named[site][names[place]] for place in places}
            return Anchor(Fragment(parameters, align, None), codec, len(models), site)

        self.anchors = [[anchor_of(site, places) for site in range(len(models))] for places in packed]
        self.running: list[tuple[int, int, list[Tensor]]] = []  # due, fragment, values that were sent
        self._pool = ThreadPoolExecutor(len(models))

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for one in [one for one in self.running if one[0] <= self.steps]:
            self.running.remove(one)
            self._end(one[1], one[2])
        for place in range(self.table.fragments):
            if self.table.begins(place, self.steps):
                sent = self._begin(place)
                if self.table.delay:
                    self.running.append((self.steps + self.table.delay, place, sent))

    @torch.no_grad()
    def finish(self) -> None:
        for _, place, sent in self.running:
            self._end(place, sent)
        for place in range(self.table.fragments):
            self._begin(place, overlaps=False)

    def _begin(self, place: int, *, overlaps: bool | None = None) -> list[Tensor]:
        anchors = self.anchors[place]
        sent = [one.fragment.read() for one in anchors]
        barrier, rows = threading.Barrier(len(anchors)), list[Tensor | None]([None] * len(anchors))

        def run(site: int) -> State:
            one, links = anchors[site], _Links(site, rows, barrier)
            with torch.no_grad():
                return one.run_round(one.state, sent[site], 1.0, self.optimizer, links, one.state.rounds)

        for one, state in zip(anchors, self._pool.map(run, range(len(anchors))), strict=True):
            one.state = state
            if not (self.table.delay if overlaps is None else overlaps):
                one.fragment.write(one.values)
        return sent

    def _end(self, place: int, sent: Sequence[Tensor]) -> None:
        for one, values in zip(self.anchors[place], sent, strict=True):
            one.fragment.write(one.fragment.read() + (one.values - values))
