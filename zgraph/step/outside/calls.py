"""Record the functions called while a step is traced, to find the outside values that the step may have read."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Generator
from types import CodeType, FrameType
from typing import Any

import torch

from zgraph.step.outside.functions import names_of

# With these, code may read attributes whose names do not appear in it.
_BY_ANY_NAME = frozenset({"vars", "__dict__", "attrgetter", "eval", "exec", "dir", "__getattr__", "__getattribute__"})
_BY_A_NAME = frozenset({"getattr", "hasattr"})  # the second argument


class Calls:
    """Record of the code that has run while a step was traced.

    Attributes:
        is_known: whether all code was recorded; an active profiler prevents it.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._ran: dict[int, CodeType] = {}  # by ids, as hashing code is slow

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        """Record all calls in this thread inside the `with`."""
        ran = self._ran

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                code = frame.f_code
                ran[id(code)] = code

        if sys.getprofile() is not None:  # a profiler in C could not be restored
            self.is_known = False
            yield
            return
        self.is_known = True
        sys.setprofile(note)
        try:
            with torch.autograd.set_multithreading_enabled(False):  # GPU backwards run in their own threads
                yield
        finally:
            sys.setprofile(None)

    def has_run(self, code: CodeType) -> bool:
        return not self.is_known or id(code) in self._ran

    def names(self) -> frozenset[str]:
        """Return all names in the recorded code, including code of libraries."""
        return frozenset[str]().union(*map(names_of, self._ran.values()))


@functools.cache
def computes_names(code: CodeType) -> bool:
    """Return whether `code` may read attributes by computed names, as `getattr(self, f"w{number}")` does."""
    asks = names_of(code)
    if not _BY_ANY_NAME.isdisjoint(asks):
        return True
    if _BY_A_NAME.isdisjoint(asks):
        return False
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))))
    except (OSError, SyntaxError):  # without a source, or a lambda in the middle of a line
        return True
    used = [node for node in nodes if isinstance(node, ast.Name) and node.id in _BY_A_NAME]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in used]
    known = [call for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)]
    return not used or len(used) != len(known)
