"""Error and warning types, and checks of options, whose errors say who, where, what was found, what to do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard


class ZgraphError(RuntimeError):
    """Base of every error that zgraph raises at compile or run time (user options raise ValueError)."""


class PreconditionError(ZgraphError):
    """A pass was run on a graph that does not meet its requirements."""


class BudgetError(ValueError):
    """A step does not fit into the target's budget_bytes; the message says what would suffice."""


class VerifyError(ZgraphError):
    """A graph broke an invariant after a pass."""


class AgreementError(ZgraphError):
    """Ranks compiled graphs whose collectives do not match."""


class CollectiveError(ZgraphError):
    """A collective failed or timed out; the message names it and its parameters.

    Raised on gloo, and on NCCL if TORCH_NCCL_BLOCKING_WAIT=1 makes waits block. By default NCCL's waits only queue and
    torch's watchdog ends the process; `zgraph.reporting.collective_numbers` then tells which collective it was.
    """


class CheckpointError(ZgraphError):
    """A checkpoint cannot be written, or cannot be loaded into this model."""


class DiskError(ZgraphError):
    """Tensors on disk: the folder cannot be used, space is insufficient, or a transfer failed."""


class ZgraphWarning(UserWarning):
    """Something works, but probably not as the user intended."""


def renamed(before: str, now: str) -> None:
    """Warn that a name has changed, with the name to write."""
    warnings.warn(f"zgraph: {before} is now {now}; the old name will go.", ZgraphWarning, stacklevel=3)


# --- checks of options: each raises a ValueError that names the option ------------------------------------------------


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_least(who: str, least: float, instead: str, fault: str = "", /, **options: object) -> None:
    """Refuse options that are not numbers of at least `least`.

    Args:
        who: pass or class that has the options.
        least: smallest allowed number.
        instead: words for the allowed values, after "write".
        fault: words for the fault, after the refused value.
        options: values by name.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= least:
            raise ValueError(f"{who}: {name}={value!r}{fault}; write {instead}.")


def check_bytes(who: str, or_else: str = "", /, **options: object) -> None:
    """Refuse options that are not positive numbers of bytes; `or_else` adds words for other allowed values."""
    check_least(who, 1, f"a positive number of bytes{or_else}", " holds nothing", **options)


def check_choice(who: str, choices: Sequence[object], /, **options: object) -> None:
    """Refuse options that are not among the choices."""
    for name, value in options.items():
        if value not in choices:
            *others, last = [f'"{choice}"' if isinstance(choice, str) else f"{choice}" for choice in choices]
            raise ValueError(f"{who}: {name}={value!r} is unknown; write {', '.join(others)} or {last}.")


def check_kind(what: str, value: object, kind: Any, instead: str) -> None:
    """Refuse a value that is not an instance of `kind`, a class or union of classes."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}; {instead}.")


def check_patterns(who: str, /, **options: object) -> None:
    """Refuse a single string in place of a tuple of patterns: each of its characters would be a pattern."""
    for name, value in options.items():
        if isinstance(value, str):
            raise ValueError(f"{who}: {name}={value!r}; write a tuple of patterns, ({value!r},).")
