"""A run of Lightning that the test starts as processes of its own: alone, or on two ranks that are killed in a save."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_runs import whole
from tests.support.ranks import free_port
from zgraph.integrations.lightning import ZgraphStrategy

RANKS = 2
TIMEOUT = timedelta(seconds=60)
LIMIT_S = 120.0  # for the processes to come to the save in which they are killed
WIDTH = 256


class Wide(pl.LightningModule):
    """Large enough that a save takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH))
        self.losses: list[str] = []
        self.loaded = ""

    def on_train_start(self) -> None:
        self.loaded = digest(self)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(float(loss.detach()).hex())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def digest(net: pl.LightningModule) -> str:
    """Of all weights and optimizer state, bit by bit, the same on every rank."""
    found = hashlib.sha256()
    states = net.trainer.optimizers[0].state.values() if net.trainer.optimizers else ()
    tensors: list[Any] = [*whole(net).values(), *(one for entries in states for one in entries.values())]
    for tensor in tensors:
        found.update((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy().tobytes())
    return found.hexdigest()


class SaveEachStep(pl.Callback):
    """Notes what it is about to save, and how long that took."""

    def __init__(self, folder: Path, overwrites: bool) -> None:
        self.folder, self.overwrites = folder, overwrites

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        path = self.folder / ("last.ckpt" if self.overwrites else f"{trainer.global_step}.ckpt")
        state = digest(pl_module)
        with (self.folder / "notes.txt").open("a", buffering=1) as notes:
            if trainer.is_global_zero:
                notes.write(f"saving {path.name} {state}\n")
            began = time.monotonic()
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                notes.write(f"saved {time.monotonic() - began}\n")


def fit(max_epochs: int, path: str | None = None, callback: pl.Callback | None = None) -> tuple[Wide, pl.Trainer]:
    """Train on as many ranks as torchrun's variables say; without them, on one. An epoch has two batches."""
    world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.manual_seed(0)
    rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    net = Wide()
    trainer = pl.Trainer(
        strategy=ZgraphStrategy(
            compile=False, save_distributed_checkpoint=True, process_group_backend="gloo", timeout=TIMEOUT
        ),
        accelerator="cpu",
        devices=world,
        max_epochs=max_epochs,
        callbacks=callback,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(rows), batch_size=32 // world), ckpt_path=path)
    return net, trainer


def train_alone(folder: str) -> tuple[list[str], list[str]]:
    """Losses of the second epoch, in one run, and in one that resumes from a checkpoint of the first."""
    whole_run, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(folder)
    resumed, _ = fit(2, folder)
    return whole_run.losses[2:], resumed.losses


def _save_until_killed(rank: int, port: int, folder: Path, overwrites: bool) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    given = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fit(1000, callback=SaveEachStep(folder, overwrites))


def kill_in_a_save(folder: Path, seed: int) -> tuple[Path, str, bool]:
    """Start a run that saves after each step, and kill all of its ranks in a save after the second.

    Args:
        folder: folder of the checkpoints. With an odd seed, each save overwrites the one before.
        seed: draws the save, and the moment in it.

    Returns:
        The checkpoint; digest of what it should hold; and whether the save had ended already.
    """
    moments = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    folder.mkdir()
    notes, port = folder / "notes.txt", free_port()
    processes = [
        context.Process(target=_save_until_killed, args=(rank, port, folder, seed % 2 == 1), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        after, until = 2 * moments.randint(2, 4), time.monotonic() + LIMIT_S
        while len(lines := notes.read_text().splitlines() if notes.exists() else []) <= after:
            assert time.monotonic() < until, "the run does not come to its saves"
            assert all(process.is_alive() for process in processes), "a rank has ended"
            time.sleep(0.0005)
        time.sleep(moments.uniform(0.0, float(lines[after - 1].split()[1])))
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
    lines = [line for line in notes.read_text().splitlines() if line]
    ended = lines[-1].startswith("saved")
    _, name, state = lines[-2 if ended else -1].split()
    return folder / name, state, ended


def resume_killed(path: str) -> str:
    """Digest of what is loaded from a checkpoint, or the error that refuses it."""
    try:
        net, _ = fit(1001, path, StopAtOnce())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return net.loaded


class StopAtOnce(pl.Callback):
    """Ends the run after its first batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        trainer.should_stop = True
