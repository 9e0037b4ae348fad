"""The report of one compiled graph: its communication, memory and time, as plain data without the graph itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import MemoryCurve, memory_curve, owned_inputs
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.memory_ledger import SpaceUse, ledger_of
from zgraph.graph import meta, nodes
from zgraph.graph.sizes import tensor_bytes
from zgraph.graph.traffic import Transfer, transfers_of
from zgraph.reporting.lifetimes import Lifetime, lifetimes_of
from zgraph.reporting.network import network_of
from zgraph.scheduling.exposure import why_exposed
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline
from zgraph.tiers.lanes import HOST_UPDATES
from zgraph.tiers.tier import DEVICE, listed
from zgraph.torch_compat.operators import written_arguments

if TYPE_CHECKING:
    import networkx

_log = logging.getLogger(__name__)
LARGEST = 3  # storages named at the peak


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A node that communicates: the start of a collective, or an unshard or reduce_grad marker that runs collectives.

    Attributes:
        name: name of the node.
        transfers: collectives that the node runs; usually one, but several for a marker or for a coalesced collective
            of the model's own.
        us: predicted time from the start to the result; None without costs.
        exposed_us: predicted time for which compute waits for the collective; None without costs.
        reason: why the collective is exposed; "" if it is not.
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
    """Predicted peak memory of a graph by itself; memory that is allocated outside of the graph does not count.

    Attributes:
        bytes: bytes at the peak. Inputs count only if the graph frees them; backward frees saved values and the
            gradients of the forward's outputs.
        node: name of the node that runs at the peak.
        largest: name and bytes of each of the largest storages alive at the peak.
        unknown: names of nodes whose size depends on data; they count as 0 bytes.
        elsewhere: name and peak bytes of each memory space other than the device, including bytes stored there between
            calls.
    """

    bytes: int
    node: str
    largest: tuple[tuple[str, int], ...]
    unknown: tuple[str, ...] = ()
    elsewhere: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, curve: MemoryCurve) -> Peak:
        alive = curve.alive_at(curve.peak_position)[:LARGEST]
        node = curve.nodes[curve.peak_position].name if curve.nodes else ""
        names = listed(entry.space for entry in curve.ranges)
        return cls(
            bytes=curve.peak_bytes,
            node=node,
            largest=tuple((entry.node.name, entry.bytes) for entry in alive),
            unknown=curve.unknown,
            elsewhere=tuple((name, curve.peak_in(name)) for name in names if name != DEVICE.name),
        )


@dataclass(frozen=True, kw_only=True)
class LaneCopies:
    """Totals of one lane of a graph, which has either copies between memory spaces or optimizer updates on the host.

    Attributes:
        lane: name of the lane, such as "device_to_host" or "host_updates".
        count: number of copies or updates.
        bytes: bytes that are copied, or that the updates write.
        us: predicted total time on the lane; None without costs.
        exposed_us: predicted time for which compute waits for the lane; None without costs.
    """

    lane: str
    count: int
    bytes: int
    us: float | None = None
    exposed_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """Report on one compiled graph.

    Attributes:
        frame: Dynamo's number of the frame and of its recompile, such as "0/1".
        direction: "forward", "backward", "inference" or "step".
        nodes: number of nodes of the final graph.
        transfers: collectives of the graph, in program order.
        reason: guard whose failure caused a recompile; "" if there was none, or Dynamo does not name it.
        lifetimes: lifetime of every parameter that the frame reads; the same for its forward and backward.
        collectives: collectives with predictions, one entry per node.
        copies: copies between memory spaces, by lane.
        decisions: choices that passes made by costs, such as where optimizer updates run.
        us: predicted time of one call in microseconds; None: the pipeline has no target.
        peak: predicted peak memory; None: not predictable.
        ledger: bytes of a rank in each memory space; () unless the graph is a whole step.
        owned: positions of the inputs that the graph frees.
        network: the graph, converted by `zgraph.graph_of`; None unless the report keeps graphs.
    """

    frame: str
    direction: Direction
    nodes: int
    transfers: tuple[Transfer, ...]
    reason: str = ""
    lifetimes: Mapping[str, Lifetime] = field(default_factory=dict[str, Lifetime])
    collectives: tuple[Collective, ...] = ()
    copies: tuple[LaneCopies, ...] = ()
    decisions: tuple[str, ...] = ()
    us: float | None = None
    peak: Peak | None = None
    ledger: tuple[SpaceUse, ...] = ()
    owned: tuple[int, ...] = ()
    network: networkx.DiGraph[str] | None = field(default=None, repr=False, compare=False)

    @property
    def buckets(self) -> int:
        """Number of collectives that carry several parameters."""
        return sum(len(transfer.parameters) > 1 for transfer in self.transfers)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends when the graph runs once."""
        return sum(transfer.sent_bytes for transfer in self.transfers)

    @property
    def received_bytes(self) -> int:
        return sum(transfer.received_bytes for transfer in self.transfers)

    @property
    def exposed_us(self) -> float | None:
        """Predicted time for which compute waits for collectives and copies; None if `us` is None."""
        if self.us is None:
            return None
        return sum(each.exposed_us or 0.0 for each in (*self.collectives, *self.copies))


@dataclass(frozen=True)
class Prediction:
    """Predictions for one graph. None stands for a failed prediction, or for missing costs.

    Attributes:
        owned: inputs that the graph frees.
        curve: memory curve.
        costs: costs of the graph's calls.
        timeline: simulated timeline.
    """

    owned: tuple[fx.Node, ...] = ()
    curve: MemoryCurve | None = None
    costs: Mapping[fx.Node, NodeCost] | None = None
    timeline: Timeline | None = None


def predict(graphs: Mapping[Direction, fx.Graph], ctx: PassContext, frame: str) -> dict[Direction, Prediction]:
    """Predict memory and, if costs are known, times of a frame's final graphs.

    Takes 60 to 100 us per node, that is, 2 to 4 % of a compile without Inductor.
    """
    return {direction: _predict(direction, graphs, ctx, frame) for direction in graphs}


def _predict(direction: Direction, graphs: Mapping[Direction, fx.Graph], ctx: PassContext, frame: str) -> Prediction:
    graph = graphs[direction]
    owned: tuple[fx.Node, ...] = ()
    curve = costs = timeline = None
    try:
        if direction == "backward" and "forward" in graphs and ctx.user_outputs is not None:
            owned = tuple(owned_inputs(graphs["forward"], graph, user_outputs=ctx.user_outputs))
        curve = memory_curve(graph, owned=owned, threads=torch.get_num_threads())
        if ctx.cost_of is not None:
            costs = {node: ctx.cost_of(node) for node in nodes.call_functions(graph, lambda _: True)}
            timeline = simulate(list(graph.nodes), costs, ctx.sharing)
    except Exception:  # a report must not fail a compile
        _log.warning("zgraph: no prediction for the %s graph of frame %s", direction, frame, exc_info=True)
    return Prediction(owned, curve, costs, timeline)


def describe(
    graphs: Mapping[Direction, fx.Graph],
    ctx: PassContext,
    predictions: Mapping[Direction, Prediction],
    *,
    limits: Limits | None,
    frame: str,
    parameters: tuple[str, ...],
    reason: str,
    keep_graphs: bool = False,
) -> list[GraphReport]:
    """Return the reports of a frame's final graphs.

    Args:
        graphs: final graphs by direction.
        ctx: context in which the passes ran.
        predictions: predictions by direction.
        limits: limits of the scheduler; None: the schedule follows rules without costs.
        frame: Dynamo's number of the frame and of its recompile.
        parameters: names of the parameters that the frame reads.
        reason: guard whose failure caused the recompile.
        keep_graphs: whether each report keeps its graph as a `network`.
    """
    lifetimes = lifetimes_of(graphs, parameters, ctx.user_outputs)
    found: list[GraphReport] = []
    for direction, graph in graphs.items():
        known = predictions[direction]
        inputs = graph.find_nodes(op="placeholder")
        collectives = tuple(_collectives(graph, known.timeline, limits))
        found.append(
            GraphReport(
                frame=frame,
                direction=direction,
                nodes=len(graph.nodes),
                transfers=tuple(transfer for each in collectives for transfer in each.transfers),
                reason=reason,
                lifetimes=lifetimes,
                collectives=collectives,
                copies=tuple(_copies(graph, known.timeline)),
                decisions=tuple(text for where, text in ctx.decisions if where == direction),
                us=None if known.timeline is None else known.timeline.step_us,
                peak=None if known.curve is None else Peak.of(known.curve),
                ledger=ledger_of(known.curve) if direction == "step" and known.curve is not None else (),
                owned=tuple(position for position, node in enumerate(inputs) if node in known.owned),
                network=_network(graph, known, frame) if keep_graphs else None,
            )
        )
    return found


def _network(graph: fx.Graph, known: Prediction, frame: str) -> networkx.DiGraph[str] | None:
    try:
        return network_of(graph, known.costs, known.timeline)
    except Exception:
        _log.warning("zgraph: no network of a graph of frame %s", frame, exc_info=True)
        return None


def _is_update_beside(node: fx.Node) -> bool:
    return bool(written_arguments(node)) and not nodes.is_update_wait(node) and meta.beside(node) is not None


def _copies(graph: fx.Graph, timeline: Timeline | None) -> Iterator[LaneCopies]:
    by_lane: dict[str, list[fx.Node]] = {}
    for node in nodes.call_functions(graph, lambda node: nodes.is_copy_start(node) or _is_update_beside(node)):
        by_lane.setdefault(str(meta.lane(node) or HOST_UPDATES), []).append(node)
    for lane, starts in by_lane.items():
        size = sum(map(_carried_bytes, starts))
        if timeline is None:
            yield LaneCopies(lane=lane, count=len(starts), bytes=size)
            continue
        exposed_us = sum(timeline.exposed_us.get(start, 0.0) for start in starts)
        us = sum(timeline.spans[start].us for start in starts)
        yield LaneCopies(lane=lane, count=len(starts), bytes=size, us=us, exposed_us=exposed_us)


def _carried_bytes(start: fx.Node) -> int:
    """Return the bytes that a copy moves, or that an optimizer update on the host writes."""
    if meta.beside(start) is None:
        return nodes.unsharded_bytes(start)
    return sum(tensor_bytes(meta.tensor_value(node)) for node in dict.fromkeys(written_arguments(start)))


def _collectives(graph: fx.Graph, timeline: Timeline | None, limits: Limits | None) -> list[Collective]:
    order = list(graph.nodes)
    found: list[Collective] = []
    for node in nodes.call_functions(graph, lambda node: nodes.is_collective(node) or nodes.is_marker(node)):
        sent = tuple(transfers_of(node))
        if not sent:
            continue
        if timeline is None:
            found.append(Collective(name=node.name, transfers=sent))
            continue
        exposed_us = timeline.exposed_us.get(node, 0.0)
        reason = why_exposed(node, order, timeline, limits) if exposed_us else ""
        us = timeline.spans[node].us
        found.append(Collective(name=node.name, transfers=sent, us=us, exposed_us=exposed_us, reason=reason))
    return found
