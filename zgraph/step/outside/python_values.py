"""Values of Python that a step may read, as they were when it was captured: numbers, containers, configurations.

They are found by names: what a step and its model's forwards name in their code, what the functions do that they name,
and everything that modules hold. Each container is compared entry by entry, by identity first, which is cheap.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import call, is_, length_hint
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from zgraph.errors import ZgraphError
from zgraph.step.outside.calls import Calls, reads_by_any_name
from zgraph.step.outside.functions import Functions, classes_of, is_library_module, packages_of
from zgraph.torch_compat.dynamo import without_compile
from zgraph.torch_compat.fake_values import is_fake

_MOST_ENTRIES = 1000  # of a container; of a longer one only the length is compared
_DEPTH = 6
_ROUNDS = 5  # in each, functions that are found name more
_STANDARD = frozenset(nn.Module().__dict__) - {"training"} | {"_zgraph", "zero_grad"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, type)
_MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()


@dataclass(frozen=True)
class Binding:
    """An attribute, or an entry of a dict, to which a step binds a tensor that it makes."""

    holder: dict[Any, Any]
    key: Any
    tensor: Tensor


@dataclass(eq=False)
class Place:
    """A container, and what it held.

    Attributes:
        path: how people come to it.
        holder: a dict of attributes or entries, a list, a set, a cell, or an iterator.
        keys: of attributes; None: all that is there.
        counts: whether attributes that come later matter, too.
        reads: which of these; None: all.
        kind: the class whose attributes they are; None: an object's.
        held: what was there, in order.
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
        """Whether there are other attributes than there were, of those that matter."""
        added = [key for key in self.holder if key not in self.every]
        return any(self.reads is None or key in self.reads for key in added) or (
            self.reads is None and len(self.holder) != len(self.every)
        )

    @property
    def _is_too_long(self) -> bool:
        """Whether of a dict only the length is known, not keys and values."""
        return self.keys is None and len(self.held) % 2 == 1

    @property
    def is_iterator(self) -> bool:
        return hasattr(self.holder, "__next__")

    def now(self) -> list[Any]:
        """What is there."""
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

    def name(self, place: int) -> str:
        """What people call an entry."""
        if self.keys is not None:
            return f"{self.path}.{self.keys[place]}" if self.path else self.keys[place]
        if (isinstance(self.holder, dict) or self.holder is os.environ) and len(self.held) == 2 * len(self.holder):
            return f"{self.path}[{self.held[place % len(self.holder)]!r}]"
        return f"{self.path}[{place}]" if isinstance(self.holder, list | tuple | deque) else self.path

    def take_made(self) -> list[Binding]:
        """Attributes or entries, tensors or nothing before, that hold tensors of a trace; they are put back."""
        if not isinstance(self.holder, dict) or self._is_too_long:
            return []
        half = len(self.held) // 2
        keys, values = (self.held[:half], self.held[half:]) if self.keys is None else (self.keys, self.held)
        before = dict(zip(keys, values, strict=True))
        found: list[Binding] = []
        for key in dict.fromkeys((*before, *(self.holder if self.keys is None else ()))):
            one, other = self.holder.get(key), before.get(key, _MISSING)
            if one is other or not (isinstance(one, Tensor) and is_fake(one)):
                continue
            if other is None or other is _MISSING or isinstance(other, Tensor):
                found.append(Binding(self.holder, key, one))
                self.holder[key] = other
                if other is _MISSING:
                    del self.holder[key]
        return found

    def restore(self) -> None:
        """Put back what was there."""
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
            self.holder.cell_contents = self.held[0]


class _Compared:
    """Places whose entries are compared by identity, all at once.

    Entries of a tuple stay what they are. An entry that is equal, but another object, is for the places to judge.
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
        """Compare with the sizes that there are now."""
        self._sizes = list(map(len, self._sized))

    def _now(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._dicts),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(self._lists),
            (content for cell in self._cells for content in _contents(cell)),
        )

    def are_same(self) -> bool:
        """Whether all entries are the same objects."""
        return (
            all(map(is_, map(cast(Any, call), self._readers, self._keys), self._values))
            and list(map(len, self._sized)) == self._sizes
            and _are_same(self._now(), self._entries)
            and all(place.now() == place.held for place in self._others)
        )


def _contents(cell: CellType) -> list[Any]:
    """What is in a cell; nothing if it is empty."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _are_same(now: Iterator[Any], before: list[Any]) -> bool:
    """Whether there are as many, and the same objects."""
    return all(map(is_, chain(now, (_MISSING,)), chain(before, (_MISSING,))))


def _is_same_place(place: Place) -> bool:
    now = place.now()
    return len(now) == len(place.held) and all(map(is_, now, place.held))


class PythonValues:
    """A snapshot of what a step may read.

    Args:
        functions: the step, and hooks on parameters.
        models: modules whose forwards it may call; of them everything is read.
        ran: what the step has called, if it was traced; what other code names it cannot have read.

    Attributes:
        places: what was found, by the ids of the containers.
        calls: what the step calls while it is traced.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], models: Sequence[nn.Module], ran: Calls | None = None
    ) -> None:
        kinds = [kind for model in models for kind in classes_of(model)]
        self._given = functions, models
        self._ran, self.calls = ran, Calls()
        self._functions = Functions(packages_of(kinds), has_run=(ran or Calls()).has_run)
        self._models = list(models)
        self._parts: set[int] = set()
        self._owners: list[tuple[str, Any]] = []
        for one in functions:
            self._functions.add(one, getattr(one, "__name__", "the step"))
            owner = getattr(one, "__self__", None)
            if owner is not None:
                self._owners.append(("self", owner))
        self.places: dict[int, Place] = {}
        for _ in range(_ROUNDS):
            before = len(self._functions.seen)
            self._walk()
            if len(self._functions.seen) == before:
                break

        self._compared = _Compared([place for place in self.places.values() if not place.is_iterator])

    def of_what_ran(self) -> PythonValues:
        """A snapshot of what the step can have read, by what it has called in its trace."""
        return PythonValues(*self._given, self.calls) if self.calls.is_known else self

    # --- compare ------------------------------------------------------------------------------------------------------

    def changed(self) -> str:
        """The first value that is not what it was, for people; "" if all are."""
        if self._compared.are_same():
            return ""
        for place in self.places.values():
            if place.counts and place.has_more():
                return f"{place.path} has {len(place.holder)} attributes, before {len(place.every)}"
            now = place.now()
            if len(now) == len(place.held) and all(map(is_, now, place.held)):
                continue
            if place.is_iterator:
                continue  # who goes on with it outside of the step changes nothing in it
            if text := self._difference(place, now):
                return text
        self._compared.take_sizes()  # of objects with other attributes, which no code names
        return ""

    def _difference(self, place: Place, now: list[Any]) -> str:
        if len(now) != len(place.held):
            each = 2 if isinstance(place.holder, dict) else 1  # keys, and values
            return f"{place.path} has {len(now) // each} entries, before {len(place.held) // each}"
        for number, (one, other) in enumerate(zip(now, place.held, strict=True)):
            if not self._same(one, other, _DEPTH):
                return f"{place.name(number)}={one!r:.80}, before {other!r:.80}"
        return ""

    def _same(self, one: Any, other: Any, depth: int) -> bool:
        if one is other:
            return True
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            return isinstance(one, Tensor) and isinstance(other, Tensor)
        if type(one) is not type(other) or not depth:
            return False
        if isinstance(other, (*_PLAIN, frozenset, MethodType)) or _is_number_of_numpy(other):
            return bool(one == other)
        known = self.places.get(id(_inside(other)))
        if known is None:
            return False
        again = Place(known.path, _inside(one), known.keys, kind=known.kind)
        return len(again.held) == len(known.held) and all(
            self._same(a, b, depth - 1) for a, b in zip(again.held, known.held, strict=True)
        )

    def effects(self) -> tuple[list[Binding], str]:
        """What a trace has changed: attributes and entries that hold its tensors, and the first other change."""
        bindings: list[Binding] = []
        found = ""
        for place in self.places.values():
            for key in [key for key in place.holder if key not in place.every] if place.counts else ():
                value = place.holder[key]
                if isinstance(value, Tensor) and is_fake(value):
                    bindings.append(Binding(place.holder, key, value))
                else:
                    found = found or f"{place.path}.{key}={value!r:.80}, before nothing"
                del place.holder[key]
            now = place.now()
            if _is_same_place(place):
                continue
            bindings += place.take_made()
            now = place.now()
            text = self._difference(place, now)
            before = set(map(id, place.held))
            if not text and any(isinstance(one, Tensor) and is_fake(one) for one in now if id(one) not in before):
                text = f"{place.path} holds a tensor that the step has made"
            found = found or text
            place.restore()
        return bindings, found

    # --- find ---------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self.places = {}
        self._read_of_modules = self._names_of_modules()
        for model in self._models:
            for name, part in model.named_modules():
                self._module(name, part)
        for path, owner in self._owners:
            self._value(path, owner, _DEPTH)
        names = self._functions.names
        if "environ" in names or "getenv" in names:
            self._add(Place("os.environ", os.environ))
        for path, holder, key in list(self._functions.roots()):
            if isinstance(holder, CellType):
                self._add(Place(path, holder), _DEPTH)
            elif key is None:
                self._value(path, holder, _DEPTH)
            else:
                self._global(path, holder, key)

    def _names_of_modules(self) -> frozenset[str] | None:
        """Attributes of modules that may be read; None: all."""
        if self._ran is None or reads_by_any_name(one.__code__ for one in self._functions.seen):
            return None
        return self._ran.names()

    def _module(self, path: str, part: nn.Module) -> None:
        self._functions.methods(type(part), type(part).__name__)
        held = part.__dict__
        read = self._read_of_modules
        keys = tuple(key for key in held if key not in _STANDARD and (read is None or key in read))
        self._parts.add(id(part))
        self._add(Place(path or type(part).__name__, held, keys, counts=True, reads=read), _DEPTH)
        self._class_attributes(type(part))
        for kind in _HOOKS:
            hooks = held.get(kind)
            if isinstance(hooks, dict):
                self._add(Place(f"{path}.{kind}", hooks))
                for hook in cast("dict[int, Any]", hooks).values():
                    self._value(f"a hook on {path}", hook, _DEPTH)

    def _global(self, path: str, held: dict[str, Any], key: str) -> None:
        value = held[key]
        if isinstance(value, FunctionType | type | ModuleType | nn.Module):
            self._value(path, value, _DEPTH)
            return
        known = self.places.get(id(held))
        if known is None:
            self._add(Place("", held, (key,)), _DEPTH)
        elif known.keys is not None and key not in known.keys:
            known.keys, known.held = (*known.keys, key), [*known.held, value]
            self._value(path, value, _DEPTH)

    def _add(self, place: Place, depth: int = 1) -> None:
        if id(place.holder) in self.places:
            return
        self.places[id(place.holder)] = place
        if not place.is_iterator:
            for number, value in enumerate(place.held):
                self._value(place.name(number), value, depth - 1)

    def _value(self, path: str, value: Any, depth: int) -> None:
        """Look into a value."""
        if depth <= 0 or isinstance(value, (*_PLAIN[:-1], Tensor, optim.Optimizer, torch.amp.GradScaler)):
            return
        if isinstance(value, nn.Module):
            plain = without_compile(value)
            if id(plain) not in self._parts:
                self._models.append(plain)
                for name, part in plain.named_modules(prefix=path):
                    self._module(name, part)
        elif isinstance(value, type):
            if self._functions.is_users_class(value):
                self._functions.methods(value, path)
                self._class_attributes(value)
        elif isinstance(value, ModuleType):
            if not is_library_module(value, self._functions):
                for name in sorted(self._functions.names & vars(value).keys()):
                    self._global(f"{path}.{name}", vars(value), name)
        elif isinstance(value, FunctionType):
            self._functions.add(value, path)
        elif isinstance(value, MethodType):
            self._functions.add(value, path)
            self._value(path, value.__self__, depth - 1)
        elif isinstance(value, list | dict | set | deque) or (isinstance(value, tuple) and value):
            self._add(Place(path, value), depth)
        elif hasattr(value, "__next__"):
            if isinstance(value, GeneratorType) or type(value).__module__ in ("builtins", "itertools"):
                self._add(Place(path, value))
        else:
            self._object(path, value, depth)

    def _object(self, path: str, value: Any, depth: int) -> None:
        self._functions.add(value, path)  # a partial
        kind, held = type(value), getattr(value, "__dict__", None)
        is_known = isinstance(value, SimpleNamespace) or kind.__name__ in ("Namespace", "partial")
        if not isinstance(held, dict) or not (is_known or self._functions.is_users_class(kind)):
            return
        self._functions.methods(kind, path)
        names = frozenset(self._functions.names)
        keys = tuple(sorted(names & held.keys()))
        self._class_attributes(kind)
        self._add(Place(path, held, keys, counts=True, reads=names), depth)

    def _class_attributes(self, kind: type) -> None:
        """Attributes of classes that code names."""
        for base in kind.__mro__:
            if not self._functions.is_users_class(base) or base is object:
                continue
            names = self._functions.names & vars(base).keys()
            keys = tuple(sorted(key for key in names if _is_data(vars(base)[key])))
            if keys and id(base) not in self.places:
                place = Place(kind.__name__, vars(base), keys, kind=base)
                self.places[id(base)] = place
                for number, value in enumerate(place.held):
                    self._value(place.name(number), value, _DEPTH - 1)


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class is a value, not a method or another descriptor."""
    return not callable(value) and not hasattr(type(value), "__get__")


def _inside(value: Any) -> Any:
    """What is compared of a value: itself, or an object's attributes."""
    if isinstance(value, list | dict | set | deque | tuple):
        return cast(Any, value)
    return getattr(value, "__dict__", value)


def _is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0)


@contextlib.contextmanager
def same_random_numbers() -> Generator[None]:
    """Refuse to draw from Python's and numpy's generators, whose numbers a graph would hold for good.

    Raises:
        ZgraphError: something has drawn; the generators are as they were.
    """
    numpy: Any = sys.modules.get("numpy")
    before, seed = (random.getstate(), None if numpy is None else numpy.random.get_state()), torch.initial_seed()
    yield
    after = random.getstate(), None if numpy is None else numpy.random.get_state()
    if torch.initial_seed() != seed:
        raise ZgraphError(
            f"zgraph.training_step: the step sets torch's seed ({torch.initial_seed()}), which would happen only while "
            "it is captured; call torch.manual_seed before the step."
        )
    names = [name for name, a, b in zip(("random", "numpy.random"), before, after, strict=True) if str(a) != str(b)]
    if names:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
        raise ZgraphError(
            f"zgraph.training_step: the step draws from {names[0]}, whose number would be a constant of its graph; "
            "draw outside and pass the number, or draw a tensor (torch.rand) and choose with torch.where."
        )
