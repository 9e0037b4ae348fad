"""Error and warning types, and checks of options. Each message says where, what was found, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard


class ZgraphError(RuntimeError):
    """Base class of errors raised while zgraph compiles or runs a model; invalid options raise a ValueError instead."""


class PreconditionError(ZgraphError):
    """A pass cannot run on a graph, because the graph lacks properties that the pass requires."""


class BudgetError(ValueError):
    """A step needs more memory than the target's `budget_bytes`; the message says how much would suffice."""


class VerifyError(ZgraphError):
    """A graph is invalid after a pass."""


class AgreementError(ZgraphError):
    """Ranks run different collectives, or the same collectives in a different order or with different options."""


class CollectiveError(ZgraphError):
    """A collective failed or timed out; the message names it and its parameters.

    Raised on gloo, and on NCCL if TORCH_NCCL_BLOCKING_WAIT=1 makes waits block. By default, waits on NCCL only queue,
    and torch's watchdog ends the process; then files of `zgraph.reporting.collective_numbers` help to identify the
    collective.
    """


class CheckpointError(ZgraphError):
    """A checkpoint cannot be written, or cannot be loaded into this model."""


class DiskError(ZgraphError):
    """Tensors cannot be stored on disk: the folder is unusable, space is insufficient, or a read or write failed."""


class ZgraphWarning(UserWarning):
    """Something works, but probably not as the user intends."""


def renamed(before: str, now: str) -> None:
    """Warn about the use of an old name, and give the new one."""
    warnings.warn(f"zgraph: {before} is now {now}; the old name will go.", ZgraphWarning, stacklevel=3)


# --- checks of options: each raises a ValueError that names the option ------------------------------------------------


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_least(who: str, least: float, instead: str, fault: str = "", /, **options: object) -> None:
    """Refuse options that are not numbers of at least `least`.

    Args:
        who: pass or class that has the options.
        least: smallest allowed number.
        instead: description of the allowed values, which the message has after "write".
        fault: description of the fault, which the message has after the refused value.
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
