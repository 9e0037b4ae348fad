"""Reduce gradients as low-bit codes, with error feedback."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.compression.low_rank import LowRank
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import BlockMethod, CompressionMethod, LoCo, TensorMethod, TwoHop
from zgraph.compression.sign_momentum import SignMomentum
from zgraph.dialect.wire_dtypes import wire_dtype_of
from zgraph.errors import PreconditionError, check_least, check_patterns
from zgraph.graph import edits, meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.build_compressed import MEANS, CompressedReduction
from zgraph.passes.common.build_low_rank import build_low_rank
from zgraph.passes.step.update_by_momentum import update_by_momentum
from zgraph.runtime.window_state import OPEN


@dataclass(frozen=True, kw_only=True)
class CompressGradients(GraphPass):
    """Reduce large gradients as low-bit codes, exchanged by one all_to_all per bucket; the mean is computed in fp32.

    With `LowRank`, two thin factors are sent instead of each gradient. A bucket then needs two reductions: one for the
    first factors, one for the second. With `SignMomentum`, momenta are sent, and the updates of AdamW use their means.

    The mean is inexact; `zgraph.passes.LoCo` and the other methods document the error. Each rank keeps error-feedback
    state for each parameter, see `zgraph.runtime_state`. Gradients are quantized from their own dtype. Gradients
    accumulated in a `no_sync` window are compressed once, at its end.

    Leaves alone: gradients that are small, have few dims or a skipped name, which LowerReductions sends uncompressed;
    gradients on a single rank, which are not sent.

    Attributes:
        method: LoCo, ErrorFeedback, NoFeedback, TwoHop, LowRank, SignMomentum, or your own subclass of
            `zgraph.passes.TensorMethod`.
        min_numel, min_dims: minimum numbers of elements and dims of a parameter whose gradient is compressed.
        skip: names of parameters whose gradients are not compressed, as shell patterns ("*.embed*"). Blocks that share
            a compiled graph are treated like the block for which it was compiled; if a pattern must distinguish
            such blocks, compile the whole model.
        warmup_steps: number of initial optimizer steps in which gradients are not compressed. SignMomentum has its own.
        mean_codec: encoding in which averaged gradients of replicated parameters are gathered: a dtype, or a
            BlockMethod, whose codes have error feedback of their own. Gradients sent uncompressed use `mean_dtype` of
            `zgraph.shard` instead. LowRank does not use it, because each rank rebuilds all averages itself, nor does
            SignMomentum, which sends signs both ways.
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
        if not isinstance(self.method, BlockMethod | TensorMethod | TwoHop | LowRank):
            raise ValueError(
                f"compress_gradients: method={self.method!r} is not a compression method; write zgraph.passes.LoCo(), "
                "say, or one of your own, a subclass of zgraph.passes.TensorMethod."
            )
        check_least("compress_gradients", 1, "1 or more", min_numel=self.min_numel)
        check_least("compress_gradients", 0, "0 or more", min_dims=self.min_dims, warmup_steps=self.warmup_steps)
        check_patterns("compress_gradients", skip=self.skip)
        if not (self.mean_codec in MEANS or isinstance(self.mean_codec, BlockMethod)):
            raise ValueError(
                f"compress_gradients: mean_codec={self.mean_codec}; write torch.bfloat16, torch.float16 or float32, "
                "or a method of zgraph's own, such as zgraph.passes.LoCo(bits=8)."
            )
        if isinstance(self.method, LowRank) and self.mean_codec != torch.bfloat16:
            raise ValueError(
                f"compress_gradients: mean_codec={self.mean_codec} is not used by LowRank, which gathers no means: "
                "each rank rebuilds them from factors; leave mean_codec out."
            )
        if isinstance(self.method, SignMomentum):
            if self.warmup_steps:
                raise ValueError(
                    f"compress_gradients: warmup_steps={self.warmup_steps}, and SignMomentum has a warm-up of its own; "
                    f"write SignMomentum(warmup={self.warmup_steps})."
                )
            if self.mean_codec != torch.bfloat16:
                raise ValueError(
                    f"compress_gradients: mean_codec={self.mean_codec} is not used by SignMomentum, which gathers "
                    "means as signs; leave mean_codec out."
                )
        if isinstance(self.method, CompressionMethod):
            to_text(self.method)  # refused here rather than in the middle of a compile

    @property
    def from_step(self) -> int:
        return self.method.from_step if isinstance(self.method, SignMomentum) else self.warmup_steps

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        markers = list(nodes.call_functions(gm.graph, nodes.is_reduce_grad))
        reductions = Counter((ReduceArgs.of(marker).handle, meta.part(marker)) for marker in markers)
        covered = [marker for marker in markers if self._covers(marker, reductions)]
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
        signs = self.method if isinstance(self.method, SignMomentum) else None
        if signs is not None and covered:
            _check_momenta(covered, ctx)
        method, mean_codec = self.method, self.mean_codec
        if signs is not None:
            method, mean_codec = signs.codec, signs.without_momentum
        previous: fx.Node | None = None
        means: dict[fx.Node, tuple[str, ...]] = {}
        for marker in covered:
            edits.drop_unchanging_views(marker)
            reduction = CompressedReduction(gm.graph, marker, ctx, method, mean_codec, previous)
            with gm.graph.inserting_before(marker):
                reduced = reduction.build()
            previous = reduction.first
            means[reduced] = meta.parameters(marker)
            marker.replace_all_uses_with(reduced)
            edits.erase_dead(gm.graph, [marker, ReduceArgs.of(marker).grad])
        if signs is not None:
            update_by_momentum(gm.graph, means, signs)
        return bool(covered)

    def _covers(self, marker: fx.Node, reductions: Counter[tuple[fx.Node, int | None]]) -> bool:
        args = ReduceArgs.of(marker)
        if not args.layout.is_reduced:
            return False
        if args.layout.gradients_wait(args.window) and args.window == OPEN:
            return False  # nothing is sent before the closing backward
        grad = meta.tensor_value(args.grad)
        if grad.dtype not in MEANS or grad.dim() < self.min_dims or grad.numel() < self.min_numel:
            return False
        # Of two low-rank reductions of one parameter in a backward, the second would start before the first has ended.
        if isinstance(self.method, LowRank) and (
            reductions[args.handle, meta.part(marker)] > 1 or not self.method.pays(grad.shape, _sent_bytes(args, grad))
        ):
            return False
        names = meta.parameters(marker)
        return not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.skip)


def _check_momenta(covered: Sequence[fx.Node], ctx: PassContext) -> None:
    """Refuse graphs without the optimizer, and those that reduce a gradient in several parts.

    Raises:
        PreconditionError: as said.
    """
    names = ", ".join(meta.parameters(covered[0]))
    if ctx.direction != "step":
        raise PreconditionError(
            f"compress_gradients: SignMomentum is part of AdamW's update, which this {ctx.direction} of {names} does "
            "not contain; write the loop's body as a function, decorated by @zgraph.training_step(model, optimizer, "
            "options=...), or compress by LoCo()."
        )
    parts = Counter(ReduceArgs.of(marker).handle for marker in covered)
    several = next((marker for marker in covered if parts[ReduceArgs.of(marker).handle] > 1), None)
    if several is not None:
        stage = ReduceArgs.of(several).layout.zero_stage
        waits = "put all backwards but the last into zgraph.no_sync(model)"
        raise PreconditionError(
            f"compress_gradients: the gradient of {', '.join(meta.parameters(several))} is reduced "
            f"{parts[ReduceArgs.of(several).handle]} times in a step, and SignMomentum sends one momentum in each; "
            f"{waits if stage < 2 else 'write presets.default(interleave_micro_batches=True)'}, or compress by LoCo()."
        )


def _sent_bytes(args: ReduceArgs, grad: torch.Tensor) -> int:
    """Return the bytes that a rank sends for an uncompressed gradient: its size, or twice its size if replicated."""
    wire = wire_dtype_of(grad.dtype, args.wire_dtype)
    return grad.numel() * (wire.itemsize if args.layout.is_sharded else 2 * wire.itemsize)
