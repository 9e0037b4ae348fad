"""Report documents as large as one wants, made without a compile: every layer gathers, computes, and reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zgraph.reporting.data.frame import Strings
from zgraph.reporting.data.memory import BUFFERS, CLASSES, GATHERED, SPACES

Document = dict[str, Any]
PER_LAYER = 20  # nodes of a graph
GATHER_US, COMPUTE_US = 30.0, 2.0
MIB = 2**20


def large_report(nodes: int, parameter: str = "layers.{}.weight") -> Document:
    """A document of one frame with so many nodes, half of them in forward and half in backward.

    Args:
        nodes: of both graphs, a multiple of twice `PER_LAYER`.
        parameter: pattern of the parameters' names.
    """
    strings = Strings()
    layers = nodes // 2 // PER_LAYER
    lines: dict[str, list[Any]] = {"name": [], "value": [], "call": [], "parameters": []}
    names = [parameter.format(layer) for layer in range(layers)]
    graphs = [_graph(direction, names, lines, strings, number) for number, direction in enumerate(DIRECTIONS)]
    frame = {
        "frame": "0/0",
        "reason": "",
        "lowering": "fx",
        "from_step": 0,
        "hardware": {"name": "h100", "backend": "nccl", "memory_bytes": 80 * 2**30},
        "strings": strings.texts,
        "lanes": ["compute", "group:0"],
        "lines": lines,
        "captured": {},
        "passes": [_pass(number, graph, lines, strings) for number, graph in enumerate(graphs)],
        "graphs": graphs,
        "memory": _memory(layers),
        "parameters": _parameters(names, graphs, strings),
    }
    for entry, graph in zip(frame["passes"], graphs, strict=True):
        frame["captured"][entry["direction"]] = _captured(graph["nodes"]["line"], entry.pop("first_old"))
    rows = [
        {
            "frame": "0/0",
            "nodes": len(graph["nodes"]["line"]),
            **{name: graph[name] for name in ("direction", "sent_bytes", "peak_bytes", "predicted_us", "exposed_us")},
        }
        for graph in graphs
    ]
    return {
        "format": "zgraph-report",
        "version": "1.0",
        "made_with": {"zgraph": "0", "torch": "2.13.0", "python": "3.11"},
        "rank": 0,
        "world_size": 2,
        "memory_classes": list(CLASSES),
        "memory_spaces": list(SPACES),
        "at_rest": {"parameters": layers * MIB},
        "frames": [frame],
        "ranks": [{"rank": 0, "graphs": rows}],
    }


DIRECTIONS = ("forward", "backward")


def _graph(
    direction: str, names: Sequence[str], lines: dict[str, list[Any]], strings: Strings, number: int
) -> Document:
    """A gather that each layer waits for at once, and what it computes: gathers are exposed but for nothing."""
    texts = ("op", "target", "shape", "dtype", "stride", "module", "source", "parameters")
    numbers = ("line", "bytes", "storage", "lane", "cost_us", "start_us", "end_us", "exposed_us", "inputs")
    columns: dict[str, list[Any]] = {name: [] for name in (*texts, *numbers)}
    collectives: dict[str, list[Any]] = {name: [] for name in COLLECTIVE}
    now = 0.0
    for layer, name in enumerate(names):
        gather_us = GATHER_US + (layer == 1)  # one that is exposed most
        for place in range(PER_LAYER):
            position = layer * PER_LAYER + place
            kind = "all_gather" if place == 0 else "wait_tensor" if place == 1 else "mm"
            us = (gather_us, gather_us, COMPUTE_US)[min(place, 2)]
            label = f"{kind}_{number}_{layer}_{place}"
            call = f"{kind}({f'{label}_input' if place == 0 else lines['name'][-1]})"
            _add_line(lines, strings, label, "f32[256, 1024]", call, name if place < 2 else "")
            row = {
                "op": "call_function",
                "target": f"aten.{kind}",
                "shape": "[256, 1024]",
                "dtype": "f32",
                "stride": "",
                "module": f"model.layers.{layer}" + ("" if place < 10 else ".mlp"),
                "source": f"model.py:{place + 10} in forward",
                "parameters": name if place < 2 else "",
            }
            for field, text in row.items():
                columns[field].append(strings.number(text))
            start = now
            now += us if place else 0.0
            values = (
                len(lines["name"]) - 1,
                MIB,
                1 if place < 2 else 2,
                (1, -1, 0)[min(place, 2)],
                us if place != 1 else 0,
            )
            for field, value in zip(numbers[:5], values, strict=True):
                columns[field].append(value)
            columns["start_us"].append(start)
            columns["end_us"].append(start + us)
            columns["exposed_us"].append(gather_us if place == 0 else 0)
            columns["inputs"].append([position - 1] if position else [])
        entry = {
            "node": layer * PER_LAYER,
            "wait": layer * PER_LAYER + 1,
            "kind": strings.number("all_gather"),
            "group": strings.number("0"),
            "group_size": 2,
            "dtype": strings.number("f32"),
            "codec": strings.number(""),
            "payload_bytes": MIB,
            "sent_bytes": MIB,
            "received_bytes": MIB,
            "parameters": [layer],
            "predicted_us": gather_us,
            "exposed_us": gather_us,
            "reason": strings.number("too little to compute before its result is needed"),
        }
        for field, value in entry.items():
            collectives[field].append(value)
    return {
        "direction": direction,
        "nodes": columns,
        "collectives": collectives,
        "predicted_us": now,
        "exposed_us": sum(collectives["exposed_us"]),
        "sent_bytes": len(names) * MIB,
        "received_bytes": len(names) * MIB,
        "critical": list(range(0, len(names) * PER_LAYER, PER_LAYER)),
        "peak_bytes": 3 * MIB,
    }


COLLECTIVE = (
    "node",
    "wait",
    "kind",
    "group",
    "group_size",
    "dtype",
    "codec",
    "payload_bytes",
    "sent_bytes",
    "received_bytes",
    "parameters",
    "predicted_us",
    "exposed_us",
    "reason",
)


def _add_line(lines: dict[str, list[Any]], strings: Strings, name: str, value: str, call: str, parameters: str) -> None:
    lines["name"].append(name)
    lines["value"].append(strings.number(value))
    lines["call"].append(call)
    lines["parameters"].append(strings.number(parameters))


def _pass(number: int, graph: Document, lines: dict[str, list[Any]], strings: Strings) -> Document:
    """A pass that has changed the last node of every layer."""
    nodes = graph["nodes"]["line"]
    old = len(lines["name"])
    hunks: list[list[Any]] = []
    for layer in range(len(nodes) // PER_LAYER):
        at = (layer + 1) * PER_LAYER - 1
        _add_line(lines, strings, lines["name"][nodes[at]], "f32[256, 1024]", f"add(mm_{layer}, 1)", "")
        hunks.append([at, 1, [[nodes[at], 1]]])
    totals = {
        "nodes": len(nodes),
        "sent_bytes": graph["sent_bytes"],
        "peak_bytes": 4 * MIB,
        "predicted_us": graph["predicted_us"] + 10,
        "exposed_us": graph["exposed_us"] + 10,
    }
    return {
        "name": f"tidy_{graph['direction']}",
        "options": "Tidy()",
        "direction": graph["direction"],
        "changed": True,
        "notes": ["one of every layer"],
        "before": totals,
        "after": {**totals, **{name: graph[name] for name in ("peak_bytes", "predicted_us", "exposed_us")}},
        "hunks": hunks,
        "first_old": old,
    }


def _captured(lines: Sequence[int], first_old: int) -> list[list[int]]:
    """Runs of the lines before the pass: the last node of each layer read otherwise."""
    found: list[list[int]] = []
    for layer in range(len(lines) // PER_LAYER):
        found += [[lines[layer * PER_LAYER], PER_LAYER - 1], [first_old + layer, 1]]
    return found


def _memory(layers: int) -> Document:
    """A gathered parameter for each layer, and a buffer for its gather; the second layer of backward holds most."""
    nodes = 2 * layers * PER_LAYER
    storages: dict[str, list[int]] = {name: [] for name in ("node", "bytes", "first", "last", "kind", "space", "held")}
    for layer in range(2 * layers):
        first = layer * PER_LAYER
        buffer = 2 * MIB + (layer == layers + 1)
        for kind, size, last in ((GATHERED, MIB, first + PER_LAYER - 1), (BUFFERS, buffer, first + 1)):
            row = (first, size, first, last, CLASSES.index(kind), SPACES.index("device"), 0)
            for column, value in zip(storages.values(), row, strict=True):
                column.append(value)
    peak = 2 * (layers + 1)
    return {
        "directions": list(DIRECTIONS),
        "nodes": nodes,
        "storages": storages,
        "workspace_bytes": [0] * nodes,
        "held_bytes": layers * MIB,
        "budget_bytes": 4 * MIB,
        "peak_bytes": 3 * MIB + 1,
        "peak_position": (layers + 1) * PER_LAYER,
        "at_peak": [peak + 1, peak],
        "unknown": [],
    }


def _parameters(names: Sequence[str], graphs: Sequence[Document], strings: Strings) -> Document:
    count = len(names)
    return {
        "name": list(names),
        "shape": [strings.number("[256, 1024]")] * count,
        "dtype": [strings.number("f32")] * count,
        "zero_stage": [3] * count,
        "lifetime": [strings.number("gathered for each use")] * count,
        "codec": [strings.number("")] * count,
        "rests": [strings.number("device")] * count,
        "local_bytes": [MIB // 2 + layer for layer in range(count)],
        "feedback_bytes": [0] * count,
        "collectives": [[[number, layer] for number in range(len(graphs))] for layer in range(count)],
        "wire_bytes": [2 * MIB] * count,
    }
