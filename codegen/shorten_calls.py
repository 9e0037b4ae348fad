"""Merges operator calls in a program that runs node by node; values and their lifetimes stay the same.

Packing and unpacking a bucket of many small parameters needs several calls for each of them, and each call costs about
two microseconds of Python and dispatch. The calls for all parts of a buffer are therefore merged into one, and every
operator is called through its fastest binding:

    slice, view | slice, view | ...                ->  views_of
    slice, clone, view | slice, clone, view | ...  ->  rows_as for small parts; split_with_sizes, reshape | reshape...
    view | view | ..., cat                         ->  flatten_each, or interleave
    t, addmm                                       ->  linear
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from zgraph.graph import meta, nodes, traits
from zgraph.torch_compat.bindings import flatten_each, function_for, interleave, rows_as, views_of
from zgraph.torch_compat.fake_values import without_fake_mode
from zgraph.torch_compat.operators import OpOverload, written_arguments

aten = torch.ops.aten
_INVOLUTIONS = frozenset({aten.t.default, aten.transpose.int})  # applied twice, they do nothing
FEWEST_PARTS = 3
# Elements of one part, and of all parts, copied out by one call: all of them live until the last one is read.
MOST_PART_NUMEL, MOST_NUMEL = 2**10, 2**14


def shorten_calls(graph: fx.Graph) -> None:
    """Merge operator calls in a graph that will run node by node.

    The result cannot be traced or compiled, because not all of its calls are operators.
    """
    with without_fake_mode():  # leaves the fake mode of the surrounding compile
        _drop_kept_dims(graph)
        _join_copies_in(graph)
        _cancel_views(graph)
        _reshape_once(graph)
        _copy_out_together(graph)
        _cut_once(graph)
        _call_linear(graph)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or not _is_view(node))
    for node in nodes.call_functions(graph, _is_plain):
        node.target = function_for(node)


def _is_plain(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")


def _is_view(node: fx.Node) -> bool:
    return node.target in _INVOLUTIONS or node.target in (aten.view.default, aten.slice.Tensor, aten.clone.default)


# --- calls without effect ---------------------------------------------------------------------------------------------


def _cancel_views(graph: fx.Graph) -> None:
    """Bypass pairs of transpositions that cancel, and views of views.

    Values that the graph returns stay, because a returned view of an input must not become the input itself.
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


def _drop_kept_dims(graph: fx.Graph) -> None:
    """Drop `keepdim` from sums whose only readers are views."""
    for node in nodes.call_functions(graph, lambda node: node.target is aten.sum.dim_IntList):
        value = _value(node)
        if len(node.args) != 3 or not node.args[2] or not _is_contiguous(node) or value is None:
            continue
        if node.users and all(user.target is aten.view.default for user in node.users):
            node.args = node.args[:2]
            for dim in sorted((dim % value.ndim for dim in cast("Sequence[int]", node.args[1])), reverse=True):
                value = value.squeeze(dim)
            node.meta = {**node.meta, "val": value}


def _call_linear(graph: fx.Graph) -> None:
    """Replace `t` and `addmm` by `linear`, which calls the same kernel (torch 2.11 - 2.15)."""
    for node in nodes.call_functions(graph, lambda node: node.target is aten.addmm.default):
        bias, x, transposed = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args)
        if transposed.target is aten.t.default and len(transposed.users) == 1 and not node.kwargs and _rank(bias) == 1:
            node.target, node.args = torch.nn.functional.linear, (x, transposed.args[0], bias)


def _replace(node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


# --- packing ----------------------------------------------------------------------------------------------------------


def _join_copies_in(graph: fx.Graph) -> None:
    """Pack all parts of a buffer with one call, instead of one view for each part and a cat."""
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
            # On GPUs, cat is better: its copy kernel needs no table of addresses.
            rows = cast("tuple[int, ...]", shapes[0])[0]
            sources = [_divided(part, rows) for part in parts]
            cat.target, cat.args = interleave, (sources, rows)


def _source(view: fx.Node) -> fx.Node:
    """Return the tensor found by following views back from `view`, as long as the viewed tensors are contiguous."""
    while view.target is aten.view.default and _is_contiguous(view.all_input_nodes[0]):
        view = view.all_input_nodes[0]
    return view


def _divided(part: fx.Node, rows: int) -> fx.Node:
    """Return the base tensor of the view `part` if the base's first dim is divisible by `rows`; else `part`."""
    source = _source(part)
    shape = _shape(source)
    return source if shape and shape[0] and shape[0] % rows == 0 else part


# --- unpacking --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A slice of a buffer along one dim: elements from `start` to before `end`, and the node that reads them."""

    start: int
    end: int
    node: fx.Node


def _reshape_once(graph: fx.Graph) -> None:
    """Replace a contiguous copy and the view of this copy with one reshape."""
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


def _copy_out_together(graph: fx.Graph) -> None:
    """Copy small parts out of a row-major buffer with one call, at the position of the first copy."""
    found: dict[fx.Node, list[Part]] = {}
    for copy in nodes.call_functions(graph, lambda node: node.target is aten.reshape.default):
        cut = cast(fx.Node, copy.args[0])
        if cut.target is not aten.slice.Tensor or len(cut.users) != 1 or len(cut.args) != 4 or cut.kwargs:
            continue
        base, dim, start, end = cut.args
        assert isinstance(base, fx.Node)
        numel = 0 if _shape(copy) is None else meta.tensor_value(copy).numel()
        if dim != 1 or _rank(base) != 2 or not _is_contiguous(base) or not _is_on_cpu(base):
            continue
        if 0 < numel <= MOST_PART_NUMEL and not _is_returned(copy):  # results must have memory of their own
            found.setdefault(base, []).append(Part(cast(int, start), cast(int, end), copy))
    for base, parts in found.items():
        for together in [] if _is_written(base) else _runs(parts):
            if len(together) >= FEWEST_PARTS:
                _copy_out(graph, base, together)


def _is_returned(node: fx.Node) -> bool:
    views = [user for user in node.users if traits.is_view(user) or nodes.is_getitem(user)]
    return any(user.op == "output" for user in node.users) or any(map(_is_returned, views))


def _is_written(base: fx.Node) -> bool:
    """Return whether any node writes to the memory of `base`."""
    while traits.is_view(base):
        base = base.all_input_nodes[0]
    views = [base]
    for node in views:
        views.extend(user for user in node.users if traits.is_view(user))
    return any(node in written_arguments(user) for node in views for user in node.users)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Group consecutive parts into runs of at most `MOST_NUMEL` elements."""
    runs: list[list[Part]] = [[]]
    numel = 0
    for part in parts:
        own = meta.tensor_value(part.node).numel()
        if numel + own > MOST_NUMEL:
            runs.append([])
            numel = 0
        runs[-1].append(part)
        numel += own
    return runs


def _copy_out(graph: fx.Graph, base: fx.Node, parts: Sequence[Part]) -> None:
    rows, length = cast("tuple[int, int]", _shape(base))
    width = math.gcd(length, *(place for part in parts for place in (part.start, part.end)))
    index = [
        place
        for part in parts
        for row in range(rows)
        for place in range((row * length + part.start) // width, (row * length + part.end) // width)
    ]
    shapes = [cast("tuple[int, ...]", _shape(part.node)) for part in parts]
    with graph.inserting_before(parts[0].node):
        call = graph.call_function(_bound(rows_as, index=torch.tensor(index), width=width, like=_like(shapes)), (base,))
    for number, (*_, copy) in reversed(list(enumerate(parts))):
        with graph.inserting_after(call):
            selected = graph.call_function(operator.getitem, (call, number))
        selected.meta = dict(copy.meta)
        copy.replace_all_uses_with(selected)
        cut = cast(fx.Node, copy.args[0])
        graph.erase_node(copy)
        graph.erase_node(cut)


def _cut_once(graph: fx.Graph) -> None:
    """Cut a buffer into its parts with one call, at the position of the first slice."""
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
    """Return the view that is the only reader of a slice, or else the slice."""
    if len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.view.default and _shape(user) is not None:
            return user
    return node


def _viewer(shapes: Sequence[Sequence[int]]) -> Callable[[Tensor], Sequence[Tensor]]:
    return _bound(views_of, like=_like(shapes))


def _like(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [torch.empty(tuple(shape), device="meta") for shape in shapes]  # only their shapes are read


def _bound(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    found: Any = partial(function, **arguments)
    found.__name__, found.__module__ = function.__name__, __name__  # its name in the generated program
    return found


# --- shapes -----------------------------------------------------------------------------------------------------------


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a tensor node; None for other values and for symbolic sizes."""
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
    """Return whether a tensor can be viewed with `shape` without a copy.

    Same rule as ATen's `computeStride`, which cannot be called because it runs in the fake mode of the compile.
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
