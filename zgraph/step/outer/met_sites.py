"""Sites that meet at a store: takes part in the rounds of those that are there."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.groups import rank_and_world
from zgraph.step.outer.fixed_sites import check_same
from zgraph.step.outer.meeting import PATIENCE, Meeting
from zgraph.step.outer.peers import Peers
from zgraph.step.outer.rounds import Anchor, OuterOptimizer, State
from zgraph.step.outer.turns import Running, Timetable, Turn
from zgraph.step.outer.watch import Beats, Watch

_log = logging.getLogger(__name__)
_LOOK_S = 0.02
_ASK_S = 0.2
_MOST = 16  # rounds that begin, or newcomers that are promised values, at one step
COMMIT, ABORT = "commit", "abort"


@dataclass(frozen=True)
class _Member:
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


class MetSites:
    """Takes part in the rounds of a meeting. All ranks of this process group are one site.

    Args:
        meeting: where the sites meet.

    Attributes:
        sent_bytes: bytes that this rank has sent to other sites.
        count: number of sites in the last round.
        site: number of this site, which no other site of the meeting ever has.
    """

    overlaps = True  # rounds may take several steps

    def __init__(self, meeting: Meeting) -> None:
        self.sent_bytes, self.count, self.rank = 0, 1, 0
        self._meeting, self._ledger = meeting, meeting.connect()
        self._position, self._ranks = rank_and_world()
        self.site = self._from_first(lambda: self._ledger.add("sites", 1))
        self._watch: Watch | None = None  # of the first rank only
        self._begun, self._since = 0, 0  # number of the last round that has begun, and steps since
        self._place = -1  # fragment of that round
        self._next = 0  # number of the next round to run, of the thread
        self._peers: Peers | None = None
        self._group = ""

    # --- at the start ---

    def join(self, described: Mapping[str, object], anchors: Sequence[Anchor]) -> None:
        """Check that this site is like the others, and get their anchors.

        Args:
            described: options, and layouts of parameters, by name.
            anchors: anchors, whose values are overwritten unless this site is the first.

        Raises:
            ZgraphError: the site differs from the others, or no site gives values within the deadline.
        """
        ledger, own = self._ledger, {name: repr(value) for name, value in described.items()}
        own["ranks"] = repr(self._ranks)
        first = json.loads(ledger.write_once(f"described/{self._position}", json.dumps(own)))
        check_same(first, own, f"on site {self.site}", "where the meeting began")
        founder = self._from_first(lambda: ledger.write_once("founder", str(self.site)) == str(self.site))
        if not founder:
            self._ask(anchors)
        self._begun = self._next - 1
        ledger.write(f"joined/{self.site}", str(self._next))
        if self._position == 0:
            self._watch = Watch(self._meeting.connect(), self.site, self._next)

    def _ask(self, anchors: Sequence[Anchor]) -> None:
        """Get anchors and the number of the next round from another site; if it dies meanwhile, from the next."""
        received: list[tuple[Tensor, Tensor]] | None = None
        while received is None:
            request = self._from_first(lambda: self._ledger.add("requests", 1))
            if not self._from_first(partial(self._is_answered, request)):
                raise ZgraphError(
                    f"zgraph.Meeting: the meeting at {self._meeting.address} has begun, and none of its sites has been "
                    f"live for {self._meeting.deadline_s:g} s. If all have ended, start the store anew."
                )
            received = self._received(request, anchors)
        for anchor, (values, numbers) in zip(anchors, received, strict=True):
            rounds, self._next = map(int, numbers)
            anchor.state = replace(anchor.state, values=values, sites=0, rounds=rounds)
            anchor.fragment.write(values)

    def _received(self, request: int, anchors: Sequence[Anchor]) -> list[tuple[Tensor, Tensor]] | None:
        """Return the values of each anchor, with its rounds and the number of the next round; None on all ranks if the
        site that gives them has failed on one."""
        found: list[tuple[Tensor, Tensor]] = []
        try:
            peers = Peers(self._ledger.under(f"give/{request}/{self._position}"), 1, 2, self._meeting.deadline_s)
            for anchor in anchors:
                values, numbers = torch.empty_like(anchor.values), torch.zeros(2, dtype=torch.int64)
                peers.swap({}, {0: values})
                peers.swap({}, {0: numbers})
                found.append((values, numbers))
        except RuntimeError as error:
            _log.warning("zgraph: a site that was giving its values has failed: %s", error)
        missing = torch.tensor([len(anchors) - len(found)])
        if self._ranks > 1:
            missing = self._on_device(missing)
            dist.all_reduce(missing, dist.ReduceOp.MAX)
        return None if int(missing) else found

    def _is_answered(self, request: int) -> bool:
        """Wait until a site begins to give values, as long as any site is live."""
        ledger, beats, live_at = self._ledger, Beats(), time.monotonic()
        while not ledger.read(f"giving/{request}"):
            ledger.add(f"request/{request}", 1)
            others = (site for site in range(1, 1 + ledger.add("sites")) if site != self.site)
            if any([beats.is_alive(ledger, f"beat/{site}") for site in others]):
                live_at = time.monotonic()
            elif time.monotonic() - live_at > self._meeting.deadline_s:
                return False
            time.sleep(_ASK_S)
        return True

    def give(self, request: int, anchors: Sequence[Anchor]) -> None:
        """Send a newcomer the anchors, on the thread of rounds."""
        try:
            self._ledger.write(f"giving/{request}", "yes")
            store = self._ledger.under(f"give/{request}/{self._position}")
            peers = Peers(store, 0, 2, self._meeting.deadline_s)
            for anchor in anchors:
                peers.swap({1: anchor.values}, {})
                peers.swap({1: torch.tensor([anchor.state.rounds, self._next])}, {})
            self.sent_bytes += peers.sent_bytes
        except RuntimeError as error:
            _log.warning("zgraph: a newcomer to the meeting has not got its values: %s", error)

    # --- at each step ---

    def turn(self, steps: int, running: Sequence[Running], table: Timetable) -> Turn:
        """Decide, on the first rank, which rounds end and begin now; all ranks of the site call this."""
        self._since += 1
        decided = torch.full((3, 1 + 2 * _MOST), -1, dtype=torch.int64)
        if self._watch is not None:
            self._decide(self._watch, decided, steps, running, table)
        self._broadcast(decided)
        ended, begun, given = ([int(one) for one in row if one >= 0] for row in decided)
        turn = Turn(
            [one for one in running if one.number in ended], [*zip(begun[::2], begun[1::2], strict=True)], given
        )
        if turn.beginning:
            (self._begun, self._place), self._since = turn.beginning[-1], 0
        return turn

    def _decide(self, watch: Watch, decided: Tensor, steps: int, running: Sequence[Running], table: Timetable) -> None:
        rests = [*running]
        for one in running:
            if one.begun_at + table.delay <= steps:
                wait([one.found], timeout=max(0.0, one.begun_s + self._meeting.deadline_s - time.monotonic()))
            if not one.found.done():
                break
            decided[0, len(running) - len(rests)] = one.number
            rests.remove(one)
        late = any(one.begun_at + table.delay <= steps for one in rests)
        for count in range(0 if late else _MOST):
            number = self._begun + 1 + count
            if number not in watch.opened:
                break
            place = watch.opened.pop(number)
            if place in [one.place for one in rests]:
                watch.opened[number] = place
                break
            decided[1, 2 * count], decided[1, 2 * count + 1] = number, place
        if decided[1, 0] < 0 and not late and self._since >= table.every // table.fragments:
            watch.wanted = self._begun + 1, (self._place + 1) % table.fragments
        promised, watch.newcomers = watch.newcomers[:_MOST], watch.newcomers[_MOST:]
        decided[2, : len(promised)] = torch.tensor(promised, dtype=torch.int64)

    def last_turns(self, table: Timetable) -> Iterator[tuple[int, int]]:
        """Take part in a round of each fragment, as they open."""
        for _ in range(table.fragments):
            decided = torch.full((2,), -1, dtype=torch.int64)
            if self._watch is not None:
                number = self._begun + 1
                self._watch.wanted = number, (self._place + 1) % table.fragments
                while number not in self._watch.opened and not self._watch.failure:
                    time.sleep(_LOOK_S)
                decided = torch.tensor([number, self._watch.opened.pop(number, -1)])
            self._broadcast(decided)
            if decided[1] < 0:
                return
            self._begun, self._place = map(int, decided)
            self._since = 0
            yield self._begun, self._place

    def _from_first(self, compute: Any) -> int:
        """Return a number that the site's first rank computes."""
        found = torch.tensor([int(compute()) if self._position == 0 else 0])
        self._broadcast(found)
        return int(found)

    def _broadcast(self, tensor: Tensor) -> None:
        if self._ranks > 1:
            sent = self._on_device(tensor)
            dist.broadcast(sent, 0)
            tensor.copy_(sent)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of the site's process group."""
        return tensor.cuda() if dist.get_backend() == "nccl" else tensor

    # --- on the thread of rounds ---

    def run_round(
        self, anchor: Anchor, sent: Tensor, weight: float, optimizer: OuterOptimizer, number: int
    ) -> Tensor | None:
        """Run a round, and return the anchor's new values; None if it is given up, or has begun without this site."""
        until = time.monotonic() + self._meeting.deadline_s
        self._next = number + 1
        state = anchor.state
        members = self._members(number, _Member(state.rounds, state.sites, state.site, self._group), until)
        if self.site not in members:
            return None
        found: State | None = None
        try:
            found = self._exchange(members, anchor, sent, weight, optimizer, number, until)
            if self._ledger.add(f"done/{number}", 1) == len(members) * self._ranks:
                self._ledger.write_once(f"outcome/{number}", COMMIT)
        except RuntimeError as error:
            _log.warning("zgraph: round %d of the sites %s is given up: %s", number, [*members], error)
            self._ledger.write_once(f"outcome/{number}", ABORT)
        outcome = self._ledger.wait(f"outcome/{number}", until) or self._ledger.write_once(f"outcome/{number}", ABORT)
        if outcome != COMMIT or found is None:
            self._peers, self._group = None, ""
            return None
        anchor.state = replace(found, rounds=number + 1)
        self.count = len(members)
        return anchor.values

    def _members(self, number: int, own: _Member, until: float) -> dict[int, _Member]:
        """Enter a round; return its members by site, none if it is given up."""
        ledger, key, text = self._ledger, f"members/{number}", ""
        if self._watch is None:
            text = ledger.wait(key, until)
        else:
            begun = time.monotonic()
            patient_until = begun + PATIENCE * (until - begun)
            ledger.write(f"enter/{number}/{self.site}", json.dumps(vars(own)))
            while not (text := ledger.read(key)) and time.monotonic() < until:
                live = sorted(self._watch.live)
                entered = {site: text for site in live if (text := ledger.read(f"enter/{number}/{site}"))}
                patient = time.monotonic() < patient_until
                missing = [site for site in live if site not in entered and patient and self._is_active(site, number)]
                if not missing and len(entered) >= self._meeting.least:
                    text = ledger.write_once(key, json.dumps({site: json.loads(one) for site, one in entered.items()}))
                    break
                time.sleep(_LOOK_S)
        found = json.loads(text or ledger.write_once(key, "{}"))
        return {int(site): _Member(**entry) for site, entry in found.items()}

    def _is_active(self, site: int, number: int) -> bool:
        """Return whether a site has lately entered a round, or come; others do not wait for it, as it may evaluate."""
        joined = self._ledger.read(f"joined/{site}")
        return bool(self._ledger.read(f"enter/{number - 1}/{site}")) or (joined != "" and int(joined) >= number - 1)

    def _exchange(
        self,
        members: Mapping[int, _Member],
        anchor: Anchor,
        sent: Tensor,
        weight: float,
        optimizer: OuterOptimizer,
        number: int,
        until: float,
    ) -> State:
        """Bring this site's state up to date, and run the round with the other members."""
        entries, rank = [*members.values()], [*members].index(self.site)
        peers = self._peers_of(members, rank, number, until)
        before, state = peers.sent_bytes, anchor.state
        newest = max(entry.rounds for entry in entries)
        if (state.sites, state.site) != (len(members), rank):
            state = anchor.divided(state, len(members), rank)
        # Rows of the momentum move from the sites that own them to those that will.
        old, new = ([self._rows(anchor, entry.sites, entry.site) for entry in entries], [
            self._rows(anchor, len(members), place) for place in range(len(members))
        ])  # fmt: skip
        holders = [entry.rounds == newest for entry in entries]
        state = self._with_momentum(peers, anchor, state, old, new, holders)
        # Anchors of sites that have missed a round.
        donor, stale = holders.index(True), [place for place, holds in enumerate(holders) if not holds]
        if rank == donor:
            peers.swap(dict.fromkeys(stale, state.values), {})
        elif rank in stale:
            values = torch.empty_like(state.values)
            peers.swap({}, {donor: values})
            sent = values - (state.values - sent)  # what this site has learnt since its own anchor
            state = replace(state, values=values)
        found = anchor.run_round(state, sent, weight, optimizer, peers, number)
        self.sent_bytes += peers.sent_bytes - before
        return found

    def _rows(self, anchor: Anchor, sites: int, site: int) -> range:
        rows = anchor.rows(sites) if sites else 0
        return range(site * rows, (site + 1) * rows)

    def _with_momentum(
        self,
        peers: Peers,
        anchor: Anchor,
        state: State,
        old: Sequence[range],
        new: Sequence[range],
        holders: Sequence[bool],
    ) -> State:
        """Return the state with the momentum of its rows, as far as members have it; zeros elsewhere."""
        own, wanted = old[peers.rank], new[peers.rank]
        momentum = state.values.new_zeros(len(wanted))
        sends: dict[int, Tensor] = {}
        receives: dict[int, Tensor] = {}
        for place in range(peers.count):
            leaves, arrives = _shared(own, new[place]), _shared(old[place], wanted)
            if holders[peers.rank] and leaves:
                part = anchor.state.momentum[leaves.start - own.start : leaves.stop - own.start]
                if place == peers.rank:
                    momentum[leaves.start - wanted.start : leaves.stop - wanted.start] = part
                else:
                    sends[place] = part
            if holders[place] and arrives and place != peers.rank:
                receives[place] = momentum[arrives.start - wanted.start : arrives.stop - wanted.start]
        peers.swap(sends, receives)
        return replace(state, momentum=momentum)

    def _peers_of(self, members: Mapping[int, _Member], rank: int, number: int, until: float) -> Peers:
        """Return the group of the members; a new one unless all of them were in it in their last round."""
        names = {entry.group for entry in members.values()}
        if self._peers is None or names != {self._group} or self._peers.count != len(members):
            self._group = f"{number}"
            store = self._ledger.under(f"group/{number}/{self._position}")
            self._peers = Peers(store, rank, len(members), max(1.0, until - time.monotonic()))
        return self._peers


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
