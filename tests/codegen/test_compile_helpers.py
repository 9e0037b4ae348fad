"""Helper processes: islands that they compile are found by the rank; without them nothing is different."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import zgraph
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.codegen.ahead.helpers import MOST, Helpers, spare_cores, start_helpers
from zgraph.codegen.inductor import InductorLowering
from zgraph.codegen.islands import cut_out, find_islands
from zgraph.driver.options import CompileOptions
from zgraph.torch_compat.fake_values import step_mode
from zgraph.torch_compat.inductor import compile_with_inductor, graphs_from_cache

LONG_S = 240.0  # for starting and compiling on a machine with other work


def island(function: Callable[..., Any]) -> fx.GraphModule:
    """The only island of a function of two matrices."""
    with step_mode() as mode:
        fakes = [mode.from_tensor(torch.empty(6, 8)) for _ in range(2)]
        gm = make_fx(function)(*fakes)
    (members,) = find_islands(gm.graph)
    return cut_out(members).gm


def products(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return ((x @ y.permute(1, 0)).sin() + 1,)


def sums(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return ((x + y).sum(1).exp() * 2,)


def compiled(gm: fx.GraphModule, *inputs: Tensor) -> Tensor:
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    (found,) = compile_with_inductor(gm, fakes)(list(inputs))
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    yield tmp_path
    torch.compiler.reset()


def test_what_a_helper_compiled_is_found_and_has_the_same_bits(cache: Path) -> None:
    """The settings of this process reach the helper, or the keys of the cache would differ."""
    inputs = torch.randn(6, 8), torch.randn(6, 8)
    graphs: dict[object, fx.GraphModule] = {function.__name__: island(function) for function in (products, sums)}
    torch.use_deterministic_algorithms(True)
    try:
        with config.patch({"epilogue_fusion": False, "cpp.min_chunk_size": 256}):
            helpers = start_helpers(graphs, 1, 1)
            assert helpers is not None
            assert [helpers.has_compiled(key, LONG_S) for key in graphs] == [True, True]
            assert all(helpers.claim(key) for key in graphs)
            before = graphs_from_cache()
            found = [compiled(gm, *inputs) for gm in graphs.values()]
            assert graphs_from_cache() - before == len(graphs)
            with config.patch({"force_disable_caches": True}):
                expected = [compiled(gm, *inputs) for gm in graphs.values()]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, expected))


ANSWERS_ONCE = """#!{python}
import pickle, sys
pickle.load(sys.stdin.buffer)
pickle.dump((True, ""), sys.stdout.buffer)
sys.stdout.flush()
pickle.load(sys.stdin.buffer)  # an island
"""


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", ANSWERS_ONCE])
def test_a_helper_that_ends_early_costs_its_work_only(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first island, or in it: no wait is left hanging, and the rank compiles all islands."""
    program = tmp_path / "python"
    program.write_text(text.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    helpers = Helpers({"first": b"", "second": b""}, 1, b"")
    (thread,) = helpers.threads
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert helpers.claim("first") and helpers.claim("second") and helpers.claim("an island that was not sent")
    assert not helpers.has_compiled("first") and not helpers.has_compiled("second")


KILLED = """
import os, signal, sys, time
from tests.codegen import test_compile_helpers as here
helpers = here.start_helpers({"products": here.island(here.products), "sums": here.island(here.sums)}, 1, 1)
children = []
while not children:
    time.sleep(0.05)
    tasks = os.listdir("/proc/self/task")
    children = [pid for task in tasks for pid in open(f"/proc/self/task/{task}/children").read().split()]
if sys.argv[1] == "while it compiles":
    helpers.has_compiled("products", here.LONG_S)
print(children[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def members_of(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("when", ["while it starts", "while it compiles"])
def test_no_process_outlives_a_rank_that_is_killed(when: str, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, when], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == -9, done.stderr
    group, deadline = int(done.stdout), time.monotonic() + LONG_S
    while members_of(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members_of(group) == []


def both(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return products(x, y) + sums(x, y)


def test_no_helpers_without_a_cache_or_for_few_islands() -> None:
    few = island(both)
    for count, options in ((None, {}), (1, {"force_disable_caches": True}), (1, {"fx_graph_cache": False})):
        lowering = InductorLowering(count=count)
        with config.patch(options):
            lowering.compile_ahead([few])
        assert lowering.helpers is None
    assert start_helpers({}, 1, 1) is None


def test_islands_with_symbolic_sizes_are_left_to_the_rank() -> None:
    with_symbols = make_fx(sums, tracing_mode="symbolic")(torch.empty(6, 8), torch.empty(6, 8))
    assert start_helpers({"sums": with_symbols}, 1, 1) is None


def test_helpers_have_the_cores_that_ranks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [spare_cores(ranks) for ranks in (1, 4, 8, 16, 64)] == [MOST, 3, 1, 0, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert spare_cores(64) == 3


@pytest.mark.parametrize(
    ("options", "settings", "found"),
    [
        ({"compile_helpers": -1}, {}, "is no number of processes"),
        ({"compile_helpers": True}, {}, "is no number of processes"),
        ({"compile_helpers": "2"}, {}, "is no number of processes"),
        ({"compile_helpers": 1, "lowering": "fx"}, {}, "compiles nothing"),
        ({"compile_helpers": 1}, {"force_disable_caches": True}, "cache"),
        ({"compile_helpers": 1}, {"_post_fusion_custom_pass": len}, "functions of yours"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_an_error(
    options: dict[str, Any], settings: dict[str, Any], found: str
) -> None:
    with config.patch(settings), pytest.raises(ValueError, match=f"compile_helpers.*{found}"):
        CompileOptions.parse(options)
    with config.patch(settings):
        assert CompileOptions.parse({"compile_helpers": 0, "lowering": "fx"}).compile_helpers == 0


def test_a_step_that_makes_state_runs_by_fx_without_helpers() -> None:
    """The option is for the steps after it, which Inductor compiles."""
    with fake_world(1):
        check_first_step()


def check_first_step() -> None:
    expected = nn.Linear(6, 3)
    model = zgraph.shard(copy.deepcopy(expected), zero_stage=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @zgraph.training_step(model, optimizer, options={"compile_helpers": 1})
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(8, 6)
    step(x)
    expected(x).square().mean().backward()
    torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9).step()
    assert all(
        torch.equal(whole(p.detach()), q) for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    )


def trained(folder: str, count: int) -> dict[str, Any]:
    """Losses and parameters after two steps, with a cache in a folder of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["ZGRAPH_CACHE_DIR"] = f"{folder}/{count}"
    torch.compiler.reset()
    torch.manual_seed(0)
    model = zgraph.shard(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)), zero_stage=3)
    run = torch.compile(model, backend="zgraph", options={"compile_helpers": count})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses: list[float] = []
    for _ in range(2):
        loss = run(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = zgraph.summary(model)
    counts = report.distinct_islands, report.cached_islands, report.helped_islands
    return {
        "losses": losses,
        "state": [whole(value.detach()).clone() for value in model.parameters()],
        "islands": counts,
    }


def test_ranks_with_helpers_train_to_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    without, helped = (ranks.run(trained, str(tmp_path), count) for count in (0, 1))
    for one, other in zip(without, helped, strict=True):
        assert one["losses"] == other["losses"] and all(map(torch.equal, one["state"], other["state"]))
        assert one["islands"][2] == 0 and other["islands"][0] == one["islands"][0] >= sum(other["islands"][1:])
