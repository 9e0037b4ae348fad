"""Finds the layers of a step's micro-batches, and the order in which all micro-batches run a layer before the next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from torch import fx

from zgraph.analysis.hazards import hazards
from zgraph.graph import dataflow, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs, UnshardArgs
from zgraph.graph.sizes import tensor_bytes, tensors_of
from zgraph.runtime.window_state import ALONE

Key = tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """A forward and its backwards: one, or one for each of several losses.

    Attributes:
        part: number of the first forward's part; its backward has the next number.
        forward: calls of the forward, in program order.
        backwards: calls of each backward, in program order.
    """

    part: int
    forward: list[fx.Node]
    backwards: list[list[fx.Node]]

    def backward(self) -> Iterator[fx.Node]:
        return chain.from_iterable(self.backwards)

    def reductions(self) -> Iterator[fx.Node]:
        return filter(nodes.is_reduce_grad, self.backward())


class StepParts:
    """The forwards and backwards of a step, and the parameters that its nodes read.

    Args:
        graph: graph of a whole training step, before gathers are lowered.

    Attributes:
        gathered: handle of the parameter for each gather, and for each view and cast of a gathered parameter.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.gathered: dict[fx.Node, fx.Node] = {}
        self._shards: set[fx.Node] = set()
        for marker in nodes.call_functions(graph, nodes.is_unshard):
            args = UnshardArgs.of(marker)
            self.gathered |= dict.fromkeys(dataflow.reshaped_values(marker), args.handle)
            self._shards.add(dataflow.without_views(args.shard))
        self._calls: dict[int, list[fx.Node]] = {}
        for node, part in dataflow.parts_of(graph).items():
            self._calls.setdefault(part, []).append(node)

    def parameters(self, node: fx.Node) -> list[fx.Node]:
        """Return the handles of the parameters that a node computes with."""
        if node in self.gathered:
            return []
        return list(dict.fromkeys(self.gathered[one] for one in node.all_input_nodes if one in self.gathered))

    def windows(self) -> Iterator[list[MicroBatch]]:
        """Yield lists of consecutive micro-batches that need nothing of each other but sums of their gradients.

        A window ends where a parameter is written, and where a forward reads what an earlier backward has computed.
        """
        window: list[MicroBatch] = []
        computed: set[fx.Node] = set()  # by backwards of the window, and what they write to
        for part in sorted({part - part % 2 for part in self._calls}):
            forward, backward = self._calls.get(part, []), self._calls.get(part + 1, [])
            read = (source for node in forward for source in node.all_input_nodes)
            ends = self._writes_parameters((*forward, *backward))
            if ends or any(source in computed or dataflow.below_views(source) in computed for source in read):
                yield window
                window, computed = [], set()
            if ends or not backward:
                continue
            if any(map(self.parameters, forward)):
                window.append(MicroBatch(part, [*forward], [backward]))
            elif window:  # another loss
                window[-1].forward.extend(forward)
                window[-1].backwards.append(backward)
            computed.update(backward, *map(dataflow.written_sources, backward))
        yield window

    def _writes_parameters(self, calls: Iterable[fx.Node]) -> bool:
        return any(not self._shards.isdisjoint(dataflow.written_sources(node)) for node in calls)


@dataclass(frozen=True)
class Layers:
    """The layers of a model, as cut out of one of its forwards.

    Attributes:
        of_parameters: number of the layer that first reads each parameter, by the parameter's handle.
    """

    of_parameters: Mapping[fx.Node, int]

    @property
    def last(self) -> int:
        """Number of the last layer; the first has the number 0."""
        return max(self.of_parameters.values(), default=0)

    @classmethod
    def of(cls, one: MicroBatch, parts: StepParts) -> Layers:
        """Cut a forward before nodes that read a new parameter, where fewer bytes pass than at the places around.

        Ranks whose batches differ in size find the same layers.
        """
        asked = list(_first_reads(one.forward, parts))
        passing = _passing_bytes(one.forward, parts)
        around = [math.inf, *(passing[place] for place, _ in asked[1:]), math.inf]
        found: dict[fx.Node, int] = dict.fromkeys(asked[0][1], 0)
        layer = 0
        for number, (place, handles) in enumerate(asked[1:]):
            layer += passing[place] <= min(around[number], around[number + 2])
            found |= dict.fromkeys(handles, layer)
        return cls(found)

    def of_nodes(self, one: MicroBatch, parts: StepParts) -> dict[fx.Node, int]:
        """Return the layer of each node of a micro-batch.

        It rises in program order in forward, and falls in backward. A forward may pass through the model several times,
        as for a preference loss: the layer starts again where a parameter is read together with values of earlier
        layers only, in backward where values of later layers are read.
        """
        found: dict[fx.Node, int] = {}
        least: dict[fx.Node, int] = {}  # by a node's inputs
        layer = 0
        for node in one.forward:
            read = [self.of_parameters.get(handle, 0) for handle in parts.parameters(node)]
            least[node] = max([0, *read, *(least[source] for source in node.all_input_nodes if source in least)])
            layer = least[node] if read else max(layer, least[node])
            found[node] = layer
        for node in reversed(one.forward):
            users = [found[user] for user in node.users if user in found]
            # A gather comes just before its use, and so do nodes before another pass.
            found[node] = min([*users, *([] if node in parts.gathered and users else [found[node]])])
        # What backward reads was saved by a reader in forward, or by the node that made it: by the last one, as
        # backward has passed the layers after it.
        saved_by = dict(found)
        for node in found:
            for source in node.all_input_nodes:
                if source in saved_by:
                    saved_by[source] = max(saved_by[source], found[node])
        for backward in one.backwards:
            found |= self._descend(backward, saved_by)
        return found

    def _descend(self, backward: Sequence[fx.Node], saved_by: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        """Return the layers of one backward's nodes.

        Args:
            backward: the nodes.
            saved_by: for each node of forward, the layer that saved its value.
        """
        found: dict[fx.Node, int] = {}
        most: dict[fx.Node, int] = {}  # by a node's inputs
        layer = self.last
        for node in backward:
            read = [saved_by[source] for source in node.all_input_nodes if source in saved_by]
            made = (most[source] for source in node.all_input_nodes if source in most)
            most[node] = min([max(read, default=self.last), *made])
            layer = most[node] if read else min(layer, most[node])
            found[node] = layer
        for node in reversed(backward):
            found[node] = max([found[node], *(found[user] for user in node.users if user in found)])
        return found


def _first_reads(forward: Sequence[fx.Node], parts: StepParts) -> Iterator[tuple[int, list[fx.Node]]]:
    """Yield the place of each node that reads new parameters, and the parameters' handles."""
    known: set[fx.Node] = set()
    for place, node in enumerate(forward):
        new = [handle for handle in parts.parameters(node) if handle not in known]
        known.update(new)
        if new:
            yield place, new


def _passing_bytes(forward: Sequence[fx.Node], parts: StepParts) -> list[int]:
    """Return for each place of a forward the bytes of activations that earlier nodes have made and later ones read."""
    place_of = {node: place for place, node in enumerate(forward)}
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(forward):
        last |= {dataflow.below_views(source): place for source in node.all_input_nodes}
    change = [0] * (len(forward) + 1)
    for source, end in last.items():
        if source in place_of and source not in parts.gathered:
            size = sum(map(tensor_bytes, tensors_of(source)))
            change[place_of[source] + 1] += size
            change[end + 1] -= size
    return list(accumulate(change))


def by_layer(order: Sequence[fx.Node], window: Sequence[MicroBatch], layer_of: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the nodes of a graph, with the micro-batches of a window interleaved layer by layer.

    In the last layer, the backward of each micro-batch follows its forward, so that one loss at a time is alive.
    Accesses to the same memory keep their order if one of them writes.

    Args:
        order: all nodes of the graph.
        window: the micro-batches.
        layer_of: layer of each of their nodes.
    """
    last = max(layer_of.values())
    keys: dict[fx.Node, Key] = {}
    for number, one in enumerate(window):
        for forward, part in ((True, one.forward), (False, one.backward())):
            for node in part:
                layer = layer_of[node]
                if layer == last:
                    keys[node] = (2, 0, number)
                else:
                    keys[node] = (1, layer, number) if forward else (3, -layer, number)
    begin = order.index(window[0].forward[0])
    return _sorted(order, [keys.get(node, (0,) if place < begin else (4,)) for place, node in enumerate(order)])


def _sorted(order: Sequence[fx.Node], keys: Sequence[Key]) -> list[fx.Node]:
    """Return nodes in the order of their keys, as far as their inputs and the memory that they share allow."""
    place_of = {node: place for place, node in enumerate(order)}
    ahead = hazards(order)
    users: list[list[int]] = [[] for _ in order]
    missing: list[int] = []
    for place, node in enumerate(order):
        needs = {*node.all_input_nodes, *(one for one in ahead.get(node, ()) if not _may_swap(one, node))}
        missing.append(len(needs))
        for source in needs:
            users[place_of[source]].append(place)
    ready = [(keys[place], place) for place, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    placed: list[fx.Node] = []
    while ready:
        _, place = heapq.heappop(ready)
        placed.append(order[place])
        for user in users[place]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], user))
    return placed


def _may_swap(earlier: fx.Node, node: fx.Node) -> bool:
    """Whether two nodes are ordered only because they might act outside of the graph, and neither draws a number.

    The model's own collectives may swap because all ranks swap them.
    """
    return all(nodes.is_collective(one) or traits.has_zero_dropout(one) for one in (earlier, node))


def drawn_in_another_order(window: Sequence[MicroBatch], layer_of: Mapping[fx.Node, int]) -> fx.Node | None:
    """Return a node that would draw random numbers in another order if micro-batches ran layer by layer, or None.

    Draws before the first parameter is read, such as the noise of a diffusion model, keep their order.
    """
    for one in window:
        for node in (*one.forward, *one.backward()):
            if traits.is_random(node) and not traits.has_zero_dropout(node) and layer_of[node]:
                return node
    return None


def reductions_by_parameter(window: Iterable[MicroBatch]) -> list[list[fx.Node]]:
    """Return the reductions of a window, in one list for each parameter, in program order."""
    found: dict[ReduceArgs, list[fx.Node]] = {}
    for node in (node for one in window for node in one.reductions()):
        args = ReduceArgs.of(node)
        found.setdefault(replace(args, grad=args.handle, window=ALONE), []).append(node)
    return list(found.values())
