"""Anchors, momentum and errors in the tier of optimizer state: the same bits as on the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zgraph
from tests.support.outer_runs import Run
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, SHARDS, under
from zgraph.sharding.scope import state_of
from zgraph.tiers.tier import DEVICE


def spaces(run: Run) -> set[str]:
    """Where tensors of outer steps are between rounds."""
    state = state_of(run.model)
    assert state is not None and state.scope.resting is not None
    tensors = [tensor for one in run.outer._anchors for tensor in one.state.tensors() if tensor.numel()]
    return {state.scope.resting.space_of(one).name for one in tensors}


def check_tier(folder: Path, offload: zgraph.Offload) -> None:
    """Sites start with values of their own, and are compared with a run of the first site's values."""
    at_rest = under(folder, offload)
    plain, run = Run(2), Run(2, at_rest)
    other = Run(2, at_rest, seed=run.mesh["site"].get_local_rank())
    expected = str(offload.optimizer or DEVICE)
    for step in range(9):
        for one in (plain, run, other):
            one.train(step, step + 1)
        assert spaces(run) == spaces(other) == {expected}, f"step {step}"
    assert run.outer.kept_bytes == plain.outer.kept_bytes

    def compare(one: Run) -> None:
        with plain.outer.anchor():
            values = [one.clone() for one in plain.values()]
        with one.outer.anchor():
            assert all(map(torch.equal, values, one.values()))
        assert all(map(torch.equal, plain.values(), one.values()))

    compare(run)
    compare(other)
    resumed = Run(2, at_rest)
    resumed.model.load_state_dict(plain.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    resumed.outer.load_state_dict(run.outer.state_dict())
    assert spaces(resumed) == {expected}
    for one in (plain, resumed):
        one.train(9, 15)
        one.outer.finish()
    compare(resumed)


@worlds(2, 4)
@pytest.mark.parametrize("offload", [HOST, DISK, SHARDS, replace(DISK, params=None)], ids=str)
def test_what_outer_steps_keep_is_where_optimizer_state_is(
    ranks: Ranks, offload: zgraph.Offload, tmp_path: Path
) -> None:
    ranks.run(check_tier, tmp_path, offload)
