"""Find the functions that a step may call, by the names in their code."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_SITES = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("purelib", "platlib"))
_OWN = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).resolve().parents[2]}/")
_MOST_FUNCTIONS = 2000
_CALLED_BY_PYTHON = frozenset({"forward", "backward", "setup_context", "__call__", "__init__"})


@dataclass
class Functions:
    """All functions that a step may call: those named in the step's code, or in the code of functions already found.

    Attributes:
        names: attribute names in the code of all functions, and the code's strings, which may be attribute names.
        seen: functions found so far, with their paths.
        packages: installed packages whose functions are followed; all others are libraries.
        has_run: function that returns whether a code object has run; functions that have not run are ignored.
    """

    packages: frozenset[str]
    has_run: Callable[[CodeType], bool] = lambda _: True
    names: set[str] = field(default_factory=set[str])
    seen: dict[FunctionType, str] = field(default_factory=dict[FunctionType, str])
    _users: dict[type, bool] = field(default_factory=dict[type, bool])

    def add(self, value: Any, path: str) -> bool:
        """Add the functions of a value (a function, method or property) with the names in their code.

        Returns whether any function is new.
        """
        found = [one for one in _plain(value) if one not in self.seen and self.follows(one)]
        for one in found if len(self.seen) < _MOST_FUNCTIONS else ():
            self.seen[one] = path
            self.names |= names_of(one.__code__)
        return bool(found)

    def follows(self, function: FunctionType) -> bool:
        """Return whether a function has run, and is defined by the user or in a package that the model comes from."""
        code = function.__code__
        return self.is_users(code.co_filename, function.__module__) and self.has_run(code)

    def is_users(self, file: str, module: str | None) -> bool:
        if file.startswith(_OWN) or file.startswith("<"):
            return False
        if file.startswith(_SITES):
            return (module or "").partition(".")[0] in self.packages
        return not file.startswith(_STDLIB)

    def roots(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (path, holder, key) of values that functions read by name: cells, globals, defaults."""
        for function, path in self.seen.items():
            code = function.__code__
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                yield name, cell, None
            held = function.__globals__
            for name in names_of(code):
                if name in held:
                    yield name, held, name
            if function.__defaults__ or function.__kwdefaults__:
                yield f"defaults of {path}", [*(function.__defaults__ or ()), function.__kwdefaults__ or {}], None

    def methods(self, kind: type, path: str) -> bool:
        """Add those methods of a class that code names, or that Python itself calls; return whether any is new."""
        is_new = False
        for base in kind.__mro__:
            if base is object or not self.is_users_class(base):
                continue
            for name, member in vars(base).items():
                if name in self.names or name in _CALLED_BY_PYTHON:
                    is_new |= self.add(member, f"{path}.{name}")
        return is_new

    def is_users_class(self, kind: type) -> bool:
        """Return whether a class was defined by the user, or in a package that the model comes from."""
        if kind not in self._users:
            self._users[kind] = self._is_users_class(kind)
        return self._users[kind]

    def _is_users_class(self, kind: type) -> bool:
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        return (file is None and kind.__module__ == "__main__") or (
            file is not None and self.is_users(file, kind.__module__)
        )


def packages_of(kinds: Iterable[type]) -> frozenset[str]:
    """Return the top-level packages in which classes are defined."""
    return frozenset(kind.__module__.partition(".")[0] for kind in kinds) - {"torch", "zgraph"}


@functools.cache
def names_of(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that `code` names, and the strings in it, which may be attribute names."""
    found = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str) and one.isidentifier())}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= names_of(inner)
    return frozenset(found)


def _plain(value: Any) -> list[FunctionType]:
    """Return the plain functions in a value: a function, method, property or partial."""
    if isinstance(value, MethodType):
        return _plain(value.__func__)
    if isinstance(value, staticmethod | classmethod):
        return _plain(cast(Any, value).__func__)
    if isinstance(value, property):
        return [one for member in (value.fget, value.fset) if member is not None for one in _plain(member)]
    if isinstance(value, functools.partial):
        return _plain(cast("functools.partial[Any]", value).func)
    if not isinstance(value, FunctionType):
        return []
    wrapped: Callable[..., Any] | None = getattr(value, "__wrapped__", None)
    return [value, *(_plain(wrapped) if wrapped is not None else ())]


def is_library_module(value: ModuleType, functions: Functions) -> bool:
    """Return whether a Python module is a library: not the user's, and not in a package that the model comes from."""
    file = getattr(value, "__file__", None)
    return file is None or not functions.is_users(file, value.__name__)


def classes_of(model: nn.Module) -> list[type]:
    return list(dict.fromkeys(type(part) for part in model.modules()))
