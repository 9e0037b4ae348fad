"""Shared by the tests of front ends: ranks as torchrun starts them, a tied model, and its data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import zgraph

TOKENS, WIDTH, LENGTH = 11, 8, 5
VOCABULARY, CONTEXT = 32, 12  # of the Llama


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


def llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        **sizes,
        **config,
    }
    return LlamaForCausalLM(LlamaConfig(**options))


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


# --- recipes ----------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Initialises itself in place, as models that are made on the meta device do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _loop_of_recipe() -> dict[str, Any]:
    return {"loss_of": loss_of, "batches": DataLoader(tokens(32), batch_size=4)}


def fabric_at_hand() -> dict[str, Any]:
    """What a script of Fabric has at hand on one of two ranks, which torchrun has started."""
    variables = contextlib.ExitStack()
    variables.enter_context(launched())
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    return _loop_of_recipe() | {"L": lightning, "model": tied(), "variables": variables}


def fabric_trained(names: dict[str, Any]) -> None:
    names["variables"].close()
    trained_as_alone(names, tied())


def meta_at_hand() -> dict[str, Any]:
    batches = [tokens(32)[4 * number : 4 * number + 4] for number in range(dist.get_rank(), 8, 2)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return _loop_of_recipe() | {"Net": Blocks, "mesh": mesh, "batches": batches}


def meta_trained(names: dict[str, Any]) -> None:
    """The run is the one of whole weights, and its checkpoint has the weights that it ended with."""
    alone = Blocks()
    alone.load_state_dict(_from_first(names["start"]))
    trained_as_alone(names, alone)
    model, optimizer = names["model"], names["optimizer"]
    ended = zgraph.full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id="runs/step-4")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = zgraph.full_state_dict(model)
    assert not ended or furthest(loaded, ended) == 0


def trained_as_alone(names: dict[str, Any], alone: nn.Module) -> None:
    """The weights are those of one process, on the batches of both ranks, which is what DDP computes."""
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for x, y in DataLoader(tokens(32), batch_size=8):
        loss_of(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model = names["model"]
    found = zgraph.full_state_dict(getattr(model, "module", model))
    assert not found or furthest(found, alone.state_dict()) < 1e-3


def _from_first(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    box = [weights]
    dist.broadcast_object_list(box, 0)
    return box[0]


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far the worst tensor is off, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())
