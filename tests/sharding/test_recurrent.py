"""nn.LSTM, nn.GRU and nn.RNN, whose forward reads a list of weights, trained as without sharding."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole

TOKENS, STEPS = 20, 2


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(TOKENS, 8), kind(8, 6, **options)  # pyright: ignore
        width = self.rnn.proj_size or 6
        self.head = nn.Linear(width * (1 + self.rnn.bidirectional), TOKENS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Any = self.rnn(self.embed(x))
        return F.cross_entropy(self.head(found[0]).flatten(0, 1), y.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training: options of the module and of `zgraph.shard`; run: "eager", "compile" or "step"."""

    kind: type[nn.RNNBase] = nn.LSTM
    stage: int = 3
    run: str = "eager"
    lowering: str = "fx"
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1
    traces_rnn: bool = False
    module: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shard: Mapping[str, Any] = field(default_factory=dict[str, Any])


TWO_WAYS = {"batch_first": True, "bidirectional": True, "num_layers": 2}
HOST = zgraph.Offload(params="host", optimizer="host")
CASES = {
    "stage_0": Case(stage=0, module={"dropout": 0.0, "num_layers": 2}),
    "stage_1": Case(stage=1, micro_batches=2, module={"proj_size": 3}),
    "stage_2": Case(stage=2, micro_batches=2, kind=nn.RNN, module={"nonlinearity": "relu", "bias": False}),
    "stage_3": Case(kind=nn.GRU, module=TWO_WAYS),
    "as_unit": Case(shard={"units": [nn.LSTM]}),
    "compiled": Case(run="compile", stage=2, kind=nn.GRU, micro_batches=2),
    "traced": Case(run="compile", traces_rnn=True, module={"batch_first": True}),
    "inductor": Case(run="compile", stage=1, lowering="inductor", dtype=torch.float32),
    "step": Case(run="step", module=TWO_WAYS),
    "step_offloaded": Case(run="step", kind=nn.GRU, micro_batches=2, shard={"offload": HOST}),
    "step_inductor": Case(run="step", stage=1, kind=nn.RNN, lowering="inductor", dtype=torch.float32),
}
# Differences of sums in another order, where there are several micro-batches or Inductor fuses.
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6}


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(TOKENS, (2, 3, 5), generator=torch.Generator().manual_seed(10 * number + rank))
    return drawn[0], drawn[1]


def trained(case: Case) -> float:
    torch.manual_seed(0)
    model = Net(case.kind, **case.module).to(case.dtype)
    plain = copy.deepcopy(model)
    zgraph.shard(model, init_device_mesh("cpu", (2,)), zero_stage=case.stage, **case.shard)
    opt, other = (torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (model, plain))
    options: dict[str, Any] = {"lowering": case.lowering}
    run = torch.compile(model, backend="zgraph", options=options) if case.run == "compile" else model

    def lines(given: list[tuple[Tensor, Tensor]]) -> None:
        for place, one in enumerate(given):
            is_last = place == len(given) - 1 or case.run == "step"
            with contextlib.nullcontext() if is_last else zgraph.no_sync(model):
                (run(*one) / len(given)).backward()
        opt.step()
        opt.zero_grad()

    step = zgraph.training_step(model, opt, options=options)(lines) if case.run == "step" else lines
    for number in range(STEPS):
        numbers = [case.micro_batches * number + place for place in range(case.micro_batches)]
        with torch._dynamo.config.patch(allow_rnn=case.traces_rnn):  # pyright: ignore[reportPrivateUsage]
            step([batch(one, dist.get_rank()) for one in numbers])
        for one in numbers:
            for rank in range(2):
                (plain(*batch(one, rank)) / (2 * case.micro_batches)).backward()
        other.step()
        other.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(one.detach()) - twin).abs().max() / twin.abs().max()) for one, twin in pairs)


@worlds(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:zgraph. the model is compiled, but outside its graphs")
def test_recurrent_modules_train_as_without_sharding(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    assert max(ranks.run(trained, case)) <= ROUNDING[case.dtype]


def _held() -> tuple[bool, bool]:
    model = nn.LSTM(4, 3, batch_first=True).double()
    plain, weight = copy.deepcopy(model), weakref.ref(model.weight_ih_l0)
    zgraph.shard(model, init_device_mesh("cpu", (2,)))
    gc.collect()
    rows = torch.randn(3, 5, 4, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([5, 3, 2]), batch_first=True)
    for one in (model, plain):
        nn.utils.rnn.pad_packed_sequence(one(packed)[0])[0].square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return weight() is None, all(torch.equal(whole(one.grad), twin.grad) for one, twin in pairs)  # pyright: ignore


@worlds(2)
def test_whole_weights_are_freed_and_sequences_may_be_packed(ranks: Ranks) -> None:
    assert ranks.run(_held) == [(True, True)] * 2
