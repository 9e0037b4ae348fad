"""Where sites meet that come, leave and come back: a store, in which they agree on rounds.

A round has a number n, which counts the rounds of all fragments. Under this number the store has

    open/n      the fragment; written by the first site that has trained enough since the last round
    enter/n/s   site s takes part: the layout of its state
    members/n   all sites of the round; written once all have entered that are live and active, or after some patience
    done/n      the number of ranks that have finished their exchanges
    outcome/n   "commit" once all have; "abort" if one of them gives up before

A site gets its number by counting "sites"; beat/s grows while site s lives; joined/s is the number of a round in which
it will take part. A newcomer gets the number r of its request by counting "requests"; request/r grows while it waits;
donor/r is the site that has promised its values, and giving/r says that they are sent. "founder" is the first site;
described/p has its options, and the layout of parameters on its rank p.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented

from zgraph.errors import ZgraphError, check_least, is_count

PATIENCE = 0.25  # share of the deadline for which members that have entered wait for live sites that have not
_LOOK_S = 0.05
_PREFIX = "zgraph/sites"


@dataclass(frozen=True)
class Meeting:
    """Where the sites of `zgraph.OuterSteps` meet, if each is a run of its own that may come late, end, or come back.

        zgraph sites --port 29400                                             on a host that stays
        outer = zgraph.OuterSteps(model, zgraph.Meeting("10.0.0.1:29400"))    on every rank of each site

    A site that comes gets the anchors of those that are there, and trains on from them.

    Attributes:
        address: host and port of the store.
        least: number of sites that a round needs.
        deadline_s: seconds after which a round is given up; what sites have learnt then counts in the fragment's next
            round.
    """

    address: str
    least: int = 1
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f'zgraph.Meeting: address={self.address!r}; write host and port, such as "10.0.0.1:29400".'
            )
        if not is_count(self.least):
            raise ValueError(f"zgraph.Meeting: least={self.least!r}; write a number of sites, at least 1.")
        check_least("zgraph.Meeting", 1, "a number of seconds, at least 1", deadline_s=self.deadline_s)

    def connect(self) -> Ledger:
        """Open a connection to the store; each thread needs its own, because a call blocks the connection.

        Raises:
            ZgraphError: there is no store at this address.
        """
        host, _, port = self.address.rpartition(":")
        timeout = timedelta(seconds=self.deadline_s)
        try:
            return Ledger(TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout))
        except RuntimeError as error:
            raise ZgraphError(
                f"zgraph.Meeting: no store answers at {self.address}: {error}. Start one with zgraph sites --port "
                f"{port}, on a host that all sites reach."
            ) from error


def open_store(port: int) -> TCPStore:
    """Open the store of a meeting in this process; it ends with the returned object.

    Raises:
        RuntimeError: the port cannot be opened.
    """
    return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)


class Ledger:
    """Keys and values that all sites share."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(_PREFIX, store)

    def read(self, key: str) -> str:
        """Return the value of a key; "" if it has none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def write(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def write_once(self, key: str, value: str) -> str:
        """Write a value unless the key has one; return the value that the key has now."""
        return self._store.compare_set(key, "", value).decode()

    def add(self, key: str, number: int = 0) -> int:
        """Add to a counter, and return its value."""
        return self._store.add(key, number)

    def wait(self, key: str, until: float) -> str:
        """Return the value of a key once it has one; "" if it has none at the time `until`, of the monotonic clock."""
        while not (found := self.read(key)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return found

    def under(self, prefix: str) -> Store:
        return PrefixStore(prefix, self._store)
