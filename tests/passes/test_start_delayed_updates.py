"""StartDelayedUpdates: updates of gradients of the call before, as early as nobody reads what they overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import zgraph
from tests.support.graphs import KeepEach, fake_world
from tests.support.hash_seeds import HashSeeds
from zgraph.graph import meta, nodes
from zgraph.graph.text import graph_text
from zgraph.passes import StartDelayedUpdates, StreamStates, presets

LAYERS = 3
PRODUCTS = 8  # three of forward, and two of backward for each layer but the first, which has one
HOST = zgraph.Offload(optimizer="host", delayed_update_after=0)
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def steady(
    stage: int,
    *ends: zgraph.GraphPass,
    fused: bool = True,
    at_rest: zgraph.Offload = HOST,
    notes: list[str] | None = None,
) -> fx.GraphModule:
    """The graph of three layers that later calls run; behind the last of these passes, or before StreamStates."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))
    model = zgraph.shard(layers, zero_stage=stage, offload=at_rest)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)
    found: list[fx.GraphModule] = []
    *rules, stream = presets.default(bucket_bytes=1)
    streams = any(isinstance(one, StreamStates) for one in ends)
    report = zgraph.Report()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    pipeline = zgraph.Pipeline([*rules, *ends, KeepEach(found), *([] if streams else [stream])])
    options: dict[str, Any] = {"lowering": "fx", "pipeline": pipeline, "report": report}
    whole: Any = zgraph.training_step(model, optimizer, options=options)(step)
    for _ in range(3):
        whole(torch.ones(2, 4))
    if notes is not None:
        notes += [note for note in report.notes if note.startswith("start_delayed_updates")]
    return found[-1]


def hidden(gm: fx.GraphModule) -> list[int]:
    """For each update that runs beside compute, how many products stand between its start and its wait."""
    order = list(gm.graph.nodes)
    starts = [node for node in order if meta.beside(node) is not None and not nodes.is_update_wait(node)]
    waits = {meta.beside(node): node for node in order if nodes.is_update_wait(node)}
    return [
        sum(node.target is aten.mm.default for node in order if start < node < waits[meta.beside(start)])
        for start in starts
    ]


@pytest.mark.parametrize(
    ("stage", "beside"),
    [
        (0, [7, 3, 1]),  # of the first layer, which backward does not read, of the last, and of the one between
        (1, [8, 7, 6]),  # gathers of forward are the only reads
        (2, [8, 7, 6]),
        (3, [8, 4, 2]),  # backward gathers again
    ],
)
def test_updates_run_beside_what_follows_the_last_read(stage: int, beside: list[int]) -> None:
    gm = steady(stage, StartDelayedUpdates(), StreamStates())
    assert sum(node.target is aten.mm.default for node in gm.graph.nodes) == PRODUCTS
    assert hidden(gm) == beside


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_nobody_reads_a_parameter_behind_the_start(stage: int) -> None:
    """Values that lie in a shard are found by their names, not by what the pass asks."""
    order = list(steady(stage, StartDelayedUpdates()).graph.nodes)
    updates = [node for node in order if "_fused_" in str(node.target)]
    assert len(updates) == LAYERS
    for update in updates:
        (shard,) = update.args[0]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
        views = {node for node in order if node.target is aten.t.default and shard in node.all_input_nodes}
        readers = {user for value in (shard, *views) for user in value.users} - views
        waits = {wait for user in readers if nodes.is_start(user) for wait in nodes.waits_of(user)}
        assert readers == {update} | {one for one in readers if one < update}
        assert all(wait < update for wait in waits)


def test_a_second_run_changes_nothing() -> None:
    once, twice = steady(3, StartDelayedUpdates()), steady(3, StartDelayedUpdates(), StartDelayedUpdates())
    assert graph_text(once.graph) == graph_text(twice.graph)


@pytest.mark.parametrize(
    ("fused", "at_rest"), [(False, HOST), (True, zgraph.Offload(optimizer="host"))], ids=["not fused", "not delayed"]
)
def test_other_updates_stay(fused: bool, at_rest: zgraph.Offload) -> None:
    notes: list[str] = []
    moved = steady(2, StartDelayedUpdates(), fused=fused, at_rest=at_rest, notes=notes)
    assert notes and all("no fused update is delayed" in note for note in notes)
    assert graph_text(moved.graph) == graph_text(steady(2, KeepEach([]), fused=fused, at_rest=at_rest).graph)


@pytest.mark.parametrize("stage", [2, 3])
def test_on_disk_gradients_are_read_once_and_written_once(stage: int, tmp_path: Path) -> None:
    """A moment is read, and written back; a parameter is on the device."""
    at_rest = zgraph.Offload(optimizer="disk", path=tmp_path, delayed_update_after=0)
    graph = steady(stage, StartDelayedUpdates(), StreamStates(), at_rest=at_rest).graph
    reloads = [node.args[0] for node in nodes.call_functions(graph, nodes.is_reload)]
    stores = [node.args[1] for node in nodes.call_functions(graph, nodes.is_store)]
    resting = [node for node in graph.find_nodes(op="placeholder") if meta.space(node) == "disk"]
    assert len(resting) == 3 * LAYERS
    assert sorted(map(str, reloads)) == sorted(map(str, stores)) == sorted(map(str, resting))
    products = [node for node in graph.nodes if node.target is aten.mm.default]
    updates = [node for node in graph.nodes if "_fused_" in str(node.target)]
    assert updates[0] < products[-1], "reads and writes of a disk run beside backward"


def printed() -> None:
    with fake_world(2):
        print(graph_text(steady(3, StartDelayedUpdates()).graph))


@pytest.mark.slow  # two processes
def test_the_graph_is_the_same_under_every_hash_seed(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    one, other = hash_seeds.printed(f"from {__name__} import printed; printed()", tmp_path)
    assert "_fused_adamw_" in one
    assert one == other
