"""The thread of a site's first rank that shows others that the site is live, and looks for rounds and newcomers."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref

from zgraph.step.outer.meeting import Ledger

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_BEAT_S = 0.5
_LAPSE_S = 5.0  # a site is gone that has not beaten for as long


class Beats:
    """Counters that grow while their owners live."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def is_alive(self, ledger: Ledger, key: str) -> bool:
        """Return whether a counter has grown lately, as far as this object has looked at it."""
        value, now = ledger.add(key), time.monotonic()
        known, since = self._seen.get(key, (value, -math.inf))
        self._seen[key] = (value, now if value != known else since)
        return now - self._seen[key][1] < _LAPSE_S


class Watch:
    """What a site's first rank knows of the others, kept up to date by a thread as long as this object exists.

    Args:
        ledger: connection of the thread.
        site: number of this site.
        number: number of the first round that it may take part in.

    Attributes:
        opened: index of the fragment of each round, by the number of the round.
        wanted: (number, fragment) of a round that this site wants to open; None: it wants none.
        live: numbers of the live sites.
        newcomers: numbers of requests for values that this site has promised to answer.
        failure: text of the error that has ended the thread; "" while it runs.
    """

    def __init__(self, ledger: Ledger, site: int, number: int) -> None:
        self.opened: dict[int, int] = {}
        self.wanted: tuple[int, int] | None = None
        self.live: frozenset[int] = frozenset({site})
        self.newcomers: list[int] = []
        self.failure = ""
        self._ledger, self._site, self._next = ledger, site, number
        self._beats, self._beat_at = Beats(), -math.inf
        self._requests: list[int] = []  # that no site has promised to answer
        self._last_request = 0
        threading.Thread(target=_look_again, args=(weakref.ref(self),), name="zgraph-meeting", daemon=True).start()

    def look(self) -> None:
        ledger, now = self._ledger, time.monotonic()
        if now - self._beat_at > _BEAT_S:
            self._beat_at = now
            ledger.add(f"beat/{self._site}", 1)
        others = (site for site in range(1, 1 + ledger.add("sites")) if site != self._site)
        self.live = frozenset({self._site, *(one for one in others if self._beats.is_alive(ledger, f"beat/{one}"))})
        if self.wanted is not None and self.wanted[0] == self._next:
            ledger.write_once(f"open/{self._next}", str(self.wanted[1]))
        while fragment := ledger.read(f"open/{self._next}"):
            self.opened[self._next] = int(fragment)
            self._next += 1
        last = ledger.add("requests")
        self._requests += range(self._last_request + 1, last + 1)
        self._last_request = last
        for request in [*self._requests]:
            if ledger.read(f"donor/{request}"):
                self._requests.remove(request)
            elif self._beats.is_alive(ledger, f"request/{request}"):
                self._requests.remove(request)
                if ledger.write_once(f"donor/{request}", str(self._site)) == str(self._site):
                    self.newcomers.append(request)


def _look_again(watched: weakref.ref[Watch]) -> None:
    while (watch := watched()) is not None:
        try:
            watch.look()
        except RuntimeError as error:
            watch.failure = str(error)
            _log.warning("zgraph: the store of the sites is gone: %s. This site trains on by itself.", error)
            return
        del watch
        time.sleep(_LOOK_S)
