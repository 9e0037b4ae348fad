"""Detect writes to gathered parameters in Dynamo's graphs; AOTAutograd would pass the written values to later reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.graph import nodes
from zgraph.runtime.handle import name_of
from zgraph.sharding.model.written_weights import GatheredParameter, as_gathered, written
from zgraph.sharding.scope import scope_behind
from zgraph.sharding.tensors.sharded_tensor import ASSIGNED
from zgraph.torch_compat.dynamo import dynamo_example, dynamo_fake, raise_through_dynamo
from zgraph.torch_compat.fake_values import fake_storage_key
from zgraph.torch_compat.memory import version_of
from zgraph.torch_compat.operators import assigns_data


def refuse_written_weights(gm: fx.GraphModule, handles: Mapping[int, str]) -> None:
    """Refuse a graph that writes to a gathered parameter, whether the graph itself or earlier code gathers it.

    A write is detected by the version counter of the fake tensors with which Dynamo has traced each node.

    Args:
        gm: graph of a frame.
        handles: names of parameters, by the indices of their handles among the graph's inputs.

    Raises:
        ZgraphError: the graph writes to a parameter; the message names it.
    """
    places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    names = {node: handles[place] for node, place in places.items() if place in handles}
    for graph in _graphs(gm):
        gathered: dict[int, str] = {}
        for node in graph.nodes:
            value = dynamo_fake(node)
            if not isinstance(value, Tensor):
                continue
            key, name = fake_storage_key(value), _gathered_name(node, names)
            if name is not None:
                gathered[key] = name
            if assigns_data(node.target):  # Dynamo resets the version
                name = _gathered_name(node.args[0], names)
                if name is None and isinstance(value, DTensor):
                    raise_through_dynamo(ASSIGNED, ZgraphError)
            elif version_of(value) > 0:
                name = gathered.get(key)
            else:
                name = None
            if name is not None:
                raise_through_dynamo(written(name), ZgraphError)


def _graphs(gm: fx.GraphModule) -> Iterable[fx.Graph]:
    """Return the frame's graph and its nested graphs, such as those of checkpointed regions."""
    return [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]


def _gathered_name(node: object, names: Mapping[fx.Node, str]) -> str | None:
    """Return the parameter's name if the value of `node` is a gathered parameter, else None."""
    if not isinstance(node, fx.Node):
        return None
    if nodes.is_unshard(node):
        handle = node.args[1]
        return names.get(handle, "a parameter") if isinstance(handle, fx.Node) else "a parameter"
    given = dynamo_example(node) if node.op == "placeholder" else None
    return given.parameter_name if isinstance(given, GatheredParameter) else None


def watch_outputs(gm: fx.GraphModule, handles: Mapping[int, str], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Watch for writes of uncompiled code to gathered parameters that a graph returns.

    Args:
        gm: graph of a frame.
        handles: names of parameters, by the indices of their handles among the graph's inputs.
        compiled: compiled form of the graph.

    Returns:
        A wrapper of `compiled` that registers its outputs for the check; `compiled` itself if the graph returns no
        gathered parameter.
    """
    places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder")) if place in handles}
    given = nodes.output_of(gm.graph).args[0]
    assert isinstance(given, tuple | list)
    found = {
        number: places[one.args[1]]
        for number, one in enumerate(given)
        if isinstance(one, fx.Node) and nodes.is_unshard(one) and one.args[1] in places
    }
    if not found:
        return compiled

    def run(*args: Any) -> Any:
        outputs = list(compiled(*args))
        for number, place in found.items():
            scope, name = scope_behind(args[place]), name_of(args[place])
            if scope is not None and scope.active:
                outputs[number] = as_gathered(outputs[number], name)
                scope.reads.add_read(name, outputs[number])
        return tuple(outputs)

    return run
