"""The model of a step whose forward and backward become two graphs: what forward saves, what backward recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.graph import meta, nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.scheduling.lifetimes.lifetime_model import Choice, HostLinks, LifetimeModel, StepEstimate, Value
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.aot import is_tangent, mutated_inputs
from zgraph.torch_compat.operators import written_arguments


class PartitionedModel(LifetimeModel):
    """The model of a training step whose joint graph will be split into a forward and a backward graph.

    Forward runs in the order of the joint graph. Backward runs in the order of torch's partitioner, in which a
    recomputed node runs just before its first reader.

    Args:
        joint: forward and backward in one graph.
        forward, backward: the two graphs of a split that saves all values that may be saved, but no gathered parameter.
        user_outputs: number of outputs that the user receives.
        cost_of: cost of each call of the joint graph.
        sharing: how lanes share links and compute.
        copies: links to the host and back; None: nothing is offloaded.
    """

    def __init__(
        self,
        joint: fx.Graph,
        forward: fx.Graph,
        backward: fx.Graph,
        *,
        user_outputs: int,
        cost_of: Callable[[fx.Node], NodeCost],
        sharing: Sharing,
        copies: HostLinks | None = None,
    ) -> None:
        known = {node.name: node for node in joint.nodes}
        calls = {name: node for name, node in known.items() if node.op == "call_function"}
        super().__init__(joint, cost_of=cost_of, sharing=sharing, copies=copies)
        self.forward = [calls[node.name] for node in forward.nodes if node.name in calls]
        in_forward = dict.fromkeys(self.forward)
        in_backward = [calls[node.name] for node in backward.nodes if node.name in calls]
        self.base_recomputed = [node for node in in_backward if node in in_forward]
        backward_only = set(in_backward) - set(in_forward)
        self.backward = _from_first_tangent([node for node in calls.values() if node in backward_only])
        self.part = dict.fromkeys(calls.values(), 0) | dict.fromkeys(self.backward, 1)
        outputs = enumerate(nodes.returned_by(joint))
        self.returned = [(node, int(place >= user_outputs)) for place, node in outputs if isinstance(node, fx.Node)]
        self.user_outputs = [node for node, part in self.returned if part == 0]
        self.mutated = dict.fromkeys(mutated_inputs(joint))
        self.required = _ancestors(self.user_outputs, self.forward)
        saved = [known[node.name] for node in nodes.returned_by(forward)[user_outputs:] if node is not None]
        # A saved view is replaced by its base, which needs no more memory and serves all readers.
        self.saved = list(dict.fromkeys(self._base_of(node, self.placed.lies_in) for node in saved))
        self.values = [*self._parameters(), *self._activations()]

    # --- what can be saved

    def _base_of(self, node: fx.Node, lies_in: Mapping[fx.Node, tuple[int, ...]]) -> fx.Node:
        while node.op == "call_function" and not nodes.is_getitem(node) and not meta.is_tagged_by_others(node):
            source = next(iter(self.reads[node]), None)
            if source is None or not lies_in[node] or lies_in[source] != lies_in[node]:
                break
            node = source
        return node

    def _parameters(self) -> Iterator[Value]:
        """Yield a value for each gathered parameter that both forward and backward read.

        The value is the parameter's cast if all readers cast it.
        """
        recomputed = dict.fromkeys(self.base_recomputed)
        for gather in self.base_recomputed:
            if nodes.is_unshard(gather) and UnshardArgs.of(gather).layout.zero_stage == 3 and gather in self.required:
                kept = gather
                while len(kept.users) == 1 and traits.cast_dtype(user := next(iter(kept.users))) and user in recomputed:
                    kept = user
                if self.lies_in[kept]:  # on a single rank nothing is gathered
                    yield Value((kept,), gather)

    def _activations(self) -> Iterator[Value]:
        """Yield a value for each storage of saved activations, without those that an output of the user keeps alive."""
        held = {*self.storages_of(self.user_outputs)}
        by_storage: dict[tuple[int, ...], list[fx.Node]] = {}
        for node in self.saved:
            places = self.lies_in.get(node, ())
            if node.op == "call_function" and places and not held & set(places):
                by_storage.setdefault(places, []).append(node)
        for members in by_storage.values():
            if not any(meta.is_tagged_by_others(node) or nodes.is_unshard(node) for node in members):
                yield Value(tuple(members))

    def base_of(self, value: Value) -> fx.Node | None:
        return value.nodes[0] if value.gather is None and len(value.nodes) == 1 else None

    # --- one step

    def choice(self, dropped: Mapping[Value, None]) -> Choice:
        unsaved = {node for value in dropped for node in value.nodes}
        kept = [value for value in self.values if value not in dropped]
        saved = [node for node in self.saved if node not in unsaved]
        saved += [node for value in kept if value.gather is not None for node in value.nodes]
        needed = _ancestors([*self.user_outputs, *saved], self.forward)
        forward = [node for node in self.forward if node in needed or written_arguments(node)]
        return Choice([*forward, *self.backward], self.recomputed({*saved}.__contains__), tuple(saved))

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        available = {*estimate.saved, *estimate.recomputed} - {*value.nodes}
        found: dict[fx.Node, None] = {}
        pending = list(value.nodes)
        while pending:
            node = pending.pop()
            if node in found or node in available:
                continue
            if node in self.mutated:
                return None
            if node.op == "call_function":
                if meta.is_tagged_by_others(node) or not traits.is_repeatable(node):
                    return None
                found[node] = None
                pending.extend(self.reads[node])
        return list(found)


def _ancestors(ends: Iterable[fx.Node], order: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The given nodes and all nodes of a program that they depend on."""
    needed = dict.fromkeys(ends)
    for node in reversed(order):
        if node in needed:
            needed |= dict.fromkeys(node.all_input_nodes)
    return needed


def _from_first_tangent(calls: list[fx.Node]) -> list[fx.Node]:
    """Drop the calls before the first reader of a tangent: each of them will run just before its own first reader."""
    first = next(
        (position for position, node in enumerate(calls) if any(map(is_tangent, node.all_input_nodes))),
        0,
    )
    return calls[first:]
