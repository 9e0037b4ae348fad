"""What gloo holds on to: each of its threads keeps the buffers of its last collective until its next one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zgraph.runtime.groups import OF_REDUCTIONS
from zgraph.torch_compat.groups import find_group

TRIES = 100


def flush() -> None:
    """Give every thread something small to hold; called on all ranks.

    Several barriers in flight at once keep one thread from taking them all, but cannot make sure of it.
    """
    beside = find_group("0" + OF_REDUCTIONS)  # has threads of its own
    groups = [None] if beside is None else [None, beside]
    for _ in range(4):
        for group in groups:
            for work in [dist.barrier(group, async_op=True) for _ in range(8)]:
                assert work is not None
                work.wait()
        time.sleep(0.01)


def settled(look: Callable[[], int], expected: int) -> int:
    """What `look` finds, once it is what is expected on every rank or the threads have had every chance to let go."""
    found = look()
    for _ in range(TRIES):
        equal = torch.tensor(float(found == expected))
        dist.all_reduce(equal, dist.ReduceOp.MIN)  # all ranks stop together, for the barriers are collectives too
        if equal.item():
            break
        flush()
        found = look()
    return found
