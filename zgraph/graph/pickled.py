"""Pickles and unpickles graph modules with their fake values.

A fake tensor comes back with its shape, strides, dtype and device, but on a storage of its own: what depends on shared
storages, offsets or `requires_grad` must be done before.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from zgraph.graph import meta
from zgraph.torch_compat.fake_values import (
    fake_from_layout,
    is_fake,
    number_of_parts,
    number_parts,
    without_fake_mode,
)
from zgraph.torch_compat.modules import lazy_graph_module
from zgraph.torch_compat.operators import OpOverload, is_higher_order

_MODE = "fake mode"


def dumps(value: object) -> bytes:
    """Pickle an object that may contain graph modules and fake tensors with static sizes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a part cannot be pickled.
    """
    stream = io.BytesIO()
    with without_fake_mode():
        _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def loads(data: bytes, mode: Any) -> Any:
    """Unpickle an object pickled by `dumps`; fake tensors are created in the fake mode `mode`."""
    with without_fake_mode():
        return _Unpickler(io.BytesIO(data), mode).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return _MODE if obj is _Mode else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.GraphModule):
            return _graph_module, _parts(obj)
        if isinstance(obj, OpOverload):
            return _operator, (obj.namespace, *str(obj).split(".")[1:])
        if is_higher_order(obj):
            return _higher_order, (str(obj),)
        if isinstance(obj, Tensor) and is_fake(obj):
            if any(isinstance(size, torch.SymInt) for size in (*obj.shape, *obj.stride())):
                raise pickle.PicklingError("symbolic sizes")
            return fake_from_layout, (_Mode, tuple(obj.shape), obj.stride(), obj.dtype, obj.device)
        if isinstance(obj, torch.SymFloat):
            return number_of_parts, (_Mode, *number_parts(obj))
        if isinstance(obj, torch.SymInt | torch.SymBool | fx.Node):
            raise pickle.PicklingError(f"a {type(obj).__name__}")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, mode: Any) -> None:
        super().__init__(stream)
        self.mode = mode

    def persistent_load(self, pid: str) -> Any:
        if pid != _MODE:
            raise pickle.UnpicklingError(pid)
        return self.mode


class _Mode:
    """Stands for the fake mode in a pickle."""


@dataclass(frozen=True, slots=True)
class _Number:
    """Stands for a node in the arguments of other nodes."""

    place: int


def _parts(gm: fx.GraphModule) -> tuple[Any, ...]:
    places = {node: _Number(place) for place, node in enumerate(gm.graph.nodes)}

    def numbered(argument: Any) -> Any:
        return places[argument] if isinstance(argument, fx.Node) else argument

    rows = [
        (
            node.op,
            node.name,
            node.target,
            _plain(map_aggregate(node.args, numbered)),
            _plain(map_aggregate(node.kwargs, numbered)),
            meta.portable(node),
        )
        for node in gm.graph.nodes
    ]
    names = dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    return rows, {name: functools.reduce(getattr, name.split("."), gm) for name in names}


def _plain(value: Any) -> Any:
    """Return arguments without the immutable containers of torch.fx."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return tuple(_plain(one) for one in value) if type(value) is tuple else value


def _graph_module(rows: Sequence[tuple[Any, ...]], attributes: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def node_of(argument: Any) -> Any:
        return made[argument.place] if isinstance(argument, _Number) else argument

    for op, name, target, args, kwargs, found in rows:
        node = graph.create_node(op, target, map_aggregate(args, node_of), map_aggregate(kwargs, node_of), name=name)
        node.meta = found
        made.append(node)
    return lazy_graph_module(attributes, graph)


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)
