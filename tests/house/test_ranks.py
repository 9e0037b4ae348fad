"""The ranks of the other tests: one that fails ends the others, which may wait for it."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.support import ranks as support
from tests.support.ranks import RankFailure, fresh_ranks


def fails_on_one() -> None:
    """The other rank waits, for longer than the test would."""
    if dist.get_rank() == 1:
        raise FloatingPointError("of this rank alone")
    dist.barrier()


def rank() -> int:
    return dist.get_rank()


def test_a_rank_that_fails_ends_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds: ranks start twice."""
    monkeypatch.setattr(support, "GRACE_S", 0.2)
    with fresh_ranks(2, timeout_s=600) as ranks:
        with pytest.raises(RankFailure) as failure:
            ranks.run(fails_on_one)
        assert "FloatingPointError: of this rank alone" in str(failure.value)
        assert "--- rank 0\nno answer within 0.2 s after rank 1 had failed" in str(failure.value)
        assert ranks.run(rank) == [0, 1]


def make_groups(count: int) -> int:
    """Groups stay, as those of a test's meshes do."""
    for _ in range(count):
        dist.barrier(dist.new_group([0, 1]))
    return os.getpid()


def test_ranks_start_anew_when_their_groups_have_become_many() -> None:
    with fresh_ranks(2) as ranks:
        few = ranks.run(make_groups, 2)
        ranks.renew()
        assert ranks.run(make_groups, 40) == few
        ranks.renew()
        assert not set(ranks.run(make_groups, 1)) & set(few)
