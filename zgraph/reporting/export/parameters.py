"""Builds the table of parameters in `report.json`: storage, collectives and bytes of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from zgraph.compression.low_rank import state_of_matrix
from zgraph.compression.method_text import from_text
from zgraph.graph import meta, nodes
from zgraph.graph.operator_arguments import LowRankArgs, QuantizeArgs, layout_of
from zgraph.graph.sizes import size_hint, tensor_bytes
from zgraph.graph.text import dtype_text
from zgraph.reporting.data.frame import GraphData, ParameterColumns, Strings
from zgraph.reporting.of_graph import GraphReport
from zgraph.tiers.tier import DEVICE


@dataclass(frozen=True, kw_only=True)
class KnownParameter:
    """Facts about a parameter, read from the captured graph.

    Attributes:
        shape: unsharded shape; None: unknown.
        zero_stage: 0 to 3; -1: unknown.
        dtype: dtype of this rank's part between steps; None: unknown.
        local_bytes: size of this rank's part between steps.
        rests: memory space of this rank's part between steps, such as "device"; "" if unknown.
    """

    shape: tuple[int, ...] | None = None
    zero_stage: int = -1
    dtype: torch.dtype | None = None
    local_bytes: int = 0
    rests: str = ""


def known_parameters(captured: fx.Graph, names: Iterable[str]) -> dict[str, KnownParameter]:
    """Return facts about each parameter that a frame reads, by name, in the order of `names`.

    Args:
        captured: graph before any pass; its unshard and reduce_grad nodes have the parameters' names and layouts.
        names: names of the parameters.
    """
    found = dict.fromkeys(names, KnownParameter())
    for marker in nodes.call_functions(captured, nodes.is_marker):
        layout = layout_of(marker)
        for name in meta.parameters(marker):
            if name not in found or (found[name].dtype is not None):
                continue
            at_rest = marker.args[0] if nodes.is_unshard(marker) else None
            value = meta.value(at_rest) if isinstance(at_rest, fx.Node) else None
            known = KnownParameter(shape=tuple(map(size_hint, layout.shape)), zero_stage=layout.zero_stage)
            if isinstance(at_rest, fx.Node) and isinstance(value, Tensor):
                known = KnownParameter(
                    shape=known.shape,
                    zero_stage=known.zero_stage,
                    dtype=value.dtype,
                    local_bytes=tensor_bytes(value),
                    rests=_rests(at_rest),
                )
            found[name] = known
    return found


def _rests(at_rest: fx.Node) -> str:
    """Return the memory space of the graph input from which a node is computed through copies and casts."""
    while at_rest.op != "placeholder" and at_rest.all_input_nodes:
        at_rest = at_rest.all_input_nodes[0]
    return str(meta.space(at_rest) or DEVICE)


def feedback_bytes(graphs: Iterable[fx.Graph]) -> dict[str, int]:
    """Return, for each parameter by name, the bytes of error feedback that this rank keeps between steps."""
    found: dict[str, int] = {}
    for graph in graphs:
        for node in nodes.call_functions(graph, lambda node: nodes.is_quantize(node) or nodes.is_low_rank_left(node)):
            for name, kept in zip(meta.parameters(node), _kept_by(node), strict=False):
                found[name] = found.get(name, 0) + sum(prod(shape) * dtype.itemsize for shape, dtype in kept.values())
    return found


def _kept_by(node: fx.Node) -> list[Mapping[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Return {name: (shape, dtype)} of the error-feedback tensors, for each parameter of a compressed reduction."""
    if nodes.is_low_rank_left(node):
        layout = LowRankArgs.of(node).layout
        return [
            state_of_matrix(rows, columns, layout.rank)
            for rows, columns in zip(layout.rows, layout.columns, strict=True)
        ]
    args = QuantizeArgs.of(node)
    method = from_text(args.method)
    return [method.state(numel, args.world * args.stretches) for numel in args.numels]


def parameter_columns(
    known: Mapping[str, KnownParameter],
    reports: Sequence[GraphReport],
    graphs: Sequence[GraphData],
    feedback: Mapping[str, int],
    strings: Strings,
) -> ParameterColumns:
    """Return a frame's table of parameters.

    Args:
        known: facts about the parameters, by name and in the order of the table.
        reports: reports of the frame's graphs.
        graphs: tables of the same graphs, in the same order.
        feedback: bytes of error feedback, by parameter name.
        strings: table of texts, to which new ones are added.
    """
    names = list(known)
    carried: list[list[tuple[int, int]]] = [[] for _ in names]
    wire: list[int] = [0] * len(names)
    codecs: list[dict[str, None]] = [{} for _ in names]
    sizes = [prod(known[name].shape or (0,)) for name in names]
    for graph_number, graph in enumerate(graphs):
        for number, members in enumerate(graph.collectives.parameters):
            whole = sum(sizes[member] for member in members)
            for member in members:
                carried[member].append((graph_number, number))
                wire[member] += graph.collectives.sent_bytes[number] * sizes[member] // whole if whole else 0
                codec = strings.texts[graph.collectives.codec[number]]
                if codec:
                    codecs[member][codec] = None
    columns = ParameterColumns()
    lifetimes = reports[0].lifetimes
    for number, (name, one) in enumerate(known.items()):
        columns.name.append(name)
        columns.shape.append(strings.number("?" if one.shape is None else f"[{', '.join(map(str, one.shape))}]"))
        columns.dtype.append(strings.number("?" if one.dtype is None else dtype_text(one.dtype)))
        columns.zero_stage.append(one.zero_stage)
        columns.lifetime.append(strings.number(str(lifetimes.get(name, ""))))
        columns.codec.append(strings.number(", ".join(codecs[number])))
        columns.rests.append(strings.number(one.rests))
        columns.local_bytes.append(one.local_bytes)
        columns.feedback_bytes.append(feedback.get(name, 0))
        columns.collectives.append(carried[number])
        columns.wire_bytes.append(wire[number])
    return columns
