"""The report of one compiled graph: what it communicates, holds and takes; the graph itself is not kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from zgraph.analysis.liveness import MemoryCurve, memory_curve, owned_inputs
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.graph import nodes
from zgraph.graph.traffic import Transfer, transfers_of
from zgraph.reporting.lifetimes import Lifetime, lifetimes_of
from zgraph.scheduling.exposure import why_exposed
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline

_log = logging.getLogger(__name__)
LARGEST = 3  # storages that are named at the peak


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One start of a graph, or a marker that was not lowered.

    Attributes:
        name: of the node.
        transfers: one; of a marker those of its kernel, and of a coalesced one of the model's own all in one.
        us: predicted from its start to its result, and
        exposed_us: how long of it compute waits; None: without costs.
        reason: why it is exposed; "" where it is not.
    """

    name: str
    transfers: tuple[Transfer, ...]
    us: float | None = None
    exposed_us: float | None = None
    reason: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.transfers[0].parameters

    @property
    def sent_bytes(self) -> int:
        return sum(transfer.sent_bytes for transfer in self.transfers)

    @property
    def received_bytes(self) -> int:
        return sum(transfer.received_bytes for transfer in self.transfers)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Where a graph holds most, beside what somebody else holds.

    Attributes:
        bytes: of its inputs those are counted that it lets die: in backward what forward has saved, and tangents.
        node: that runs there.
        largest: names and bytes of the largest storages alive there.
        unknown: nodes whose size only the data tells, counted as 0.
    """

    bytes: int
    node: str
    largest: tuple[tuple[str, int], ...]
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, curve: MemoryCurve) -> Peak:
        alive = curve.alive_at(curve.peak_position)[:LARGEST]
        node = curve.nodes[curve.peak_position].name if curve.nodes else ""
        return cls(
            bytes=curve.peak_bytes,
            node=node,
            largest=tuple((entry.node.name, entry.bytes) for entry in alive),
            unknown=curve.unknown,
        )


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        frame: Dynamo's "frame/recompile".
        direction: "forward", "backward" or "inference".
        nodes: of the final graph.
        transfers: its collectives in program order.
        reason: the guard that failed, if the frame was compiled before; "" where Dynamo does not say.
        lifetimes: of every parameter that the frame reads; the same in its forward and backward.
        collectives: the transfers by node, with what is predicted of them.
        us: predicted for one call; None: the pipeline was given no hardware.
        peak: predicted; None where it could not be.
        owned: positions of the inputs that die inside.
    """

    frame: str
    direction: Direction
    nodes: int
    transfers: tuple[Transfer, ...]
    reason: str = ""
    lifetimes: Mapping[str, Lifetime] = field(default_factory=dict[str, Lifetime])
    collectives: tuple[Collective, ...] = ()
    us: float | None = None
    peak: Peak | None = None
    owned: tuple[int, ...] = ()

    @property
    def buckets(self) -> int:
        """How many collectives carry several parameters at once."""
        return sum(len(transfer.parameters) > 1 for transfer in self.transfers)

    @property
    def sent_bytes(self) -> int:
        """What this rank sends when the graph runs once."""
        return sum(transfer.sent_bytes for transfer in self.transfers)

    @property
    def received_bytes(self) -> int:
        return sum(transfer.received_bytes for transfer in self.transfers)

    @property
    def exposed_us(self) -> float | None:
        """For how long compute is predicted to wait; None as `us`."""
        return None if self.us is None else sum(each.exposed_us or 0.0 for each in self.collectives)


def describe(
    graphs: Mapping[Direction, fx.Graph], ctx: PassContext, *, frame: str, parameters: tuple[str, ...], reason: str
) -> list[GraphReport]:
    """The reports of a frame's final graphs.

    Curves and, where there are costs, the simulation are made at once, for 60 to 100 us a node, 2 to 4 % of a compile
    without Inductor: to make them when somebody asks, graphs would have to be kept.
    """
    lifetimes = lifetimes_of(graphs, parameters, ctx.user_outputs)
    return [_describe(direction, graphs, ctx, frame, lifetimes, reason) for direction in graphs]


def _describe(
    direction: Direction,
    graphs: Mapping[Direction, fx.Graph],
    ctx: PassContext,
    frame: str,
    lifetimes: Mapping[str, Lifetime],
    reason: str,
) -> GraphReport:
    graph = graphs[direction]
    inputs = graph.find_nodes(op="placeholder")
    owned: list[fx.Node] = []
    peak = timeline = None
    try:
        if direction == "backward" and "forward" in graphs and ctx.user_outputs is not None:
            owned = owned_inputs(graphs["forward"], graph, user_outputs=ctx.user_outputs)
        peak = Peak.of(memory_curve(graph, owned=owned, threads=torch.get_num_threads()))
        if ctx.cost_of is not None:
            costs = {node: ctx.cost_of(node) for node in nodes.call_functions(graph, lambda _: True)}
            timeline = simulate(list(graph.nodes), costs, ctx.sharing)
    except Exception:  # a report must not be what fails a compile
        _log.warning("zgraph: no prediction for the %s graph of frame %s", direction, frame, exc_info=True)
    collectives = tuple(_collectives(graph, timeline, ctx))
    return GraphReport(
        frame=frame,
        direction=direction,
        nodes=len(graph.nodes),
        transfers=tuple(transfer for each in collectives for transfer in each.transfers),
        reason=reason,
        lifetimes=lifetimes,
        collectives=collectives,
        us=None if timeline is None else timeline.step_us,
        peak=peak,
        owned=tuple(position for position, node in enumerate(inputs) if node in owned),
    )


def _collectives(graph: fx.Graph, timeline: Timeline | None, ctx: PassContext) -> list[Collective]:
    order = list(graph.nodes)
    found: list[Collective] = []
    for node in nodes.call_functions(graph, lambda node: nodes.is_start(node) or nodes.is_marker(node)):
        sent = tuple(transfers_of(node))
        if not sent:
            continue
        if timeline is None:
            found.append(Collective(name=node.name, transfers=sent))
            continue
        exposed_us = timeline.exposed_us.get(node, 0.0)
        reason = why_exposed(node, order, timeline, ctx.limits) if exposed_us else ""
        us = timeline.spans[node].us
        found.append(Collective(name=node.name, transfers=sent, us=us, exposed_us=exposed_us, reason=reason))
    return found
