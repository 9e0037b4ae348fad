"""Snapshot of the Python values that a step may read: numbers, containers, configurations.

The values are all attributes of the model's modules, and the variables and attributes named in the code of the step, of
the modules' forwards, and of functions that this code calls.
"""

from __future__ import annotations

import enum
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from zgraph.step.outside.calls import Calls, computes_names
from zgraph.step.outside.functions import Functions, classes_of, is_library_module, packages_of
from zgraph.step.outside.places import Binding, Compared, Place
from zgraph.step.outside.traced import holds_traced, is_traced
from zgraph.torch_compat.dynamo import without_compile

_DEPTH = 6
_ROUNDS = 5  # in each, newly found functions name more values
_STANDARD = frozenset(nn.Module().__dict__) - {"training"} | {"_zgraph", "zero_grad"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, type)


class PythonValues:
    """A snapshot of the values that a step may read.

    Args:
        functions: the step, and hooks on parameters.
        models: modules whose forwards the step may call; all their attributes are read.
        ran: record of the functions called in a trace; only values named in their code are included. None: values named
            in any reachable function are included.

    Attributes:
        places: containers found, by their ids.
        calls: record of the functions that the step calls while it is traced.
        bound: dicts to which a trace has assigned tensors. Later calls assign to the same objects, so replacing one of
            these dicts by an equal dict counts as a change.
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
        self.bound: list[Any] = []
        self.places: dict[int, Place] = {}
        for _ in range(_ROUNDS):
            before = len(self._functions.seen)
            self._walk()
            if len(self._functions.seen) == before:
                break

        self._compared = Compared([place for place in self.places.values() if not place.is_iterator])

    def of_what_ran(self) -> PythonValues:
        """Return a smaller snapshot, with only the values named in functions that the trace has called."""
        found = PythonValues(*self._given, self.calls) if self.calls.is_known else self
        found.bound = self.bound
        return found

    # --- compare ------------------------------------------------------------------------------------------------------

    def changed(self) -> str:
        """Describe the first value that has changed since the snapshot; "" if there is none."""
        if self._compared.are_same():
            return ""
        for place in self.places.values():
            if place.counts and place.has_more():
                return f"{place.path} has {len(place.holder)} attributes, before {len(place.every)}"
            if place.is_iterator or place.is_same():
                continue  # advancing an iterator outside the step does not affect the step
            if text := self._difference(place, place.now()):
                return text
        self._compared.take_sizes()  # objects may have new attributes that no code names
        return ""

    def _difference(self, place: Place, now: list[Any]) -> str:
        if len(now) != len(place.held):
            each = 2 if isinstance(place.holder, dict) else 1  # keys, and values
            return f"{place.path} has {len(now) // each} entries, before {len(place.held) // each}"
        for number, (one, other) in enumerate(zip(now, place.held, strict=True)):
            if not self._same(one, other, _DEPTH):
                return f"{place.name(number)}={_shown(one)}, before {_shown(other)}"
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
        held = _inside(other)
        known = self.places.get(id(held))
        if known is None or any(held is one for one in self.bound):
            return False
        again = Place(known.path, _inside(one), known.keys, kind=known.kind)
        return len(again.held) == len(known.held) and all(
            self._same(a, b, depth - 1) for a, b in zip(again.held, known.held, strict=True)
        )

    def effects(self) -> tuple[list[Binding], str]:
        """Undo the changes that a trace has made to the values.

        Returns the assignments of traced tensors, and a text that describes the first other change and ends with
        advice ("" if there is no other change).
        """
        bindings: list[Binding] = []
        found = ""
        for place in self.places.values():
            for key in [key for key in place.holder if key not in place.every] if place.counts else ():
                value = place.holder[key]
                if is_traced(value):
                    bindings.append(Binding(place.holder, key, value))
                else:
                    text = f"{place.path}.{key}={_shown(value)}, before nothing"
                    found = found or text + _advice([value])
                del place.holder[key]
            if place.is_same():
                continue
            bindings += place.take_made()
            now = place.now()
            text = self._difference(place, now)
            before = set(map(id, place.held))
            changed = [one for one in now if id(one) not in before]
            if not text and any(map(is_traced, changed)):
                text = f"{place.path} holds a tensor that the step has made"
            found = found or (text + _advice(changed) if text else "")
            place.restore()
        self.bound = [one.holder for one in bindings] or self.bound
        return bindings, found

    # --- find ---------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self.places = {}
        self._any_name = self._computes_names()
        # All attributes of modules are read, until the code that has run is known.
        self._read_of_modules = None if self._ran is None or self._any_name else self._ran.names()
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

    def _computes_names(self) -> bool:
        """Return whether code that has run may read attributes by computed names, as with `getattr`."""
        return self._ran is not None and any(computes_names(one.__code__) for one in self._functions.seen)

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
        """Add a value's contents to the snapshot, up to `depth` levels deep."""
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
        if isinstance(value, functools.partial):
            self._functions.add(value, path)
            bound = cast("functools.partial[Any]", value)
            self._add(Place(f"{path}.keywords", bound.keywords), depth)
            self._value(f"{path}.args", bound.args, depth)
        kind, held = type(value), getattr(value, "__dict__", None)
        is_known = isinstance(value, SimpleNamespace) or kind.__name__ in ("Namespace", "partial")
        if not isinstance(held, dict) or not (is_known or self._functions.is_users_class(kind)):
            return
        self._functions.methods(kind, path)
        names = None if self._any_name else frozenset(self._functions.names)
        keys = tuple(sorted(held if names is None else names & held.keys()))
        self._class_attributes(kind)
        self._add(Place(path, held, keys, counts=True, reads=names), depth)

    def _class_attributes(self, kind: type) -> None:
        """Add to the snapshot all attributes of a class that are named in code."""
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
    """Return whether an attribute of a class is a value, not a method or another descriptor."""
    return not callable(value) and not hasattr(type(value), "__get__")


def _inside(value: Any) -> Any:
    """Return the container of a value's parts: the `__dict__` of an object; for a container, the value itself."""
    if isinstance(value, list | dict | set | deque | tuple):
        return cast(Any, value)
    return getattr(value, "__dict__", value)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if holds_traced(value):
        return f"a {type(value).__name__} of tensors"
    return f"{value!r:.80}"


def _advice(changed: Sequence[Any]) -> str:
    """Return what to do instead of a change that only the trace would make."""
    if any(map(holds_traced, changed)):
        return (
            ", where a graph cannot put its tensors; return the tensor from the step and keep it outside, or bind it "
            "to a variable or attribute that has held None, a number or a tensor"
        )
    return (
        ", which would happen only while it is captured; change it outside the step, return the new value, or keep it "
        'in a tensor: self.register_buffer("calls", torch.zeros(())), and self.calls.add_(1)'
    )


def _is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0)
