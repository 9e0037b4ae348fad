"""Builds the nodes of a compressed reduction, which is one or two hops (exchanges within a process group).

Each hop quantizes, exchanges codes, and sums the decoded values.
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import fx

from zgraph.compiler.graph_pass import PassContext
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import BlockMethod, CompressionMethod, LoCo, TwoHop
from zgraph.compression.payload import chunk_unit
from zgraph.compression.sign_momentum import SignMomentum
from zgraph.dialect.wire_dtypes import accumulate_dtype
from zgraph.graph import meta, traits
from zgraph.passes.common.build_reduction import ReductionBuilder
from zgraph.runtime.chunks import Chunk, chunk_rows
from zgraph.runtime.exchanges.collectives import hosts_of
from zgraph.tiers.tier import HOST
from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, wait_op
from zgraph.torch_compat.groups import resolve_group

aten = torch.ops.aten
MEANS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of a compressed reduction, between the ranks of one process group.

    Attributes:
        group_name, world: name and size of the group.
        rank: this rank's number in the group.
        method: compression method.
        slot: name under which each parameter keeps the error-feedback state of this hop.
        salt: seed of random numbers; differs between groups along the same mesh axis, and between hops.
        chunk: part of the gradient that the collective carries.
        numel: number of elements of one chunk.
        receivers: number of ranks that get different data: `world`, or 1 if all ranks get the same.
        stretches: number of chunks for each receiver; the next hop sends each of them to a different rank.
    """

    group_name: str
    world: int
    rank: int
    method: CompressionMethod
    slot: str
    salt: int
    chunk: Chunk
    numel: int
    receivers: int
    stretches: int = 1

    @property
    def chunks(self) -> int:
        return self.receivers * self.stretches

    @property
    def keeps_on_host(self) -> bool:
        """Whether the error-feedback state of the hop is kept on the host between steps."""
        method = self.method
        return (
            isinstance(method, BlockMethod)
            and method.error_device is not None
            and bool(method.state(self.numel, self.chunks))
        )


class CompressedReduction(ReductionBuilder):
    """Builds the nodes of one reduction whose collectives carry codes."""

    def __init__(
        self,
        graph: fx.Graph,
        marker: fx.Node,
        ctx: PassContext,
        method: CompressionMethod | TwoHop,
        mean_codec: torch.dtype | BlockMethod | SignMomentum,
        previous: fx.Node | None,
    ) -> None:
        super().__init__(graph, marker, ctx)
        self.previous = previous  # the first quantization of the reduction before this one
        self.first: fx.Node | None = None
        self.mean_codec = mean_codec
        self.method = self._resolved(method) if isinstance(method, LoCo) else method

    def on_the_wire(self, grad: fx.Node) -> fx.Node:
        source = grad.all_input_nodes[0] if traits.cast_dtype(grad) == torch.float32 else grad
        return source if meta.tensor_value(source).dtype in MEANS else grad

    def mean_dtype(self, grad: torch.dtype) -> torch.dtype:
        if not isinstance(self.mean_codec, torch.dtype) or self.mean_codec.itemsize >= self.args.dtype.itemsize:
            return self.args.dtype
        return self.mean_codec

    def padded(self, pieces: fx.Node, world: int) -> fx.Node:
        return pieces  # missing elements count as zeros

    def sum(self, pieces: fx.Node, chunk: Chunk, divisor: int, dtype: torch.dtype) -> fx.Node:
        world = self.ctx.group_size(chunk.group_names[-1])
        if world == 1:
            return super().sum(pieces, chunk, divisor, dtype)
        shape = meta.tensor_value(pieces).shape
        rows = chunk_rows(shape[0], world)
        wide = accumulate_dtype(meta.tensor_value(pieces).dtype)
        *before, last = self._hops(chunk, rows * math.prod(shape[1:]))
        for hop in before:
            pieces = self._exchange(pieces, hop, 1, wide)
        total = self._exchange(pieces, last, divisor, dtype)
        return self.node(aten.view.default, total, [rows, *shape[1:]])

    def gathered(self, piece: fx.Node, chunk: Chunk, numel: int, dtype: torch.dtype) -> fx.Node:
        world = self.ctx.group_size(chunk.group_names[-1])
        if world == 1 or isinstance(self.mean_codec, torch.dtype):
            return super().gathered(piece, chunk, numel, dtype)
        own = meta.tensor_value(piece).shape[0]
        every = self._gather(piece, self._mean_hop(self.mean_codec, chunk, own))
        return every if world * own == numel else self.node(aten.slice.Tensor, every, 0, 0, numel)

    # --- hops -------------------------------------------------------------------------------------------------------

    def _resolved(self, method: LoCo) -> CompressionMethod | TwoHop:
        """Return the method with the number of hops decided: a LoCo with one hop, or a TwoHop."""
        one_hop = replace(method, hops=1)
        if method.hops == 1 or (
            method.hops == "auto" and self.layout.num_replicas == 1 and self._known_ranks_per_host() is None
        ):
            return one_hop
        return TwoHop(inter_host=one_hop)

    def _known_ranks_per_host(self) -> int | None:
        """Return the number of consecutive ranks of the group on each host.

        Returns None if the hardware of the target or this machine is unknown, if each host has a single rank, if one
        host has all ranks, or if hosts have different numbers of ranks.
        """
        machine, world = self.ctx.hardware or self.ctx.machine, self.layout.world
        if machine is None or world == 1:
            return None
        on_nodes = hosts_of(resolve_group(self.layout.reduce_group), machine.ranks_per_host)
        found = len(on_nodes[0])
        neighbours = [list(range(first, first + found)) for first in range(0, world, found)]
        return found if 1 < found < world and on_nodes == neighbours else None

    def _hops(self, chunk: Chunk, numel: int) -> list[Hop]:
        """Return the hops (exchanges) of the reduction over the last process group of `chunk`, in order."""
        if isinstance(self.method, TwoHop) and self.layout.num_replicas == 1:
            return self._hops_by_host(self.method, chunk, numel)
        is_second = len(chunk.group_names) > 1  # over the replicas: hybrid sharding is two hops by itself
        method = self.method
        if isinstance(method, TwoHop):
            method = method.inter_host if is_second else method.intra_host
        if isinstance(method, SignMomentum) and is_second and self.layout.world > 1:
            method = method.without_momentum  # the first hop has made momenta
        layout = self.layout
        slot, salt = ("second_hop", layout.num_replicas + layout.rank) if is_second else ("first_hop", layout.replica)
        return [self._hop(chunk.group_names[-1], method, slot, salt, chunk, numel)]

    def _hops_by_host(self, method: TwoHop, chunk: Chunk, numel: int) -> list[Hop]:
        """Return a hop inside each host and a hop across hosts, without hops of a single rank.

        The second hop connects the ranks at the same position in their hosts.
        """
        per_host = self._ranks_per_host(method)
        intra_host, inter_host = self.ctx.host_groups(chunk.group_names[-1], per_host)
        host, place = divmod(self.layout.rank, per_host)
        both = replace(chunk, group_names=(intra_host, inter_host))
        first = self._hop(intra_host, method.intra_host, "first_hop", host, both, numel)
        second = self._hop(inter_host, method.inter_host, "second_hop", self.layout.world + place, both, numel)
        return [hop for hop in (replace(first, stretches=second.world), second) if hop.world > 1]

    def _ranks_per_host(self, method: TwoHop) -> int:
        found = method.ranks_per_host or self._known_ranks_per_host()
        if found is None:
            raise ValueError(
                "compress_gradients: two hops need to know which ranks share a host, and the mesh has one axis; write "
                "TwoHop(ranks_per_host=...), or shard over a mesh of (hosts, ranks per host)."
            )
        world = self.layout.world
        if world % found:
            raise ValueError(
                f"compress_gradients: ranks_per_host={found} does not divide the {world} ranks of the group; "
                "hosts need equally many ranks."
            )
        return found

    def _mean_hop(self, codec: BlockMethod | SignMomentum, chunk: Chunk, numel: int) -> Hop:
        """Return the hop in which each rank gathers the averaged parts of the other ranks."""
        hops, layout = len(chunk.group_names), self.layout
        salt = 2 * layout.world * layout.num_replicas + (layout.rank if hops > 1 else layout.replica)
        return replace(self._hop(chunk.group_names[-1], codec, f"means of {hops}", salt, chunk, numel), receivers=1)

    def _hop(self, group_name: str, method: CompressionMethod, slot: str, salt: int, chunk: Chunk, numel: int) -> Hop:
        world, rank = self.ctx.group_size(group_name), self.ctx.group_rank(group_name)
        return Hop(
            group_name=group_name,
            world=world,
            rank=rank,
            method=method,
            slot=slot,
            salt=salt,
            chunk=chunk,
            numel=numel,
            receivers=world,
        )

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _exchange(self, pieces: fx.Node, hop: Hop, divisor: int, dtype: torch.dtype) -> fx.Node:
        """Exchange, sum and divide `pieces`: [world * stretches * numel] -> this rank's part [stretches * numel]."""
        payload, draw = self._quantized(pieces, hop)
        splits = [meta.tensor_value(payload).shape[0] // hop.world] * hop.world
        start = self.node(all_to_all_op(), payload, splits, splits, hop.group_name, name=f"all_to_all_{self.label}")
        meta.set_chunks(start, chunk_unit(hop.method, hop.chunk, hop.stretches))
        received = self.node(wait_op(), start, name=f"wait_grad_{self.label}")
        sums = self.node(
            torch.ops.zgraph.dequantize_sum.default,
            *(received, draw, to_text(hop.method), [hop.numel], hop.world, hop.stretches, hop.salt, divisor, dtype),
            name=f"dequantize_{self.label}",
        )
        return self.node(operator.getitem, sums, 0)

    def _gather(self, piece: fx.Node, hop: Hop) -> fx.Node:
        """Gather the `piece` [numel] of every rank as codes; return the decoded values [world * numel]."""
        payload, draw = self._quantized(piece, hop)
        start = self.node(all_gather_op(), payload, hop.world, hop.group_name, name=f"all_gather_grad_{self.label}")
        meta.set_chunks(start, chunk_unit(hop.method, hop.chunk, hop.stretches))
        received = self.node(wait_op(), start, name=f"wait_grad_{self.label}")
        every = self.node(
            torch.ops.zgraph.dequantize_each.default,
            *(received, draw, to_text(hop.method), [hop.numel], hop.world, hop.salt, self.args.dtype),
        )
        return self.node(operator.getitem, every, 0)

    def _quantized(self, pieces: fx.Node, hop: Hop) -> tuple[fx.Node, fx.Node]:
        """Quantize `pieces`; return the payload [receivers * bytes] and the key of its random numbers."""
        errors = self._errors(hop, meta.tensor_value(pieces).device)
        quantized = self.node(
            torch.ops.zgraph.quantize_grads.default,
            *([pieces], [self.args.handle], errors, to_text(hop.method), hop.slot, [hop.numel]),
            *(hop.receivers, hop.stretches, hop.rank, hop.salt, self.args.window),
            name=f"quantize_{self.label}",
        )
        self.first = self.first or quantized
        return self.node(operator.getitem, quantized, 0), self.node(operator.getitem, quantized, 1)

    def _errors(self, hop: Hop, device: torch.device) -> list[fx.Node]:
        """Build the nodes that copy error-feedback state from the host; [] if the state is on the device.

        The copy starts before the reduction of the previous gradient, and so overlaps that reduction.
        """
        if not hop.keeps_on_host:
            return []
        with nullcontext() if self.previous is None else self.graph.inserting_before(self.previous):
            loaded = self.node(
                torch.ops.zgraph.load_errors.default,
                *([self.args.handle], to_text(hop.method), hop.slot, [hop.numel], hop.chunks, device),
                name=f"load_errors_{self.label}",
            )
        meta.set_transit(loaded, HOST, to_device=True)
        return [
            self.node(operator.getitem, loaded, place) for place in range(len(hop.method.state(hop.numel, hop.chunks)))
        ]
