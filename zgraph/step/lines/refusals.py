"""Checks before a step is traced, and error messages that name the user's line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import optim

from zgraph.errors import ZgraphError
from zgraph.step.outside.variables import variables_of
from zgraph.torch_compat.modules import before_steps, step_hooks

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).resolve().parents[2]}/")


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer whose step cannot be traced.

    Raises:
        ValueError: the step cannot be traced; the message says why.
    """
    for name in ("differentiable", "capturable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ValueError(
                f"zgraph.training_step: the optimizer is {name}; create it without this option, which changes how it "
                "counts steps."
            )
    foreign = [hook for hook in step_hooks(optimizer) if not _is_own(hook)]
    if foreign:
        raise ValueError(
            f"zgraph.training_step: the optimizer has a step hook, {foreign[0]!r}, which would run only while the step "
            "is traced; remove it, or do its work after the step."
        )


def _is_own(hook: Any) -> bool:
    """Return whether a hook is zgraph's own `step_on_shards`, which a captured step does not need."""
    return str(getattr(hook, "__module__", "")).startswith("zgraph.")


def check_function(function: Callable[..., Any], optimizers: Sequence[optim.Optimizer]) -> None:
    """Refuse a function that uses an optimizer which was not passed to `zgraph.training_step`.

    Raises:
        ValueError: the function uses such an optimizer; the message names its variable.
    """
    for name, value in variables_of(function):
        if isinstance(value, optim.Optimizer) and all(value is not one for one in optimizers):
            raise ValueError(
                f"zgraph.training_step: the step uses an optimizer that it was not given, {name}; pass all optimizers "
                "that it steps, as a list."
            )


@contextlib.contextmanager
def only_given(optimizers: Sequence[optim.Optimizer]) -> Generator[None]:
    """Refuse, inside the `with`, steps of any optimizer not in `optimizers`, such as one that another one wraps."""

    def check(optimizer: optim.Optimizer, *_: object) -> None:
        if all(optimizer is not one for one in optimizers):
            raise refusal(
                f"steps an optimizer that it was not given, of class {type(optimizer).__name__}, whose state would be "
                "that of no call",
                "pass all optimizers that it steps, as a list, also one inside another: [opt, opt.base_optimizer]",
            )

    # Other hooks would meet the other ranks first.
    with before_steps(check):
        yield


def refusal(what: str, instead: str) -> ZgraphError:
    """Return the error for an operation that a captured step cannot contain, with the user's line."""
    return ZgraphError(f"zgraph.training_step: {user_line() or 'the step'} {what}; {instead}.")


def user_line() -> str:
    """Return the innermost line outside torch and zgraph, such as "train.py:12 in step"; "" if there is none."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def is_library(file: str) -> bool:
    """Return whether `file`, the file name of a code object, belongs to torch or zgraph, or is not a real file."""
    return file.startswith((*_LIBRARIES, "<"))


def line_of(error: BaseException) -> str:
    """Return the innermost line of an error's traceback outside torch and zgraph, in the format of `user_line`."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = f"{Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found
