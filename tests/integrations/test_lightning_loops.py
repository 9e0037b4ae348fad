"""Loops that people write in Lightning: GANs, callbacks, mixed precision, padded batches, ranks without a batch."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.lightning_runs import (
    TOKENS,
    Net,
    batches,
    fitted,
    seeded,
    strategy,
    torchrun_variables,
    trainer,
    whole,
)
from tests.support.ranks import Ranks, worlds
from zgraph.integrations.lightning_metrics import ZgraphMetrics
from zgraph.metrics import JsonLines


class Gan(pl.LightningModule):
    """Lightning's example of two optimizers, with the noise in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def loss(self, shown: Tensor, is_real: bool) -> Tensor:
        verdict = self.discriminator(shown)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(is_real)))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        noise, real = batch
        optimizer_g, optimizer_d = self.optimizers()  # pyright: ignore

        self.toggle_optimizer(optimizer_g)
        self.step(optimizer_g, self.loss(self(noise), True))
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        self.step(optimizer_d, (self.loss(real, True) + self.loss(self(noise).detach(), False)) / 2)
        self.untoggle_optimizer(optimizer_d)

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-3) for part in parts], []


def train_gan(by: Any) -> dict[str, Tensor]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = TensorDataset(*torch.randn(2, 32, 4, generator=torch.Generator().manual_seed(2)).unbind())
    data.tensors = (data.tensors[0][:, :3], data.tensors[1])
    net = seeded(Gan)
    loader = DataLoader(data, batch_size=8 // world, sampler=range(rank, 32, world))
    trainer(by, max_epochs=2, use_distributed_sampler=False).fit(net, loader)
    return whole(net)


def train_sharded_gan(stage: int) -> dict[str, Tensor]:
    with torchrun_variables():
        return train_gan(strategy(zero_stage=stage))


@pytest.fixture(scope="module")
def plain_gan() -> dict[str, Tensor]:
    return train_gan("auto")


@worlds(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gan_with_two_optimizers_is_that_of_one_process(
    ranks: Ranks, plain_gan: dict[str, Tensor], stage: int
) -> None:
    for found in ranks.run(train_sharded_gan, stage):
        torch.testing.assert_close(found, plain_gan, rtol=1e-3, atol=1e-5)


def train_with_callbacks(is_plain: bool, folder: str) -> Any:
    """Stops after the second epoch without a better loss."""
    with torchrun_variables():
        best = ModelCheckpoint(folder, "best", monitor="validation", save_top_k=1, save_last=True)
        metrics = ZgraphMetrics(tokens=lambda batch: batch[0].numel(), writers=[JsonLines(f"{folder}/steps.jsonl")])
        callbacks = [EarlyStopping("validation", min_delta=10.0, patience=2), LearningRateMonitor("step"), best]
        net = seeded(Net)
        found = fitted(
            "ddp" if is_plain else strategy(),
            net,
            max_epochs=9,
            callbacks=callbacks if is_plain else [*callbacks, metrics],
            logger=CSVLogger(folder, name="", version=""),
            enable_checkpointing=True,
            log_every_n_steps=1,
            val_check_interval=4,  # twice in an epoch
        )
        return found.current_epoch, float(best.best_model_score or 0.0), found.global_step


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@worlds(2)
def test_callbacks_and_loggers_see_what_they_see_with_ddp(ranks: Ranks, tmp_path: Path) -> None:
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    expected = ranks.run(train_with_callbacks, True, str(plain))[0]
    found = ranks.run(train_with_callbacks, False, str(sharded))[0]
    assert found == pytest.approx(expected, abs=1e-5)
    for name in ("loss_step", "validation", "norm", "lr-AdamW"):
        assert column(plain, name)
        assert column(sharded, name) == pytest.approx(column(plain, name), abs=1e-5)
    net = Net.load_from_checkpoint(sharded / "best.ckpt")
    with torch.no_grad():
        losses = [net.loss(batch) * net.scale.mean() for batch in batches()]
    assert float(torch.stack(losses).mean()) == pytest.approx(found[1], abs=1e-5)

    steps = found[2]
    sent = column(sharded, "sent_bytes")
    assert len(sent) == len(column(sharded, "step_ms")) == len(column(sharded, "tokens_per_s")) == steps
    # Evaluations send more, in every second step: they are not counted. The first step has no weights gathered before.
    assert len(set(sent)) == 1, sent
    assert len((sharded / "steps.jsonl").read_text().splitlines()) == steps


def save_and_resume_with_metrics(path: str) -> Any:
    """Whether saving is paused out, what was paused around, and the steps counted in both runs."""
    with torchrun_variables():
        metrics = ZgraphMetrics()
        by = strategy()
        found = fitted(by, Net(), callbacks=[metrics], max_epochs=1)
        assert metrics.metrics is not None
        pauses = by.while_saving == metrics.metrics.pause
        seen: list[str] = []
        by.while_saving = lambda: Noted(seen)
        found.save_checkpoint(path)
        again = ZgraphMetrics()
        fitted(strategy(), Net(), callbacks=[again], ckpt_path=path, max_epochs=2)
        assert again.metrics is not None
        return pauses, seen, metrics.metrics.state_dict(), again.metrics.state_dict()


class Noted:
    """A context manager that notes when it is entered and left."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        self.seen.append("begin")

    def __exit__(self, *caught: object) -> None:
        self.seen.append("end")


@worlds(2)
def test_metrics_leave_out_saving_and_count_on(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks.run(save_and_resume_with_metrics, str(tmp_path / "file.ckpt")):
        assert result == (True, ["begin", "end"], {"step": 2}, {"step": 4})


def test_metrics_of_another_strategy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"strategy=ZgraphStrategy"):
        trainer("auto", callbacks=[ZgraphMetrics()]).fit(Net(), batches())


def padded(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Rows of different lengths as one batch."""
    return [nn.utils.rnn.pad_sequence(list(side), batch_first=True) for side in zip(*rows, strict=True)]


def train_padded(is_plain: bool) -> tuple[list[float], dict[str, Tensor], list[int]]:
    with torchrun_variables():
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 9, (32,), generator=generator).tolist()
        rows = [tuple(torch.randint(0, TOKENS, (2, length), generator=generator)) for length in lengths]
        own = range(dist.get_rank(), 32, 2)
        loader: Any = DataLoader(rows, batch_size=2, sampler=own, collate_fn=padded)  # pyright: ignore
        net = seeded(Net)
        by = "ddp" if is_plain else strategy()
        trainer(by, max_epochs=1, use_distributed_sampler=False).fit(net, loader)
        longest = [len(batch[0][0]) for batch in loader]
        return net.losses, whole(net), longest


@worlds(2)
def test_ranks_see_different_lengths_in_one_step(ranks: Ranks) -> None:
    expected, found = ranks.run(train_padded, True), ranks.run(train_padded, False)
    assert found[0][2] != found[1][2]
    for (losses, parameters, _), plain in zip(found, expected, strict=True):
        assert len(losses) == 8
        assert losses == pytest.approx(plain[0], abs=1e-5)
        torch.testing.assert_close(parameters, plain[1], rtol=1e-3, atol=1e-5)


class Targets(pl.LightningModule):
    """Notes the dtype of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.targets = batch[1].dtype
        loss = F.mse_loss(self.net(batch[0]).float(), batch[1].float())
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_in(precision: Any, by: Any = None, loco: bool = False, plugins: Any = None) -> Any:
    with torchrun_variables():
        rows = TensorDataset(*torch.randn(2, 48, 4, generator=torch.Generator().manual_seed(2)).unbind())
        rows.tensors = (rows.tensors[0], rows.tensors[1][:, :1])
        net = seeded(Targets)
        found = trainer(by or strategy(loco=loco), precision=precision, plugins=plugins, max_epochs=2)
        found.fit(net, DataLoader(rows, batch_size=4))
        state = found.optimizers[0].state.values()
        dtypes = {str(value.dtype) for entries in state for value in entries.values()}
        dtypes |= {str(one.dtype) for one in net.parameters()}
        return net.losses, str(net.targets), dtypes


@worlds(2)
def test_bf16_is_close_and_mixed_bf16_keeps_fp32(ranks: Ranks) -> None:
    expected, _, _ = ranks.run(train_in, "32-true", "ddp")[0]
    mixed, true = ranks.run(train_in, "bf16-mixed")[0], ranks.run(train_in, "bf16-true")[0]
    assert mixed[0] == pytest.approx(expected, abs=2e-2)
    assert true[0] == pytest.approx(expected, abs=2e-2)
    assert mixed[1:] == ("torch.float32", {"torch.float32"})
    assert "torch.bfloat16" in true[2]


def train_scaled(growth_interval: int) -> list[float]:
    """By a scaler that doubles the scale after so many steps, with error feedback."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=growth_interval)
    plugins = [MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
    return train_in(None, loco=True, plugins=plugins)[0]


@worlds(2)
def test_error_feedback_follows_the_scale_of_the_losses(ranks: Ranks) -> None:
    constant, growing = ranks.run(train_scaled, 1000)[0], ranks.run(train_scaled, 1)[0]
    assert growing == pytest.approx(constant, rel=1e-3)


class Unlogged(Net):
    """Calls nothing of Lightning's that waits for the other ranks."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)


class Stream(IterableDataset[Any]):
    """Does not know its length."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows[place] for place in range(len(self.rows)))


def run_unevenly(way: str, stage: int, is_stream: bool = False) -> str:
    """The second rank has a batch less."""
    with torchrun_variables():
        found = trainer(strategy(zero_stage=stage), use_distributed_sampler=False, num_sanity_val_steps=0)
        given: Any = batches(12 - 4 * dist.get_rank())
        if is_stream:
            given = DataLoader(Stream(given.dataset), batch_size=4)
        try:
            if way == "train":
                found.fit(Net(), given)
            elif way == "fit":
                found.fit(Unlogged(), batches(4), given)
            else:
                getattr(found, way)(Unlogged(), given)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ran"


@worlds(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", ["train", "fit", "validate", "test", "predict"])
def test_a_rank_without_a_batch_is_an_error_on_all_ranks(ranks: Ranks, way: str, stage: int) -> None:
    for text in ranks.run(run_unevenly, way, stage):
        assert text.startswith("AgreementError: zgraph: ranks 0 and 1 do not do the same")
        assert "which must be equally many on all ranks" in text
        assert re.search(r"of \[?3\]? batches", text) and re.search(r"of \[?2\]? batches", text)


@worlds(2)
def test_a_stream_that_ends_earlier_on_a_rank_is_an_error(ranks: Ranks) -> None:
    for text in ranks.run(run_unevenly, "validate", 3, True):
        assert text.startswith("AgreementError: zgraph: ranks 0 and 1 do not do the same")
        assert "which all ranks must come to after equally many batches" in text


@worlds(2)
def test_evaluation_without_gathers_needs_no_equal_numbers(ranks: Ranks) -> None:
    assert ranks.run(run_unevenly, "validate", 0) == ranks.run(run_unevenly, "predict", 0) == ["ran", "ran"]


def shard_again() -> tuple[list[str], int]:
    """What strategies with other options say; and how often one with the same options has trained."""
    with torchrun_variables():
        net = Net()
        fitted(strategy(zero_stage=1, compile=False), net, max_epochs=1)
        refusals: list[str] = []
        for given in ({"zero_stage": 3}, {"param_dtype": torch.bfloat16}, {"reduction": "sum"}):
            try:
                fitted(strategy(**given), net, max_epochs=1)
            except ValueError as error:
                refusals.append(str(error))
        known = len(net.losses)
        fitted(strategy(zero_stage=1, param_dtype=None, compile=False), net, max_epochs=1)
        return refusals, len(net.losses) // known


@worlds(2)
def test_a_second_strategy_does_not_shard_otherwise(ranks: Ranks) -> None:
    for refusals, runs in ranks.run(shard_again):
        for name, text in zip(("zero_stage=3", "param_dtype=torch.bfloat16", "reduction='sum'"), refusals, strict=True):
            assert f"ZgraphStrategy({name})" in text
            assert "make a new Net" in text
        assert runs == 2


@pytest.mark.parametrize("name", ["_data_parallel_size", "_timeout", "_process_group_backend"])
def test_private_names_of_lightning_are_there(name: str) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    assert name in vars(ModelParallelStrategy()), f"ModelParallelStrategy of this release has no {name}"
