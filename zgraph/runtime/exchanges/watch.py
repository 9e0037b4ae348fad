"""Detects exchanges that never end because two ranks have started different ones, and raises an error on both ranks.

An exchange is a collective between ranks. A rank that has waited for an exchange for a second publishes this exchange
in the rendezvous store, and reads there which exchanges its peers wait for. If two ranks wait for different exchanges,
and neither has started the exchange of the other, both would wait forever. Then each rank writes an error text for the
other to the store, and sends it dummy messages, which end its wait. The received data is not used: the wait raises an
AgreementError that names both exchanges.

    rank 0   starts A ......... waits for A: publishes "A"     has not started B; rank 1 has not started A
    rank 1   starts B ......... waits for B: publishes "B"     has not started A; rank 0 has not started B

A slow peer causes no error: it has started the exchange that this rank waits for, or it is not waiting.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from zgraph.errors import AgreementError, ZgraphError, ZgraphWarning
from zgraph.runtime.exchanges.changes import ADVICE_ON_CHANGES
from zgraph.runtime.exchanges.identity import About, Exchanges, exchanges_of, tag_of
from zgraph.torch_compat.fake_values import without_fake_mode
from zgraph.torch_compat.groups import resolve_group

_log = logging.getLogger(__name__)
PATIENCE_S = 1.0  # duration of a wait before the store is consulted
SILENCE_S = 60.0  # duration of a wait before a rank says what it waits for
_LOOK_S = 0.25
_REMEMBERED = 4096  # most recently started exchanges; far more than are ever under way
ADVICE = (
    "All ranks must call the same parts of the model in the same order, and make the same calls outside of it: take "
    "them out of `if rank == 0:`. Name modules that only some ranks run: zgraph.shard(model, optional=[...]), which "
    "keeps them whole everywhere; or draw the layers that run alike on all ranks; or name the module around them: "
    "zgraph.shard(model, units=[...]), which gathers and reduces all of it everywhere. A rank without a loss or a "
    "batch goes on with an old one: (loss * 0).backward(). "
    f"{ADVICE_ON_CHANGES}"
)


class Exchange(dist.Work):
    """All messages of one collective as one `dist.Work`, whose wait is watched.

    Args:
        works: works of the messages.
        about: identity of the collective.
        place: number of the collective in its graph.
        group: process group of the collective.
        sends, receives: bytes sent to, and received from, each rank of the group.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        about: About,
        place: int,
        group: dist.ProcessGroup,
        sends: Sequence[int],
        receives: Sequence[int],
    ) -> None:
        super().__init__()
        self.works, self.about, self.place, self.group = works, about, place, group
        self.sends, self.receives = sends, receives
        self.watch = watch_of(about.exchanges.store)
        self.watch.announced = None
        self.watch.started.append((about.key, place, sends, receives))

    @property
    def key(self) -> list[int]:
        return [self.about.key, self.place]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        watch = self.watch
        watch.waits = self
        try:
            for work in self.works:
                work.wait()
        finally:
            refusal = watch.end(self) if watch.published else ""
            watch.waits = None
        if refusal:
            raise AgreementError(refusal)
        return True


class Watch:
    """Background thread that checks now and then whether this rank's current wait is stuck; one per rendezvous store.

    Attributes:
        waits: the exchange that this rank waits for.
        published: JSON text that describes `waits`, while this text is in the store; else "".
        announced: (error text, exchange counter of the model) of a failed call; None once this rank starts another
            exchange.
        started: (key, place, bytes to each rank, bytes from each rank) of the latest exchanges that this rank has
            started.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self.waits: Exchange | None = None
        self.published = ""
        self.announced: tuple[str, Exchanges] | None = None
        self.started: deque[tuple[int, int, Sequence[int], Sequence[int]]] = deque(maxlen=_REMEMBERED)
        self._store = PrefixStore("zgraph/watch", store)
        self._seen: list[int] | None = None  # key of the exchange last seen; the exchange would keep a model alive
        self._since = 0.0  # when it was first seen
        self._has_spoken = False  # whether a long wait was logged
        self._sent: list[Any] = []  # dummy messages, and their memory
        self._lock = threading.Lock()  # guards the published text
        threading.Thread(target=_look_again, args=(weakref.ref(self),), daemon=True).start()

    def end(self, exchange: Exchange) -> str:
        """Remove a published wait from the store; return the error text if a peer has ended the wait, else ""."""
        with self._lock:
            self.waits = None
            self._store.set(f"waits/{self.rank}", "")
            self.published = ""
        text = self._read(f"told/{self.rank}/{exchange.key}")
        if text:
            exchange.about.exchanges.restart()
            # The peer that ended this wait may also be stuck, and this rank's thread may not have ended its wait yet.
            for rank in dist.get_process_group_ranks(exchange.group):
                found = self.stuck(rank) if rank != self.rank else None
                if found is not None:
                    self.tell(rank, found, text)
        return text

    def stuck(self, rank: int) -> dict[str, Any] | None:
        """Return the description of the exchange that peer `rank` waits for although this rank has not started it.

        None if there is no such exchange.
        """
        text = self._read(f"waits/{rank}")
        found: dict[str, Any] = json.loads(text) if text else {}
        if self.rank not in found.get("ranks", ()):
            return None
        peer, messages = found["ranks"].index(rank), found["messages"][str(self.rank)]
        for key, place, sends, receives in tuple(self.started):
            if [key, place] == found["key"] and [receives[peer], sends[peer]] == messages:
                return None
        return found

    def tell(self, rank: int, found: dict[str, Any], text: str) -> None:
        """End the wait of a stuck peer with dummy messages; the peer then raises an AgreementError with the given text.

        Args:
            rank: the peer.
            found: description of the peer's exchange, from `stuck`.
            text: text of the error.
        """
        place = f"told/{rank}/{found['key']}"
        if self._read(f"{place}/by/{self.rank}"):
            return
        self._store.set(f"{place}/by/{self.rank}", "1")
        self._store.set(place, text)
        group = resolve_group(found["group"])
        peer = found["ranks"].index(rank)
        sends, receives = found["messages"][str(self.rank)]  # as the peer sees it
        key, place = found["key"]
        with without_fake_mode():  # this rank may be compiling
            if receives:
                empty = torch.zeros(receives, dtype=torch.uint8)
                self._sent.append((empty, group.send([empty], peer, tag_of(key, place, receives))))
            if sends:
                empty = torch.empty(sends, dtype=torch.uint8)
                self._sent.append((empty, group.recv([empty], peer, tag_of(key, place, sends))))

    def look(self) -> None:
        """Check once: publish this rank's wait if it takes long, and end the waits of peers that are stuck."""
        exchange = self.waits
        key = None if exchange is None else exchange.key
        if key != self._seen:
            self._seen, self._since = key, time.monotonic()
        if self.announced is not None:
            text, exchanges = self.announced
            for rank in range(dist.get_world_size()):
                found = self.stuck(rank) if rank != self.rank else None
                if found is not None and exchanges.began_anew(*found["count"]):
                    self.tell(rank, found, f"{text} (raised by rank {self.rank})")
        if exchange is None or time.monotonic() - self._since < PATIENCE_S:
            self._publish(exchange, "")
            return
        ranks = dist.get_process_group_ranks(exchange.group)
        peers = {rank: self.stuck(rank) for rank in ranks if rank != self.rank}
        self._publish(exchange, _text(exchange, ranks, {rank: found["key"] for rank, found in peers.items() if found}))
        elsewhere = [str(rank) for rank in peers if not self._read(f"waits/{rank}")]
        if elsewhere and not self._has_spoken and time.monotonic() - self._since > SILENCE_S:
            self._has_spoken = True
            _log.warning(
                "zgraph: rank %d has waited %g s for %s; rank(s) %s wait for no exchange of zgraph's. They compute or "
                "compile for long, or are elsewhere: in a barrier or another collective of the script, in a loop that "
                "this rank does not run, or out of data.",
                *(self.rank, SILENCE_S, exchange.about, ", ".join(elsewhere)),
            )
        for rank, found in peers.items():
            # The peer was in this very wait when it saw that it had not started the exchange this rank waits for. It
            # stays stuck as long as this rank, itself waiting, does not start the exchange that the peer waits for.
            if found is None or found["missing"].get(str(self.rank)) != exchange.key or self.waits is not exchange:
                continue
            waits = {self.rank: (str(exchange.about), exchange.about.names), rank: (found["about"], found["names"])}
            first, second = sorted(waits)
            self.tell(
                rank,
                found,
                f"zgraph: ranks {first} and {second} do not do the same: rank {first} waits for "
                f"{waits[first][0]}, rank {second} for {waits[second][0]}{_difference(waits)}. Nothing of it was used. "
                f"{ADVICE}",
            )

    def _read(self, place: str) -> str:
        return self._store.get(place).decode() if self._store.check([place]) else ""

    def _publish(self, exchange: Exchange | None, text: str) -> None:
        with self._lock:
            if text != self.published and self.waits is exchange:
                self.published = text  # first: a peer that reads the store may end the wait immediately
                self._store.set(f"waits/{self.rank}", text)


def _text(exchange: Exchange, ranks: Sequence[int], missing: Mapping[int, list[int]]) -> str:
    """Describe a wait as JSON for the store.

    Args:
        exchange: the exchange that this rank waits for.
        ranks: ranks of the exchange's group.
        missing: for each stuck peer, the key of the exchange that the peer waits for.
    """
    messages = zip(ranks, exchange.sends, exchange.receives, strict=True)
    return json.dumps(
        {
            "key": exchange.key,
            "count": exchange.about.exchanges.began,
            "about": str(exchange.about),
            "names": exchange.about.names,
            "group": exchange.group.group_name,
            "ranks": ranks,
            "messages": {rank: sizes for rank, *sizes in messages},
            "missing": missing,
        }
    )


def _difference(waits: Mapping[int, tuple[str, Sequence[str]]]) -> str:
    """Say what the texts of two ranks' waits leave out, of which each has the names of the parameters, too."""
    (one, (text, names)), (other, (other_text, others)) = sorted(waits.items())
    pairs = [(mine, theirs) for mine, theirs in zip_longest(names, others, fillvalue="none") if mine != theirs]
    if text == other_text and not pairs:
        return ", after another number of exchanges: one of them may run outside of graphs, see the warnings"
    if text == other_text:
        return f", which differ first in {pairs[0][0]} on rank {one}, {pairs[0][1]} on rank {other}"
    for rank, short, long in ((one, text, other_text), (other, other_text, text)):
        if f"{short}," in long:
            return f"; rank {rank} may run outside of graphs what the other one compiles: see its warnings"
    return ""


@contextlib.contextmanager
def announcing(handles: Sequence[Tensor]) -> Generator[None]:
    """If the `with` block raises a ZgraphError, tell it to peers that wait for exchanges of the failed call."""
    try:
        yield
    except ZgraphError as error:
        found = exchanges_of(handles)
        if found is not None:
            found.restart()
            watch_of(found.store).announced = str(error), found
        raise


def _look_again(watched: weakref.ref[Watch]) -> None:
    while (watch := watched()) is not None:
        try:
            watch.look()
        except Exception as error:
            if dist.is_initialized():  # otherwise the store is gone, and no rank waits
                warnings.warn(
                    f"zgraph: the watch over exchanges has ended: {error} Ranks that do not do the same now "
                    "wait for the timeout of their group.",
                    ZgraphWarning,
                    stacklevel=1,
                )
            return
        del watch
        time.sleep(_LOOK_S)


@functools.lru_cache(maxsize=1)
def watch_of(store: Store) -> Watch:
    """Return the watch for a rendezvous store, created on first use; only the latest store has a watch."""
    return Watch(store, dist.get_rank())
