"""Turn a final graph into a callable whose islands of compute Inductor has compiled, in the order the passes chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import operator

from torch import fx

from zgraph import meta
from zgraph.codegen.islands import Island, find_islands
from zgraph.codegen.lower import lower_fx
from zgraph.torch_compat import compile_with_inductor


class IslandCompiler:
    """Compiles islands, equal ones once."""

    def __init__(self) -> None:
        self.compiled: dict[Any, Callable[[list[Any]], Any]] = {}

    def lower(self, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        gm = fx.GraphModule(gm, gm.graph)
        replaced = {}
        found = find_islands(gm.graph)
        import collections
        print("islands", len(found), "distinct", len({i.gm.code for i in found}), "nodes left", len(gm.graph.nodes)-sum(len(i.members) for i in found), flush=True)
        for island in found:
            _replace(gm.graph, island, self.compile(island), replaced)
        return lower_fx(gm)

    def compile(self, island: Island) -> Callable[[list[Any]], Any]:
        given, key = island, (island.gm.code, tuple(_layout(node) for node in island.inputs))
        if key not in self.compiled:
            compiled = compile_with_inductor(given.gm, [node.meta["val"] for node in given.inputs])

            def island(args: list[Any]) -> Any:
                return compiled(args)

            self.compiled[key] = island
        return self.compiled[key]


def _layout(node: fx.Node) -> Any:
    value = meta.value(node)
    return (tuple(value.shape), value.stride(), value.dtype, value.device) if hasattr(value, "stride") else str(value)


def _replace(graph: fx.Graph, island: Island, run: Callable[[list[Any]], Any], replaced) -> None:
    last = island.members[-1]
    with graph.inserting_after(last):
        call = graph.call_function(run, ([replaced.get(n, n) for n in island.inputs],))
    call._rename("island")
    previous = call
    for number, node in enumerate(island.outputs):
        with graph.inserting_after(previous):
            previous = graph.call_function(operator.getitem, (call, number))
        previous.meta = dict(node.meta)
        replaced[node] = previous
        node.replace_all_uses_with(previous, delete_user_cb=lambda user: user not in island.members)
    for node in reversed(island.members):
        graph.erase_node(node)
