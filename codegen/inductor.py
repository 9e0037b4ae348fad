"""Turn a final graph into a callable whose compute Inductor has compiled, island by island, in the order passes chose.

Compiling the whole graph would need its order pinned against a compiler that moves, fuses and reuses; here it is the
order of the generated program. Equal blocks have equal islands, which are compiled once, and an island contains no
communication, so Inductor's cache keeps it for other processes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx

from zgraph.codegen.islands import Island, cut_out, find_islands
from zgraph.codegen.lower_fx import lower_fx
from zgraph.graph import meta
from zgraph.runtime.profiler import GraphProfiler
from zgraph.torch_compat.inductor import compile_with_inductor

Compiled = Callable[[list[Any]], Any]


class InductorLowering:
    """Lowers the graphs of one frame; islands that compute the same are compiled once.

    Attributes:
        rank, ranks: this process among those that compile the same.
        islands: how many were found.
        compiled: the distinct ones.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.islands = 0
        self.compiled: dict[object, Compiled] = {}

    def lower(
        self, gm: fx.GraphModule, profiler_of: Callable[[], GraphProfiler | None] | None = None, ranks_per_host: int = 1
    ) -> Compiled:
        """As `lower_fx`, with a call of a compiled function in the place of each island."""
        gm = fx.GraphModule(gm, gm.graph)
        self.islands += self.place(gm)
        return lower_fx(gm, profiler_of, ranks_per_host)

    def place(self, gm: fx.GraphModule) -> int:
        """Put calls of compiled functions in the places of islands; returns how many there were."""
        self._compile(map(cut_out, find_islands(gm.graph)))
        return place_islands(gm, lambda island: self.compiled[_key(island)])

    def _compile(self, islands: Iterable[Island]) -> None:
        """Compile those that are new.

        Ranks begin at different ones. Those of a host share Inductor's cache, so each finds there, when it comes to
        them, what others have compiled meanwhile.
        """
        new = {key: island for island in islands if (key := _key(island)) not in self.compiled}
        names = {key: f"island_{len(self.compiled) + number}" for number, key in enumerate(new)}
        keys = list(new)
        first = len(keys) * self.rank // self.ranks
        for key in [*keys[first:], *keys[:first]]:
            island = new[key]
            compiled = compile_with_inductor(island.gm, [meta.value(node) for node in island.inputs])
            self.compiled[key] = _named(names[key], compiled)


def _key(island: Island) -> object:
    """Equal for islands that compute the same."""
    return island.gm.code, tuple(_layout(node) for node in island.inputs)


def _named(name: str, compiled: Compiled) -> Compiled:
    def run(args: list[Any]) -> Any:
        return compiled(args)

    run.__name__ = name  # what the generated program calls it
    return run


def _layout(node: fx.Node) -> object:
    value = meta.value(node)
    if not isinstance(value, Tensor):
        return str(value)
    # As text: symbolic sizes cannot be hashed.
    return str(tuple(value.shape)), str(value.stride()), value.dtype, value.device


def hand_over(*values: Any) -> list[Any]:
    """A list that is the only holder of values whose last use this is: the callee empties it, and they die early."""
    return list(values)


def place_islands(gm: fx.GraphModule, compile: Callable[[Island], Compiled]) -> int:
    """Put a call of what `compile` returns in the place of each island's nodes; all others stay where they are.

    Returns:
        How many there were.
    """
    found = find_islands(gm.graph)
    for members in found:
        island = cut_out(members)
        _put_call(gm.graph, island, compile(island))
    gm.recompile()
    return len(found)


def _put_call(graph: fx.Graph, island: Island, compiled: Compiled) -> None:
    with graph.inserting_after(island.members[-1]):
        handed = graph.call_function(hand_over, island.inputs)
    with graph.inserting_after(handed):
        call = graph.call_function(compiled, (handed,))
    last = call
    for number, node in enumerate(island.outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, number))
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
    for node in reversed(island.members):
        graph.erase_node(node)
