"""Reports of broken graphs: never an exception, no guard, no operator run, no tensor read; small and quick to make."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph
from tests.support.graphs import Drawing, compile_model, fake_world, mlp
from zgraph.analysis.cost import CostModel
from zgraph.compiler.frame_plan import FramePlan, Variant
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.graph import meta
from zgraph.graph.text import graph_text, line_of
from zgraph.passes import SinkWaits
from zgraph.reporting.data.frame import FrameData
from zgraph.reporting.export.build_frame import build_frame
from zgraph.reporting.export.folder import files_of, write_frame
from zgraph.reporting.export.reading import load, rows_of, texts_of
from zgraph.reporting.export.record_passes import PassRecorder
from zgraph.reporting.export.report_json import document_of, schema, times_of, to_json
from zgraph.reporting.of_graph import describe, predict
from zgraph.reporting.summary import Report

aten = torch.ops.aten


class Poison:
    """Shows itself to nobody, and is nothing's size, name or container."""

    def __repr__(self) -> str:
        raise RuntimeError("poisoned")

    __str__ = __repr__
    __format__ = __repr__  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise RuntimeError("poisoned")

    __len__ = __iter__
    __bool__ = __iter__


class PoisonText(str):
    """A text that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("poisoned")

    __str__ = __repr__


def frame_of(graph: fx.Graph, *, costs: bool = False) -> FrameData | None:
    """A graph of inference as a compile would report it, after one pass that finds it as it is."""
    hardware = zgraph.Hardware.preset("h100")
    cost_of = CostModel(hardware).cost if costs else None
    ctx = PassContext(direction="inference", hardware=hardware if costs else None, cost_of=cost_of)
    recorder = PassRecorder()
    recorder.observe(None, ctx, graph)
    recorder.observe(SinkWaits(), ctx, graph)
    graphs: dict[Direction, fx.GraphModule] = {"inference": fx.GraphModule({}, fx.Graph())}
    graphs["inference"]._graph = graph  # as it is: setting it would compile the broken code
    plan = FramePlan(variants=(Variant(from_step=0, graphs=graphs),), ctx=ctx, runs=(), limits=None)
    known = predict({"inference": graph}, ctx, "0/0")
    reports = describe({"inference": graph}, ctx, known, limits=None, frame="0/0", parameters=(), reason="")
    return build_frame(plan, known, reports, {}, lowering="fx", recorder=recorder)


def document_from(graph: fx.Graph, **options: Any) -> dict[str, Any]:
    """The document of a graph, valid and in every format; what is left out of a folder is an error here."""
    frame = frame_of(graph, **options)
    assert frame is not None
    document = json.loads(to_json(document_of([frame], rank=0, world_size=1)))
    Draft202012Validator(schema()).validate(document)
    assert [name for name, _ in files_of(document)] == ["index.html", "trace.json"]
    return document


def drawn() -> Drawing:
    """x and two calls."""
    drawing = Drawing()
    x = drawing.input("x", 4, 4)
    drawing.done(drawing.call(aten.tanh.default, drawing.call(aten.relu.default, x, name="relu"), name="tanh"))
    return drawing


def cyclic() -> list[Any]:
    found: list[Any] = []
    found += [found, found, found]
    return found


def value_of_poison(node: fx.Node) -> None:
    node.meta["val"] = Poison()


def value_in_a_circle(node: fx.Node) -> None:
    node.meta["val"] = cyclic()


def argument_of_poison(node: fx.Node) -> None:
    node.args = (*node.args, Poison(), [PoisonText("a")])


def argument_in_a_circle(node: fx.Node) -> None:
    node._args = (*node.args, cyclic())


def parameters_of_poison(node: fx.Node) -> None:
    node.meta["zgraph_parameters"] = Poison()


def modules_of_poison(node: fx.Node) -> None:
    node.meta["nn_module_stack"] = Poison()
    node.meta["stack_trace"] = Poison()


def lane_of_poison(node: fx.Node) -> None:
    node.meta["zgraph_lane"] = Poison()


def meta_gone(node: fx.Node) -> None:
    del node.meta


def target_gone(node: fx.Node) -> None:
    node.target = Poison()


def value_unknown(node: fx.Node) -> None:
    del node.meta["val"]


def reads_erased(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        gone = node.graph.call_function(aten.neg.default, (node.all_input_nodes[0],))
    node.graph.erase_node(gone)
    node._args = (gone,)
    node._input_nodes = {gone: None}


SPOILERS: list[Callable[[fx.Node], None]] = [
    *(value_of_poison, value_in_a_circle, argument_of_poison, argument_in_a_circle, parameters_of_poison),
    *(modules_of_poison, lane_of_poison, meta_gone, target_gone, value_unknown, reads_erased),
]


@pytest.mark.parametrize("costs", [False, True])
@pytest.mark.parametrize("spoil", SPOILERS)
def test_unprintable_node_is_reported(spoil: Callable[[fx.Node], None], costs: bool) -> None:
    """The other nodes stay as they are."""
    drawing = drawn()
    (node,) = [each for each in drawing.graph.nodes if each.name == "relu"]
    spoil(node)
    text = graph_text(drawing.graph)
    document = document_from(drawing.graph, costs=costs)
    (frame,) = document["frames"]
    rows = list(rows_of(document, frame, frame["graphs"][0]))
    assert [row["name"] for row in rows] == ["x", "relu", "tanh", "output"]
    assert [row["code"] for row in rows] == text.splitlines()
    assert rows[2]["code"] == "tanh: f32[4, 4] = aten.tanh(relu)"
    if spoil not in (value_unknown, reads_erased, lane_of_poison):
        assert "<unprintable " in json.dumps(rows[1])


def test_a_report_that_fails_altogether_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, and the dump's texts are there."""

    def fail(*args: Any) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr("zgraph.reporting.export.build_frame.parameter_columns", fail)
    with caplog.at_level(logging.WARNING, logger="zgraph"), fake_world(2):
        compile_model(mlp, {"dump": tmp_path})
    told = [record.getMessage() for record in caplog.records if record.name.startswith("zgraph.reporting")]
    assert told == ["zgraph: nothing to report of frame 0/0"]
    assert list(tmp_path.rglob("*.py")) and not list(tmp_path.rglob("*.json"))


def test_symbolic_sizes_are_shown_and_counted_without_a_guard() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    drawing = Drawing(mode=FakeTensorMode(shape_env=shapes))
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = drawing.graph.placeholder("x")
    meta.set_value(x, drawing.mode.from_tensor(torch.ones(5, 3), symbolic_context=context))
    drawing.done(drawing.call(aten.relu.default, x, name="relu"))
    before = len(shapes.guards)
    document = document_from(drawing.graph, costs=True)
    assert len(shapes.guards) == before
    (frame,) = document["frames"]
    row = list(rows_of(document, frame, frame["graphs"][0]))[1]
    assert row["shape"].startswith("[s") and row["shape"].endswith(", 3]") and row["bytes"] == 5 * 3 * 4


class NoOperators(TorchDispatchMode):
    """Refuses every operator: to read a tensor, or to wait for a device, would take one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


def test_a_report_runs_no_operator_and_waits_for_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: Any) -> None:
        raise AssertionError("a device was waited for")

    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    graph = drawn().graph
    with NoOperators():
        with pytest.raises(AssertionError, match="ran"):
            torch.ones(1).item()
        frame = frame_of(graph)
        assert frame is not None and write_frame(tmp_path, frame, Report())
    assert load(tmp_path)["frames"][0]["frame"] == "0/0"


def test_a_dump_compiles_no_frame_again(tmp_path: Path) -> None:
    """The same batches make the same frames, whose sizes become symbols, with and without a dump."""

    def frames(**options: Any) -> list[tuple[str, str, int]]:
        report = zgraph.Report()
        with fake_world(2):
            compile_model(build, {"report": report, **options}, batches=(6, 7, 8, 9))
        return [(graph.frame, graph.direction, graph.nodes) for graph in report.graphs]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    assert frames() == frames(dump=tmp_path)
    shapes = [each for frame in load(tmp_path)["frames"] for each in frame["strings"]]
    assert any("[s" in text for text in shapes)


NODES = 20_000


def large() -> fx.Graph:
    """Blocks of a matrix product, a bias and an activation, each in a module of its own."""
    drawing = Drawing()
    x, weight, bias = drawing.input("x", 64, 64), drawing.input("weight", 64, 64), drawing.input("bias", 64)
    for number in range((NODES - 4) // 4):
        for target, args, name in (
            (aten.mm.default, (x, weight), f"mm_{number}"),
            (aten.add.Tensor, (None, bias), f"add_tensor_{number}"),
            (aten.gelu.default, (None,), f"gelu_{number}"),
            (aten.view.default, (None, [64, 64]), f"view_default_{number}"),
        ):
            x = drawing.call(target, *(x if each is None else each for each in args), name=name)
            x.meta["nn_module_stack"] = {"0": (f"L['self'].layers[{number}].mlp", nn.Linear)}
            x.meta["stack_trace"] = f'File "/home/me/train.py", line {100 + number % 40}, in forward\n'
    drawing.done(x)
    return drawing.graph


def test_twenty_thousand_nodes_stay_small() -> None:
    """Under 4 MB, with times and a pass that has moved every third node."""
    graph = large()
    frame = frame_of(graph, costs=True)
    assert frame is not None and len(frame.graphs[0].nodes.line) >= NODES - 4
    text = to_json(document_of([frame], rank=0, world_size=1))
    assert len(text) < 4e6, len(text)
    times = to_json(times_of([frame], {}, {}))
    assert len(times) < 1000
    document = json.loads(text)
    *_, (_, lines) = texts_of(document["frames"][0], "inference")
    assert lines == document["frames"][0]["graphs"][0]["nodes"]["line"]


def test_two_lines_that_look_alike_stay_two() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(torch.neg, (x,)), graph.call_function(torch.neg, (x,))
    second.name = first.name  # what a faulty pass may do
    graph.output((first, second))
    assert str(line_of(first)) == str(line_of(second))
    document = document_from(graph)
    (frame,) = document["frames"]
    assert len(set(frame["graphs"][0]["nodes"]["line"])) == 4
