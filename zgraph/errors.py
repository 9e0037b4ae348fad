"""Error and warning types. Each message says where something happened, what was found, and what to do."""

from __future__ import annotations

import warnings


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
