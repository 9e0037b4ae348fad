"""Process group for subcommands that run under torchrun."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

LIMIT = timedelta(minutes=2)  # for all ranks to connect


def rank_of_launch() -> int:
    """Return the rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def is_launched() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= {*os.environ}


@contextmanager
def launched_ranks() -> Generator[None]:
    """Connect torchrun's ranks in a process group during a `with` block; without torchrun, do nothing.

    The backend is NCCL if each rank of the host has a GPU, else gloo.
    """
    if not is_launched():
        yield
        return
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) and dist.is_nccl_available()
    if on_gpus:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", timeout=LIMIT, device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo", timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()
