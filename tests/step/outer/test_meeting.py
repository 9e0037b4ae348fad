"""Sites that meet at a store: they come late, are killed, come back, and keep equal anchors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

import zgraph
from tests.support.meetings import meeting
from tests.support.models import Language
from tests.support.outer_runs import batches, loss_of
from tests.support.ranks import RankFailure
from zgraph.runtime.exchanges.changes import checksum

DEADLINE_S = 8.0
Log = list[tuple[int, int, int]]  # of anchors: fragment, rounds, checksum


def anchors_of(outer: zgraph.OuterSteps) -> Log:
    return [(place, one.state.rounds, checksum([one.values])) for place, one in enumerate(outer._anchors)]


def train(
    address: str, seed: int, phases: Sequence[tuple[int, int]], ends: str = "returns", folder: Path | None = None
) -> Log:
    """Train until so many rounds had so many sites, phase by phase; the anchors after each step.

    Each phase that has ended adds to a counter of the store. A site may be killed at the end, while rounds run. One of
    several ranks keeps anchors in a folder.
    """
    host, port = address.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    torch.manual_seed(seed)
    model: nn.Module = Language(layers=1, width=12)
    if dist.get_world_size() > 1:
        model = zgraph.shard(model, offload=zgraph.Offload(optimizer="disk", path=folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = zgraph.OuterSteps(model, zgraph.Meeting(address, deadline_s=DEADLINE_S), every=4, fragments=2, delay=1)
    log = anchors_of(outer)
    step = 0
    for number, (sites, rounds) in enumerate(phases):
        seen = {(place, count) for place, count, _ in anchors_of(outer)}
        done = 0
        while done < rounds:
            loss_of(model, *batches(step, seed, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            step += 1
            found = anchors_of(outer)
            log += found
            new = {(place, count) for place, count, _ in found} - seen
            seen |= new
            done += len(new) if outer._sites.count == sites else 0
        if dist.get_rank() == 0:
            store.add(f"phase {number}", 1)
    if ends == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return log


def check_equal(logs: Sequence[Log]) -> int:
    """Check that the anchors of a fragment are equal after equal rounds; the number of rounds."""
    known: dict[tuple[int, int], int] = {}
    for log in logs:
        for place, rounds, digest in log:
            assert known.setdefault((place, rounds), digest) == digest, f"fragment {place} after round {rounds}"
    return len(known)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sites_that_meet_keep_equal_anchors(ranks: int, tmp_path: Path) -> None:
    """Of each site one rank or two; each position has anchors of its own."""
    with meeting() as sites:
        runs = [sites.start(train, seed, [(2, 6)], "returns", tmp_path, ranks=ranks) for seed in range(2)]
        logs = [run.result() for run in runs]
    for position in range(ranks):
        assert check_equal([log[position] for log in logs]) > 6


def test_a_killed_site_delays_no_round_for_long_and_its_successor_gets_the_anchors() -> None:
    with meeting() as sites:
        survivors = [sites.start(train, seed, [(3, 3), (2, 4), (3, 3)]) for seed in range(2)]
        killed = sites.start(train, 2, [(3, 3)], "is killed")
        with pytest.raises(RankFailure, match="died"):
            killed.result()
        sites.await_counter("phase 1", 2)
        successor = sites.start(train, 3, [(3, 3)])
        logs = [run.result()[0] for run in (*survivors, successor)]
    assert check_equal(logs) > 10
    first = logs[-1][:2]
    assert all(entry in logs[0] or entry in logs[1] for entry in first), "it starts from anchors of others"


def finish_after_a_pause(address: str, pauses: bool) -> tuple[list[float], float]:
    """One site pauses while the other goes on with rounds, then finishes: what it has learnt is not lost."""
    host, port = address.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    outer = zgraph.OuterSteps(
        model, zgraph.Meeting(address, deadline_s=4), every=2, fragments=1, lr=1.0, momentum=0.0, codec=None
    )
    if pauses:
        for _ in range(6):
            outer.step()
        model.weight.data += 8.0
        store.add("paused", 1)
        while store.add("rounds", 0) < 4:
            time.sleep(0.05)
        outer.finish()
        store.add("finished", 1)
        return [one.item() for one in model.parameters()], outer._anchors[0].values[0].item()
    store.add("begun", 1)
    while store.add("finished", 0) == 0:
        before = outer._anchors[0].state.rounds
        outer.step(weight=1.0)
        time.sleep(0.01)
        if store.add("paused", 0) and outer._anchors[0].state.rounds != before:
            store.add("rounds", 1)
    outer.finish()
    return [one.item() for one in model.parameters()], outer._anchors[0].values[0].item()


def test_a_site_that_finishes_after_a_pause_loses_nothing() -> None:
    with meeting() as sites:
        going = sites.start(finish_after_a_pause, False)
        sites.await_counter("begun", 1)  # a site that pauses gives no newcomer its values
        paused = sites.start(finish_after_a_pause, True)
        ((values, anchor),) = paused.result()
        ((_, last),) = going.result()
    assert values == [anchor] and anchor > 0, "it has moved the anchor"
    assert last > 0, "also that of the other site"


def fail_once(address: str, fails: bool) -> tuple[Log, set[int]]:
    """Train for some rounds; one site fails in round 2 after its exchange, when the other one has got everything."""
    model = nn.Linear(6, 6)
    outer = zgraph.OuterSteps(model, zgraph.Meeting(address, least=2, deadline_s=4), every=1, fragments=1)
    if fails:
        add = outer._sites._ledger.add
        outer._sites._ledger.add = lambda key, number=0: _fail() if key == "done/2" else add(key, number)
    log: Log = []
    while not log or log[-1][1] < 6:
        with torch.no_grad():
            model.weight += 1.0 + fails
        outer.step()
        log += anchors_of(outer)
    return log, {rounds for _, rounds, _ in log}


def _fail() -> int:
    raise RuntimeError("this site fails before it says that it is done")


def test_a_round_that_one_site_cannot_finish_counts_nowhere() -> None:
    with meeting() as sites:
        runs = [sites.start(fail_once, fails) for fails in (False, True)]
        found = [run.result()[0] for run in runs]
    check_equal([log for log, _ in found])
    for _, rounds in found:
        assert 6 in rounds and 3 not in rounds, "the third round changed the anchor of a site"


def finish_alone(address: str) -> str:
    outer = zgraph.OuterSteps(nn.Linear(2, 2), zgraph.Meeting(address, least=2, deadline_s=4), every=2)
    for _ in range(6):
        outer.step()
    with pytest.raises(zgraph.ZgraphError, match="have not been exchanged: 1 of at least 2 sites are live"):
        outer.finish()
    return str(outer)


def test_a_lone_site_with_too_few_others_is_told_at_the_end() -> None:
    with meeting() as sites:
        assert "6 steps, 0 rounds" in sites.start(finish_alone).result()[0]


def other_numbers_of_ranks(address: str) -> None:
    model = nn.Linear(4, 4)
    if dist.get_world_size() > 1:
        model = zgraph.shard(model)
    zgraph.OuterSteps(model, zgraph.Meeting(address, deadline_s=2), every=4)


def test_a_site_with_another_number_of_ranks_is_refused_on_all_of_them() -> None:
    with meeting() as sites:
        sites.start(other_numbers_of_ranks).result()
        with pytest.raises(RankFailure) as error:
            sites.start(other_numbers_of_ranks, ranks=2).result()
    assert str(error.value).count("the number of ranks is 2 on site 2, and 1 where the meeting began") >= 2


def join_with(address: str, every: int) -> None:
    zgraph.OuterSteps(nn.Linear(2, 2), zgraph.Meeting(address, deadline_s=2), every=every)


def test_a_site_with_other_options_is_refused() -> None:
    with meeting() as sites:
        sites.start(join_with, 4).result()
        with pytest.raises(RankFailure, match="every is 5 on site 2, and 4 where the meeting began"):
            sites.start(join_with, 5).result()


def test_a_site_whose_predecessors_have_all_ended_is_told() -> None:
    with meeting() as sites:
        first = sites.start(join_with, 4)
        first.result()
        sites.ranks[0].close()
        with pytest.raises(RankFailure, match="none of its sites has been live for 2 s"):
            sites.start(join_with, 4).result()


def test_bad_addresses_are_refused() -> None:
    for address in ("10.0.0.1", "host:port", ":29400"):
        with pytest.raises(ValueError, match=re.escape(f"address={address!r}")):
            zgraph.Meeting(address)
    with pytest.raises(ValueError, match="least=0"):
        zgraph.Meeting("host:1", least=0)
    with pytest.raises(ValueError, match="deadline_s=0"):
        zgraph.Meeting("host:1", deadline_s=0)
    with pytest.raises(zgraph.ZgraphError, match="Start one with zgraph sites --port 1,"):
        zgraph.OuterSteps(nn.Linear(2, 2), zgraph.Meeting("127.0.0.1:1", deadline_s=1))


def test_the_command_keeps_a_store() -> None:
    command = [sys.executable, "-m", "zgraph", "sites", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        port = re.search(r'"port": (\d+)', "".join(lines))
        assert port is not None, lines
        zgraph.OuterSteps(nn.Linear(2, 2), zgraph.Meeting(f"127.0.0.1:{port[1]}"))
        process.terminate()  # a process in the background may have been told to ignore SIGINT
        assert process.wait() == -signal.SIGTERM
