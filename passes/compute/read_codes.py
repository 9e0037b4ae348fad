"""Let matrix products and lookups of rows read weights as codes, instead of decoding whole weights first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from zgraph.compiler.graph_pass import GraphPass, PassContext
from zgraph.compression.method_text import from_text
from zgraph.compression.methods import BlockMethod
from zgraph.graph import edits, meta, nodes, traits
from zgraph.torch_compat.operators import arguments_by_name

aten, dialect = torch.ops.aten, torch.ops.zgraph
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ReadCodes(GraphPass):
    """Replace `x @ decoded.T`, `x @ decoded` and `embedding(decoded, ids)` with operators that read codes.

    For inference on CPUs. The decoded weight is never stored. A product decodes each code in a register: with few rows
    of `x`, as for one token, it reads an eighth of the bytes of fp32. Products add up the same values in another order.
    With bf16 weights, or a cast to bf16 as under autocast, they do not round weights: they multiply the decoded values
    in fp32, and round each sum once. Lookups have the same bits.

    Leaves alone: weights that other operators read, too; weights whose rows are no multiple of a group; graphs for
    GPUs, whose matrix units need decoded weights.
    """

    name: ClassVar[str] = "read_codes"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "inference":
            return False
        found = 0
        for decode in [node for node in gm.graph.nodes if nodes.is_dequantize_shards(node)]:
            readers = _readers(_Decoded(decode), decode)
            made = [one.node for _, weight in readers or () for one in weight.path]
            for reader, weight in readers or ():
                rewrite = _looked_up if _is_lookup(reader, weight.node) else _multiplied
                with gm.graph.inserting_before(reader):
                    reader.replace_all_uses_with(rewrite(reader, decode, weight))
                gm.graph.erase_node(reader)
            edits.erase_dead(gm.graph, dict.fromkeys(made))
            found += len(readers or ())
        ctx.note(self, f"{found} operators read codes" if found else "no operator can read codes")
        return found > 0


@dataclass(frozen=True)
class _Decoded:
    """A decoded weight after views, casts and transposes, with its elements in their order.

    Attributes:
        node: the value.
        source: the value that it was made of; None: it is the decoded weight.
        transposed: whether it is the transpose of rows of the weight.
    """

    node: fx.Node
    source: _Decoded | None = None
    transposed: bool = False

    @property
    def path(self) -> list[_Decoded]:
        """The values from the decoded weight to this one."""
        return [*(self.source.path if self.source else ()), self]

    @property
    def rows(self) -> Tensor:
        """The fake value, transposed back."""
        value = meta.tensor_value(self.node)
        return value.t() if self.transposed and value.ndim == 2 else value

    def read_by(self, reader: fx.Node) -> _Decoded | None:
        """Return the value that a reader makes; None unless that has the first elements of the weight, in order."""
        turns = _transposes(reader)
        if not (turns or traits.cast_dtype(reader) in _DTYPES or (reader.target in _VIEWS and not self.transposed)):
            return None
        made = _Decoded(reader, self, self.transposed != turns)
        return made if made.rows.is_contiguous() and made.rows.storage_offset() == 0 else None


def _readers(weight: _Decoded, decode: fx.Node) -> list[tuple[fx.Node, _Decoded]] | None:
    """Return all products and lookups of a decoded weight, each with its operand; None if one cannot read codes."""
    found: list[tuple[fx.Node, _Decoded]] = []
    for reader in weight.node.users:
        if _is_product(reader, weight.node) or (_is_lookup(reader, weight.node) and not weight.transposed):
            below = [(reader, weight)] if _fits(decode, weight) else None
        else:
            made = weight.read_by(reader)
            below = None if made is None else _readers(made, decode)
        if below is None:
            return None
        found += below
    return found


def _transposes(node: fx.Node) -> bool:
    """Return whether the node swaps the two dims of a matrix."""
    if node.target is aten.transpose.int:
        return set(node.args[1:]) in ({0, 1}, {-1, -2}) and meta.tensor_value(node).ndim == 2
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def _is_product(node: fx.Node, weight: fx.Node) -> bool:
    is_known = node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs  # factors of an addmm
    return is_known and node.args[-1] is weight and weight not in node.args[:-1]


def _is_lookup(node: fx.Node, weight: fx.Node) -> bool:
    return node.target is aten.embedding.default and node.args[0] is weight


def _fits(decode: fx.Node, weight: _Decoded) -> bool:
    """Return whether rows of a weight consist of whole groups, each on one rank, and a CPU reads them."""
    rows, args = weight.rows, arguments_by_name(decode)
    method = from_text(args["method"])
    if rows.ndim != 2 or not isinstance(method, BlockMethod) or method.rotate:
        return False
    whole_groups = rows.shape[1] % method.group == 0 and args["numel"] % rows.shape[1] == 0
    return rows.device.type == "cpu" and rows.dtype in _DTYPES and whole_groups


def _multiplied(product: fx.Node, decode: fx.Node, weight: _Decoded) -> fx.Node:
    *bias, x, _ = product.args
    args = (x, *_codes(decode), *weight.rows.shape, weight.transposed)
    new = meta.create(product.graph, dialect.multiply_codes.default, args, like=product)
    return meta.create(product.graph, aten.add.Tensor, (new, *bias), like=product) if bias else new


def _looked_up(lookup: fx.Node, decode: fx.Node, weight: _Decoded) -> fx.Node:
    """Return rows of the weight, cast after the lookup in the order in which the weight was cast."""
    received, *codes = _codes(decode)
    args = (received, lookup.args[1], *codes, *weight.rows.shape, meta.tensor_value(decode).dtype)
    found = meta.create(lookup.graph, dialect.lookup_codes.default, args, like=lookup)
    for dtype in filter(None, (traits.cast_dtype(one.node) for one in weight.path)):
        found = meta.create_cast(lookup.graph, found, dtype, like=lookup)
    return found


def _codes(decode: fx.Node) -> list[Any]:
    args = arguments_by_name(decode)
    return [args[name] for name in ("received", "method", "numel", "offset", "world")]
