"""Traits of operators: a table of properties that schemas lack, and functions that read it.

The functions take nodes, because traits of some operators depend on arguments. The table lacks properties that torch's
schemas and tags have: `zgraph.torch_compat.operators` reads these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import fx

from zgraph.graph import meta, nodes
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.operators import (
    OpOverload,
    OpOverloadPacket,
    alias_positions,
    argument_of,
    is_elementwise_over_lists,
    is_pure,
    is_tagged_random,
    overloads_of,
    returns_alias,
    written_arguments,
)

aten, prims, dialect = torch.ops.aten, torch.ops.prims, torch.ops.zgraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Traits of one operator: a row of the table.

    Attributes:
        reshapes: the result is a view, a cast or a copy of the first argument. Operators that return a view of their
            only tensor have this trait without being listed.
        decodes: converts the first argument, which has the codes of a quantized gathered parameter, to values.
        packs: packs a rank's rows into a result whose size is the same on all ranks.
        is_view: the result shares memory with the first argument, although the schema does not say so.
        vanishes: lowering replaces the call by its first argument, so the result shares memory with that argument.
        may_copy: the result is a view according to the schema, but a copy where no view is possible.
        makes_no_values: the result is uninitialised memory.
        overwrites: writes its first argument without reading its values.
        reads_rows: returns some rows of the first argument, and reads only these rows.
        crosses_devices: may copy between device and host.
        in_a_library: runs a kernel of a library, also in compiled code.
        accumulates: adds to the accumulated gradients of an accumulation window, or reads them.
        stays: works for a parameter, but must not be moved by schedulers.
    """

    reshapes: bool = False
    decodes: bool = False
    packs: bool = False
    is_view: bool = False
    vanishes: bool = False
    may_copy: bool = False
    makes_no_values: bool = False
    overwrites: bool = False
    reads_rows: bool = False
    crosses_devices: bool = False
    in_a_library: bool = False
    accumulates: bool = False
    stays: bool = False


def _rows(operators: Iterable[OpOverload | OpOverloadPacket], traits: Traits) -> dict[OpOverload, Traits]:
    """Return table rows that give several operators the same traits; an operator packet means all its overloads."""
    return dict.fromkeys((overload for operator in operators for overload in overloads_of(operator)), traits)


TABLE: Mapping[OpOverload, Traits] = MappingProxyType(
    {
        **_rows(
            [
                aten.view.default,
                aten.t.default,
                aten.transpose.int,
                aten.permute.default,
                aten.expand.default,
                aten.unsqueeze.default,
                aten.squeeze.default,
                aten.squeeze.dim,
                aten.slice.Tensor,
                aten.select.int,
                aten.alias.default,
                aten.detach.default,
                aten.clone.default,
                prims.convert_element_type.default,
                aten.split.Tensor,
                aten.split_with_sizes.default,
            ],
            Traits(reshapes=True),
        ),
        aten._unsafe_view.default: Traits(reshapes=True, is_view=True),
        dialect.depend.default: Traits(vanishes=True),
        aten.reshape.default: Traits(reshapes=True, may_copy=True),
        **_rows([aten.contiguous, aten.to, aten.flatten, aten.ravel], Traits(may_copy=True)),
        aten._to_copy.default: Traits(reshapes=True, crosses_devices=True),
        aten.copy_.default: Traits(overwrites=True, crosses_devices=True),
        prims.device_put.default: Traits(crosses_devices=True),
        **_rows([aten.copy.default, aten.fill_.Scalar, aten.zero_.default], Traits(overwrites=True)),
        **_rows(
            [
                aten.empty.memory_format,
                aten.empty_like.default,
                aten.empty_permuted.default,
                aten.empty_strided.default,
                aten.new_empty.default,
                aten.new_empty_strided.default,
            ],
            Traits(makes_no_values=True),
        ),
        **_rows(
            [
                aten.embedding.default,
                aten.index.Tensor,
                aten.index_select.default,
                aten.gather.default,
                aten.take.default,
                dialect.lookup_codes.default,
            ],
            Traits(reads_rows=True),
        ),
        **_rows(
            [aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward],
            Traits(in_a_library=True),
        ),
        dialect.dequantize_shards.default: Traits(decodes=True),
        **_rows(
            [aten.cat.default, dialect.cast_shards, dialect.quantize_shards],
            Traits(packs=True),
        ),
        dialect.add_accumulated.default: Traits(accumulates=True),
        dialect.accumulate_grad.default: Traits(accumulates=True, stays=True),
        dialect.wait_in_grad.default: Traits(stays=True),
    }
)
NONE_LISTED = Traits()


def of(node: fx.Node) -> Traits:
    """Return the traits of the operator that a node calls."""
    return TABLE.get(cast(OpOverload, node.target), NONE_LISTED)


# --- does it move data, or compute? -----------------------------------------------------------------------------------


def is_reshaping(node: fx.Node) -> bool:
    """Whether the node only views, casts, copies or decodes a tensor, or selects one of several results."""
    row = of(node)
    if row.reshapes or row.decodes or nodes.is_getitem(node):
        return True
    return len(node.all_input_nodes) == 1 and returns_alias(node.target)


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the target dtype of a node that only casts, else None.

    Casts are `aten._to_copy` in graphs from eager torch, and `prims.convert_element_type` after Inductor's
    decompositions and zgraph's passes.
    """
    if node.target is prims.convert_element_type.default:
        return cast("torch.dtype", node.args[1])
    # The cast that autograd records for autocast also names the value's own layout and device.
    if node.target is not aten._to_copy.default or set(node.kwargs) - {"dtype", "layout", "device"}:
        return None
    source, found = meta.tensor_value(node.all_input_nodes[0]), meta.tensor_value(node)
    if (source.layout, source.device) != (found.layout, found.device):
        return None
    return cast("torch.dtype | None", node.kwargs.get("dtype"))


def is_decoding(node: fx.Node) -> bool:
    """Whether the node converts the codes of a quantized gathered parameter to values."""
    return of(node).decodes


def is_packing(node: fx.Node) -> bool:
    """Whether the node copies this rank's rows into a buffer that has the same size on all ranks."""
    if nodes.is_getitem(node):
        return nodes.is_cast_shards(node.all_input_nodes[0])
    return of(node).packs


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler can generate a fused kernel for the node: a pointwise operator, a reduction or a copy."""
    if not isinstance(node.target, OpOverload) or is_view(node):
        return False
    row = of(node)
    return not (row.in_a_library or row.makes_no_values or "scaled_dot_product" in str(node.target))


def is_over_lists(node: fx.Node) -> bool:
    """Whether the node calls a foreach operator or a fused optimizer update, which process lists of tensors."""
    return isinstance(node.target, OpOverload) and is_elementwise_over_lists(node.target)


# --- where is its result stored? --------------------------------------------------------------------------------------


def is_view(node: fx.Node) -> bool:
    """Whether the node's result is a view of an argument; some of these operators copy where no view is possible."""
    row = of(node)
    return returns_alias(node.target) or row.is_view or row.vanishes


def shared_arguments(node: fx.Node) -> tuple[int | None, ...]:
    """Return, for each result, the position of the argument whose memory the result always shares.

    A result that shares no argument's memory has the position None, or no position.
    """
    row = of(node)
    return () if row.may_copy else (0,) if row.is_view or row.vanishes else alias_positions(node.target)


def outlives_graph(node: fx.Node) -> bool:
    """Whether the node's result is kept after the call, for the other forwards of an accumulation window."""
    return nodes.is_kept_gather(node) and OPEN in node.args


# --- what does it cost? -----------------------------------------------------------------------------------------------


def is_free(node: fx.Node) -> bool:
    """Whether the node takes no time, because it runs no kernel, as for a view or `aten.empty`."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if nodes.is_wait(node) or nodes.is_update_wait(node) or nodes.is_getitem(node):
        return True
    return of(node).makes_no_values or (is_view(node) and not written_arguments(node))


# --- may it run elsewhere, or twice? ----------------------------------------------------------------------------------


def is_random(node: fx.Node) -> bool:
    """Whether the node may draw random numbers; then it must be called as often and in the same order as before."""
    return isinstance(node.target, OpOverload) and is_tagged_random(node.target)


def has_zero_dropout(node: fx.Node) -> bool:
    """Whether the node is a random operator, such as attention, that draws nothing because its `dropout_p` is zero."""
    return is_random(node) and argument_of(node, "dropout_p") == 0


def is_repeatable(node: fx.Node) -> bool:
    """Whether a second call of the node gives the same bits and has no side effects.

    False for random operators, operators that write, the model's own collectives, and unknown operators.
    """
    if nodes.is_unshard(node):
        return UnshardArgs.of(node).layout.zero_stage in (0, 3)
    if nodes.is_getitem(node):
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims") and is_pure(node.target)


def is_movable(node: fx.Node) -> bool:
    """Whether a scheduler may move the node.

    A scheduler may move a parameter's collectives (starts, waits, copies into and out of buffers), copies between
    memory spaces, and waits for asynchronous updates. It may not move a gather that is pinned to the use of its result,
    nor a node that only accumulates gradients: such a node frees memory and hides no collective.
    """
    if nodes.is_copy_start(node) or nodes.is_copy_wait(node) or nodes.is_update_wait(node):
        return True
    if not nodes.is_communication(node) or not meta.parameters(node) or meta.is_tagged_at_use(node):
        return False
    return nodes.wait_of(node) is not None if nodes.is_start(node) else not of(node).stays
