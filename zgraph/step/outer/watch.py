"""The thread of a site's first rank that shows others that the site is live, and looks for rounds and newcomers."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Collection

from zgraph.step.outer.meeting import Ledger

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_BEAT_S = 0.5
LAPSE_S = 5.0  # a site is gone that has not beaten for as long
_RARELY_S = 30.0  # between looks at a site that has been gone for twice as long


class Beats:
    """Counters that grow while their owners live."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def is_alive(self, ledger: Ledger, key: str, *, at_first: bool) -> bool:
        """Return whether a counter has grown lately, as far as this object has looked at it.

        Args:
            ledger: connection to the store.
            key: key of the counter.
            at_first: whether the owner counts as alive until the counter was seen not to grow.
        """
        value, now = ledger.add(key), time.monotonic()
        known, since = self._seen.get(key, (value, now if at_first else -math.inf))
        self._seen[key] = (value, now if value != known else since)
        return now - self._seen[key][1] < LAPSE_S


class Watch:
    """What a site's first rank knows of the others, kept up to date by a thread as long as this object exists.

    Args:
        ledger: connection of the thread.
        site: number of this site.
        number: number of the first round that it may take part in.

    Attributes:
        live: numbers of the live sites.
        known: numbers of these, and of sites that have not been gone for long.
        failure: text of the error that has ended the thread; "" while it runs.
    """

    def __init__(self, ledger: Ledger, site: int, number: int) -> None:
        self.live = self.known = frozenset({site})
        self.failure = ""
        self._ledger, self._site, self._next = ledger, site, number
        self._lock = threading.Lock()
        self._opened: dict[int, int] = {}  # fragments by the number of the round, of rounds without known members
        self._wanted: tuple[int, int] | None = None
        self._beats, self._beat_at = Beats(), -math.inf
        self._gone: dict[int, tuple[float, float]] = {}  # since when a site has not beaten, and when to look again
        self._last_request, self._requests = 0, list[int]()  # requests that no site has promised to answer
        self._promised: list[int] = []
        self._steps = True
        threading.Thread(target=_look_again, args=(weakref.ref(self),), name="zgraph-meeting", daemon=True).start()

    # --- for the main thread ---

    def rounds_after(self, number: int, busy: Collection[int]) -> list[tuple[int, int]]:
        """Return (number, fragment) of open rounds after one, up to the first of a busy fragment.

        Args:
            number: number of the last round that has begun.
            busy: fragments with a running round.
        """
        with self._lock:
            opened = sorted((each, place) for each, place in self._opened.items() if each > number)
        found: list[tuple[int, int]] = []
        for each, place in opened:
            if place in busy or place in [other for _, other in found]:
                break
            found.append((each, place))
        return found

    def want(self, place: int) -> None:
        """Open a round of a fragment, unless another site opens one first."""
        with self._lock:
            self._wanted = self._next, place

    def newcomers(self) -> list[int]:
        """Return the requests of newcomers that this site has promised to answer since the last call.

        Calls show that this site is stepping; otherwise it promises nothing.
        """
        with self._lock:
            self._steps = True
            promised, self._promised = self._promised, []
        return promised

    # --- for the thread ---

    def look(self) -> None:
        ledger, now = self._ledger, time.monotonic()
        if now - self._beat_at > _BEAT_S:
            self._beat_at = now
            ledger.add(f"beat/{self._site}", 1)
        live, known = {self._site}, {self._site}
        for site in range(1, 1 + ledger.add("sites")):
            since, look_at = self._gone.get(site, (now, now))
            if site == self._site or now < look_at:
                continue
            known.add(site)
            if self._beats.is_alive(ledger, f"beat/{site}", at_first=True):
                live.add(site)
                self._gone.pop(site, None)
            else:
                self._gone[site] = since, now + (_RARELY_S if now - since > 2 * _RARELY_S else 0.0)
        self.live, self.known = frozenset(live), frozenset(known)
        self._look_for_rounds()
        self._look_for_newcomers()

    def _look_for_rounds(self) -> None:
        ledger = self._ledger
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted[0] == self._next:
            self._announce()
            ledger.write_once(f"open/{self._next}", str(wanted[1]))
        while fragment := ledger.read(f"open/{self._next}"):
            with self._lock:
                self._opened[self._next] = int(fragment)
                self._next += 1
        begun = [number for number in [*self._opened] if ledger.read(f"members/{number}")]
        with self._lock:
            for number in begun:
                del self._opened[number]
        if self._steps and any(not ledger.read(f"enter/{number}/{self._site}") for number in begun):
            self._announce()

    def _announce(self) -> None:
        """Let other sites wait for this one, which steps, in the next round."""
        self._ledger.write(f"joined/{self._site}", str(self._next))

    def _look_for_newcomers(self) -> None:
        ledger, last = self._ledger, self._ledger.add("requests")
        self._requests += range(self._last_request + 1, last + 1)
        self._last_request = last
        for request in [*self._requests]:
            if ledger.read(f"donor/{request}"):
                self._requests.remove(request)
            elif self._steps and self._beats.is_alive(ledger, f"request/{request}", at_first=False):
                self._requests.remove(request)
                if ledger.write_once(f"donor/{request}", str(self._site)) == str(self._site):
                    with self._lock:
                        self._promised.append(request)
        self._steps = False


def _look_again(watched: weakref.ref[Watch]) -> None:
    while (watch := watched()) is not None:
        try:
            watch.look()
        except RuntimeError as error:
            watch.failure = str(error)
            _log.warning("zgraph: the store of the meeting is gone: %s. This site trains on by itself.", error)
            return
        del watch
        time.sleep(_LOOK_S)
