"""What a process that NCCL's watchdog ends leaves behind: which parameters each collective worked for, by number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.graphs import Drawing, deep, fake_world, traced
from zgraph.codegen.lower_fx import lower_fx
from zgraph.errors import CollectiveError
from zgraph.graph import nodes
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions, SinkWaits
from zgraph.passes.common.merge_collectives import Bucket, merge
from zgraph.reporting import collective_numbers
from zgraph.reporting.collective_numbers import with_numbers
from zgraph.torch_compat.groups import flight_recorder_directory

PASSES = (LowerGathers(), LowerReductions(), BucketCollectives(bucket_bytes=1000, gathers="coalesced"), SinkWaits())


@pytest.fixture
def on_nccl(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Groups claim to be NCCL's, and how far each has counted."""
    counted = {"0": 0, "0.reductions": 0}
    monkeypatch.setattr(collective_numbers, "group_backend", lambda group_name, device: "nccl")
    monkeypatch.setattr(collective_numbers, "collectives_so_far", lambda group: counted[group.group_name])
    return counted


def test_a_file_says_where_each_graph_began_and_what_follows(
    on_nccl: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "a" / "dump_rank_"))
    with fake_world(2):
        found = traced(deep, PASSES)
        called: list[Any] = []
        runs = {
            direction: with_numbers(called.append, found.graphs[direction].graph, f"0/0 {direction}", 1)
            for direction in ("forward", "backward")
        }
        on_nccl["0"] = 17
        runs["forward"](["first"])
        on_nccl |= {"0": 19, "0.reductions": 4}
        runs["backward"](["second"])
    assert called == [["first"], ["second"]]
    lines = (tmp_path / "a" / "zgraph_collectives_rank_1.txt").read_text().splitlines()
    heads = [line for line in lines if line.startswith("process")]
    assert [line.removeprefix(f"process {os.getpid()}, ") for line in heads] == [
        "graph 0/0 forward, on group 0 its last call began after collective 0000000017",
        "graph 0/0 backward, on group 0 its last call began after collective 0000000019",
        "graph 0/0 backward, on group 0.reductions its last call began after collective 0000000004",
    ]
    first = "all_gather_into_tensor_coalesced: 0.weight, 1.weight, 2.weight"
    starts = [*nodes.call_functions(found.graphs["forward"].graph, nodes.is_start)]
    assert lines[1].startswith(f"  +1 {first}") and len(starts) == lines.index(heads[1]) - 1


def test_elsewhere_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "dump_rank_"))
    with fake_world(2):
        graph = traced(deep, PASSES).graphs["forward"].graph
        run: Any = object()
        assert with_numbers(run, graph, "0/0 forward", 0) is run
    assert not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_written_is_done_without(
    on_nccl: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "file" / "dump_rank_"))
    with fake_world(2):
        graph = traced(deep, PASSES).graphs["forward"].graph
        run: Any = object()
        assert with_numbers(run, graph, "0/0 forward", 0) is run


def test_it_lies_where_the_flight_recorder_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert flight_recorder_directory() == Path(os.path.expanduser("~/.cache/torch"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert flight_recorder_directory() == Path("/cache/torch")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/old/trace_rank_")
    assert flight_recorder_directory() == Path("/old")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/new/trace_rank_")
    assert flight_recorder_directory() == Path("/new")


def test_where_waits_block_a_groups_failure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCH_NCCL_BLOCKING_WAIT=1 the wait raises a DistBackendError."""

    def fail(started: Any) -> Any:
        raise dist.DistBackendError("Watchdog caught collective operation timeout")

    monkeypatch.setattr("zgraph.runtime.exchanges.collectives.wait", fail)
    with fake_world(2):
        drawing = Drawing()
        starts = [drawing.start_gather(drawing.input(name, 4, 8), name) for name in ("w", "v")]
        gm = drawing.done(*[drawing.wait(start) for start in starts])
        merge(gm.graph, Bucket(tuple(starts), starts[-1]), "coalesced")
        with pytest.raises(CollectiveError, match=r"all_gather_into_tensor_coalesced.*\bw, v\b.*caught collective"):
            lower_fx(gm)([torch.zeros(4, 8), torch.zeros(4, 8)])
