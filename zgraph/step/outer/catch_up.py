"""Brings a site up to date before a round: momentum of the rows that it owns now, and an anchor that it has missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zgraph.step.outer.peers import Peers
from zgraph.step.outer.rounds import Anchor, State


@dataclass(frozen=True)
class Member:
    """A site in a round, as it has entered: what it has of the fragment.

    Attributes:
        rounds: one more than the number of the last round whose result it has; 0: none.
        sites, site: division of rows in that round; 0, 0 if it was not in that round, and has no momentum of it.
        group: name of the group in which it took part in its last round; "" after a failure.
    """

    rounds: int
    sites: int
    site: int
    group: str


def caught_up(members: Sequence[Member], peers: Peers, anchor: Anchor, sent: Tensor) -> tuple[State, Tensor]:
    """Return the state with which this site enters a round, and its values [numel]; all members call this.

    Args:
        members: the members of the round.
        peers: their group.
        anchor: anchor of the fragment.
        sent: [numel], this site's values.
    """
    state, newest = anchor.fetched(), max(member.rounds for member in members)
    holds, momentum = [member.rounds == newest for member in members], state.momentum
    if (state.sites, state.site) != (peers.count, peers.rank):
        state = anchor.divided(state, peers.count, peers.rank)
    old = [_rows(anchor, member.sites, member.site) for member in members]
    new = [_rows(anchor, peers.count, rank) for rank in range(peers.count)]
    state = replace(state, momentum=_moved(peers, momentum, old, new, holds))
    donor, stale = holds.index(True), [rank for rank, has in enumerate(holds) if not has]
    if peers.rank == donor:
        peers.swap(dict.fromkeys(stale, state.values), {})
    elif peers.rank in stale:
        values = torch.empty_like(state.values)
        peers.swap({}, {donor: values})
        sent = values - (state.values - sent)  # the new anchor, with what this site has learnt since its own
        state = replace(state, values=values)
    return state, sent


def _moved(peers: Peers, kept: Tensor, old: Sequence[range], new: Sequence[range], holds: Sequence[bool]) -> Tensor:
    """Return the momentum of the rows that this site owns in this round, zeros for rows whose owner is gone.

    Args:
        peers: group of the members.
        kept: momentum of this site's old rows.
        old, new: rows of each member in its last round, and in this one.
        holds: whether each member was in the last round.
    """
    own, wanted = old[peers.rank], new[peers.rank]
    momentum = kept.new_zeros(len(wanted))
    sends: dict[int, Tensor] = {}
    receives: dict[int, Tensor] = {}
    for rank in range(peers.count):
        leaving, arriving = _shared(own, new[rank]), _shared(old[rank], wanted)
        if holds[peers.rank] and leaving:
            sends[rank] = kept[leaving.start - own.start : leaving.stop - own.start]
        if holds[rank] and arriving:
            receives[rank] = momentum[arriving.start - wanted.start : arriving.stop - wanted.start]
    staying, landing = sends.pop(peers.rank, None), receives.pop(peers.rank, None)
    if staying is not None and landing is not None:
        landing.copy_(staying)
    peers.swap(sends, receives)
    return momentum


def _rows(anchor: Anchor, sites: int, site: int) -> range:
    rows = anchor.rows(sites) if sites else 0
    return range(site * rows, (site + 1) * rows)


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
