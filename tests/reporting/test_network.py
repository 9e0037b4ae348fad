"""`zgraph.graph_of`: what a networkx graph says of a compiled one, and that files of it can be read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from torch import fx, nn

import zgraph
from tests.support.costs import cost_of
from tests.support.graphs import Drawing, Traced, deep, fake_world, traced
from zgraph.graph import meta, nodes
from zgraph.passes import presets
from zgraph.scheduling.simulate import simulate

aten = torch.ops.aten


@pytest.fixture(scope="module")
def lowered() -> Traced:
    with fake_world(2):
        found = traced(deep, presets.default(bucket_bytes=512))
    return replace(found, ctx=replace(found.ctx, cost_of=cost_of))


def test_nodes_say_what_they_are(lowered: Traced) -> None:
    gm = lowered.graphs["forward"]
    network = zgraph.graph_of(gm)
    order = list(gm.graph.nodes)
    assert [*network.nodes] == [node.name for node in order]
    start = next(node for node in order if nodes.is_start(node))
    found = network.nodes[start.name]
    value = meta.tensor_value(start)
    assert (found["op"], found["position"]) == ("call_function", order.index(start))
    assert found["target"] == "_c10d_functional.all_gather_into_tensor"
    assert (found["shape"], found["dtype"], found["bytes"]) == (str([*value.shape]), "f32", value.nbytes)
    assert found["parameters"].split(", ") == [*meta.parameters(start)]
    assert not {"lane", "us", "begin_us"} & set(found)  # there are no costs


def test_edges_are_the_data_and_what_must_come_first(lowered: Traced) -> None:
    for direction in ("forward", "backward"):
        gm = lowered.graphs[direction]
        network = zgraph.graph_of(gm)
        data = {(source.name, node.name) for node in gm.graph.nodes for source in node.all_input_nodes}
        kinds: dict[Any, str] = networkx.get_edge_attributes(network, "kind")
        assert {edge for edge, kind in kinds.items() if kind != "order"} == data
        starts = [node for node in gm.graph.nodes if nodes.is_start(node)]
        waits = {(start.name, wait.name) for start in starts for wait in nodes.waits_of(start)}
        assert {edge for edge, kind in kinds.items() if kind == "wait"} == waits
        for group_name in {nodes.group_of(start) for start in starts}:
            queued = [start.name for start in starts if nodes.group_of(start) == group_name]
            assert all(network.has_edge(*pair) for pair in pairwise(queued))
        assert networkx.is_directed_acyclic_graph(network)


def test_reads_of_old_values_precede_the_write_new_ones_follow() -> None:
    with fake_world(2):
        drawing = Drawing()
        x, held = drawing.input("x", 4), drawing.input("held", 2, 2)
        old = drawing.call(aten.relu.default, drawing.call(aten.view.default, held, [4]), name="old")
        write = drawing.call(aten.copy_.default, drawing.call(aten.view.default, held, [4]), x, name="write")
        new = drawing.call(aten.relu.default, held, name="new")
        other = drawing.call(aten.relu.default, x, name="other")
        network = zgraph.graph_of(drawing.done(old, write, new, other))
    order = {(one, two) for one, two, kind in network.edges(data="kind") if kind == "order"}
    assert {("old", "write"), ("write", "new")} <= order
    assert not [edge for edge in order if "other" in edge]


def test_costs_and_the_critical_path_are_the_simulators(lowered: Traced) -> None:
    gm = lowered.graphs["backward"]
    network = zgraph.graph_of(gm, lowered.ctx)
    order = list(gm.graph.nodes)
    timeline = simulate(
        order, {node: cost_of(node) for node in order if node.op == "call_function"}, lowered.ctx.sharing
    )
    assert max(end for _, end in network.nodes(data="end_us")) == timeline.step_us
    critical = [name for name, on_path in network.nodes(data="critical") if on_path]
    assert critical and sorted(critical) == sorted(node.name for node in timeline.critical_path())
    lanes = {lane for _, lane in network.nodes(data="lane") if lane}
    assert lanes == {"compute", "group:0"}
    exposed = {name: us for name, us in network.nodes(data="exposed_us") if us is not None}
    assert exposed == {node.name: us for node, us in timeline.exposed_us.items()}


def test_a_file_holds_all_of_it_whatever_names_there_are(lowered: Traced, tmp_path: Path) -> None:
    gm = lowered.graphs["forward"]
    start = next(node for node in gm.graph.nodes if nodes.is_start(node))
    meta.set_parameters(start, ['<script>&"\x00\ud800\n', "höhe"], ["", ""])
    network = zgraph.graph_of(gm, lowered.ctx)
    assert network.nodes[start.name]["parameters"] == '<script>&"\\x00\\ud800\\n, höhe'
    networkx.write_graphml(network, tmp_path / "forward.graphml")
    read: Any = networkx.read_graphml(tmp_path / "forward.graphml")
    assert dict(read.nodes(data=True)) == dict(network.nodes(data=True))
    assert [*read.edges(data=True)] == [*network.edges(data=True)]


def in_gexf(network: networkx.DiGraph[str], path: Path) -> Any:
    networkx.write_gexf(network, path)
    return networkx.read_gexf(path)


def in_gml(network: networkx.DiGraph[str], path: Path) -> Any:
    networkx.write_gml(network, path)
    return networkx.read_gml(path)


def in_json(network: networkx.DiGraph[str], path: Path) -> Any:
    path.write_text(json.dumps(networkx.node_link_data(network, edges="edges")))
    return networkx.node_link_graph(json.loads(path.read_text()), edges="edges")


@pytest.mark.parametrize("written", [in_gexf, in_gml, in_json])
def test_other_formats_hold_all_of_it_too(written: Callable[..., Any], lowered: Traced, tmp_path: Path) -> None:
    network = zgraph.graph_of(lowered.graphs["backward"], lowered.ctx)
    read = written(network, tmp_path / "backward")
    assert {**read.nodes} == {name: {**read.nodes[name], **about} for name, about in network.nodes(data=True)}
    assert {*read.edges(data="kind")} == {*network.edges(data="kind")}


def test_module_and_line_are_the_users() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).relu()

    report = zgraph.Report(keep_graphs=True)
    model = nn.Sequential(Block(), Block())
    options = {"report": report, "lowering": "fx"}
    torch.compile(model, backend="zgraph", options=options)(torch.ones(2, 4)).sum().backward()
    for graph in report.graphs:
        assert graph.network is not None and len(graph.network) == graph.nodes
        modules = {module for _, module in graph.network.nodes(data="module") if module}
        assert {"0.up", "1.up", "0"} <= modules
    forward = report.graphs[0].network
    assert forward is not None
    lines = {source for _, source in forward.nodes(data="source") if source}
    assert lines and all(line.startswith(f"{__file__}:") and line.endswith(" in forward") for line in lines)


def test_a_report_keeps_no_graph_unless_asked_to() -> None:
    report = zgraph.Report()
    torch.compile(nn.Linear(4, 4), backend="zgraph", options={"report": report, "lowering": "fx"})(torch.ones(2, 4))
    assert [graph.network for graph in report.graphs] == [None] * len(report.graphs) != []


def test_an_unknown_value_is_left_out() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    found = zgraph.graph_of(fx.GraphModule({}, graph))
    assert {*found.nodes["x"]} == {"position", "op", "target", "value", "bytes"}
