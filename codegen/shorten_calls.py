"""Fewer and cheaper calls for a program that runs node by node; values, and how long they live, stay the same.

A collective of many small parameters is packed and unpacked by some calls for each of them, and each call of an
operator costs about two microseconds of Python and dispatch, whatever it computes. So what is done to each part of a
buffer is done by one call for all parts, and every operator is called by what calls it fastest:

    slice, view | slice, view | ...                ->  views_of
    slice, clone, view | slice, clone, view | ...  ->  split_with_sizes; reshape | reshape | ...
    view | view | ..., cat                         ->  flatten_each, or interleave
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from zgraph.graph import nodes
from zgraph.torch_compat.bindings import flatten_each, function_for, interleave, views_of
from zgraph.torch_compat.fake_values import without_fake_mode
from zgraph.torch_compat.operators import OpOverload

aten = torch.ops.aten
_INVOLUTIONS = frozenset({aten.t.default, aten.transpose.int})  # twice the same is nothing
FEWEST_PARTS = 3


def shorten_calls(graph: fx.Graph) -> None:
    """Shorten a graph that will run node by node; nobody else may need it, for it is no longer made of operators."""
    with without_fake_mode():  # of the compile that this is a part of
        _join_copies_in(graph)
        _cancel_views(graph)
        _reshape_once(graph)
        _cut_once(graph)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or not _is_view(node))
    for node in nodes.call_functions(graph, _is_plain):
        node.target = function_for(node)


def _is_plain(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")


def _is_view(node: fx.Node) -> bool:
    return node.target in _INVOLUTIONS or node.target in (aten.view.default, aten.slice.Tensor, aten.clone.default)


# --- what does nothing ------------------------------------------------------------------------------------------------


def _cancel_views(graph: fx.Graph) -> None:
    """Read through a second transposition that undoes the first, and through views of views.

    What the graph returns stays: a view may be an input's, and is then another tensor than the input.
    """
    for node in nodes.call_functions(graph, _is_view):
        source = node.all_input_nodes[0]
        if node.target in _INVOLUTIONS and source.target is node.target and source.args[1:] == node.args[1:]:
            _replace(node, source.all_input_nodes[0])
        elif node.target is aten.view.default:
            while source.target is aten.view.default and _is_contiguous(source.all_input_nodes[0]):
                source = source.all_input_nodes[0]
            node.args = (source, *node.args[1:])
            if _shape(node) is not None and _shape(node) == _shape(source):
                _replace(node, source)


def _replace(node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


# --- packing ----------------------------------------------------------------------------------------------------------


def _join_copies_in(graph: fx.Graph) -> None:
    """Let one call pack what is viewed part by part."""
    for cat in nodes.call_functions(graph, lambda node: node.target is aten.cat.default):
        parts = cast("Sequence[fx.Node]", cat.args[0])
        dim = cat.args[1] if len(cat.args) > 1 else 0
        shapes = [_shape(part) for part in parts]
        if len(parts) < FEWEST_PARTS or cat.kwargs or not all(map(_is_contiguous, parts)):
            continue
        ranks = {len(shape) for shape in shapes if shape is not None}
        if ranks == {1} and None not in shapes:
            cat.target, cat.args = flatten_each, (list(map(_source, parts)),)
        elif ranks == {2} and dim == 1 and None not in shapes and _is_on_cpu(parts[0]):
            # On GPUs a copy kernel without a table of addresses is better to have.
            rows = cast("tuple[int, ...]", shapes[0])[0]
            sources = [_divided(part, rows) for part in parts]
            cat.target, cat.args = interleave, (sources, rows)


def _source(view: fx.Node) -> fx.Node:
    """What a view of a contiguous tensor views, through all of them; of anything else itself."""
    while view.target is aten.view.default and _is_contiguous(view.all_input_nodes[0]):
        view = view.all_input_nodes[0]
    return view


def _divided(part: fx.Node, rows: int) -> fx.Node:
    """What a part with so many rows views, if its own rows can be divided evenly."""
    source = _source(part)
    shape = _shape(source)
    return source if shape and shape[0] and shape[0] % rows == 0 else part


# --- unpacking --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A slice of a buffer."""

    start: int
    end: int
    node: fx.Node


def _reshape_once(graph: fx.Graph) -> None:
    """Copy and view in one call where the view needs the copy; it stands where the copy did."""
    for clone in nodes.call_functions(graph, lambda node: node.target is aten.clone.default):
        if len(clone.users) != 1 or clone.kwargs != {"memory_format": torch.contiguous_format}:
            continue
        view, source = next(iter(clone.users)), clone.all_input_nodes[0]
        shape = _shape(view)
        if view.target is not aten.view.default or shape is None or _shape(source) is None:
            continue
        if not _can_view(source, shape):
            clone.target, clone.args, clone.kwargs = aten.reshape.default, (source, list(shape)), {}
            clone.meta = dict(view.meta)
            view.replace_all_uses_with(clone)
            graph.erase_node(view)


def _cut_once(graph: fx.Graph) -> None:
    """Cut a buffer into its parts by one call, where its first part is read."""
    cut: dict[tuple[fx.Node, int], list[Part]] = {}
    for node in nodes.call_functions(graph, lambda node: node.target is aten.slice.Tensor):
        base, dim, start, end, *step = node.args
        shape = _shape(cast(fx.Node, base))
        if shape is None or step or node.kwargs or not isinstance(start, int) or not isinstance(end, int):
            continue
        assert isinstance(base, fx.Node) and isinstance(dim, int)
        if 0 <= dim < len(shape) and 0 <= start <= end <= shape[dim]:
            cut.setdefault((base, dim), []).append(Part(start, end, node))
    for (base, dim), parts in cut.items():
        in_order = sorted(parts, key=lambda part: (part.start, part.end))
        length = cast("tuple[int, ...]", _shape(base))[dim]
        if len(parts) < FEWEST_PARTS or any(a.end > b.start for a, b in pairwise(in_order)):
            continue
        sizes: list[int] = []
        places: list[int] = []
        for part in in_order:
            if part.start > sum(sizes):
                sizes.append(part.start - sum(sizes))
            places.append(len(sizes))
            sizes.append(part.end - part.start)
        if sum(sizes) < length:
            sizes.append(length - sum(sizes))
        _cut(graph, base, dim, parts[0].node, sizes, places, [part.node for part in in_order])


def _cut(
    graph: fx.Graph,
    base: fx.Node,
    dim: int,
    first: fx.Node,
    sizes: Sequence[int],
    places: Sequence[int],
    slices: Sequence[fx.Node],
) -> None:
    finals = [_only_view(node) for node in slices]
    as_views = _rank(base) == 1 and all(sizes) and _is_contiguous(base)
    with graph.inserting_before(first):
        if as_views:
            shapes: list[Sequence[int]] = [[size] for size in sizes]
            for place, final in zip(places, finals, strict=True):
                shapes[place] = cast("tuple[int, ...]", _shape(final))
            call = graph.call_function(_viewer(shapes), (base,))
        else:
            call = graph.call_function(aten.split_with_sizes.default, (base, list(sizes), dim))
    for place, node, final in zip(places, slices, finals, strict=True):
        with graph.inserting_before(node):
            part = graph.call_function(operator.getitem, (call, place))
        replaced = final if as_views else node
        part.meta = dict(replaced.meta)
        replaced.replace_all_uses_with(part)
        graph.erase_node(replaced)


def _only_view(node: fx.Node) -> fx.Node:
    """The view that alone reads a slice, or the slice itself."""
    if len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.view.default and _shape(user) is not None:
            return user
    return node


def _viewer(shapes: Sequence[Sequence[int]]) -> Callable[[Tensor], Sequence[Tensor]]:
    like = [torch.empty(tuple(shape), device="meta") for shape in shapes]  # only their shapes are read
    found: Any = partial(views_of, like=like)
    found.__name__, found.__module__ = views_of.__name__, __name__
    return found


# --- shapes -----------------------------------------------------------------------------------------------------------


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of what is a tensor with a shape without symbols, else None."""
    value = _value(node)
    if value is None or not all(type(size) is int for size in (*value.shape, *value.stride())):
        return None
    return tuple(value.shape)


def _rank(node: fx.Node) -> int:
    value = _value(node)
    return -1 if value is None else value.ndim


def _is_contiguous(node: fx.Node) -> bool:
    value = _value(node)
    return _shape(node) is not None and value is not None and value.is_contiguous()


def _is_on_cpu(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.device.type == "cpu"


def _can_view(node: fx.Node, shape: Sequence[int]) -> bool:
    """Whether a view with this shape exists: each run of dimensions that lie densely is cut by itself.

    As ATen decides (`computeStride`); asked there, the answer would come from whatever mode the compile runs in.
    """
    value = cast(Tensor, _value(node))
    if not value.numel():
        return True
    left = list(shape)
    dense, step = 1, value.stride(-1) if value.ndim else 1
    for dim in reversed(range(value.ndim)):
        dense *= value.shape[dim]
        if dim and (value.shape[dim - 1] == 1 or value.stride(dim - 1) == dense * step):
            continue
        covered = 1
        while left and (covered < dense or left[-1] == 1):
            covered *= left.pop()
        if covered != dense:
            return False
        dense, step = 1, value.stride(dim - 1) if dim else 1
    return all(size == 1 for size in left)
