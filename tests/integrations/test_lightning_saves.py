"""Lightning's checkpoints with zgraph's strategy: on other numbers of ranks, alone, and when a save was killed."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.support.budget import long
from tests.support.lightning_runs import Net, fitted, seeded, strategy, torchrun_variables, whole
from tests.support.ranks import Ranks, RanksPool, worlds
from tests.support.runs.lightning_saving import kill_in_a_save, resume_killed, train_alone


def state_of(trainer: pl.Trainer) -> list[Tensor]:
    """All state of the optimizer, whole."""
    states: Any = trainer.optimizers[0].state.values()
    values = [value for entries in states for value in entries.values()]
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).clone() for one in values]


def save(path: str, stage: int, folder: bool) -> Any:
    with torchrun_variables():
        net = seeded(Net)
        found = fitted(strategy(zero_stage=stage, save_distributed_checkpoint=folder), net, max_epochs=1)
        found.save_checkpoint(path)
        return whole(net), state_of(found)


class NoteLoaded(pl.Callback):
    """Keeps weights and state as they are before the first step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights, self.state = whole(pl_module), state_of(trainer)


def resume(path: str, stage: int, folder: bool) -> Any:
    with torchrun_variables():
        seen, net = NoteLoaded(), Net()
        by = strategy(zero_stage=stage, save_distributed_checkpoint=folder)
        fitted(by, net, ckpt_path=path, callbacks=[seen])
        return seen.weights, seen.state, len(net.losses)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("stage", "folder"), [(3, False), (3, True), *long((1, False), (1, True))])
def test_other_numbers_of_ranks_load_to_the_bit(
    pool: RanksPool, tmp_path: Path, world: int, stage: int, folder: bool
) -> None:
    path = str(tmp_path / "saved.ckpt")
    weights, state = pool.of(2).run(save, path, stage, folder)[0]
    assert state
    for found_weights, found_state, steps in pool.of(world).run(resume, path, stage, folder):
        assert found_weights.keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in found_weights.items())
        assert len(found_state) == len(state)
        assert all(torch.equal(one, other) for one, other in zip(found_state, state, strict=True))
        assert steps


def test_one_process_trains_saves_and_resumes_to_the_bit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with ProcessPoolExecutor(1, mp_context=context) as alone:
        going_on, resumed = alone.submit(train_alone, str(tmp_path / "saved.ckpt")).result()
    assert len(resumed) == 2
    assert going_on == resumed


def resume_in_ranks(path: str) -> str:
    with torchrun_variables():
        return resume_killed(path)


@worlds(2)
@pytest.mark.parametrize("seed", [0, 1, *long(*range(2, 10))])
def test_a_save_that_was_killed_is_refused_or_whole(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    path, state, ended = kill_in_a_save(tmp_path / "run", seed)
    for found in ranks.run(resume_in_ranks, str(path)):
        if found != state:
            assert not ended
            says = "CheckpointError: zgraph" if path.exists() else "FileNotFoundError"  # it had not begun to write
            assert found.startswith(says) and str(path) in found
