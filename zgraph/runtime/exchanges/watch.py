"""A watch over exchanges that do not end: has a peer gone another way?

A rank that has waited for an exchange for some time publishes what it waits for to the rendezvous store, and reads what
its peers wait for. Two ranks that wait for different exchanges, neither of which the other has started, wait forever:
each is told so, and receives the messages it waits for, without meaning, so that its wait ends. What it has received is
then not used: the wait raises an AgreementError that names both exchanges.

    rank 0   starts A ......... waits for A: publishes "A"     has not started B; rank 1 has not started A
    rank 1   starts B ......... waits for B: publishes "B"     has not started A; rank 0 has not started B

A slow peer is no such case: it has started what it is waited for, or waits for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from zgraph.errors import AgreementError, ZgraphError
from zgraph.runtime.exchanges.identity import About, exchanges_of, tag_of
from zgraph.torch_compat.fake_values import without_fake_mode
from zgraph.torch_compat.groups import default_store, resolve_group

PATIENCE_S = 1.0  # of a wait, before the store is asked
_LOOK_S = 0.25
_REMEMBERED = 4096  # exchanges that have been started; far more than are ever under way
ADVICE = (
    "All ranks must call the same parts of the model in the same order. Where the layers that "
    "run depend on the rank, draw them alike on all ranks, or name the module around them: zgraph.shard(model, "
    "units=[...]), which gathers and reduces all of it everywhere."
)


class Message(NamedTuple):
    """One peer's part of an exchange: bytes to send and to receive, by its rank in the group."""

    peer: int
    sends: int
    receives: int


class Exchange(dist.Work):
    """The messages of one exchange as one work, whose wait is watched.

    Args:
        works: of the messages.
        about: which exchange it is.
        place: its number in its graph.
        group: of the ranks that take part.
        messages: one for each peer.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        about: About,
        place: int,
        group: dist.ProcessGroup,
        messages: Sequence[Message],
    ) -> None:
        super().__init__()
        self.works, self.about, self.place, self.group, self.messages = works, about, place, group, messages
        self.watch = watch_of(default_store())
        self.watch.note_start(self)

    @property
    def key(self) -> list[int]:
        return [self.about.key, self.place]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.watch.begin(self)
        try:
            for work in self.works:
                work.wait()
        finally:
            refusal = self.watch.end()
        if refusal:
            raise AgreementError(refusal)
        return True


class Watch:
    """Watches what this rank waits for; one for each rendezvous store."""

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self._store = PrefixStore("zgraph/watch", store)
        self._started: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # what each peer gets and gives
        self._waits: Exchange | None = None
        self._number = 0  # of the wait
        self._since = 0.0
        self._published = ""
        self._announced = ""  # why this rank will not start what its peers may wait for
        self._sent: list[Any] = []  # messages without meaning, and their memory
        self._lock = threading.Lock()  # of what is published
        self._thread: threading.Thread | None = None

    def note_start(self, exchange: Exchange) -> None:
        """Remember that this rank has started an exchange."""
        self._announced = ""
        ranks = dist.get_process_group_ranks(exchange.group)
        given = {ranks[one.peer]: (one.receives, one.sends) for one in exchange.messages}
        self._started[exchange.about.key, exchange.place] = given
        if len(self._started) > _REMEMBERED:
            del self._started[next(iter(self._started))]

    def begin(self, exchange: Exchange) -> None:
        """A wait begins."""
        self._number, self._since = self._number + 1, time.monotonic()
        self._waits = exchange
        self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_look_again, args=(weakref.ref(self),), daemon=True)
            self._thread.start()

    def announce(self, text: str) -> None:
        """Tell peers that wait for this rank that it has raised an error; until it starts another exchange."""
        self._announced = text
        self._start_thread()

    def end(self) -> str:
        """A wait has ended; why what it has received must not be used, or ""."""
        exchange = self._waits
        with self._lock:
            self._waits = None
            if self._published:
                self._store.set(f"waits/{self.rank}", "")
                self._published = ""
        if exchange is None or time.monotonic() - self._since < PATIENCE_S:
            return ""  # nobody has looked
        place = f"told/{self.rank}/{self._number}"
        text = self._store.get(place).decode() if self._store.check([place]) else ""
        if text:
            exchange.about.exchanges.restart()
            # Who has told this rank may wait for an answer, which the thread has not given yet.
            for rank in dist.get_process_group_ranks(exchange.group):
                found = self.stuck(rank) if rank != self.rank else None
                if found is not None:
                    self.tell(rank, found, text)
        return text

    def stuck(self, rank: int) -> dict[str, Any] | None:
        """What a peer waits for that this rank has not started and takes part in; None: nothing like that."""
        place = f"waits/{rank}"
        text = self._store.get(place).decode() if self._store.check([place]) else ""
        found: dict[str, Any] = json.loads(text) if text else {}
        if self.rank not in found.get("ranks", ()):
            return None
        given = self._started.get(tuple(found["key"]), {}).get(rank)
        return found if given != tuple(found["messages"][str(self.rank)]) else None

    def tell(self, rank: int, found: dict[str, Any], text: str) -> None:
        """End the wait of a stuck peer, which raises the text as an AgreementError."""
        place = f"told/{rank}/{found['wait']}"
        if self._store.check([f"{place}/by/{self.rank}"]):
            return
        self._store.set(f"{place}/by/{self.rank}", "1")
        self._store.set(place, text)
        group = resolve_group(found["group"])
        peer = found["ranks"].index(rank)
        sends, receives = found["messages"][str(self.rank)]  # as the peer sees it
        key, place = found["key"]
        with without_fake_mode():  # a rank that compiles tells others as well
            if receives:
                empty = torch.zeros(receives, dtype=torch.uint8)
                self._sent.append((empty, group.send([empty], peer, tag_of(key, place, receives))))
            if sends:
                empty = torch.empty(sends, dtype=torch.uint8)
                self._sent.append((empty, group.recv([empty], peer, tag_of(key, place, sends))))

    def look(self) -> None:
        """Compare what this rank waits for with what its peers do."""
        exchange, number = self._waits, self._number
        if self._announced:
            for rank in range(dist.get_world_size()):
                found = self.stuck(rank) if rank != self.rank else None
                if found is not None:
                    self.tell(rank, found, f"{self._announced} (raised by rank {self.rank})")
        if exchange is None or time.monotonic() - self._since < PATIENCE_S:
            return
        ranks = dist.get_process_group_ranks(exchange.group)
        peers = {rank: self.stuck(rank) for rank in ranks if rank != self.rank}
        missing = {rank: found["wait"] for rank, found in peers.items() if found is not None}
        self._publish(exchange, number, ranks, missing)
        for rank, found in peers.items():
            # The peer was stuck in this very wait when it found that it lacks what this rank waits for, and stays so
            # as long as this rank, which waits, does not start what the peer waits for.
            if found is None or found["missing"].get(str(self.rank)) != number or self._number != number:
                continue
            waits = {self.rank: str(exchange.about), rank: found["about"]}
            first, second = sorted(waits)
            self.tell(
                rank,
                found,
                f"zgraph: ranks {first} and {second} exchange different parameters: rank {first} waits for "
                f"{waits[first]}, rank {second} for {waits[second]}. Nothing of it was used. {ADVICE}",
            )

    def _publish(self, exchange: Exchange, number: int, ranks: list[int], missing: dict[int, int]) -> None:
        text = json.dumps(
            {
                "wait": number,
                "key": exchange.key,
                "about": str(exchange.about),
                "group": exchange.group.group_name,
                "ranks": ranks,
                "messages": {ranks[one.peer]: [one.sends, one.receives] for one in exchange.messages},
                "missing": missing,
            }
        )
        with self._lock:
            if text != self._published and self._waits is exchange:
                self._store.set(f"waits/{self.rank}", text)
                self._published = text


@contextlib.contextmanager
def announcing(handles: Sequence[Tensor]) -> Generator[None]:
    """Tell the peers of an error of zgraph's own, so that none waits for what this rank does not start any more."""
    try:
        yield
    except ZgraphError as error:
        found = exchanges_of(handles)
        if found is not None:
            found.restart()
            watch_of(default_store()).announce(str(error))
        raise


def _look_again(watched: weakref.ref[Watch]) -> None:
    while (watch := watched()) is not None:
        watch.look()
        del watch
        time.sleep(_LOOK_S)


@functools.lru_cache(maxsize=1)
def watch_of(store: Store) -> Watch:
    """The watch that asks this store; that of an earlier store ends."""
    return Watch(store, dist.get_rank())
