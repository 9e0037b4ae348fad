"""The model of a whole training step in one graph: what each backward recomputes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.graph import dataflow, nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.scheduling.lifetimes.lifetime_model import Choice, HostLinks, LifetimeModel, StepEstimate, Value
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.operators import written_arguments


class WholeStepModel(LifetimeModel):
    """A whole step: any number of forwards and backwards in one graph, then the optimizer.

    A value is a storage that one forward makes and that only this forward and its backward read. If the value is
    dropped, its backward recomputes it just before the first reader, from storages that are alive there. Casts of
    replicated parameters are always dropped, because their gathers are free.

    Args:
        graph: graph of the step, whose nodes record which forward or backward they belong to; it is not changed.
        cost_of: cost of each call.
        sharing: how lanes share links and compute.
        copies: links to the host and back; None: nothing is offloaded.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        cost_of: Callable[[fx.Node], NodeCost],
        sharing: Sharing,
        copies: HostLinks | None = None,
    ) -> None:
        super().__init__(graph, cost_of=cost_of, sharing=sharing, copies=copies)
        self.calls = list(self.costs)
        self.part = dataflow.parts_of(graph)
        self.backward = [node for node in self.calls if self.part[node] % 2]
        returned = [node for node in nodes.returned_by(graph) if isinstance(node, fx.Node)]
        self.returned = [(node, self.part[node]) for node in returned if node in self.part]
        self.effects = {node for node in self.calls if written_arguments(node) or node.is_impure()}
        self.spoiled = self._spoiled()
        self.crossing = self._crossing()
        self.gathered_once = self._gathered_once(graph)
        gathers = self._gathers(graph)
        values = [Value(tuple(found), gathers.get(number)) for number, found in self._candidates()]
        replicated = [value for value in values if value.gather is not None and _stage(value.gather) == 0]
        self.always = dict.fromkeys(replicated)
        self.values = [value for value in values if value not in self.always]
        self.required = self._required()
        self._asked: tuple[StepEstimate, frozenset[int], set[fx.Node]] | None = None

    # --- what can be dropped

    def _spoiled(self) -> set[fx.Node]:
        """Nodes whose memory is overwritten before the last backward ends. Later readers would see other data."""
        last = max((place for place, node in enumerate(self.calls) if self.part[node] % 2), default=-1)
        places = self.placed.lies_in
        written = {
            number for node in self.calls[: last + 1] for target in written_arguments(node) for number in places[target]
        }
        return {node for node, numbers in places.items() if written & {*numbers}}

    def _crossing(self) -> dict[int, dict[fx.Node, None]]:
        """For each storage, those of its nodes that a forward makes and the backward of the same forward reads."""
        found: dict[int, dict[fx.Node, None]] = {}
        for node in self.backward:
            for source in self.reads[node]:
                if source.op == "call_function" and self.part[source] == self.part[node] - 1:
                    for number in self.lies_in[source]:
                        found.setdefault(number, {})[source] = None
        return found

    def _candidates(self) -> Iterator[tuple[int, list[fx.Node]]]:
        for number, found in self.crossing.items():
            storage = self.placed.storages[number]
            if storage.outlives or storage.first.op != "call_function":
                continue
            forward = self.part[storage.first]
            readers = {self.part.get(reader) for reader in storage.readers}  # the output has no part
            if readers <= {forward, forward + 1} and all(self.lies_in[node] == (number,) for node in found):
                yield number, list(found)

    def _gathers(self, graph: fx.Graph) -> dict[int, fx.Node]:
        """Gathers of stages 0 and 3, keyed by the storages of a gather's result, and of its views, casts and copies."""
        found: dict[int, fx.Node] = {}
        for marker in nodes.call_functions(graph, nodes.is_unshard):
            if _stage(marker) in (0, 3):
                for node in dataflow.reshaped_values(marker):
                    found |= dict.fromkeys(self.lies_in[node], marker)
        return found

    def _required(self) -> dict[fx.Node, None]:
        """Nodes that forwards always run: for the user, for later parts, and for values that cannot be recomputed."""
        fixed = {node for found in self.crossing.values() for node in found}
        fixed -= {node for value in (*self.values, *self.always) for node in value.nodes}
        needed = dict.fromkeys([*(node for node, _ in self.returned), *fixed, *self.effects])
        for node in reversed(self.calls):
            if node in needed:
                needed |= dict.fromkeys(source for source in self.reads[node] if self._may_need(node, source))
        return needed

    def _may_need(self, node: fx.Node, source: fx.Node) -> bool:
        return source.op == "call_function" and self.part[source] % 2 == 0 and self.part[node] % 2 == 0

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        forward = self.part[value.nodes[0]]
        if self._asked is None or self._asked[0] is not estimate:  # one estimate is asked about many values
            self._asked = estimate, self._gone(estimate.dropped), {*estimate.recomputed}
        _, kept_away, again = self._asked
        gone = kept_away | self.numbers_of([value])
        found: dict[fx.Node, None] = {}
        pending = list(value.nodes)
        while pending:
            node = pending.pop()
            if node in found or node in again:
                continue
            if node in self.spoiled:
                return None
            if node.op != "call_function" or self.is_alive(node, gone, forward):
                continue
            if self.part[node] != forward or not traits.is_repeatable(node):
                return None
            found[node] = None
            pending.extend(self.reads[node])
        return list(found)

    def is_alive(self, node: fx.Node, gone: Collection[int], forward: int) -> bool:
        """Whether a node is alive in the backward of part `forward` if that backward lacks the storages `gone`."""
        own = self.crossing if self.part[node] == forward else ()
        return all(
            number in self.gathered_once or (number in own and number not in gone) for number in self.lies_in[node]
        )

    def _gathered_once(self, graph: fx.Graph) -> set[int]:
        """Storages of gathered parameters of stages 1 and 2, which live until their last reader."""
        markers = nodes.call_functions(graph, nodes.is_unshard)
        return {*self.storages_of(marker for marker in markers if _stage(marker) in (1, 2))}

    def base_of(self, value: Value) -> fx.Node | None:
        """The node to offload for a value: the base of all views that backward reads. None: it cannot be offloaded."""
        if value.gather is not None or any(node in self.spoiled for node in value.nodes):
            return None
        (base, *others) = dict.fromkeys(map(self._without_views, value.nodes))
        return None if others or traits.is_view(base) else base

    def _without_views(self, node: fx.Node) -> fx.Node:
        while traits.is_view(node) and self.lies_in[source := self.reads[node][0]] == self.lies_in[node]:
            node = source
        return node

    def _gone(self, dropped: Mapping[Value, None]) -> frozenset[int]:
        return self.numbers_of((*dropped, *self.always))

    # --- one step

    def choice(self, dropped: Mapping[Value, None]) -> Choice:
        gone = self._gone(dropped)
        again = self.recomputed(lambda node: self.is_alive(node, gone, self.part[node]))
        unread: set[fx.Node] = set()  # because backward reads the recomputed copies
        copied = {node for found in again.values() for node in found}
        for node in sorted(copied, key=self.order.__getitem__, reverse=True):
            if all(user in unread or self.part.get(user) == self.part[node] + 1 for user in node.users):
                unread.add(node)
        return Choice([node for node in self.calls if node not in unread], again)


def _stage(marker: fx.Node) -> int:
    return UnshardArgs.of(marker).layout.zero_stage
