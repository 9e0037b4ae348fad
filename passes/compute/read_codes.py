"""Let matrix products and lookups of rows read weights as codes, instead of decoding whole weights first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from zgraph.compiler.graph_pass import GraphPass, PassContext
from zgraph.compression.method_text import from_text
from zgraph.compression.methods import BlockMethod
from zgraph.graph import edits, meta, nodes
from zgraph.torch_compat.operators import arguments_by_name

aten, dialect = torch.ops.aten, torch.ops.zgraph
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ReadCodes(GraphPass):
    """Replace `x @ decoded.T` and `embedding(decoded, ids)` with operators that read codes, for inference on CPUs.

    The decoded weight is never stored. A product decodes each code in a register: with few rows of `x`, as for one
    token, it reads an eighth of the bytes of fp32. Products add up the same values in another order, and do not round
    weights to bf16. Lookups have the same bits.

    Leaves alone: products without a transpose; weights with other readers; weights that are cast after decoding, as
    under autocast; rows that are no multiple of the codes' groups; GPUs, whose matrix units need decoded weights.
    """

    name: ClassVar[str] = "read_codes"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "inference":
            return False
        found = 0
        for decode in [node for node in gm.graph.nodes if nodes.is_dequantize_shards(node)]:
            chain = _chain(decode)
            readers, rewrite = [*chain[-1].users], _rewrite(chain[-1])
            if not readers or rewrite is None or not _fits(decode, chain[-1]):
                continue
            for reader in readers:
                with gm.graph.inserting_before(reader):
                    reader.replace_all_uses_with(rewrite(reader, decode))
                gm.graph.erase_node(reader)
            edits.erase_dead(gm.graph, chain)
            found += len(readers)
        ctx.note(self, f"{found} operators read codes" if found else "no operator can read codes")
        return found > 0


def _chain(decode: fx.Node) -> list[fx.Node]:
    """Return a decoded weight with its views, as long as each has one reader, up to its transpose."""
    found = [decode]
    while len(found[-1].users) == 1 and not _transposes(found[-1]):
        reader = next(iter(found[-1].users))
        if reader.target not in _VIEWS and not _transposes(reader):
            break
        found.append(reader)
    return found


def _transposes(node: fx.Node) -> bool:
    """Return whether the node swaps the two dims of a matrix."""
    if node.target is aten.transpose.int:
        return set(node.args[1:]) in ({0, 1}, {-1, -2}) and meta.tensor_value(node).ndim == 2
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def _rewrite(weight: fx.Node) -> Callable[[fx.Node, fx.Node], fx.Node] | None:
    """Return the function that rewrites all readers of a decoded weight; None if one of them cannot read codes."""
    if _transposes(weight) and all(_is_product(one, weight) for one in weight.users):
        return _multiplied
    if not _transposes(weight) and all(_is_lookup(one, weight) for one in weight.users):
        return _looked_up
    return None


def _is_product(node: fx.Node, weight: fx.Node) -> bool:
    is_known = node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs  # factors of an addmm
    return is_known and node.args[-1] is weight and weight not in node.args[:-1]


def _is_lookup(node: fx.Node, weight: fx.Node) -> bool:
    return node.target is aten.embedding.default and node.args[0] is weight


def _fits(decode: fx.Node, weight: fx.Node) -> bool:
    """Return whether a weight, perhaps transposed, has the first rows of the decoded ones, in order."""
    value, args = meta.tensor_value(weight), arguments_by_name(decode)
    method, rows = from_text(args["method"]), value.t() if _transposes(weight) and value.ndim == 2 else value
    if rows.ndim != 2 or not isinstance(method, BlockMethod) or method.rotate:
        return False
    in_order = rows.is_contiguous() and rows.storage_offset() == 0
    whole_groups = rows.shape[1] % method.group == 0 and args["numel"] % rows.shape[1] == 0
    return value.device.type == "cpu" and value.dtype in _DTYPES and in_order and whole_groups


def _multiplied(product: fx.Node, decode: fx.Node) -> fx.Node:
    *bias, x, _ = product.args
    rows = meta.tensor_value(product).shape[1]
    new = meta.create(product.graph, dialect.multiply_codes.default, (x, *_codes(decode), rows), like=product)
    return meta.create(product.graph, aten.add.Tensor, (new, *bias), like=product) if bias else new


def _looked_up(lookup: fx.Node, decode: fx.Node) -> fx.Node:
    table, (received, *codes) = meta.tensor_value(cast(fx.Node, lookup.args[0])), _codes(decode)
    args = (received, lookup.args[1], *codes, *table.shape, table.dtype)
    return meta.create(lookup.graph, dialect.lookup_codes.default, args, like=lookup)


def _codes(decode: fx.Node) -> list[Any]:
    args = arguments_by_name(decode)
    return [args[name] for name in ("received", "method", "numel", "offset", "world")]
