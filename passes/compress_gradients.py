"""Send few bits for each element of a gradient, and remember what they lack."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.compression.low_rank import LowRank
from zgraph.compression.methods import BlockMethod, CompressionMethod, LoCo, TwoHop, from_text, to_text
from zgraph.compression.payload import chunk_unit
from zgraph.dialect.window_ops import gradients_wait
from zgraph.dialect.wire_dtypes import accumulate_dtype, wire_dtype_of
from zgraph.graph import edits, meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.build_low_rank import build_low_rank
from zgraph.passes.common.build_reduction import ReductionBuilder
from zgraph.runtime.chunks import Chunk, chunk_rows
from zgraph.runtime.collectives import hosts_of
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, wait_op
from zgraph.torch_compat.groups import resolve_group

aten = torch.ops.aten
MEANS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class CompressGradients(GraphPass):
    """Reduce large gradients as codes of a few bits, which one all_to_all per bucket exchanges; the mean stays fp32.

    Or, by `LowRank`, as two thin factors, each reduced like a replicated gradient, one reduction of each per bucket.

    Lossy: the mean differs from the exact one by what `zgraph.passes.LoCo` and the other methods say, and each
    parameter keeps an error on each rank, see `zgraph.runtime_state`. Whatever dtype a gradient has or would travel in,
    its codes are made from it as it is.
    Leaves alone: gradients that are small, have few dims or a name that is skipped, and those on a single rank, of
    which nothing travels; LowerReductions sends them as they are. Gradients that wait for the end of a window are
    compressed once, at its end.

    Attributes:
        method: LoCo, ErrorFeedback, NoFeedback, TwoHop, LowRank, or one of your own: a subclass of
            `zgraph.compression.methods.CompressionMethod`.
        min_numel, min_dims: of a parameter whose gradient is compressed.
        skip: names of parameters that are not, as shell patterns ("*.embed*"). Blocks that share one compiled graph are
            treated as the one it was compiled for: a pattern that tells them apart needs the whole model compiled.
        warmup_steps: optimizer steps in which gradients travel as they are, before the first is compressed.
        mean_codec: of a replicated parameter each rank keeps a part of the mean, and gathers it from the others in this
            dtype, or compressed by a BlockMethod with an error of its own. `mean_dtype` of `zgraph.shard` is for what
            travels as it is. Of no use to LowRank, whose means each rank rebuilds by itself.
    """

    method: CompressionMethod | TwoHop | LowRank = field(default_factory=LoCo)
    min_numel: int = 2**14
    min_dims: int = 2
    skip: tuple[str, ...] = ()
    warmup_steps: int = 0
    mean_codec: torch.dtype | BlockMethod = torch.bfloat16

    name: ClassVar[str] = "compress_gradients"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.GRADIENTS_COMPRESSED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.REDUCTIONS_LOWERED, Fact.COLLECTIVES_BUCKETED})

    def __post_init__(self) -> None:
        if not isinstance(self.method, CompressionMethod | TwoHop | LowRank):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"compress_gradients: method={self.method!r} is no compression method; write zgraph.passes.LoCo(), say."
            )
        if self.min_numel < 1 or self.min_dims < 0 or self.warmup_steps < 0:
            raise ValueError(
                f"compress_gradients: min_numel={self.min_numel}, min_dims={self.min_dims}, "
                f"warmup_steps={self.warmup_steps}; write at least 1, 0 and 0."
            )
        if isinstance(self.skip, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"compress_gradients: skip={self.skip!r}; write a tuple of patterns, ({self.skip!r},).")
        if not (self.mean_codec in MEANS or isinstance(self.mean_codec, BlockMethod)):
            raise ValueError(
                f"compress_gradients: mean_codec={self.mean_codec}; write torch.bfloat16, torch.float16 or float32, "
                "or a method of zgraph's own, such as zgraph.passes.LoCo(bits=8)."
            )
        if isinstance(self.method, LowRank) and self.mean_codec != torch.bfloat16:
            raise ValueError(
                f"compress_gradients: mean_codec={self.mean_codec} with LowRank, by which each rank rebuilds means "
                "from factors; nothing is gathered, leave mean_codec out."
            )
        if isinstance(self.method, CompressionMethod):
            to_text(self.method)  # refused here rather than in the middle of a compile

    @property
    def counts_after(self) -> int:
        return self.warmup_steps

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        markers = list(nodes.call_functions(gm.graph, nodes.is_reduce_grad))
        reductions = Counter(ReduceArgs.of(marker).handle for marker in markers)
        covered = [marker for marker in markers if self._covers(marker, ctx, reductions)]
        if markers:
            numels = {marker: meta.tensor_value(ReduceArgs.of(marker).grad).numel() for marker in markers}
            share = sum(numels[marker] for marker in covered) / sum(numels.values())
            ctx.note(self, f"{len(covered)} of {len(markers)} gradients are compressed, {share:.1%} of their elements")
        else:
            ctx.note(self, "nothing is reduced here")
        if isinstance(self.method, LowRank):
            for marker in covered:
                edits.drop_unchanging_views(marker)
            build_low_rank(gm.graph, covered, ctx, self.method)
            return bool(covered)
        previous: fx.Node | None = None
        for marker in covered:
            edits.drop_unchanging_views(marker)
            reduction = _CompressedReduction(gm.graph, marker, ctx, self.method, self.mean_codec, previous)
            with gm.graph.inserting_before(marker):
                reduced = reduction.build()
            previous = reduction.first
            marker.replace_all_uses_with(reduced)
            edits.erase_dead(gm.graph, [marker, ReduceArgs.of(marker).grad])
        return bool(covered)

    def _covers(self, marker: fx.Node, ctx: PassContext, reductions: Counter[fx.Node]) -> bool:
        args = ReduceArgs.of(marker)
        if ctx.group_size(args.group_name) * ctx.group_size(args.replicas) == 1:
            return False
        if gradients_wait(args.zero_stage, args.window) and args.window == OPEN:
            return False  # nothing is sent before the closing backward
        grad = meta.tensor_value(args.grad)
        if grad.dtype not in MEANS or grad.dim() < self.min_dims or grad.numel() < self.min_numel:
            return False
        # With two low-rank reductions of one parameter in a graph, the second would begin before the first has ended.
        if isinstance(self.method, LowRank) and (
            reductions[args.handle] > 1 or not self.method.pays(grad.shape, _sent_bytes(args, grad))
        ):
            return False
        names = meta.parameters(marker)
        return not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.skip)


def _sent_bytes(args: ReduceArgs, grad: torch.Tensor) -> int:
    """Bytes of a gradient that travels as it is, over all ranks: each element to where it is summed, and back."""
    wire = wire_dtype_of(grad.dtype, args.wire_dtype)
    return grad.numel() * (wire.itemsize if args.zero_stage > 0 else 2 * wire.itemsize)


class _CompressedReduction(ReductionBuilder):
    """One reduction of which codes travel."""

    def __init__(
        self,
        graph: fx.Graph,
        marker: fx.Node,
        ctx: PassContext,
        method: CompressionMethod | TwoHop,
        mean_codec: torch.dtype | BlockMethod,
        previous: fx.Node | None,
    ) -> None:
        super().__init__(graph, marker, ctx)
        self.previous = previous  # the first quantization of the reduction before this one
        self.first: fx.Node | None = None
        self.mean_codec = mean_codec
        if isinstance(method, LoCo):
            method = self._hops_of(method)
        self.method = method
        self.replica = ctx.group_rank(self.args.replicas) if self.args.replicas else 0

    def _hops_of(self, method: LoCo) -> CompressionMethod | TwoHop:
        one_hop = replace(method, hops=1)
        if method.hops == 1 or (
            method.hops == "auto" and self.num_replicas == 1 and self._known_ranks_per_host() is None
        ):
            return one_hop
        return TwoHop(inter_host=one_hop)

    def _known_ranks_per_host(self) -> int | None:
        """How many neighbouring ranks of the group share a host of the context's hardware; None where it has one each,
        lies on one host, or has hosts with unequal numbers of ranks."""
        machine = self.ctx.hardware or self.ctx.machine
        if machine is None or self.world == 1:
            return None
        on_nodes = hosts_of(resolve_group(self.args.group_name), machine.ranks_per_host)
        found = len(on_nodes[0])
        neighbours = [list(range(first, first + found)) for first in range(0, self.world, found)]
        return found if 1 < found < self.world and on_nodes == neighbours else None

    def on_the_wire(self, grad: fx.Node) -> fx.Node:
        source = grad.all_input_nodes[0] if nodes.is_cast(grad) == torch.float32 else grad
        return source if meta.tensor_value(source).dtype in MEANS else grad

    def mean_dtype(self, grad: torch.dtype) -> torch.dtype:
        if not isinstance(self.mean_codec, torch.dtype) or self.mean_codec.itemsize >= self.args.dtype.itemsize:
            return self.args.dtype
        return self.mean_codec

    def padded(self, pieces: fx.Node, world: int) -> fx.Node:
        return pieces  # what is missing counts as zeros

    def sum(self, pieces: fx.Node, chunk: Chunk, divisor: int, dtype: torch.dtype) -> fx.Node:
        group_name = chunk.group_names[-1]
        world = self.ctx.group_size(group_name)
        if world == 1:
            return super().sum(pieces, chunk, divisor, dtype)
        shape = meta.tensor_value(pieces).shape
        rows = chunk_rows(shape[0], world)
        numel = rows * math.prod(shape[1:])
        is_second = len(chunk.group_names) > 1
        if isinstance(self.method, TwoHop) and self.num_replicas == 1:
            found = self._two_hops(pieces, self.method, chunk, numel, divisor, dtype)
        else:
            method = self.method
            if isinstance(method, TwoHop):
                method = method.inter_host if is_second else method.intra_host
            slot, salt = ("second_hop", self.num_replicas + self.rank) if is_second else ("first_hop", self.replica)
            found = self._exchange(pieces, method, slot, chunk, group_name, numel, salt, divisor, dtype)
        return self.node(aten.view.default, found, [rows, *shape[1:]])

    def _two_hops(
        self, pieces: fx.Node, method: TwoHop, chunk: Chunk, numel: int, divisor: int, dtype: torch.dtype
    ) -> fx.Node:
        """Over the ranks of a host, then over ranks of equal place in their hosts."""
        group_name = chunk.group_names[-1]
        per_host = self._ranks_per_host(method)
        intra_host, inter_host = self.ctx.host_groups(group_name, per_host)
        world, stretches = self.ctx.group_size(intra_host), self.ctx.group_size(inter_host)
        host, place = divmod(self.rank, per_host)
        wide = accumulate_dtype(meta.tensor_value(pieces).dtype)
        hops = replace(chunk, group_names=(intra_host, inter_host))
        if world == 1:
            partial = pieces
        else:
            first_divisor, first_dtype = (1, wide) if stretches > 1 else (divisor, dtype)
            partial = self._exchange(
                pieces,
                method.intra_host,
                "first_hop",
                hops,
                intra_host,
                numel,
                host,
                first_divisor,
                first_dtype,
                stretches,
            )
        if stretches == 1:
            return partial
        salt = self.world + place
        return self._exchange(partial, method.inter_host, "second_hop", hops, inter_host, numel, salt, divisor, dtype)

    def _ranks_per_host(self, method: TwoHop) -> int:
        found = method.ranks_per_host or self._known_ranks_per_host()
        if found is None:
            raise ValueError(
                "compress_gradients: two hops need to know which ranks share a host, and the mesh has one axis; write "
                "TwoHop(ranks_per_host=...), or shard over a mesh of (hosts, ranks per host)."
            )
        if self.world % found:
            raise ValueError(
                f"compress_gradients: ranks_per_host={found} does not divide the {self.world} ranks of the group; "
                "hosts need equally many ranks."
            )
        return found

    def _exchange(
        self,
        pieces: fx.Node,
        method: CompressionMethod,
        slot: str,
        chunk: Chunk,
        group_name: str,
        numel: int,
        salt: int,
        divisor: int,
        dtype: torch.dtype,
        stretches: int = 1,
    ) -> fx.Node:
        """The sum over a group of this rank's [stretches * numel]."""
        world, rank = self.ctx.group_size(group_name), self.ctx.group_rank(group_name)
        text = to_text(method)
        payload, draw = self._quantized(pieces, text, slot, numel, world, stretches, rank, salt)
        splits = [meta.tensor_value(payload).shape[0] // world] * world
        start = self.node(all_to_all_op(), payload, splits, splits, group_name, name=f"all_to_all_{self.label}")
        meta.set_chunks(start, chunk_unit(method, chunk, stretches))
        received = self.node(wait_op(), start, name=f"wait_grad_{self.label}")
        sums = self.node(
            torch.ops.zgraph.dequantize_sum.default,
            *(received, draw, text, [numel], world, stretches, salt, divisor, dtype),
            name=f"dequantize_{self.label}",
        )
        return self.node(operator.getitem, sums, 0)

    def _quantized(
        self, pieces: fx.Node, method: str, slot: str, numel: int, world: int, stretches: int, rank: int, salt: int
    ) -> tuple[fx.Node, fx.Node]:
        errors = self._errors(method, slot, numel, world * stretches, meta.tensor_value(pieces).device)
        quantized = self.node(
            torch.ops.zgraph.quantize_grads.default,
            *([pieces], [self.args.handle], errors, method, slot, [numel], world, stretches, rank, salt),
            self.args.window,
            name=f"quantize_{self.label}",
        )
        self.first = self.first or quantized
        return self.node(operator.getitem, quantized, 0), self.node(operator.getitem, quantized, 1)

    def _errors(self, method: str, slot: str, numel: int, chunks: int, device: torch.device) -> list[fx.Node]:
        """What is kept on the host, fetched while the gradient before this one is reduced."""
        found = from_text(method)
        if not isinstance(found, BlockMethod) or found.error_device is None or not found.state(numel, chunks):
            return []
        with nullcontext() if self.previous is None else self.graph.inserting_before(self.previous):
            loaded = self.node(
                torch.ops.zgraph.load_errors.default,
                *([self.args.handle], method, slot, [numel], chunks, device),
                name=f"load_errors_{self.label}",
            )
        meta.set_lane(loaded, "host_to_device")
        return [self.node(operator.getitem, loaded, place) for place in range(len(found.state(numel, chunks)))]

    def gathered(self, piece: fx.Node, chunk: Chunk, numel: int, dtype: torch.dtype) -> fx.Node:
        group_name = chunk.group_names[-1]
        world = self.ctx.group_size(group_name)
        if world == 1 or isinstance(self.mean_codec, torch.dtype):
            return super().gathered(piece, chunk, numel, dtype)
        text, rank = to_text(self.mean_codec), self.ctx.group_rank(group_name)
        own = meta.tensor_value(piece).shape[0]
        salt = 2 * self.world * self.num_replicas + (self.rank if len(chunk.group_names) > 1 else self.replica)
        payload, draw = self._quantized(piece, text, f"means of {len(chunk.group_names)}", own, 1, 1, rank, salt)
        start = self.node(all_gather_op(), payload, world, group_name, name=f"all_gather_grad_{self.label}")
        meta.set_chunks(start, chunk_unit(self.mean_codec, chunk, 1))
        received = self.node(wait_op(), start, name=f"wait_grad_{self.label}")
        every = self.node(
            torch.ops.zgraph.dequantize_each.default,
            *(received, draw, text, [own], world, salt, self.args.dtype),
        )
        whole = self.node(operator.getitem, every, 0)
        return whole if world * own == numel else self.node(aten.slice.Tensor, whole, 0, 0, numel)
