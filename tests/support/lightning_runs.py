"""Runs of Lightning in tests: a LightningModule, its data, and a Trainer on the ranks of a test's process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.compressing import compressing_passes
from zgraph.integrations.lightning import ZgraphStrategy
from zgraph.passes import LoCo

EPOCHS = 2
TOKENS = 11


class Net(pl.LightningModule):
    """Tied embeddings, a ModuleList, and a parameter of the LightningModule itself."""

    def __init__(self, dropout: float = 0.0, manual: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.embed = nn.Embedding(TOKENS, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout))
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        if self.automatic_optimization:
            loss = loss * self.scale.mean()
        else:
            self.step_manually(loss, is_last=index % 2 == 1)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def step_manually(self, loss: Tensor, *, is_last: bool) -> None:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(loss)
        if is_last:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # pyright: ignore

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.loss(batch) * self.scale.mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test", self.loss(batch) * self.scale.mean(), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0]) * self.scale.mean()

    def configure_gradient_clipping(self, optimizer: Any, **how: Any) -> None:
        norm: Any = nn.utils.get_total_norm([one.grad for one in self.parameters() if one.grad is not None])
        self.log("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.clip_gradients(optimizer, **how)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Reseeded(Net):
    """Draws the same dropout in the same step of each run: a plain file has no state of random generators."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(100 * self.trainer.global_step + 10 * batch_idx + self.global_rank)


@contextlib.contextmanager
def torchrun_variables() -> Iterator[None]:
    """The variables that torchrun would set for this rank, by which Lightning finds the group."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def strategy(loco: bool = False, lowering: str = "fx", **options: Any) -> ZgraphStrategy:
    passes = {"passes": compressing_passes(LoCo(group=32))} if loco else {}
    return ZgraphStrategy(options={"lowering": lowering, **passes}, **options)


def trainer(by: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        strategy=by,
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, **quiet, **options},
    )


def batches(rows: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TOKENS, (2, rows, 5), generator=generator)
    return DataLoader(TensorDataset(*tokens), batch_size=4)


def fitted(by: Any, net: Net, **options: Any) -> pl.Trainer:
    """A run with accumulation, clipping, a schedule and evaluation, of a model that is made from the same seed."""
    path = options.pop("ckpt_path", None)
    if net.automatic_optimization:
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    found = trainer(by, **options)
    found.fit(net, batches(), batches(), ckpt_path=path)
    return found


def seeded(kind: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)


def whole(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter, on every rank."""
    parameters: dict[str, Any] = dict(net.named_parameters())
    return {
        name: (one.detach().full_tensor() if hasattr(one, "full_tensor") else one.detach()).clone()
        for name, one in parameters.items()
    }


def logged(found: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in found.callback_metrics.items()}
