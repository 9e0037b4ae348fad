"""A training run that is killed by SIGKILL again and again, and each time resumed; see test_kills.py.

    python -m tests.support.runs.killed FOLDER --kills 200 --seed 1 [--on-disk]

Two ranks train a model with dropout, uneven shards and data of their own, and save every third step. Every other kill
comes at a random moment of a save, the others at a random moment; one rank or both are hit. How long these moments may
be is measured in a run of its own, so that a slow machine is not killed before it has saved. Afterwards the run goes on
for a few steps, and an unbroken run of as many steps is made beside it. Prints a line of JSON.

On disk, parameters and optimizer state rest there, the step is captured, and every third kill is one that a rank sends
to itself in the middle of a write to its file, so that these do not depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests.support.preloaded  # noqa: F401  # before the forks, each of which would import it anew
import zgraph
from tests.support.memory.live_tensors import local
from zgraph.tiers.disk.system_calls import BLOCK

RANKS = 2
SAVE_EVERY = 3
LIMIT_S = 60.0  # an attempt that has not come further by then is an error
SAVES = 3  # a kill at a random moment comes within the steps and saves of so many
WRITES = SAVES * SAVE_EVERY * 12  # as many as these steps take: four parameters, and two moments of each


def train(rank: int, folder: Path, attempt: int, last: int, *, on_disk: bool, die_in_write: int | None) -> None:
    """From the newest checkpoint to step `last`. Notes what it does, line by line, in `folder/rank<r>.txt`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{attempt}", rank=rank, world_size=RANKS)
    latest = zgraph.latest_checkpoint(folder / "checkpoints")
    # What an attempt draws before it loads is of no account. On a slow machine several come to no checkpoint at all.
    torch.manual_seed(0 if latest is None else attempt)
    offload = zgraph.Offload(params="disk", optimizer="disk", path=folder / "disk") if on_disk else None
    model = zgraph.shard(nn.Sequential(nn.Linear(6, 37), nn.Dropout(0.3), nn.Tanh(), nn.Linear(37, 5)), offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=on_disk)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    torch.manual_seed(rank)
    data = torch.Generator().manual_seed(rank)
    done = 0
    if latest is not None:
        checkpoint = zgraph.load_checkpoint(latest, model, optimizer)
        scheduler.load_state_dict(checkpoint.extra["scheduler"])
        data.set_state(checkpoint.extra["data"])
        done = checkpoint.step

    def advance(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = zgraph.training_step(model, optimizer, options={"lowering": "fx"})
    step_on: Any = captured(advance) if on_disk else advance
    with (folder / f"rank{rank}.txt").open("a", buffering=1) as notes:
        notes.write(f"start {done}\n")
        if die_in_write is not None:
            _die_in_write(die_in_write)
        started = time.monotonic()
        for step in range(done + 1, last + 1):
            loss = step_on(torch.randn(9, 6, generator=data))
            scheduler.step()
            notes.write(f"step {step} {loss.item().hex()}\n")
            if step % SAVE_EVERY == 0:
                notes.write(f"saving {step}\n")
                saving = time.monotonic()
                extra = {"scheduler": scheduler.state_dict(), "data": data.get_state()}
                zgraph.save_checkpoint(folder / "checkpoints", model, optimizer, step=step, extra=extra)
                notes.write(f"saved {step} {time.monotonic() - saving} {time.monotonic() - started}\n")
        notes.write(f"left {digest(model, optimizer)}\n")
    dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that this rank holds of parameters and state, bit by bit."""
    found = hashlib.sha256()
    state = (value for entries in optimizer.state.values() for value in entries.values())
    for tensor in [*model.parameters(), *state]:
        found.update(local(tensor).contiguous().numpy().tobytes())
    return found.hexdigest()


def _die_in_write(number: int) -> None:
    """Let this process kill itself when half of a write to a file is done, counted from now on."""
    real, calls = os.pwritev, itertools.count(1)

    @functools.wraps(real)
    def write(fd: int, buffers: Any, offset: int) -> int:
        if next(calls) == number:
            (memory,) = map(memoryview, buffers)
            half = memory.nbytes // 2 // BLOCK * BLOCK
            if half:
                real(fd, [memory.cast("B")[:half]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, buffers, offset)

    os.pwritev = write


@dataclass
class Run:
    """One folder of notes and checkpoints, and the attempts made in it."""

    folder: Path
    on_disk: bool
    train: Callable[..., None] = train
    attempts: int = 0
    processes: list[int] = field(default_factory=list[int])

    def start(self, last: int, die_in_write: dict[int, int] | None = None) -> None:
        """Forked, so that an attempt does not have to import torch again; nothing runs in this process but Python.

        Args:
            last: step to which it goes.
            die_in_write: ranks that kill themselves, each in a write of this number.
        """
        self.folder.mkdir(exist_ok=True)
        self.attempts += 1
        for rank in range(RANKS):
            process = os.fork()
            if process == 0:
                code = 1
                try:
                    with (self.folder / f"errors{rank}.txt").open("w") as errors:
                        os.dup2(errors.fileno(), 2)
                    dies = None if die_in_write is None else die_in_write.get(rank)
                    self.train(rank, self.folder, self.attempts, last, on_disk=self.on_disk, die_in_write=dies)
                    code = 0
                finally:
                    sys.excepthook(*sys.exc_info()) if code else None
                    os._exit(code)
            self.processes.append(process)

    def notes(self, rank: int) -> list[str]:
        path = self.folder / f"rank{rank}.txt"
        return path.read_text().splitlines() if path.exists() else []  # each line was written at once

    def wait_for(self, kind: str) -> None:
        """Until rank 0 notes another line of this kind."""
        known, until = len(self.notes(0)), time.monotonic() + LIMIT_S
        while not any(line.startswith(kind) for line in self.notes(0)[known:]):
            self._check(until)
            time.sleep(0.0005)

    def finish(self) -> None:
        """Wait until both ranks are through, however many steps that takes.

        Raises:
            RuntimeError: one failed, or notes nothing any more.
        """
        known, until = 0, time.monotonic() + LIMIT_S
        while self.processes:
            noted = len(self.notes(0))
            if noted > known:
                known, until = noted, time.monotonic() + LIMIT_S
            self._check(until)
            time.sleep(0.05)

    def _check(self, until: float) -> None:
        for process in list(self.processes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.processes.remove(process)
                if status != 0:
                    raise RuntimeError(self._errors())
        if time.monotonic() > until:
            raise RuntimeError(f"an attempt comes no further within {LIMIT_S} s\n{self._errors()}")

    def _errors(self) -> str:
        return "\n".join((self.folder / f"errors{rank}.txt").read_text() for rank in range(RANKS))

    def kill(self, victims: list[int]) -> None:
        """SIGKILL to these ranks, and to those that are left."""
        for rank in victims:
            os.kill(self.processes[rank], signal.SIGKILL)
        self._bury()

    def wait_for_death(self) -> None:
        """Until a rank has killed itself; then SIGKILL to those that are left.

        Raises:
            RuntimeError: one ended otherwise, or none did.
        """
        until = time.monotonic() + LIMIT_S
        while True:
            for process in self.processes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                        raise RuntimeError(self._errors())
                    self.processes.remove(process)
                    return self._bury()
            if time.monotonic() > until:
                raise RuntimeError(f"no rank dies within {LIMIT_S} s\n{self._errors()}")
            time.sleep(0.0005)

    def _bury(self) -> None:
        """Wait for all ranks; SIGKILL to those that have had time to notice, and are still there."""
        until = time.monotonic() + 1.0
        for process in self.processes:
            while os.waitpid(process, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    break
                time.sleep(0.001)
        self.processes.clear()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def losses(notes: list[str]) -> dict[int, set[str]]:
    """All losses noted for each step: one, where repeated steps are the same steps."""
    found: dict[int, set[str]] = {}
    for line in notes:
        kind, *values = line.split()
        if kind == "step":
            found.setdefault(int(values[0]), set()).add(values[1])
    return found


def measure_pace(run: Run) -> tuple[float, float]:
    """Run an attempt of some saves to its end: seconds that it takes, and those of its last save."""
    try:
        run.start(last=SAVES * SAVE_EVERY)
        run.finish()
    finally:
        run.close()
    _, _, save_s, all_s = next(line for line in reversed(run.notes(0)) if line.startswith("saved")).split()
    return float(all_s), float(save_s)


def kill_once(run: Run, number: int, moments: random.Random, moment_s: float, save_s: float) -> None:
    """Start an attempt and kill it, each time in another way."""
    victims = moments.choice([[0], [1], [0, 1]])
    if run.on_disk and number % 3 == 2:
        run.start(sys.maxsize, {rank: moments.randrange(1, WRITES) for rank in victims})
        return run.wait_for_death()
    run.start(sys.maxsize)
    if number % (3 if run.on_disk else 2) == 0:
        run.wait_for("saving")
        time.sleep(moments.uniform(0, save_s))
    else:
        run.wait_for("step" if number > 1 else "saved")  # all attempts but the first two resume
        time.sleep(moments.uniform(0, moment_s))
    return run.kill(victims)


def kill_again_and_again(
    folder: Path, kills: int, seed: int, on_disk: bool, train: Callable[..., None] = train
) -> dict[str, int]:
    moments = random.Random(seed)
    pace, broken, unbroken = (Run(folder / name, on_disk, train) for name in ("pace", "broken", "unbroken"))
    moment_s, save_s = measure_pace(pace)
    statistics = {"kills": kills, "while saving": 0, "partial directories": 0, "left on disk": 0}
    try:
        for number in range(kills):
            kill_once(broken, number, moments, moment_s, save_s)
            statistics["while saving"] += broken.notes(0)[-1].startswith("saving")
            statistics["partial directories"] += any(broken.folder.glob("checkpoints/.step_*"))
            statistics["left on disk"] += len([*broken.folder.glob("disk/*")])
        last = 10 + max(step for rank in range(RANKS) for step in losses(broken.notes(rank)))
        for run in (broken, unbroken):
            run.start(last)
            run.finish()
    finally:
        broken.close()
        unbroken.close()
    starts = [int(line.split()[1]) for line in broken.notes(0) if line.startswith("start")]
    statistics["refused"] = sum(line.startswith("refused") for line in broken.notes(0))
    statistics |= {"resumed": sum(step > 0 for step in starts), "from scratch": sum(step == 0 for step in starts)}
    curves = [[losses(run.notes(rank)) for rank in range(RANKS)] for run in (broken, unbroken)]
    statistics["steps"] = last
    statistics["differing"] = sum(
        ours[step] != theirs.get(step) for ours, theirs in zip(*curves, strict=True) for step in ours
    )
    statistics["complete curves"] = sum(set(curve) == set(range(1, last + 1)) for run in curves for curve in run)
    ours, theirs = ([run.notes(rank)[-1] for rank in range(RANKS)] for run in (broken, unbroken))
    statistics["ranks alike"] = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return statistics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill and resume a training run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-disk", action="store_true")
    options = parser.parse_args()
    print(json.dumps(kill_again_and_again(options.folder, options.kills, options.seed, options.on_disk)))
