"""Checkpoints of runs with outer steps: the same bits after a resume, and states that do not fit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zgraph
from tests.support.models import Language
from tests.support.outer_runs import Run
from tests.support.ranks import Ranks, worlds
from zgraph import passes


def check_resume(root: Path, saved_at: int) -> None:
    whole_run, first, second = Run(2), Run(2), Run(2)
    whole_run.train(0, 12)
    first.train(0, saved_at)
    path = zgraph.save_checkpoint(
        root / first.folder, first.model, first.optimizer, step=saved_at,
        extra={"outer": first.outer.state_dict()}, group=first.mesh["dp"],
    )  # fmt: skip
    assert path == zgraph.latest_checkpoint(root / first.folder, group=first.mesh["dp"])
    loaded = zgraph.load_checkpoint(path, second.model, second.optimizer, group=second.mesh["dp"])
    second.outer.load_state_dict(loaded.extra["outer"])
    second.train(saved_at, 12)
    for run in (whole_run, second):
        run.outer.finish()
    assert all(map(torch.equal, whole_run.values(), second.values()))
    with pytest.raises(zgraph.CheckpointError, match=r'group=mesh\["dp"\]'):
        zgraph.save_checkpoint(root, first.model, first.optimizer, step=saved_at)


@worlds(2, 4)
@pytest.mark.parametrize("saved_at", [5, 8])
def test_a_run_resumes_with_the_same_bits_while_rounds_run(ranks: Ranks, saved_at: int, tmp_path: Path) -> None:
    ranks.run(check_resume, tmp_path, saved_at)


def check_refused_states() -> None:
    run = Run(2)
    run.train(0, 5)
    state = run.outer.state_dict()
    others = {
        "other fragments": {"fragments": 2},
        "errors of another codec": {"fragments": 3, "codec": passes.NoFeedback(bits=4)},
    }
    for text, options in others.items():
        other = zgraph.OuterSteps(Run(2).model, run.mesh["site"], **options)
        with pytest.raises(zgraph.ZgraphError, match=text):
            other.load_state_dict(state)
    with pytest.raises(zgraph.ZgraphError, match="rounds are running"):
        run.outer.load_state_dict(state)


@worlds(2)
def test_states_of_other_runs_are_refused(ranks: Ranks) -> None:
    ranks.run(check_refused_states)


def check_fewer_sites(root: Path) -> None:
    run = Run(2)
    run.train(0, 9)
    if run.mesh["site"].get_local_rank() == 0:
        torch.save(run.outer.state_dict(), root / "state")
    dist.barrier()
    model = Language(width=12)
    outer = zgraph.OuterSteps(model, every=4, fragments=3)
    with pytest.warns(zgraph.ZgraphWarning, match="that of site 0 of 2, and this is site 0 of 1"):
        outer.load_state_dict(torch.load(root / "state"))
    with outer.anchor():
        values = [one.detach().clone() for one in model.parameters()]
    with run.outer.anchor():
        assert all(map(torch.equal, values, run.values()))


@worlds(2)
def test_another_number_of_sites_takes_the_anchor(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_fewer_sites, tmp_path)


def check_states_of_other_steps() -> None:
    run = Run(2)
    states = []
    for first, last in ((0, 4), (4, 8)):
        run.train(first, last)
        states.append(copy.deepcopy(run.outer.state_dict()))
    rank = run.mesh["site"].get_local_rank()
    with pytest.raises(zgraph.ZgraphError, match="site 0 loads a state of step 8, and site 1 one of step 4"):
        Run(2).outer.load_state_dict(states[1 - rank])


@worlds(2)
def test_sites_that_load_other_steps_are_told(ranks: Ranks) -> None:
    ranks.run(check_states_of_other_steps)
