"""Gather parameters as low-bit codes."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import BlockMethod, NoFeedback
from zgraph.compression.payload import ALIGNMENT, chunk_unit
from zgraph.dialect.compressed import layout_of
from zgraph.errors import check_least, check_patterns
from zgraph.graph import dataflow, meta, nodes
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.passes.lower_gathers import plan_narrow_cast, replace_marker
from zgraph.torch_compat.collectives import all_gather_op, wait_op

aten = torch.ops.aten
QUANTIZED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class QuantizeGathers(GraphPass):
    """Gather large parameters as codes, 8 bits by default; each rank decodes the codes before it uses the parameters.

    Lossy: forward, backward, and evaluation in a compiled graph use the decoded values, which are identical on all
    ranks. The shards stay exact, and are updated with the gradients of the decoded values. In a `no_sync` window the
    codes are gathered once, and decoded for each forward.
    Leaves alone: parameters that are small, have few dims or a skipped name, which LowerGathers gathers uncompressed;
    parameters that are not sent, because they are replicated or on a single rank.

    Attributes:
        method: a built-in compression method without error feedback; feedback cannot correct errors in parameters.
        min_numel, min_dims: minimum numbers of elements and dims of a quantized parameter.
        skip: names of parameters that are not quantized, as shell patterns, see `CompressGradients`.

    Source: Wang et al. 2023, "ZeRO++", arXiv 2306.10209, section 3.1 (8 bits).
    """

    method: BlockMethod = field(default_factory=lambda: NoFeedback(bits=8))
    min_numel: int = 2**14
    min_dims: int = 2
    skip: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_gathers"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_QUANTIZED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.COLLECTIVES_BUCKETED})

    def __post_init__(self) -> None:
        _check_stateless(self.method)
        check_least("quantize_gathers", 1, "1 or more", min_numel=self.min_numel)
        check_least("quantize_gathers", 0, "0 or more", min_dims=self.min_dims)
        check_patterns("quantize_gathers", skip=self.skip)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        markers = list(nodes.call_functions(gm.graph, nodes.is_unshard))
        covered = [marker for marker in markers if self._covers(marker)]
        for marker in covered:
            _replace(gm.graph, marker, self.method)
        if markers:
            ctx.note(self, f"{len(covered)} of {len(markers)} gathers send codes")
        else:
            ctx.note(self, "nothing is gathered here")
        return bool(covered)

    def _covers(self, marker: fx.Node) -> bool:
        args = UnshardArgs.of(marker)
        layout = args.layout
        if not layout.is_gathered:
            return False
        if meta.tensor_value(args.shard).dtype not in QUANTIZED or args.dtype not in QUANTIZED:
            return False
        if len(layout.shape) < self.min_dims or layout.numel < self.min_numel:
            return False
        names = meta.parameters(marker)
        return not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.skip)


def _check_stateless(method: object) -> None:
    if not isinstance(method, BlockMethod):
        raise ValueError(
            f"quantize_gathers: method={method!r} does not quantize gathers; write a method of zgraph's own, such as "
            "zgraph.passes.NoFeedback(bits=8)."
        )
    if method.residual_decay is not None:
        raise ValueError(
            f"quantize_gathers: {type(method).__name__} uses error feedback, which is only for gradients and would "
            f"change parameters; write zgraph.passes.NoFeedback(bits={method.bits}, group={method.group})."
        )
    to_text(method)


def _replace(graph: fx.Graph, marker: fx.Node, method: BlockMethod) -> None:
    args = UnshardArgs.of(marker)
    narrow = plan_narrow_cast(marker)
    if args.dtype != torch.float32:
        narrow = None  # decoded values are fp32; rounding them twice would change the results of the readers' casts
    dtype = args.dtype if narrow is None else narrow

    def build() -> fx.Node:
        return _cut(graph, marker, _gathered(graph, marker, dataflow.without_views(args.shard), method, dtype))

    replace_marker(graph, marker, narrow, build)


def _gathered(graph: fx.Graph, marker: fx.Node, shard: fx.Node, method: BlockMethod, dtype: torch.dtype) -> fx.Node:
    """Build the nodes that quantize, gather and decode a parameter; return the shards of all N ranks as [N * numel]."""
    args, label = UnshardArgs.of(marker), meta.label(marker)
    layout = args.layout
    world, chunk, text = layout.world, layout.param_chunk, to_text(method)
    numel = chunk.numel()  # elements of the longest shard of any rank
    payload = meta.create(
        graph,
        torch.ops.zgraph.quantize_shards.default,
        ([shard], text, [numel], layout.rank),
        like=marker,
        name=f"quantize_{label}",
    )
    target, arguments = all_gather_op(), (payload, world, layout.gather_group)
    if layout.keeps_gathered(args.window):
        target = torch.ops.zgraph.all_gather_kept.default
        arguments = (payload, args.handle, world, args.window, layout.gather_group)
    start = meta.create(graph, target, arguments, like=marker, name=f"all_gather_{label}")
    meta.set_chunks(start, [replace(unit, filled_to=ALIGNMENT) for unit in chunk_unit(method, chunk, 1)])
    assert layout_of(text, (numel,), 1, 1).payload_bytes == meta.chunks(start)[0].numel()
    received = meta.create(graph, wait_op(), (start,), like=marker, name=f"wait_{label}")
    decode = torch.ops.zgraph.dequantize_shards.default
    return meta.create(graph, decode, (received, text, numel, 0, world, dtype), like=marker, name=f"dequantize_{label}")


def _cut(graph: fx.Graph, marker: fx.Node, flat: fx.Node) -> fx.Node:
    """Remove the padding and restore the parameter's shape."""
    shape = UnshardArgs.of(marker).layout.shape
    row_numel = math.prod(shape[1:])
    rows = meta.tensor_value(flat).shape[0] // max(1, row_numel)
    whole = meta.create(graph, aten.view.default, (flat, [rows, *shape[1:]]), like=marker)
    if rows == shape[0]:
        return whole
    return meta.create(graph, aten.slice.Tensor, (whole, 0, 0, shape[0]), like=marker)
