"""Memory of a step by class: assigns each storage to a class such as "parameters" or "activations"."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import fx

from zgraph.analysis.liveness import LiveRange, MemoryCurve
from zgraph.analysis.workspace import remaining_bytes
from zgraph.compiler.graph_pass import Direction
from zgraph.graph import meta, nodes, traits
from zgraph.reporting.data.frame import MemoryData, StorageColumns
from zgraph.tiers.tier import DEVICE, listed

PARAMETERS, GATHERED, ACTIVATIONS, GRADIENTS, OPTIMIZER, FEEDBACK, BUFFERS, INPUTS = CLASSES = (
    "parameters",
    "gathered",
    "activations",
    "gradients",
    "optimizer state",
    "error feedback",
    "communication buffers",
    "inputs",
)
OTHER = "other"  # a user-defined memory space
SPACES = (*listed(()), OTHER)
LARGEST = 20  # storages that are listed at the peak


class StorageClasses:
    """Assigns the value of each node of one graph to a memory class.

    - parameters: inputs that a gather or a reduction reads, such as this rank's shards;
    - gathered: unsharded parameters, as gathered or as unpacked from a communication buffer;
    - communication buffers: data packed for sending, and received data that is not unpacked or summed yet;
    - gradients: gradients of parameters, before and after their reduction;
    - error feedback: compression errors while they are on the device;
    - activations: all other computed values, including gradients of activations;
    - inputs: all other inputs, which the caller of the step keeps alive.

    Args:
        graph: graph with fake values.
        direction: direction of the graph.
    """

    def __init__(self, graph: fx.Graph, direction: str) -> None:
        self.direction = direction
        self.found: dict[fx.Node, str] = {}
        self.sent: dict[fx.Node, None] = {}
        with contextlib.suppress(Exception):  # a pass may have left the graph half built
            self.sent = _before_reductions(graph) if direction == "backward" else {}
        for node in graph.nodes:
            try:
                self.found[node] = self._class_of(node)
            except Exception:
                self.found[node] = ACTIVATIONS

    def _class_of(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return self._class_of_input(node)
        if node.op == "get_attr":
            return INPUTS
        if node.op == "output":
            return ACTIVATIONS
        if _looks_at_argument(node) and node.all_input_nodes:
            return self.found.get(node.all_input_nodes[0], ACTIVATIONS)
        if nodes.is_unshard(node):
            return GATHERED
        if nodes.is_reduce_grad(node) or traits.of(node).accumulates:
            return GRADIENTS
        if nodes.is_start(node):
            return _class_of_arrival(node)
        if node.target is torch.ops.zgraph.load_errors.default:
            return FEEDBACK
        if nodes.is_communication(node):
            return self._class_of_copy(node)
        return GRADIENTS if node in self.sent else ACTIVATIONS

    def _class_of_input(self, node: fx.Node) -> str:
        used = any(nodes.is_marker(user) or nodes.is_communication(user) for user in node.users)
        if self.direction != "backward":
            return PARAMETERS if used else INPUTS
        if meta.parameters(node):  # forward has gathered and saved it
            return GATHERED
        return PARAMETERS if used or any(nodes.is_low_rank(user) for user in node.users) else ACTIVATIONS

    def _class_of_copy(self, node: fx.Node) -> str:
        """Return the memory class of a node that copies data into or out of a collective's buffers."""
        classes = [self.found.get(source) for source in node.all_input_nodes]
        if any(nodes.is_start(user) for user in node.users):
            return BUFFERS
        if GATHERED in classes or traits.is_decoding(node):
            return GATHERED
        if _behind_reduction(node):
            return GRADIENTS
        source = next((_start_behind(each) for each in node.all_input_nodes if _start_behind(each)), None)
        if source is not None:
            return GATHERED if nodes.is_gather(source) else GRADIENTS
        return BUFFERS


def _looks_at_argument(node: fx.Node) -> bool:
    return nodes.is_getitem(node) or nodes.is_wait(node) or traits.is_view(node)


def _start_behind(node: fx.Node) -> fx.Node | None:
    """Return the start of the collective whose result `node` is, or is a view of; None if there is none."""
    while _looks_at_argument(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node if nodes.is_start(node) else None


def _behind_reduction(node: fx.Node) -> bool:
    if nodes.is_sum_ranks(node) or nodes.is_dequantize_sum(node) or nodes.is_low_rank(node):
        return True
    return any(start is not None and nodes.is_reduction(start) for start in map(_start_behind, node.all_input_nodes))


def _class_of_arrival(start: fx.Node) -> str:
    """Return the memory class of a collective's result."""
    if not meta.parameters(start):
        return ACTIVATIONS  # a collective of the model's own
    if not nodes.is_gather(start):
        return BUFFERS if nodes.is_all_to_all(start) else GRADIENTS
    pending = list(start.users)
    while pending:
        user = pending.pop()
        if _looks_at_argument(user):
            pending.extend(user.users)
        elif nodes.is_communication(user):
            return BUFFERS
    return GATHERED


def _before_reductions(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes that compute parameter gradients.

    They are found backwards from the graph's outputs and reductions, through views and casts.
    """
    found: dict[fx.Node, None] = {}
    pending = [
        source
        for node in graph.nodes
        if node.op == "output"
        or nodes.is_reduce_grad(node)
        or (nodes.is_communication(node) and not nodes.is_wait(node))
        for source in node.all_input_nodes
    ]
    while pending:
        node = pending.pop()
        if node in found or node.op == "placeholder":
            continue
        found[node] = None
        if traits.is_reshaping(node):
            pending.extend(node.all_input_nodes)
    return found


def memory_data(
    curve: MemoryCurve,
    graphs: Mapping[Direction, fx.Graph],
    classes: Mapping[Direction, StorageClasses],
    budget_bytes: int | None,
) -> MemoryData:
    """Convert the memory curve of a step to tables.

    Args:
        curve: memory curve over all graphs of the step, in execution order.
        graphs: graphs by direction.
        classes: memory classes by direction.
        budget_bytes: memory budget of the step; None: no limit.
    """
    numbers = {node: number for number, node in enumerate(curve.nodes)}
    found = {node: kind for each in classes.values() for node, kind in each.found.items()}
    columns = StorageColumns()
    for number, entry in enumerate(curve.ranges):
        columns.node.append(numbers[entry.node])
        columns.bytes.append(entry.bytes)
        columns.first.append(entry.first)
        columns.last.append(entry.last)
        columns.kind.append(CLASSES.index(_class_of_range(entry, number, curve.ranges, found)))
        columns.space.append(SPACES.index(entry.space if entry.space in SPACES else OTHER))
        columns.held.append(int(entry.held))
    position = curve.peak_position
    number_of = {id(entry): number for number, entry in enumerate(curve.ranges)}
    return MemoryData(
        directions=list(graphs),
        nodes=len(curve.nodes),
        storages=columns,
        workspace_bytes=_beside_storages(curve),
        held_bytes=curve.held_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=curve.peak_bytes,
        peak_position=position,
        at_peak=[number_of[id(entry)] for entry in curve.alive_at(position)[:LARGEST]] if curve.nodes else [],
        unknown=list(curve.unknown),
    )


def _class_of_range(entry: LiveRange, number: int, ranges: Sequence[LiveRange], found: Mapping[fx.Node, str]) -> str:
    kept = remaining_bytes(entry.node) if entry.node.op == "call_function" else 0
    if kept and entry.bytes == kept and not any(later.node is entry.node for later in ranges[number + 1 : number + 2]):
        return GRADIENTS  # sum of an accumulation window
    return found.get(entry.node, ACTIVATIONS)


def _beside_storages(curve: MemoryCurve) -> list[int]:
    """Return the workspace bytes of each call: all allocated bytes minus the bytes of live storages."""
    change = [0] * (len(curve.nodes) + 1)
    for entry in curve.ranges:
        if not entry.held and entry.space == DEVICE.name and entry.first >= 0:
            change[entry.first] += entry.bytes
            change[entry.last + 1] -= entry.bytes
    return [during - alive for during, alive in zip(curve.bytes_during, accumulate(change), strict=False)]
