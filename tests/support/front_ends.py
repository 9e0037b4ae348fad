"""Shared by the tests of front ends: ranks as torchrun starts them, a tied model, and its data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TOKENS, WIDTH, LENGTH = 11, 8, 5


@contextlib.contextmanager
def launched() -> Generator[None]:
    """The variables that torchrun sets, if there is a group; and afterwards no state in the classes of Accelerate."""
    before = dict(os.environ)
    forget()
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": world}
        os.environ |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # a port nobody asks
    try:
        yield
    finally:
        forget()
        os.environ.clear()
        os.environ.update(before)


def forget() -> None:
    """Accelerate keeps what it finds in its classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Tied(nn.Module):
    """A head that shares the embedding's weight, dropout where asked for, and a number to learn."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)) * self.gain)


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


def tied(dropout: float = 0.0) -> Tied:
    torch.manual_seed(0)
    return Tied(dropout)


def tokens(rows: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randint(0, TOKENS, (rows, LENGTH), generator=generator) for _ in range(2)))


def script_of_accelerate() -> dict[str, Any]:
    """Names that a script has defined before it makes its Accelerator, in one process."""
    forget()
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    batches = DataLoader(tokens(8), batch_size=4)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}


def accumulates(names: dict[str, Any]) -> None:
    model, accelerator = names["model"], names["accelerator"]
    before = model.gain.detach().clone()
    for x, y in names["batches"]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x), y))
            names["optimizer"].step()
    assert not torch.equal(before, model.gain)
    forget()


def arguments_of_trainer() -> dict[str, Any]:
    """What the Trainer is made of, in one process."""
    forget()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rows = [{"input_ids": row, "labels": row} for row in tokens(4).tensors[0]]
    return {
        "Trainer": Trainer,
        "model": LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **sizes)),
        "args": TrainingArguments("out", max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True),
        "dataset": rows,
    }


def trains(names: dict[str, Any]) -> None:
    assert names["trainer"].train().global_step == 1
    forget()


def lightning_at_hand() -> dict[str, Any]:
    return {"L": lightning}


def strategy_is_ours(names: dict[str, Any]) -> None:
    """That it trains is tested with ranks: here Lightning would start processes."""
    assert type(names["trainer"].strategy).__name__ == "ZgraphStrategy"


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far the worst tensor is off, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())
