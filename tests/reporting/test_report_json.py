"""`report.json`: keeps to its schema, says what dumps and curves say, and is the same in every run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from torch import nn

import zgraph
from tests.support.graphs import compile_model, deep, fake_world, mlp
from tests.support.hash_seeds import HashSeeds
from zgraph.compiler.pass_list import PassList
from zgraph.compiler.target import Target
from zgraph.passes import LoCo, presets
from zgraph.reporting.export.reading import bytes_by_class, line_text, load, names_of, texts_of
from zgraph.reporting.export.report_json import schema

TARGET = Target(hardware=zgraph.Hardware.preset("h100"))


def planned() -> PassList:
    return PassList(presets.default(), target=TARGET)


def dump(directory: Path, build: Any = deep, pipeline: PassList | None = None, **shard: Any) -> Path:
    """The dump of a model of two ranks on this one."""
    with fake_world(2):
        compile_model(build, {"dump": directory, "passes": pipeline or planned()}, **shard)
    (file,) = directory.rglob("report.json")
    return file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield dump(tmp_path_factory.mktemp("dump"))


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(schema())


def test_it_keeps_to_the_schema(written: Path) -> None:
    document = json.loads(written.read_text())
    Draft202012Validator(schema()).validate(document)
    times = json.loads(written.with_name("times.json").read_text())
    Draft202012Validator({"$ref": "#/$defs/times", "$defs": schema()["$defs"]}).validate(times)
    del document["frames"][0]["graphs"][0]["nodes"]["bytes"]
    assert not Draft202012Validator(schema()).is_valid(document)


def test_texts_after_every_pass_are_those_of_the_dump(written: Path) -> None:
    """The whole text is in the lines and hunks: nothing of a dump's file is missing."""
    (frame,) = load(written)["frames"]
    files = {path.name.partition("_")[2]: path.read_text().splitlines() for path in written.parent.glob("*.py")}
    compared = 0
    for direction in ("joint", "forward", "backward"):
        for entry, lines in texts_of(frame, direction):
            text = [line_text(frame, line) for line in lines]
            name = f"{'captured' if entry is None else entry['name']}.{direction}.py"
            assert text == [line for line in files[name] if not line.startswith("# ")], name
            compared += 1
    assert compared == len(files)


def test_the_last_text_is_that_of_the_final_nodes(written: Path) -> None:
    (frame,) = load(written)["frames"]
    for graph in frame["graphs"]:
        *_, (_, lines) = texts_of(frame, graph["direction"])
        assert lines == graph["nodes"]["line"]


def test_classes_add_up_to_the_peak(written: Path) -> None:
    document = load(written)
    (frame,) = document["frames"]
    found = bytes_by_class(document, frame)
    curve = [sum(each) for each in zip(*found.values(), strict=True)]
    memory = frame["memory"]
    assert len(curve) == memory["nodes"] == sum(len(graph["nodes"]["line"]) for graph in frame["graphs"])
    assert max(curve) == memory["peak_bytes"] and curve.index(max(curve)) == memory["peak_position"]
    at_peak = [memory["storages"]["bytes"][number] for number in memory["at_peak"]]
    assert sum(at_peak) + memory["workspace_bytes"][memory["peak_position"]] == memory["peak_bytes"]


def test_a_bucket_lists_its_parameters_and_they_list_it(written: Path) -> None:
    (frame,) = load(written)["frames"]
    table = frame["parameters"]
    assert table["name"] == [f"{number}.weight" for number in range(6)]
    largest = 0
    for number, graph in enumerate(frame["graphs"]):
        columns = graph["collectives"]
        names = names_of(frame, graph)
        for row, members in enumerate(columns["parameters"]):
            assert all([number, row] in table["collectives"][member] for member in members)
            assert names[columns["node"][row]].startswith("all_") and names[columns["wait"][row]].startswith("wait_")
            largest = max(largest, len(members))
    assert largest == 6
    sent = sum(graph["sent_bytes"] for graph in frame["graphs"])
    assert sum(table["wire_bytes"]) == sent > 0


def test_without_a_target_there_are_no_times(tmp_path: Path) -> None:
    document = load(dump(tmp_path, mlp, PassList(presets.default())))
    Draft202012Validator(schema()).validate({key: value for key, value in document.items() if key != "times"})
    assert document["frames"][0]["hardware"] is None
    for graph in document["frames"][0]["graphs"]:
        assert graph["predicted_us"] is graph["nodes"]["cost_us"] is graph["collectives"]["predicted_us"] is None


def wide() -> nn.Module:
    """Two weights that are large enough to be compressed."""
    return nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh(), nn.Linear(128, 128, bias=False))


def test_compressed_reductions_say_their_codec_and_what_they_keep(tmp_path: Path) -> None:
    """LoCo keeps a byte for each element of this rank's gradient, and in each group of them a scale."""
    method = LoCo()
    document = load(dump(tmp_path, wide, PassList(presets.default(compression=method), target=TARGET)))
    frame = document["frames"][0]
    codecs = {frame["strings"][each] for each in frame["parameters"]["codec"]}
    assert len(codecs) == 1 and "LoCo" in codecs.pop()
    kept = sum(math.prod(shape) * dtype.itemsize for shape, dtype in method.state(128 * 128 // 2, 2).values())
    assert frame["parameters"]["feedback_bytes"] == [kept, kept]
    assert document["at_rest"]["error feedback"] == 2 * kept > 0


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    first, second = (dump(tmp_path / name).read_bytes() for name in ("first", "second"))
    assert first == second


def test_the_hash_seed_changes_nothing(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    program = (
        "import tempfile; from pathlib import Path; from tests.reporting.test_report_json import dump; "
        "print(dump(Path(tempfile.mkdtemp())).read_text())"
    )
    first, second = hash_seeds.printed(program, tmp_path)
    assert first == second and '"format":"zgraph-report"' in first
