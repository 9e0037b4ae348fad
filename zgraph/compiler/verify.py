"""Graph invariants, one function each, which the pass list checks after every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from zgraph.analysis.hazards import Regions
from zgraph.compiler.graph_pass import Direction, Fact
from zgraph.errors import VerifyError
from zgraph.graph import dataflow, meta, nodes, operator_arguments, traits
from zgraph.graph.text import neighbourhood
from zgraph.tiers.tier import is_offloaded
from zgraph.torch_compat.operators import is_higher_order, overwritten, written_arguments


@dataclass(frozen=True)
class Snapshot:
    """A graph's nodes, inputs and outputs before a pass, to find what the pass has changed."""

    calls: dict[fx.Node, tuple[Any, Any, Any]]
    values: dict[fx.Node, Any]
    placeholders: tuple[str, ...]
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> Snapshot:
        return cls(
            {node: (node.target, node.args, node.kwargs) for node in graph.nodes},
            {node: meta.value(node) for node in graph.nodes},
            tuple(node.name for node in graph.nodes if node.op == "placeholder"),
            tuple(meta.value(out) if isinstance(out, fx.Node) else out for out in nodes.returned_by(graph)),
        )

    def same_calls(self, graph: fx.Graph) -> bool:
        """Return whether the graph still makes the same calls in the same order."""
        return len(self.calls) == len(graph.nodes) and all(
            node is known and call == (node.target, node.args, node.kwargs)
            for node, (known, call) in zip(graph.nodes, self.calls.items(), strict=True)
        )

    def changed(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Yield the nodes that are new, or whose call, fake value or inputs' fake values have changed."""
        for node in graph.nodes:
            if self.calls.get(node) != (node.target, node.args, node.kwargs) or any(
                meta.value(known) is not self.values.get(known, meta.value(known))
                for known in (node, *node.all_input_nodes)
            ):
                yield node


@dataclass(frozen=True, kw_only=True)
class Where:
    """The pass and graph direction to name in an error message."""

    pass_name: str
    direction: Direction

    def error(self, text: str, node: fx.Node | None = None) -> VerifyError:
        shown = f"\n{neighbourhood(node)}" if node is not None else ""
        return VerifyError(f"{self.pass_name} on the {self.direction} graph: {text}{shown}")


def verify(
    graph: fx.Graph,
    before: Snapshot,
    facts: Iterable[str],
    where: Where,
    *,
    user_outputs: int | None = None,
) -> None:
    """Check all invariants of a graph after a pass.

    Args:
        graph: the graph after the pass.
        before: snapshot of the graph before the pass.
        facts: facts that hold after the pass.
        where: pass and direction, for error texts.
        user_outputs: for a forward graph, number of outputs that the user receives; the others are saved for backward.

    Raises:
        VerifyError: the first broken invariant, with the nodes around it.
    """
    check_lint(graph, where)
    check_interface(graph, before, where)
    check_values((node for node in before.changed(graph) if not meta.take_evaluation(node)), where)
    check_collectives_waited(graph, where)
    check_buffers_untouched(graph, where)
    check_stores_landed(graph, where)
    known = frozenset(facts)
    if Fact.LIFETIMES_CHOSEN in known and user_outputs is not None:
        check_gathers_released(graph, user_outputs, where)
    if Fact.LIFETIMES_CHOSEN in known and where.direction == "step":
        check_parts_gather(graph, where)
    for fact, check in ((Fact.GATHERS_LOWERED, nodes.is_unshard), (Fact.REDUCTIONS_LOWERED, nodes.is_reduce_grad)):
        if fact in known:
            check_absent(graph, fact, check, where)
    if Fact.WAITS_SUNK in known:
        check_waits_sunk(graph, where)


def check_lint(graph: fx.Graph, where: Where) -> None:
    """Check that every node is defined before it is used."""
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise where.error(f"the graph is malformed: {error}") from error


def check_interface(graph: fx.Graph, before: Snapshot, where: Where) -> None:
    """Check that a pass kept the names of inputs, and the number, shapes, dtypes and devices of outputs."""
    placeholders = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    if placeholders != before.placeholders:
        raise where.error(f"the inputs changed from {before.placeholders} to {placeholders}; keep every placeholder.")
    outputs = nodes.returned_by(graph)
    if len(outputs) != len(before.outputs):
        raise where.error(f"the graph returned {len(before.outputs)} values and now returns {len(outputs)}; keep them.")
    for position, (out, expected) in enumerate(zip(outputs, before.outputs, strict=True)):
        found = meta.value(out) if isinstance(out, fx.Node) else out
        moved = isinstance(out, fx.Node) and is_offloaded(meta.space(out))  # its reader copies it back
        if isinstance(expected, torch.Tensor) and not moved and not _same_output(expected, found):
            raise where.error(
                f"output {position} was {_shown(expected)} and is now {_shown(found)}; outputs keep shape and dtype.",
                out if isinstance(out, fx.Node) else None,
            )


def check_values(changed: Iterable[fx.Node], where: Where) -> None:
    """Check that each node's recorded value equals the result of its call on fake inputs."""
    for node in changed:
        if node.op != "call_function" or is_higher_order(node.target):  # inner graphs have no value to replay
            continue
        recorded = meta.value(node)
        try:
            found = meta.evaluate(node)
        except KeyError as missing:
            raise where.error(
                f"{node.name} reads {missing.args[0]}, which has no fake value; create nodes with "
                "zgraph.graph.meta.create.",
                node,
            ) from None
        except Exception as error:
            raise where.error(f"{node.name} cannot run on the fake values of its inputs: {error}", node) from error
        if not meta.same_layout(recorded, found):
            raise where.error(
                f"{node.name} yields {_shown(found)}, but its meta says {_shown(recorded)}; create nodes with "
                "zgraph.graph.meta.create, or set the value after changing arguments.",
                node,
            )


def check_collectives_waited(graph: fx.Graph, where: Where) -> None:
    """Check that only a wait reads the result of a collective's start."""
    for node in nodes.call_functions(graph, nodes.is_start):
        if not node.users:
            raise where.error(f"{node.name} is started and never waited for; erase it or add its wait.", node)
        for user in node.users:
            if not nodes.is_wait(user) and not (
                user.users and all(map(nodes.is_wait, user.users))
            ):  # of a coalesced collective
                raise where.error(f"{node.name} has no wait before {user.name} reads it; read its wait instead.", user)


def check_buffers_untouched(graph: fx.Graph, where: Where) -> None:
    """Check that no node writes to a buffer that a collective in flight still reads or fills."""
    if not any(nodes.call_functions(graph, nodes.is_start)):
        return
    in_flight: dict[fx.Node, list[fx.Node]] = {}
    regions: Regions | None = None  # computed only if needed to tell memory apart
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for written in written_arguments(node):
            for start, buffers in in_flight.items():
                if _buffer_of(written) in buffers and (regions := regions or Regions(list(graph.nodes))).overlap(
                    written, [start, *start.all_input_nodes]
                ):
                    raise where.error(
                        f"{node.name} writes to {written.name} while {start.name} is in flight; put {node.name} after "
                        f"the wait of {start.name}.",
                        node,
                    )
        if nodes.is_start(node):
            in_flight[node] = [node, *map(_buffer_of, node.all_input_nodes)]
        elif nodes.is_wait(node):
            # Through the getitem of a coalesced collective, whose members arrive together.
            in_flight.pop(_buffer_of(cast(fx.Node, node.args[0])), None)


def check_stores_landed(graph: fx.Graph, where: Where) -> None:
    """Check that no node reads a tensor while a copy in flight, or an update concurrent with compute, writes to it."""

    def fills(node: fx.Node) -> bool:
        return nodes.is_copy_start(node) or meta.beside(node) is not None

    if not any(nodes.call_functions(graph, fills)):
        return
    filled: dict[fx.Node, fx.Node] = {}  # the copy or update that fills each buffer
    regions: Regions | None = None  # computed only if needed to tell memory apart
    for node in graph.nodes:
        if nodes.is_copy_wait(node):
            filled = {buffer: start for buffer, start in filled.items() if start is not nodes.start_of(node)}
        elif nodes.is_update_wait(node):
            number = meta.beside(node)
            filled = {buffer: start for buffer, start in filled.items() if meta.beside(start) != number}
        elif node.op == "call_function":
            for source in () if traits.is_view(node) else node.all_input_nodes:  # a view's readers are checked
                start = filled.get(_buffer_of(source))
                if start is None or not (regions := regions or Regions(list(graph.nodes))).overlap(
                    source, overwritten(start)
                ):
                    continue
                raise where.error(
                    f"{node.name} reads what {start.name} is writing to; put {node.name} after the wait of "
                    f"{start.name}.",
                    node,
                )
            if fills(node):
                filled |= {_buffer_of(kept): node for kept in overwritten(node)}


def check_gathers_released(graph: fx.Graph, user_outputs: int, where: Where) -> None:
    """Check that forward saves no gathered parameter for backward unless its lifetime allows this.

    A parameter that the user receives as an output may also be saved, because it stays alive anyway.
    """
    outputs = nodes.returned_by(graph)
    kept = [_source_gather(out) for out in outputs[:user_outputs] if isinstance(out, fx.Node)]
    for out in outputs[user_outputs:]:
        if not isinstance(out, fx.Node):
            continue
        source = _source_gather(out)
        if source is not None and source not in kept:
            raise where.error(
                f"{out.name} saves the gathered {', '.join(meta.parameters(source))} for backward; put "
                "choose_lifetimes before the partition and keep its recompute tags.",
                out,
            )


def check_parts_gather(graph: fx.Graph, where: Where) -> None:
    """Check that no part of a whole step reads another part's gathered parameter, unless its lifetime allows this."""
    for node in nodes.call_functions(graph, lambda node: meta.part(node) is not None):
        for read in node.all_input_nodes:
            source = _source_gather(read) if meta.part(read) != meta.part(node) else None
            if source is None or meta.part(source) in (None, meta.part(node)):
                continue
            if nodes.is_unshard(source) or dataflow.copy_in(source) is not None:  # the others gather means
                raise where.error(
                    f"{node.name} reads the gathered {', '.join(meta.parameters(source))} of an earlier forward or "
                    "backward, which would keep it alive; let it read a gather of its own, as choose_lifetimes does.",
                    node,
                )


def check_absent(graph: fx.Graph, fact: str, predicate: Any, where: Where) -> None:
    """Check that `predicate` holds for no node of the graph; `fact` promises that all such nodes are lowered."""
    left = next(nodes.call_functions(graph, predicate), None)
    if left is not None:
        raise where.error(f"{left.name} is still there although {fact} was promised.", left)


def check_waits_sunk(graph: fx.Graph, where: Where) -> None:
    """Check that no compute that could hide a gather runs between the gather's wait and its first user.

    A write to the memory that the gather sends counts as a user, because it must come after the wait.
    """
    order = nodes.order_of(graph)
    regions: Regions | None = None  # computed only if needed to tell memory apart
    for wait in nodes.call_functions(graph, nodes.is_wait):
        start = nodes.start_of(wait)
        readers = [user for result in nodes.results_of(wait) for user in result.users]
        user = min(readers, key=order.__getitem__, default=None)
        if user is None or not nodes.is_gather(start):
            continue
        between = wait.next
        while between is not user:
            if between.op == "call_function" and not nodes.is_communication(between):
                written = written_arguments(between)
                regions = regions or (Regions(list(graph.nodes)) if written else None)
                if any(regions.overlap(one, start.all_input_nodes) for one in written if regions is not None):
                    break
                raise where.error(f"{wait.name} waits before {between.name}, which does not need it.", wait)
            between = between.next


def _source_gather(node: fx.Node) -> fx.Node | None:
    """Return the gather whose result a node views, casts or copies; None if there is none that must be released."""
    while True:
        if nodes.is_unshard(node):
            return (
                node
                if operator_arguments.UnshardArgs.of(node).layout.is_sharded and not meta.is_tagged_saved(node)
                else None
            )
        if nodes.is_wait(node):
            start = nodes.start_of(node)
            releases = nodes.is_gather(start) and meta.parameters(start) and not meta.is_tagged_saved(start)
            return start if releases else None
        if not traits.is_reshaping(node) or not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]


def _buffer_of(node: fx.Node) -> fx.Node:
    """Return the node at the base of a chain of views that ends with `node`; `node` itself if it is not a view."""
    while node.args and isinstance(node.args[0], fx.Node):
        if not (traits.is_view(node) or nodes.is_getitem(node)):
            break
        node = node.args[0]
    return node


def _same_output(expected: torch.Tensor, found: object) -> bool:
    # The layout of a gradient may differ (a bucket's slice), its shape and type may not.
    return isinstance(found, torch.Tensor) and (str(expected.shape), expected.dtype, expected.device) == (
        str(found.shape),
        found.dtype,
        found.device,
    )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"
    return type(value).__name__
