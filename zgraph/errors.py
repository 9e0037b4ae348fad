"""Error and warning types: who, where, what was found, what to do."""

from __future__ import annotations

import warnings


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
