"""Compiles a final graph with Inductor, but keeps the order of nodes that the passes chose.

Inductor may reorder and fuse the nodes of a graph. It therefore receives only islands: runs of compute nodes between
collectives and other nodes whose order matters. A generated program calls islands and all other nodes in order. Equal
islands, such as the blocks of a model, are compiled once. They contain no communication, so that processes can share
them through Inductor's cache.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.codegen.ahead.helpers import Helpers, start_helpers
from zgraph.codegen.cuda_graph import RecordedSteps
from zgraph.codegen.islands import Island, cut_out, find_islands
from zgraph.codegen.lower_fx import drop_dependences, lower_fx
from zgraph.codegen.progress import shown
from zgraph.graph import edits, meta
from zgraph.runtime.profiler import Runner
from zgraph.torch_compat.inductor import caches_graphs, compile_with_inductor, graphs_from_cache
from zgraph.torch_compat.modules import lazy_graph_module

Compiled = Callable[[list[Any]], Any]


class InductorLowering:
    """Lowers the graphs of one frame; equal islands (runs of compute) are compiled once.

    Attributes:
        rank: this process's rank among the processes that compile the same graphs.
        ranks: number of these processes.
        count: number of helper processes that compile islands ahead; None: the number of spare cores, at most 4.
        islands: number of islands found so far.
        compiled: compiled function of each distinct island.
        cached: number of distinct islands that were in Inductor's cache, put there by other ranks or earlier runs.
        helped: number of distinct islands that helper processes of this rank have put there.
        helpers: the helper processes; None: there are none.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, count: int | None = 0) -> None:
        self.rank, self.ranks, self.count = rank, ranks, count
        self.islands = self.cached = self.helped = 0
        self.compiled: dict[object, Compiled] = {}
        self._slowest_s = 0.0
        self.helpers: Helpers | None = None

    def compile_ahead(self, graphs: Sequence[fx.GraphModule]) -> None:
        """Have helper processes compile the islands of graphs that will be lowered soon.

        The helpers begin with the last graph, which is needed last, and take its islands in this rank's order. Helpers
        are not started if Inductor keeps no cache, or if its settings cannot be sent to other processes.
        """
        if self.count == 0 or not caches_graphs():
            return
        islands: dict[object, Island] = {}
        for gm in reversed(graphs):
            copy = edits.copy_of(gm)
            drop_dependences(copy.graph)
            found = list({_key(island): island for island in map(cut_out, find_islands(copy.graph))}.items())
            islands |= dict(found[place] for place in order_of_rank(self.rank, self.ranks, len(found)))
        self.helpers = start_helpers({key: one.gm for key, one in islands.items()}, self.count, self.ranks)

    def lower(
        self,
        gm: fx.GraphModule,
        runner_of: Callable[[list[Any]], Runner | None] | None = None,
        ranks_per_host: int = 1,
        title: str = "a graph",
        recorded: RecordedSteps | None = None,
    ) -> Compiled:
        """Lower a graph like `lower_fx`, with each island compiled; `title` is shown while islands compile."""
        gm = lazy_graph_module(gm, gm.graph)
        drop_dependences(gm.graph)
        self.islands += self.place(gm, title)
        return lower_fx(gm, runner_of, ranks_per_host, recorded)

    def place(self, gm: fx.GraphModule, title: str = "a graph") -> int:
        """Replace islands (runs of compute) by calls of compiled functions; return the number of islands."""
        self._compile(map(cut_out, find_islands(gm.graph)), title)
        return place_islands(gm, lambda island: self.compiled[_key(island)])

    def _compile(self, islands: Iterable[Island], title: str) -> None:
        """Compile islands that are not compiled yet; rank 0 shows the progress.

        Each rank compiles in a different order. Ranks of a host share Inductor's cache, so that later on each rank
        finds most islands already compiled by another.
        """
        new = {key: island for island in islands if (key := _key(island)) not in self.compiled}
        names = {key: f"island_{len(self.compiled) + number}" for number, key in enumerate(new)}
        keys = list(new)
        ordered = [keys[place] for place in order_of_rank(self.rank, self.ranks, len(keys))]
        for _, key in zip(shown(ordered, title) if self.rank == 0 else ordered, self._in_turn(ordered), strict=False):
            island, before, begun = new[key], graphs_from_cache(), time.perf_counter()
            compiled = compile_with_inductor(
                island.gm, list(map(meta.value, island.gm.graph.find_nodes(op="placeholder")))
            )
            self._slowest_s = max(self._slowest_s, time.perf_counter() - begun)
            self._count(key, graphs_from_cache() > before)
            self.compiled[key] = _named(names[key], compiled)

    def _in_turn(self, keys: Sequence[object]) -> Iterator[object]:
        """Yield the keys of islands in the order in which to compile them.

        Islands that helpers are compiling come last, each after a wait that is no longer than compiling took so far.
        """
        late: list[object] = []
        for key in keys:
            if self.helpers is None or self.helpers.claim(key):
                yield key
            else:
                late.append(key)
        for key in late:
            assert self.helpers is not None
            self.helpers.has_compiled(key, self._slowest_s)
            yield key

    def _count(self, key: object, found: bool) -> None:
        """Count an island that was compiled now, or found in Inductor's cache."""
        if self.helpers is not None and found:
            if self.helpers.has_compiled(key):
                self.helped += 1
                return
            if not self.compiled:  # an earlier run has left its cache: helpers would compile nothing
                self.helpers.stop()
        self.cached += found


def order_of_rank(rank: int, ranks: int, count: int) -> list[int]:
    """Return the order in which a rank compiles islands (runs of compute).

    Two neighbouring ranks share a range of islands, and begin at opposite ends of it until they meet. Both then
    continue with the ranges of the other ranks.
    """
    pair, goes_back = divmod(rank, 2)
    pairs = (ranks + 1) // 2
    start, end = count * pair // pairs, count * (pair + 1) // pairs
    if goes_back:
        return [*reversed(range(end)), *reversed(range(end, count))]
    return [*range(start, count), *range(start)]


def _key(island: Island) -> object:
    """Return a key that is equal for islands with equal code and equal input layouts."""
    return island.gm.code, tuple(_layout(node) for node in island.inputs)


def _named(name: str, compiled: Compiled) -> Compiled:
    def run(args: list[Any]) -> Any:
        return compiled(args)

    run.__name__ = name  # its name in the generated program
    return run


def _layout(node: fx.Node) -> object:
    value = meta.value(node)
    if not isinstance(value, Tensor):
        return float if isinstance(value, torch.SymFloat) else str(value)
    # As text: symbolic sizes cannot be hashed.
    return str(tuple(value.shape)), str(value.stride()), value.dtype, value.device


def hand_over(*values: Any) -> list[Any]:
    """Return `values` as a list; the callee empties the list, so that each value is freed at its last use."""
    return list(values)


def place_islands(gm: fx.GraphModule, compile: Callable[[Island], Compiled]) -> int:
    """Replace the nodes of each island (run of compute) by a call of the function that `compile` returns for it.

    Returns:
        The number of islands.
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
