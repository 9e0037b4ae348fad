"""The error raised for a failed collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zgraph.errors import CollectiveError


def collective_error(kind: str, parameters: Sequence[str], group_name: str, cause: BaseException) -> CollectiveError:
    """Create the error for a failed collective; its text names the process group and the parameters."""
    names = ", ".join(parameters[:4]) + (f" and {len(parameters) - 4} more" if len(parameters) > 4 else "")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return CollectiveError(
        f"zgraph: {kind} of {names} failed on rank {rank} (group {group_name}): {str(cause).strip()}. "
        "A peer has died, is stuck, or runs another model; look at the first rank that printed an error."
    )
