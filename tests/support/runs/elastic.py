"""A training script that goes on from its checkpoint when torchrun starts it again; see test_multi_node.py.

    torchrun --max-restarts 1 tests/support/runs/elastic.py CHECKPOINTS DIE_IN_STEP [compiled]

In step DIE_IN_STEP of the first attempt rank 1 ends itself by SIGKILL; -1: never. Restarts are much the same with a
compiler and without, so only the run over two hosts is compiled.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import zgraph
from tests.support.compiled import with_fx
from tests.support.models import Uneven

STEPS = 8
SAVE_EVERY = 3


def train(folder: Path, die_in_step: int, compiled: bool, attempt: int) -> str:
    """Train from the latest checkpoint to the end.

    Returns:
        The last loss, with all digits.
    """
    rank = dist.get_rank()
    torch.manual_seed(attempt)  # what a restart initialises must not matter: the checkpoint decides
    if attempt == 0:
        torch.manual_seed(5)
    model = zgraph.shard(Uneven())
    called = with_fx(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    latest = zgraph.latest_checkpoint(folder)
    first = 0 if latest is None else zgraph.load_checkpoint(latest, model, optimizer).step
    if rank == 0:
        print(f"attempt {attempt} starts at step {first}", flush=True)
    final = ""
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = called(torch.randn(8, 6, generator=generator)).square().mean()
        loss.backward()
        if attempt == 0 and step == die_in_step and rank == 1:
            print("rank 1 ends itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            zgraph.save_checkpoint(folder, model, optimizer, step=step + 1)
        final = loss.item().hex()
    return final


def unbroken(folder: Path, compiled: bool) -> str:
    """The same on ranks that are there already: the last loss of a run that nothing ends."""
    return train(folder, -1, compiled, attempt=0)


def main() -> None:
    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    loss = train(Path(sys.argv[1]), int(sys.argv[2]), "compiled" in sys.argv[3:], attempt)
    if dist.get_rank() == 0:
        print(f"final loss {loss}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
