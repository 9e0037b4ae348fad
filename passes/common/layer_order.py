"""Finds the layers of a step's micro-batches, and the order in which all micro-batches run a layer before the next."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from zgraph.analysis.hazards import hazards
from zgraph.graph import dataflow, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs, UnshardArgs
from zgraph.graph.sizes import tensor_bytes, tensors_of
from zgraph.runtime.window_state import ALONE

Key = tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """A forward and its backward.

    Attributes:
        part: number of the forward; the backward has the next number.
        forward, backward: their calls, in program order.
    """

    part: int
    forward: list[fx.Node] = field(default_factory=list[fx.Node])
    backward: list[fx.Node] = field(default_factory=list[fx.Node])


class StepParts:
    """The micro-batches of a step, and the parameters that its nodes read.

    Args:
        graph: graph of a whole training step, before gathers are lowered.

    Attributes:
        reads: for each node, the handles of the gathered parameters that it reads.
        micro_batches: every forward that reads parameters and has a backward that reduces gradients, in order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.part = dataflow.parts_of(graph)
        self.gathered: dict[fx.Node, fx.Node] = {}  # gathered parameters, views and casts of them: handle
        for marker in nodes.call_functions(graph, nodes.is_unshard):
            self.gathered |= dict.fromkeys(dataflow.reshaped_values(marker), UnshardArgs.of(marker).handle)
        found: dict[int, MicroBatch] = {}
        for node, part in self.part.items():
            one = found.setdefault(part - part % 2, MicroBatch(part - part % 2))
            (one.backward if part % 2 else one.forward).append(node)
        self.micro_batches = [
            one
            for one in found.values()
            if any(self.parameters(node) for node in one.forward) and any(map(nodes.is_reduce_grad, one.backward))
        ]

    def parameters(self, node: fx.Node) -> list[fx.Node]:
        """Return the handles of the parameters that a node computes with."""
        if node in self.gathered:
            return []
        return list(dict.fromkeys(self.gathered[one] for one in node.all_input_nodes if one in self.gathered))

    def windows(self) -> Iterator[list[MicroBatch]]:
        """Yield the lists of consecutive micro-batches between which nothing but sums of gradients depends on order.

        A window ends where a parameter is written, or where a forward reads what an earlier backward has computed.
        """
        shards = {UnshardArgs.of(one).shard for one in nodes.call_functions(self.graph, nodes.is_unshard)}
        writers = [node for node in self.part if not shards.isdisjoint(dataflow.written_sources(node))]
        order = nodes.order_of(self.graph)
        window: list[MicroBatch] = []
        for one in self.micro_batches:
            begin = order[window[-1].forward[0]] if window else 0
            written = any(begin < order[node] < order[one.backward[-1]] for node in writers)
            if window and (written or self._reads_backward(one, window)):
                yield window
                window = []
            window.append(one)
        if window:
            yield window

    def _reads_backward(self, one: MicroBatch, window: Sequence[MicroBatch]) -> bool:
        """Whether the forward of a micro-batch needs results of earlier backwards in the window."""
        after = {node for earlier in window for node in earlier.backward}
        return any(not after.isdisjoint(map(dataflow.below_views, node.all_input_nodes)) for node in one.forward)


@dataclass(frozen=True)
class Layers:
    """The layers of a micro-batch, as the parameters with which each begins.

    Attributes:
        begins: for the handle of the first parameter of each layer after the first, the number of the layer.
    """

    begins: Mapping[fx.Node, int]

    @property
    def last(self) -> int:
        """Number of the last layer."""
        return len(self.begins)

    @classmethod
    def of(cls, one: MicroBatch, parts: StepParts, micro_batches: int) -> Layers:
        """Cut a forward where few bytes pass from earlier nodes to later ones, before nodes that read a new parameter.

        Backward recomputes a layer from what passes into it, which every micro-batch keeps. With more cuts, more is
        kept, and less is alive while a layer runs: of all cuts, every n-th is used, with the n that needs the fewest
        bytes.
        """
        places, alive = _narrow_places(one.forward, parts)
        best = min(
            (_bytes_with(places[n - 1 :: n], one, parts, alive, micro_batches), n) for n in range(1, len(places) + 2)
        )
        kept = places[best[1] - 1 :: best[1]]
        known: set[fx.Node] = set()
        begins: dict[fx.Node, int] = {}
        cuts = set(kept)
        for place, node in enumerate(one.forward):
            new = [handle for handle in parts.parameters(node) if handle not in known]
            known.update(new)
            if place in cuts:
                begins[new[0]] = len(begins) + 1
        return cls(begins)

    def of_nodes(self, one: MicroBatch, parts: StepParts) -> dict[fx.Node, int]:
        """Return the layer of each node of a micro-batch. It rises in program order in forward, and falls in backward."""
        found: dict[fx.Node, int] = {}
        layer = 0
        for node in one.forward:
            for handle in parts.parameters(node):
                layer = max(layer, self.begins.get(handle, 0))
            found[node] = layer
        # A value that backward reads was saved by its reader in forward, or by the node that made it.
        saved_by = {
            node: max((found[user] for user in node.users if user in found), default=made)
            for node, made in found.items()
        }
        layer = self.last
        for node in one.backward:
            read = [saved_by[one] for one in node.all_input_nodes if one in saved_by and one not in parts.gathered]
            layer = min([layer, max(read, default=layer)])
            found[node] = layer
        return found


def _narrow_places(forward: Sequence[fx.Node], parts: StepParts) -> tuple[list[int], list[int]]:
    """Return the places of possible cuts, and for each place of a forward the bytes that pass it."""
    place_of = {node: place for place, node in enumerate(forward)}
    alive = [0] * (len(forward) + 1)
    last: dict[fx.Node, int] = {}
    for node in forward:
        for source in map(dataflow.below_views, node.all_input_nodes):
            if source in place_of and source not in parts.gathered:
                last[source] = place_of[node]
    for node, end in last.items():
        size = sum(map(tensor_bytes, tensors_of(node)))
        for place in range(place_of[node] + 1, end + 1):
            alive[place] += size
    known: set[fx.Node] = set()
    asked: list[int] = []
    for place, node in enumerate(forward):
        new = [handle for handle in parts.parameters(node) if handle not in known]
        if new and known:
            asked.append(place)
        known.update(new)
    around = [float("inf"), *(alive[place] for place in asked), float("inf")]
    narrow = [
        place
        for number, place in enumerate(asked, 1)
        if alive[place] <= min(around[number - 1], around[number + 1])
    ]
    return narrow, alive


def _bytes_with(
    cuts: Sequence[int], one: MicroBatch, parts: StepParts, alive: Sequence[int], micro_batches: int
) -> int:
    """Bytes of a window: what passes the cuts in each micro-batch, and one layer with its parameters and gradients."""
    kept = sum(alive[place] for place in cuts) * micro_batches
    most = 0
    edges = [0, *cuts, len(one.forward)]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        inside = one.forward[begin:end]
        made = sum(_made_bytes(node, parts) for node in inside)
        read = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source in parts.gathered)
        markers = dict.fromkeys(dataflow.below_views(source) for source in read)
        most = max(most, made + 3 * sum(tensor_bytes(tensor) for node in markers for tensor in tensors_of(node)))
    return kept + most


def _made_bytes(node: fx.Node, parts: StepParts) -> int:
    is_copy = traits.is_view(node) or nodes.is_getitem(node) or node in parts.gathered
    return 0 if is_copy else sum(map(tensor_bytes, tensors_of(node)))


def by_layer(graph: fx.Graph, window: Sequence[MicroBatch], layer_of: Mapping[fx.Node, int], last: int) -> list[fx.Node]:
    """Return a graph's nodes, with the micro-batches of a window interleaved layer by layer.

    In the last layer, the backward of each micro-batch follows its forward, so that only one loss is alive at a time.
    Operators that write, and random ones, keep their order.
    """
    keys: dict[fx.Node, Key] = {}
    for number, one in enumerate(window):
        for node in one.forward:
            layer = layer_of[node]
            keys[node] = (1, layer, number) if layer < last else (2, 0, number)
        for node in one.backward:
            layer = layer_of[node]
            keys[node] = (3, last - layer, number) if layer < last else (2, 0, number)
    order = list(graph.nodes)
    first = min(place for place, node in enumerate(order) if node in keys)
    return sorted_by(order, {node: keys.get(node, (0,) if place < first else (4,)) for place, node in enumerate(order)})


def sorted_by(order: Sequence[fx.Node], keys: Mapping[fx.Node, Key]) -> list[fx.Node]:
    """Return nodes in the order of their keys, as far as their inputs and the memory they share allow."""
    place_of = {node: place for place, node in enumerate(order)}
    ahead = hazards(order)
    needs = {
        node: {*node.all_input_nodes, *(one for one in ahead.get(node, ()) if not _may_swap(one, node))}
        for node in order
    }
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in order}
    for node, sources in needs.items():
        for source in sources:
            users[source].append(node)
    missing = {node: len(sources) for node, sources in needs.items()}
    ready = [(keys[node], place_of[node], node) for node in order if not missing[node]]
    heapq.heapify(ready)
    placed: list[fx.Node] = []
    while ready:
        *_, node = heapq.heappop(ready)
        placed.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], place_of[user], user))
    return placed


def _may_swap(earlier: fx.Node, node: fx.Node) -> bool:
    """Whether only the order of calls relates two nodes, which is the same on all ranks in any order: none draws."""
    return all(nodes.is_collective(one) or traits.has_zero_dropout(one) for one in (earlier, node))


def random_nodes(window: Iterable[MicroBatch]) -> list[fx.Node]:
    """Return the nodes of a window that draw random numbers."""
    return [
        node
        for one in window
        for node in (*one.forward, *one.backward)
        if traits.is_random(node) and not traits.has_zero_dropout(node)
    ]


def reductions_of(window: Iterable[MicroBatch]) -> list[list[fx.Node]]:
    """Return the reductions of a window, in one list for each parameter."""
    found: dict[ReduceArgs, list[fx.Node]] = {}
    for one in window:
        for node in filter(nodes.is_reduce_grad, one.backward):
            args = ReduceArgs.of(node)
            found.setdefault(replace(args, grad=args.handle, window=ALONE), []).append(node)
    return list(found.values())
