"""Containers that hold Python values, with copies of their earlier contents, to detect changes.

Contents are compared entry by entry, by identity first, which is cheap.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import call, is_, length_hint
from types import CellType, GeneratorType
from typing import Any, cast

from torch import Tensor

from zgraph.step.outside.traced import is_traced

_MOST_ENTRIES = 1000  # per container; of longer ones only the length is compared
_MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()


@dataclass(frozen=True)
class Binding:
    """An attribute, an entry of a dict, or a variable of an outer function, to which a step binds a tensor it makes.

    Attributes:
        holder: the attributes, the dict, or the variable's cell.
        key: name of the attribute, or key of the entry.
    """

    holder: dict[Any, Any] | CellType
    key: Any
    tensor: Tensor

    def put(self, value: Tensor) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


@dataclass(eq=False)
class Place:
    """A container, with a copy of its earlier contents.

    Attributes:
        path: Python expression of the container, for messages.
        holder: the container: a dict, an object's `__dict__`, a list, a set, a cell, or an iterator.
        keys: names of the attributes to compare; None: all contents.
        counts: whether attributes that were added later count as changes.
        reads: names of added attributes that count as changes; None: all.
        kind: class whose `__dict__` is `holder`; None: `holder` belongs to no class.
        held: earlier contents, in order.
    """

    path: str
    holder: Any
    keys: tuple[str, ...] | None = None
    counts: bool = False
    reads: frozenset[str] | None = None
    kind: type | None = None
    held: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.every = frozenset(self.holder) if self.counts else frozenset[str]()
        self.held = self.now()

    def has_more(self) -> bool:
        """Return whether attributes were added or removed since the copy; see `reads`."""
        added = [key for key in self.holder if key not in self.every]
        return any(self.reads is None or key in self.reads for key in added) or (
            self.reads is None and len(self.holder) != len(self.every)
        )

    @property
    def _is_too_long(self) -> bool:
        """Whether `held` has only the length of a dict, not its keys and values."""
        return self.keys is None and len(self.held) % 2 == 1

    @property
    def is_iterator(self) -> bool:
        return hasattr(self.holder, "__next__")

    def now(self) -> list[Any]:
        """Return the present contents."""
        holder = self.holder
        if self.keys is not None:
            return [holder.get(key, _MISSING) for key in self.keys]
        if isinstance(holder, dict) or holder is os.environ:
            if len(holder) > _MOST_ENTRIES:
                return [len(holder)]
            return [*holder, *holder.values()]
        if isinstance(holder, CellType):
            return _contents(holder) or [_MISSING]
        if isinstance(holder, list | tuple | deque):
            return list(holder) if len(holder) <= _MOST_ENTRIES else [len(holder)]
        if isinstance(holder, set):
            return [frozenset(holder)]
        if isinstance(holder, GeneratorType):
            return [None if holder.gi_frame is None else holder.gi_frame.f_lasti]
        return [length_hint(holder, -1), repr(holder)]

    def is_same(self) -> bool:
        """Return whether the present contents are the same objects as the earlier ones."""
        now = self.now()
        return len(now) == len(self.held) and all(map(is_, now, self.held))

    def name(self, place: int) -> str:
        """Return the Python expression of an entry, for messages."""
        if self.keys is not None:
            return f"{self.path}.{self.keys[place]}" if self.path else self.keys[place]
        if (isinstance(self.holder, dict) or self.holder is os.environ) and len(self.held) == 2 * len(self.holder):
            return f"{self.path}[{self.held[place % len(self.holder)]!r}]"
        return f"{self.path}[{place}]" if isinstance(self.holder, list | tuple | deque) else self.path

    def take_made(self) -> list[Binding]:
        """Undo and return assignments of traced tensors to new entries, or over a tensor, a number or None."""
        if isinstance(self.holder, CellType):
            one = next(iter(_contents(self.holder)), None)
            if one is self.held[0] or not is_traced(one) or not _gives_way(self.held[0]):
                return []
            self.restore()
            return [Binding(self.holder, None, one)]
        if not isinstance(self.holder, dict) or self._is_too_long:
            return []
        half = len(self.held) // 2
        keys, values = (self.held[:half], self.held[half:]) if self.keys is None else (self.keys, self.held)
        before = dict(zip(keys, values, strict=True))
        found: list[Binding] = []
        for key in dict.fromkeys((*before, *(self.holder if self.keys is None else ()))):
            one, other = self.holder.get(key), before.get(key, _MISSING)
            if one is other or not is_traced(one):
                continue
            if _gives_way(other):
                found.append(Binding(self.holder, key, one))
                self.holder[key] = other
                if other is _MISSING:
                    del self.holder[key]
        return found

    def restore(self) -> None:
        """Restore the earlier contents."""
        if self.kind is not None:
            for key, value in zip(self.keys or (), self.held, strict=True):
                if self.holder.get(key, _MISSING) is not value:
                    setattr(self.kind, key, value)
        elif isinstance(self.holder, dict):
            if self._is_too_long:
                return
            keys = self.keys if self.keys is not None else tuple(self.held[: len(self.held) // 2])
            values = self.held if self.keys is not None else self.held[len(self.held) // 2 :]
            if self.keys is None:
                self.holder.clear()
            for key, value in zip(keys, values, strict=True):
                if value is _MISSING:
                    self.holder.pop(key, None)
                else:
                    self.holder[key] = value
        elif isinstance(self.holder, list | deque) and len(self.holder) <= _MOST_ENTRIES:
            self.holder.clear()
            self.holder.extend(self.held)
        elif isinstance(self.holder, set):
            self.holder.clear()
            self.holder.update(self.held[0])
        elif isinstance(self.holder, CellType):
            if self.held[0] is _MISSING:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = self.held[0]


class Compared:
    """Fast check that the contents of many places are still the same objects.

    If the check fails, callers compare the places one by one, by value.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        attributes = [place for place in places if place.keys is not None]
        self._readers = [place.holder.get for place in attributes for _ in place.keys or ()]
        self._keys = [key for place in attributes for key in place.keys or ()]
        self._values = [value for place in attributes for value in place.held]
        whole = [place for place in places if place.keys is None]
        sized = [place for place in whole if isinstance(place.holder, dict | list | deque)]
        self._sized = [place.holder for place in (*sized, *(place for place in attributes if place.counts))]
        self._sizes = list(map(len, self._sized))
        short = [place.holder for place in sized if 0 < len(place.holder) <= _MOST_ENTRIES]
        self._dicts = [holder for holder in short if isinstance(holder, dict)]
        self._lists = [holder for holder in short if not isinstance(holder, dict)]
        self._cells = [place.holder for place in whole if isinstance(place.holder, CellType)]
        self._others = [place for place in whole if isinstance(place.holder, set) or place.holder is os.environ]
        self._entries = list(self._now())

    def take_sizes(self) -> None:
        """Replace the expected sizes of the containers by the present ones."""
        self._sizes = list(map(len, self._sized))

    def _now(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._dicts),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(self._lists),
            (content for cell in self._cells for content in _contents(cell)),
        )

    def are_same(self) -> bool:
        """Return whether all places still have the same contents as when this check was created."""
        return (
            all(map(is_, map(cast(Any, call), self._readers, self._keys), self._values))
            and list(map(len, self._sized)) == self._sizes
            and _are_same(self._now(), self._entries)
            and all(place.now() == place.held for place in self._others)
        )


def _gives_way(value: Any) -> bool:
    """Return whether a graph may put a tensor where this value was."""
    return value is None or value is _MISSING or isinstance(value, Tensor | int | float)


def _contents(cell: CellType) -> list[Any]:
    """Return a list of a cell's content; an empty list if the cell is empty."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _are_same(now: Iterator[Any], before: list[Any]) -> bool:
    """Return whether `now` and `before` have exactly the same objects in the same order."""
    return all(map(is_, chain(now, (_MISSING,)), chain(before, (_MISSING,))))
