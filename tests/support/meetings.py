"""Sites that meet: each a process of its own, which a test may kill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.support.ranks import Ranks
from zgraph.step.outer.meeting import open_store


class Sites:
    """A store, and sites that run functions at the same time."""

    def __init__(self) -> None:
        self.store = open_store(0)
        self._pool = ThreadPoolExecutor()
        self.ranks: list[Ranks] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.store.port}"

    def start(self, function: Callable[..., Any], *args: Any, ranks: int = 1) -> Future[list[Any]]:
        """Start a site of so many ranks that call a function with the store's address; its results by rank."""
        self.ranks.append(Ranks(ranks, 60.0))
        return self._pool.submit(self.ranks[-1].run, function, self.address, *args)

    def await_counter(self, key: str, value: int) -> None:
        """Wait until sites have added so much to a counter of the store."""
        while self.store.add(key, 0) < value:
            time.sleep(0.05)

    def close(self) -> None:
        for one in self.ranks:
            one.close()
        self._pool.shutdown()


@contextlib.contextmanager
def meeting() -> Generator[Sites]:
    sites = Sites()
    try:
        yield sites
    finally:
        sites.close()
