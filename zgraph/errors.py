"""Error and warning types: who, where, what was found, what to do."""

from __future__ import annotations


class ZgraphError(RuntimeError):
    """Base of every error that zgraph raises at compile or run time (user options raise ValueError)."""


class PreconditionError(ZgraphError):
    """A pass was asked to run where what it requires does not hold."""


class BudgetError(ValueError):
    """A step does not fit into the target's budget_bytes; says what would do."""


class VerifyError(ZgraphError):
    """A graph broke an invariant after a pass."""


class AgreementError(ZgraphError):
    """Ranks compiled graphs whose collectives do not match."""


class CollectiveError(ZgraphError):
    """A collective failed or timed out; says which one, and for which parameters.

    On gloo, and on NCCL where TORCH_NCCL_BLOCKING_WAIT=1 makes waits block. NCCL's own way is that a wait only queues,
    and that torch's watchdog ends the process; `zgraph.reporting.collective_numbers` then says which one it was.
    """


class CheckpointError(ZgraphError):
    """A checkpoint cannot be written, or what was found is not one that this model can load."""


class DiskError(ZgraphError):
    """Tensors on disk: a folder that cannot be used, space that lacks, or a transfer that failed."""


class ZgraphWarning(UserWarning):
    """Something works, but probably not as intended."""
