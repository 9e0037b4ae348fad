"""Traits of operators: a table of facts missing from schemas, and one function per question.

Functions accept nodes, because some operators behave differently with different arguments. Facts that torch's schemas
and tags state are read from torch (`zgraph.torch_compat.operators`), not repeated in the table.
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
    """A row of the table: the traits of one operator.

    Attributes:
        reshapes: the result is a view, a cast or a copy of the first argument. All other arguments that are nodes are
            symbolic sizes. The table does not list operators that return a view of their only tensor; they reshape too.
        decodes: turns the codes of a gathered parameter, its first argument, into values.
        packs: packs a rank's rows into a result of equal size on all ranks, although their numbers of rows differ.
        is_view: the result shares memory with the first argument, although the schema does not say so.
        vanishes: lowering replaces the call by its first argument, so the result shares memory with that argument.
        may_copy: the schema says that the result is a view, but the operator copies if it has to.
        makes_no_values: the result is uninitialised memory.
        overwrites: only writes its first argument or uses its shape, without reading it.
        reads_rows: returns rows of the first argument, and reads no other rows.
        crosses_devices: copies between device and host if argument and result lie on different ones.
        in_a_library: a kernel of a library computes the result, also in compiled code.
        accumulates: adds to the accumulated gradients of a window, or reads them.
        stays: works for a parameter, but schedulers must not move it.
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
    """Make rows of the table that give `operators` the same `traits`. A packet stands for all of its overloads."""
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
    """The traits of the operator that a node calls."""
    return TABLE.get(cast(OpOverload, node.target), NONE_LISTED)


# --- does it move data, or compute? -----------------------------------------------------------------------------------


def is_reshaping(node: fx.Node) -> bool:
    """Whether the node views, casts, copies or decodes its only tensor input, or selects one of several results."""
    row = of(node)
    if row.reshapes or row.decodes or nodes.is_getitem(node):
        return True
    return len(node.all_input_nodes) == 1 and returns_alias(node.target)


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The target dtype of a node that only casts, else None.

    Eager torch records casts as `aten._to_copy`, Inductor's decompositions and zgraph's passes record them as
    `prims.convert_element_type`.
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
    """Whether the node turns the codes of a gathered parameter, its first argument, into values."""
    return of(node).decodes


def is_packing(node: fx.Node) -> bool:
    """Whether the node packs a rank's rows into a result that has the same size on all ranks."""
    if nodes.is_getitem(node):
        return nodes.is_cast_shards(node.all_input_nodes[0])
    return of(node).packs


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler can generate the node's kernel: a pointwise operator, a reduction or a copy."""
    if not isinstance(node.target, OpOverload) or is_view(node):
        return False
    row = of(node)
    return not (row.in_a_library or row.makes_no_values or "scaled_dot_product" in str(node.target))


def is_over_lists(node: fx.Node) -> bool:
    """Whether the call processes a list of tensors one by one, as a call for each tensor would."""
    return isinstance(node.target, OpOverload) and is_elementwise_over_lists(node.target)


# --- where is its result stored? --------------------------------------------------------------------------------------


def is_view(node: fx.Node) -> bool:
    """Whether the node's result is a view of an argument. Some of these operators copy where no view is possible."""
    row = of(node)
    return returns_alias(node.target) or row.is_view or row.vanishes


def shared_arguments(node: fx.Node) -> tuple[int | None, ...]:
    """For each result, the position of the argument with which it always shares memory.

    None, or a missing entry, stands for a result that shares none.
    """
    row = of(node)
    return () if row.may_copy else (0,) if row.is_view or row.vanishes else alias_positions(node.target)


def outlives_graph(node: fx.Node) -> bool:
    """Whether a parameter's state keeps the node's result for the rest of a window."""
    return nodes.is_kept_gather(node) and OPEN in node.args


# --- what does it cost? -----------------------------------------------------------------------------------------------


def is_free(node: fx.Node) -> bool:
    """Whether the node takes no time on any lane, because it runs no kernel, such as a view or `aten.empty`."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if nodes.is_wait(node) or nodes.is_update_wait(node) or nodes.is_getitem(node):
        return True
    return of(node).makes_no_values or (is_view(node) and not written_arguments(node))


# --- may it run elsewhere, or twice? ----------------------------------------------------------------------------------


def is_random(node: fx.Node) -> bool:
    """Whether the operator may draw random numbers, so that the order and number of its calls must not change."""
    return isinstance(node.target, OpOverload) and is_tagged_random(node.target)


def has_zero_dropout(node: fx.Node) -> bool:
    """Whether a random operator has a `dropout_p` of zero: attention then draws nothing."""
    return is_random(node) and argument_of(node, "dropout_p") == 0


def is_repeatable(node: fx.Node) -> bool:
    """Whether a second call yields the same bits and has no side effects.

    False for random operators, operators that write, the model's own collectives, and unknown operators.
    """
    if nodes.is_unshard(node):
        return UnshardArgs.of(node).layout.zero_stage in (0, 3)
    if nodes.is_getitem(node):
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims") and is_pure(node.target)


def is_movable(node: fx.Node) -> bool:
    """Whether a scheduler may move the node: it communicates a parameter, or copies into or out of such communication.

    Copies between memory spaces are movable, too, and so are waits for concurrent updates. Nodes that only accumulate
    gradients are not movable: they have no collective to hide, and they free their gradient. Gathers that are pinned
    to the use of their result are not movable either.
    """
    if nodes.is_copy_start(node) or nodes.is_copy_wait(node) or nodes.is_update_wait(node):
        return True
    if not nodes.is_communication(node) or not meta.parameters(node) or meta.is_tagged_at_use(node):
        return False
    return nodes.wait_of(node) is not None if nodes.is_start(node) else not of(node).stays
