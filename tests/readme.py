"""The Python blocks of the README, and what a reader has at hand when they type them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests import models
from tests.graphs import fake_world

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
RANKS = 2


class Net(nn.Module):
    """A language model that returns its loss, on the meta device where it is built there."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.trunk = models.Language(layers=1, width=width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.trunk(x).flatten(0, 1).float(), y.flatten())


class Llama(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, models.VOCABULARY, (2, 9))
    return tokens[:, :-1], tokens[:, 1:]


def _mesh() -> Any:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


def _unsharded() -> dict[str, Any]:
    x, y = _tokens()
    return {"init_device_mesh": init_device_mesh, "model": Net(), "x": x, "y": y}


def _sharded() -> dict[str, Any]:
    # 80 wide: one of its weights is large enough to be compressed by default.
    model = zgraph.shard(Net(width=80), _mesh())
    opt = torch.optim.AdamW(model.parameters())
    return {"model": model, "opt": opt, "batches": [_tokens() for _ in range(3)], "step": 0}


def _training() -> dict[str, Any]:
    given = _sharded()
    given["model"] = torch.compile(given["model"], backend="zgraph")
    given["scheduler"] = torch.optim.lr_scheduler.ConstantLR(given["opt"])

    def train_step(batch: tuple[Tensor, Tensor]) -> None:
        given["model"](*batch).backward()
        given["opt"].step()
        given["opt"].zero_grad()

    train_step(given["batches"][0])
    return given | {"train_step": train_step}


def _llama() -> dict[str, Any]:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"Llama": Llama, "config": LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes)}


def _a_pass() -> dict[str, Any]:
    return {"dataclass": dataclass, "ClassVar": ClassVar, "fx": fx, "changed": False}


def _train(names: dict[str, Any]) -> None:
    """What the block has compiled trains."""
    names["model"](*_tokens()).backward()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def _trained(names: dict[str, Any]) -> None:
    assert names["loss"].isfinite()
    assert Path("out/rank0").is_dir()


def _reduced(names: dict[str, Any]) -> None:
    states = [names["opt"].state[parameter] for parameter in names["model"].parameters()]
    assert all(int(state["step"]) == 1 for state in states)


def _sharded_inside(names: dict[str, Any]) -> None:
    weight = names["model"].trunk.blocks[0].qkv.weight
    assert weight.to_local().shape[0] == -(-weight.shape[0] // 4)


def _compressed(names: dict[str, Any]) -> None:
    _train(names)
    sent = [transfer for graph in zgraph.summary(names["model"]).graphs for transfer in graph.transfers]
    assert any("LoCo" in method for transfer in sent for method in transfer.methods)


def _saved(names: dict[str, Any]) -> None:
    assert names["step"] == 0
    latest = zgraph.latest_checkpoint("runs/a")
    assert latest is not None and zgraph.load_checkpoint(latest, names["model"], names["opt"]).step == 0


def _materialized(names: dict[str, Any]) -> None:
    assert not any(parameter.is_meta for parameter in names["model"].parameters())


def _measured(names: dict[str, Any]) -> None:
    assert "measured" in str(zgraph.explain(names["model"]))


def _runs_as_a_pass(names: dict[str, Any]) -> None:
    model = torch.compile(nn.Linear(2, 2), backend="zgraph", options={"pipeline": names["pipeline"]})
    model(torch.ones(1, 2)).sum().backward()


@dataclass(frozen=True)
class Setting:
    """Where a block is run.

    Attributes:
        begins: the block, by its first line.
        given: makes the names that the text around it takes for granted.
        check: of what the block has made.
        on: "ranks": on two real ones; "one process"; "eight ranks" that are not there.
    """

    begins: str
    given: Callable[[], dict[str, Any]]
    check: Callable[[dict[str, Any]], None]
    on: str = "ranks"


SETTINGS = [
    Setting('mesh  = init_device_mesh("cpu", (2,)', _unsharded, _trained),
    Setting("for x, y in batches[:-1]:", _sharded, _reduced),
    Setting('mesh  = init_device_mesh("cpu", (2, 4)', _unsharded, _sharded_inside, on="eight ranks"),
    Setting("P      = zgraph.passes", _sharded, _compressed),
    Setting('with torch.device("meta"):', lambda: {"Net": models.Attending, "mesh": _mesh()}, _materialized),
    Setting('latest = zgraph.latest_checkpoint("runs/a")', _training, _saved),
    Setting("with zgraph.measure(model):", _training, _measured),
    Setting("def batch():", _llama, lambda names: None, on="one process"),
    Setting("machine = zgraph.calibrate()", _sharded, _train),
    Setting("@dataclass(frozen=True, kw_only=True)", _a_pass, _runs_as_a_pass, on="one process"),
]


def run_block(number: int, directory: str) -> None:
    """Run a block as it is printed, in a directory of its own, and look at what it has made."""
    block = BLOCKS[number]
    (setting,) = [one for one in SETTINGS if block.startswith(one.begins)]
    with contextlib.chdir(directory), fake_world(8) if setting.on == "eight ranks" else contextlib.nullcontext():
        names = {"torch": torch, "zgraph": zgraph, **setting.given()}
        exec(compile(block, f"README block {number}", "exec"), names)
        setting.check(names)
