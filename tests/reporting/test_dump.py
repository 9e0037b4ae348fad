"""Dumps: a file per graph and pass, deterministic, and never the reason that a compile fails."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

from tests.support.compiled import with_fx
from tests.support.graphs import compile_model, fake_world, mlp
from tests.support.hash_seeds import HashSeeds
from zgraph.compiler.graph_pass import GraphPass, PassContext, Phase
from zgraph.compiler.pass_list import PassList
from zgraph.graph import meta, nodes
from zgraph.passes import SinkWaits, presets
from zgraph.reporting.dump import Dumper


class Poison:
    """Shows itself to nobody."""

    def __repr__(self) -> str:
        raise RuntimeError("poisoned repr")

    __str__ = __repr__
    __format__ = __repr__  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class PlantPoison(GraphPass):
    """Leaves in the graph, and in its own options, what cannot be shown."""

    option: Any
    name: ClassVar[str] = "plant_poison"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for node in gm.graph.nodes:
            node.meta["poison"] = {"poison": self.option}  # a key torch does not print
        with gm.graph.inserting_before(nodes.output_of(gm.graph)):
            planted = gm.graph.call_function(Poison)
        meta.set_value(planted, self.option)
        meta.set_parameters(planted, [self.option], [])
        ctx.note(self, self.option)
        ctx.note(self, "two\nlines")
        return True


@dataclass(frozen=True, kw_only=True)
class PlantPoisonEarly(PlantPoison):
    phase: ClassVar[Phase] = "joint"


def compile_small(directory: Path, passes: list[GraphPass] | None = None) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    options: dict[str, Any] = {"dump": directory, "passes": PassList(passes or presets.default())}
    with_fx(model, **options)(torch.ones(3, 4)).sum().backward()


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the two that hold what a clock has measured: times.json and the page, which shows it."""
    files = [path for path in sorted(directory.rglob("*.*")) if path.name not in ("times.json", "index.html")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_dump_has_files_per_graph_and_pass_and_a_diff(tmp_path: Path) -> None:
    compile_small(tmp_path)
    names = [Path(name).name for name in contents(tmp_path)]
    assert len(names) == len(set(names)) > 0
    for entry in presets.default():
        for direction in ("joint",) if entry.phase == "joint" else ("forward", "backward"):
            for ending in ("py", "diff"):
                assert sum(name.endswith(f"_{entry.name}.{direction}.{ending}") for name in names) == 1
    for direction in ("joint", "forward", "backward"):
        assert sum(name.endswith(f"_captured.{direction}.py") for name in names) == 1
    assert (tmp_path / "rank0").is_dir()


def test_the_first_line_names_the_pass_and_its_options(tmp_path: Path) -> None:
    compile_small(tmp_path)
    (path,) = tmp_path.rglob("*_sink_waits.forward.py")
    first = path.read_text().splitlines()[0]
    (used,) = [entry for entry in presets.default() if isinstance(entry, SinkWaits)]
    assert first.startswith(f"# after {used!r}, forward graph, ")


def test_second_line_has_predicted_peak_and_the_previous_one(tmp_path: Path) -> None:
    """f32: the forward makes [3, 6] twice and [3, 2]; backward starts with what it is given."""
    compile_small(tmp_path)
    (captured,) = tmp_path.rglob("*_captured.forward.py")
    assert captured.read_text().splitlines()[1] == "# peak 144 bytes at tanh: addmm 72, tanh 72"
    (last,) = tmp_path.rglob("*_sink_waits.forward.py")
    assert last.read_text().splitlines()[1].endswith(" (before: peak 144 bytes at tanh)")


def test_a_diff_shows_what_the_pass_changed(tmp_path: Path) -> None:
    class Rename(GraphPass):
        name = "swap_tanh"

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
            found = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
            for node in found:
                node.target = torch.ops.aten.sin.default
            return bool(found)

    compile_small(tmp_path, [Rename()])
    (path,) = tmp_path.rglob("*_swap_tanh.forward.diff")
    lines = path.read_text().splitlines()
    assert any(line.startswith("-") and "aten.tanh" in line for line in lines)
    assert any(line.startswith("+") and "aten.sin" in line for line in lines)


class Plain:
    """Its repr holds its address."""


@dataclass(frozen=True, kw_only=True)
class HoldsObject(GraphPass):
    option: Any
    name: ClassVar[str] = "holds_object"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


def test_addresses_are_left_out(tmp_path: Path) -> None:
    held = [Plain(), Plain()]
    for number, option in enumerate(held):
        graph = fx.Graph()
        graph.output((option, graph.call_function(option.__init__, (option,))))
        Dumper(directory=tmp_path / str(number), rank=0, frame="0/0").after(
            HoldsObject(option=option), "forward", graph, ()
        )
    assert repr(held[0]) != repr(held[1])
    assert contents(tmp_path / "0") == contents(tmp_path / "1") != {}


def test_ranks_and_frames_have_directories_of_their_own(tmp_path: Path) -> None:
    with fake_world(2, rank=1):
        compile_model(mlp, {"dump": tmp_path})
    assert {str(Path(name).parent) for name in contents(tmp_path)} == {"rank1/frame_0_0"}


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        compile_small(tmp_path / name)
    assert contents(tmp_path / "first") == contents(tmp_path / "second") != {}


def test_the_hash_seed_changes_nothing(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    """Two processes, which also differ in every address."""
    program = (
        "import tempfile; from pathlib import Path; from tests.reporting.test_dump import compile_small, contents; "
        "folder = Path(tempfile.mkdtemp()); compile_small(folder); print(contents(folder))"
    )
    first, second = hash_seeds.printed(program, tmp_path)
    assert first == second and ".py" in first


@pytest.mark.parametrize("position", range(len(presets.default()) + 1))
def test_poison_at_any_pass_boundary_does_not_stop_a_compile(tmp_path: Path, position: int) -> None:
    passes = presets.default()
    early = position < len([entry for entry in passes if entry.phase == "joint"])
    passes.insert(position, (PlantPoisonEarly if early else PlantPoison)(option=Poison()))
    compile_small(tmp_path, passes)
    for entry in passes:
        for direction in ("joint",) if entry.phase == "joint" else ("forward", "backward"):
            (path,) = tmp_path.rglob(f"*_{entry.name}.{direction}.py")
            assert "aten.mm(" in path.read_text() or "aten.addmm(" in path.read_text()
            if entry.name == "plant_poison":
                title, peak, *notes = path.read_text().splitlines()[:4]
                assert peak.startswith("# peak ")
                assert title.startswith(f"# after plant_poison, {direction} graph, ")
                assert notes == ["# <unprintable Poison>", "# two lines"]
                assert "  # <unprintable tuple>" in path.read_text()


def _dump(tmp_path: Path, graph: fx.Graph) -> str:
    Dumper(directory=tmp_path, rank=0, frame="0/0").captured("forward", graph)
    (path,) = tmp_path.rglob("*.py")
    return path.read_text()


def test_unprintable_values_are_replaced(tmp_path: Path) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Poison()
    poisoned = graph.call_function(torch.add, (x, Poison()), {"alpha": [Poison()]})
    poisoned.meta["val"] = [Poison(), torch.ones(2)]
    graph.output((poisoned, Poison()))
    text = _dump(tmp_path, graph)
    assert "x: <unprintable Poison> = input" in text
    assert "add: (<unprintable Poison>, f32[2]) = add(x, <unprintable Poison>, alpha=[<unprintable Poison>])" in text
    assert "return (add, <unprintable Poison>)" in text


def test_erased_node_that_is_read_is_shown_by_name(tmp_path: Path) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gone = graph.call_function(torch.neg, (x,))
    reader = graph.call_function(torch.abs, (x,))
    graph.output(reader)
    graph.erase_node(gone)
    reader._args = (gone,)  # what a faulty pass leaves behind
    assert "abs_1: ? = absolute(neg)" in _dump(tmp_path, graph).replace("= abs(", "= absolute(")


def test_symbolic_sizes_are_shown_without_a_guard(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.ones(5, 3), symbolic_context=context)
    graph.output(x)
    before = len(shapes.guards)
    text = _dump(tmp_path, graph)
    assert "x: f32[s" in text and ", 3]" in text
    assert len(shapes.guards) == before


def test_a_directory_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with caplog.at_level(logging.WARNING, logger="zgraph.reporting.dump"):
        compile_small(blocked)
    lines = [record.getMessage() for record in caplog.records if "cannot write the dump" in record.getMessage()]
    assert len(lines) == 1 and str(blocked) in lines[0]
