"""What storages a graph holds, found by running it on real tensors and looking at them: a judge of liveness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from zgraph.graph import nodes


class StorageJudge:
    """Runs graphs on real tensors with the variables of the generated code, and looks at the storages they hold."""

    def __init__(self, held: Iterable[Any]) -> None:
        self.held = {tensor.untyped_storage().data_ptr() for tensor in _tensors(list(held))}
        self.kept: list[Any] = []  # what a user keeps
        self.during: list[int] = []
        self.after: list[int] = []

    def run(self, graph: fx.Graph, values: Iterable[Any]) -> list[Any]:
        """What the graph returns; the values are dropped as it goes."""
        given = list(values)
        last_reader: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            last_reader |= dict.fromkeys(node.all_input_nodes, node)
        variables: dict[fx.Node, Any] = {}
        in_flight: dict[fx.Node, list[Any]] = {}
        for node in graph.nodes:
            load = variables.__getitem__
            if node.op == "placeholder":
                variables[node] = given.pop(0)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), load)
                variables[node] = node.target(*args, **kwargs)
                if nodes.is_start(node):
                    in_flight[node] = [variables[source] for source in node.all_input_nodes]
                del args, kwargs
            self._look(self.during, given, variables, in_flight)
            if nodes.is_wait(node):
                in_flight.pop(node.args[0], None)
            for read in [*node.all_input_nodes, *([] if node.users or node.op != "call_function" else [node])]:
                if node.op != "output" and last_reader.get(read, node) is node:
                    variables.pop(read, None)
            self._look(self.after, given, variables, in_flight)
        return [variables[out] if isinstance(out, fx.Node) else out for out in nodes.returned_by(graph)]

    def _look(self, seen: list[int], *roots: Any) -> None:
        storages = [tensor.untyped_storage() for tensor in _tensors([*roots, self.kept])]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        seen.append(sum(size for pointer, size in sizes.items() if pointer not in self.held))


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    items = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return [tensor for item in items for tensor in _tensors(item)]
