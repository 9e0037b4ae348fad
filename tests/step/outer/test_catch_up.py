"""Members of a round that differ in their states: momentum moves to its new owners, and missed anchors are sent."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from zgraph.step.outer.catch_up import Member, caught_up
from zgraph.step.outer.fragments import Fragment
from zgraph.step.outer.peers import Peers
from zgraph.step.outer.rounds import Anchor, State

NUMEL = 13  # divides by no number of sites
MOMENTUM = torch.arange(1.0, 1 + NUMEL)


def entered(members: Sequence[Member], values: Sequence[Tensor], sent: Sequence[Tensor]) -> list[tuple[State, Tensor]]:
    """Let members with these anchors and values enter a round; each holds its rows of MOMENTUM."""
    store, connected = HashStore(), list[Peers]()  # kept: one that is ended cuts off members that still connect

    def run(rank: int) -> tuple[State, Tensor]:
        member = members[rank]
        anchor = Anchor(Fragment({"weight": torch.nn.Parameter(values[rank])}, 1, None), None)
        if member.sites:
            rows = anchor.rows(member.sites)
            padded = torch.nn.functional.pad(MOMENTUM, (0, member.sites * rows - NUMEL))
            own = padded[member.site * rows : (member.site + 1) * rows].clone()
            anchor.state = replace(anchor.state, momentum=own, sites=member.sites, site=member.site)
        connected.append(peers := Peers(PrefixStore("members", store), rank, len(members), 20.0))
        return caught_up(members, peers, anchor, sent[rank])

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, range(len(members))))


def together(found: Sequence[tuple[State, Tensor]]) -> Tensor:
    return torch.cat([state.momentum for state, _ in found])


@pytest.fixture(autouse=True)
def on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 3), (3, 3)])
def test_newcomers_get_the_momentum_of_the_rows_that_they_will_own(before: int, now: int) -> None:
    members = [Member(5, before, site, "") for site in range(before)] + [Member(5, 0, 0, "")] * (now - before)
    values = [torch.ones(NUMEL)] * now
    found = entered(members, values, values)
    rows = -(-NUMEL // now)
    assert torch.equal(together(found), torch.nn.functional.pad(MOMENTUM, (0, now * rows - NUMEL)))
    assert [(state.sites, state.site) for state, _ in found] == [(now, site) for site in range(now)]


def test_momentum_of_a_site_that_is_gone_starts_from_zeros() -> None:
    """The second of three sites has been killed: its five rows are zeros, the others keep theirs."""
    values = [torch.ones(NUMEL)] * 2
    found = entered([Member(5, 3, 0, ""), Member(5, 3, 2, "")], values, values)
    expected = MOMENTUM.clone()
    expected[5:10] = 0
    assert torch.equal(together(found)[:NUMEL], expected)


def test_a_site_that_has_missed_rounds_keeps_what_it_has_learnt() -> None:
    """It takes over the anchor, 10, and moves its own change, from 4 to 7, on to it; its old momentum is not used."""
    values, sent = [torch.full((NUMEL,), 10.0), torch.full((NUMEL,), 4.0)], [torch.full((NUMEL,), 11.0)] * 2
    sent[1] = torch.full((NUMEL,), 7.0)
    found = entered([Member(5, 1, 0, ""), Member(3, 2, 1, "")], values, sent)
    assert [state.values[0].item() for state, _ in found] == [10.0, 10.0]
    assert [values[0].item() for _, values in found] == [11.0, 13.0]
    assert torch.equal(together(found)[:NUMEL], MOMENTUM)
