"""Runs an action on all ranks, so that a failure on one rank is raised on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from zgraph.errors import CheckpointError
from zgraph.torch_compat.groups import is_distributed_ready


def group_of(group: DeviceMesh | ProcessGroup | None) -> ProcessGroup | None:
    """Return the process group of the ranks that save or load together; None for all ranks.

    Raises:
        ValueError: a mesh has several axes.
    """
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"zgraph: group={group} has {group.ndim} axes; pass the process group of the ranks that save together."
        )
    return group.get_group()


def rank_and_world(group: ProcessGroup | None = None) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if is_distributed_ready() else (0, 1)


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return the `value` of each rank, in rank order; called by every rank of the group, by default all ranks."""
    if not is_distributed_ready():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_on_all_ranks(
    who: str, action: Callable[[], Any], *, group: ProcessGroup | None = None, all: bool = False
) -> Any:
    """Run an action on each rank; if it fails on one, raise an error on every rank, so that no rank hangs.

    The action must not communicate.

    Args:
        who: name of the caller, for error messages.
        action: function without arguments.
        group: the ranks; None: all.
        all: whether to return the results of all ranks.

    Returns:
        The action's result on this rank; with `all`, a list of all ranks' results.

    Raises:
        CheckpointError: the action failed on a rank.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        mine, failure = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        cause: Exception | None = mine
    else:
        cause = None
    outcomes = gathered((failure, result if all else None), group)
    failed = [(rank, text) for rank, (text, _) in enumerate(outcomes) if text is not None]
    if failed:
        rank, text = failed[0]
        others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"zgraph.{who} failed on rank {rank}{others}: {text}") from cause
    return [value for _, value in outcomes] if all else result


@contextmanager
def dcp_errors(who: str) -> Generator[None]:
    """Convert torch's CheckpointException, raised inside the `with` block, to a CheckpointError.

    CheckpointException is a BaseException, which `except Exception` does not catch.
    """
    try:
        with warnings.catch_warnings():
            if not is_distributed_ready():  # a single process is intended
                warnings.filterwarnings("ignore", message="torch.distributed is ")
            yield
    except CheckpointException as error:
        rank, (cause, _) = sorted(error.failures.items())[0]
        raise CheckpointError(f"zgraph.{who} failed on rank {rank}: {type(cause).__name__}: {cause}") from error
