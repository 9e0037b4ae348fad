"""Sites that meet at a store: takes part in the rounds of those that are there."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.groups import rank_and_world
from zgraph.step.outer.catch_up import Member, caught_up
from zgraph.step.outer.fixed_sites import difference
from zgraph.step.outer.meeting import PATIENCE, Meeting
from zgraph.step.outer.peers import Peers
from zgraph.step.outer.rounds import Anchor, OuterOptimizer, State
from zgraph.step.outer.turns import Running, Timetable, Turn
from zgraph.step.outer.watch import LAPSE_S, Beats, Watch
from zgraph.tiers.thread_lanes import thread

_log = logging.getLogger(__name__)
_LOOK_S = 0.02
_ASK_S = 0.2
_SPEAK_S = 60.0  # after which a newcomer says what it waits for
COMMIT, ABORT = "commit", "abort"


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
        self.site: int = self._from_first(lambda: self._ledger.add("sites", 1))
        self._watch: Watch | None = None  # of the first rank only, as the next two
        self._begun, self._place = -1, -1  # number and fragment of the last round that has begun
        self._since = 0  # steps since
        self._next = 0  # number of the next round to run, for the thread of rounds
        self._peers: Peers | None = None
        self._group = ""
        self._giver = thread("newcomers")
        self._reason = ""  # why the last round was given up

    def why_not(self) -> str:
        """Say why rounds were given up."""
        return self._reason or "other sites were not in time"

    # --- at the start ---

    def join(self, described: Mapping[str, object], anchors: Sequence[Anchor]) -> None:
        """Check that this site is like the others, and get their anchors.

        Args:
            described: options, and layouts of parameters, by name.
            anchors: anchors, whose values are overwritten unless this site is the first.

        Raises:
            ZgraphError: on all ranks, if the site differs from the others, or no site is live that could give values.
        """
        self._compare("ranks", {"the number of ranks": repr(self._ranks)})
        self._compare(f"{self._position}", {name: repr(value) for name, value in described.items()})
        ledger = self._ledger
        if not self._from_first(lambda: ledger.write_once("founder", str(self.site)) == str(self.site)):
            self._ask(anchors)
        self._begun = self._next - 1
        ledger.write(f"joined/{self.site}", str(self._next))
        if self._position == 0:
            self._watch = Watch(self._meeting.connect(), self.site, self._next)

    def _compare(self, key: str, own: Mapping[str, str]) -> None:
        """Refuse, on all ranks, a site that differs from the first one of the meeting."""
        first = json.loads(self._ledger.write_once(f"described/{key}", json.dumps(own)))
        texts = self._of_all_ranks(difference(first, own, f"on site {self.site}", "where the meeting began"))
        for text in filter(None, texts):
            raise ZgraphError(text)

    def _ask(self, anchors: Sequence[Anchor]) -> None:
        """Get anchors and the number of the next round from another site; if it dies meanwhile, from the next."""
        received: list[tuple[Tensor, Tensor]] | None = None
        while received is None:
            request: int = self._from_first(lambda: self._ledger.add("requests", 1))
            answer: str = self._from_first(partial(self._answer_to, request))
            if answer == "none":
                raise ZgraphError(
                    f"zgraph.Meeting: the meeting at {self._meeting.address} has begun, and none of its sites has been "
                    f"live for {self._meeting.deadline_s:g} s. If all have ended, start the store anew."
                )
            received = self._received(request, anchors) if answer == "giving" else None
        for anchor, (values, numbers) in zip(anchors, received, strict=True):
            rounds, self._next = map(int, numbers)
            anchor.state = replace(anchor.state, values=values, sites=0, rounds=rounds)
            anchor.fragment.write(values)

    def _answer_to(self, request: int) -> str:
        """Wait for a site to give values.

        Returns:
            "giving"; "again" if a site has promised to, and has not done so before the deadline; "none" if none lives.
        """
        ledger, beats, limit_s = self._ledger, Beats(), self._meeting.deadline_s
        begun = live_at = time.monotonic()
        promised_at = 0.0
        spoken = False
        while not ledger.read(f"giving/{request}"):
            now = time.monotonic()
            ledger.add(f"request/{request}", 1)
            others = (site for site in range(1, 1 + ledger.add("sites")) if site != self.site)
            if any([beats.is_alive(ledger, f"beat/{site}", at_first=False) for site in others]):
                live_at = now
            if now - live_at > limit_s:
                return "none"
            if not promised_at and ledger.read(f"donor/{request}"):
                promised_at = now
            if promised_at and now - promised_at > limit_s:
                return "again"
            if now - begun > _SPEAK_S and not spoken:
                spoken = True
                _log.warning("zgraph: waits for a site of the meeting to call outer.step(), which gives its values.")
            time.sleep(_ASK_S)
        return "giving"

    def _received(self, request: int, anchors: Sequence[Anchor]) -> list[tuple[Tensor, Tensor]] | None:
        """Return the values of each anchor, with its rounds and the number of the next round.

        None on all ranks if the site that gives them has failed on one.
        """
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
        return found if all(self._of_all_ranks(len(found) == len(anchors))) else None

    def give(self, request: int, anchors: Sequence[Anchor]) -> None:
        """Send a newcomer the anchors; called on the thread of rounds, so that they are of one moment."""
        given = [(one.state.values, torch.tensor([one.state.rounds, self._next])) for one in anchors]
        self._giver.submit(self._give, request, given)

    def _give(self, request: int, given: Sequence[tuple[Tensor, Tensor]]) -> None:
        try:
            ledger = self._meeting.connect()
            asked = ledger.add(f"request/{request}")
            time.sleep(5 * _ASK_S)
            if ledger.add(f"request/{request}") == asked:
                return  # it is gone
            ledger.write(f"giving/{request}", "yes")
            store = ledger.under(f"give/{request}/{self._position}")
            peers = Peers(store, 0, 2, self._meeting.deadline_s)
            for values, numbers in given:
                peers.swap({1: values}, {})
                peers.swap({1: numbers}, {})
            self.sent_bytes += peers.sent_bytes
        except RuntimeError as error:
            _log.warning("zgraph: a newcomer to the meeting has not got its values: %s", error)

    # --- at each step ---

    def turn(self, steps: int, running: Sequence[Running], table: Timetable) -> Turn:
        """Decide, on the first rank, which rounds end and begin now; all ranks of the site call this."""
        ended, begun, given = self._from_first(partial(self._decided, steps, running, table))
        return Turn([one for one in running if one.number in ended], begun, given)

    def _decided(
        self, steps: int, running: Sequence[Running], table: Timetable
    ) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Return numbers of rounds that end, (number, fragment) of those that begin, and newcomers' requests."""
        watch = self._watch
        assert watch is not None, "on the first rank"
        self._since += 1
        ended: list[int] = []
        for one in running:
            if one.begun_at + table.delay <= steps:
                wait([one.found], timeout=max(0.0, one.begun_s + self._meeting.deadline_s - time.monotonic()))
            if not one.found.done():
                break
            ended.append(one.number)
        rests = [one for one in running if one.number not in ended]
        begun: list[tuple[int, int]] = []
        if not watch.failure and not any(one.begun_at + table.delay <= steps for one in rests):
            begun = watch.rounds_after(self._begun, [one.place for one in rests])
            if begun:
                (self._begun, self._place), self._since = begun[-1], 0
            elif self._since >= table.every // table.fragments and len(watch.live) >= self._meeting.least:
                watch.want((self._place + 1) % table.fragments)
        return ended, begun, watch.newcomers()

    def last_turns(self, steps: int, table: Timetable) -> Iterator[tuple[int, int]]:
        """Open and begin rounds, for each fragment at most three."""
        for _ in range(3 * table.fragments):
            found: tuple[int, int] | None = self._from_first(partial(self._next_round, table))
            if found is None:
                return
            yield found

    def _next_round(self, table: Timetable) -> tuple[int, int] | None:
        """Return (number, fragment) of a round that is open; None if there is none before the deadline."""
        watch, until = self._watch, time.monotonic() + max(self._meeting.deadline_s, LAPSE_S)
        assert watch is not None, "on the first rank"
        while time.monotonic() < until and not watch.failure:
            found = watch.rounds_after(self._begun, ())
            if found:
                self._begun, self._place = found[0]
                self._since = 0
                return found[0]
            if len(watch.live) < self._meeting.least:
                self._reason = f"{len(watch.live)} of at least {self._meeting.least} sites are live"
                return None
            watch.want((self._place + 1) % table.fragments)
            time.sleep(5 * _LOOK_S)
        self._reason = watch.failure or f"the store at {self._meeting.address} does not answer"
        return None

    def check_finite(self, sent: Tensor, names: Sequence[str]) -> None:
        """Refuse, on all ranks, to take part with values that are not finite.

        Raises:
            ZgraphError: a value of this site is not finite; other sites go on.
        """
        if not all(self._of_all_ranks(bool(sent.isfinite().all()))):
            raise ZgraphError(
                f"zgraph.OuterSteps: this site has values that are not finite among {', '.join(names[:4])} and others "
                "of their fragment, and does not take part with them. Restore its parameters, for example from "
                "outer.anchor()."
            )

    def _from_first(self, compute: Callable[[], Any]) -> Any:
        """Return what the site's first rank computes."""
        found = [compute() if self._position == 0 else None]
        if self._ranks > 1:
            dist.broadcast_object_list(found, 0)
        return found[0]

    def _of_all_ranks(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the site."""
        found = [value] * self._ranks
        if self._ranks > 1:
            dist.all_gather_object(found, value)
        return found

    # --- on the thread of rounds ---

    def run_round(
        self, anchor: Anchor, sent: Tensor, weight: float, optimizer: OuterOptimizer, number: int, place: int
    ) -> Tensor | None:
        """Run a round, and return the anchor's new values; None if it is given up, or has begun without this site."""
        self._next = number + 1
        try:
            return self._run_round(anchor, sent, weight, optimizer, number)
        except RuntimeError as error:
            self._peers, self._group, self._reason = None, "", str(error)
            _log.warning("zgraph: round %d of the meeting at %s failed: %s", number, self._meeting.address, error)
            return None

    def _run_round(
        self, anchor: Anchor, sent: Tensor, weight: float, optimizer: OuterOptimizer, number: int
    ) -> Tensor | None:
        until, state, ledger = time.monotonic() + self._meeting.deadline_s, anchor.state, self._ledger
        members = self._members(number, Member(state.rounds, state.sites, state.site, self._group), until)
        if self.site not in members:
            self._reason = "rounds have begun without this site"
            return None
        found: State | None = None
        try:
            found = self._exchange(members, anchor, sent, weight, optimizer, number, until)
            if ledger.add(f"done/{number}", 1) == len(members) * self._ranks:
                ledger.write_once(f"outcome/{number}", COMMIT)
        except RuntimeError as error:
            self._reason = str(error)
            _log.warning("zgraph: round %d of the sites %s is given up: %s", number, [*members], error)
            ledger.write_once(f"outcome/{number}", ABORT)
        outcome = ledger.wait(f"outcome/{number}", until) or ledger.write_once(f"outcome/{number}", ABORT)
        if outcome != COMMIT or found is None:
            self._peers, self._group = None, ""
            return None
        anchor.state = replace(found, rounds=number + 1)
        self.count = len(members)
        return found.values

    def _members(self, number: int, own: Member, until: float) -> dict[int, Member]:
        """Enter a round; return its members by site, none if it is given up."""
        ledger, key = self._ledger, f"members/{number}"
        decided = ledger.wait(key, until) if self._watch is None else self._decide_members(number, own, until)
        found = json.loads(decided or ledger.write_once(key, "{}"))
        return {int(site): Member(**entry) for site, entry in found.items()}

    def _decide_members(self, number: int, own: Member, until: float) -> str:
        """Wait for other sites to enter a round; return its members as all sites read them, "" if there are none."""
        ledger, watch, begun = self._ledger, self._watch, time.monotonic()
        assert watch is not None, "on the first rank"
        ledger.write(f"enter/{number}/{self.site}", json.dumps(vars(own)))
        patient_until = begun + PATIENCE * (until - begun)
        while not (found := ledger.read(f"members/{number}")) and time.monotonic() < until:
            entries = {site: ledger.read(f"enter/{number}/{site}") for site in sorted(watch.known)}
            entered = {site: json.loads(entry) for site, entry in entries.items() if entry}
            patient = time.monotonic() < patient_until
            awaited = patient and any(site not in entered and self._is_active(site, number) for site in watch.live)
            if not awaited and len(entered) >= self._meeting.least:
                return ledger.write_once(f"members/{number}", json.dumps(entered))
            if not patient and len(watch.live) < self._meeting.least:
                self._reason = f"{len(watch.live)} of at least {self._meeting.least} sites are live"
                return ""
            time.sleep(_LOOK_S)
        return found

    def _is_active(self, site: int, number: int) -> bool:
        """Return whether a site has lately entered a round, or come; others do not wait for it, as it may evaluate."""
        joined = self._ledger.read(f"joined/{site}")
        return bool(self._ledger.read(f"enter/{number - 1}/{site}")) or (joined != "" and int(joined) >= number - 1)

    def _exchange(
        self,
        members: Mapping[int, Member],
        anchor: Anchor,
        sent: Tensor,
        weight: float,
        optimizer: OuterOptimizer,
        number: int,
        until: float,
    ) -> State:
        """Bring this site's state up to date, and run the round with the other members."""
        same = {entry.group for entry in members.values()} == {self._group}
        if self._peers is None or not same or self._peers.count != len(members):
            self._group = f"{number}"
            store = self._ledger.under(f"group/{number}/{self._position}")
            rank, limit_s = [*members].index(self.site), self._meeting.deadline_s
            self._peers = Peers(store, rank, len(members), limit_s)
        peers = self._peers
        peers.until, before = until, peers.sent_bytes
        state, sent = caught_up([*members.values()], peers, anchor, sent)
        found = anchor.run_round(state, sent, weight, optimizer, peers, number)
        self.sent_bytes += peers.sent_bytes - before
        return found
