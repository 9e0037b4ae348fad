"""Mixtures of experts as units: ranks read other experts, and forwards return what people return."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole

ROUNDING = 1e-5


@dataclasses.dataclass
class Routed:
    hidden: Tensor
    balance: Tensor
    experts: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    balance: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: Tensor
    balance: Tensor


class Plain:
    def __init__(self, hidden: Tensor, balance: Tensor) -> None:
        self.hidden, self.balance = hidden, balance
        self.name = "routed"


class Holder:
    """Tensors in a list, of an object that refers back to itself."""

    def __init__(self, hidden: Tensor, balance: Tensor) -> None:
        self.parts = [hidden, {"balance": balance}]
        self.whole = self

    @property
    def hidden(self) -> Tensor:
        return self.parts[0]

    @property
    def balance(self) -> Tensor:
        return self.parts[1]["balance"]


KINDS: dict[str, Any] = {
    "tuple": lambda hidden, balance: (hidden, balance),
    "dict": lambda hidden, balance: {"balance": balance, "hidden": hidden},
    "dataclass": Routed,
    "frozen": Frozen,
    "slots": Slotted,
    "object": Plain,
    "holder": Holder,
    "beside": lambda hidden, balance: (hidden, Routed(hidden.detach(), balance)),
}


def parts_of(found: Any) -> tuple[Tensor, Tensor]:
    if isinstance(found, dict):
        return found["hidden"], found["balance"]
    if not isinstance(found, tuple):
        return found.hidden, found.balance
    return found[0], found[1].balance if isinstance(found[1], Routed) else found[1]


class Experts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.router = kind, nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, pushed: Tensor) -> Any:
        scores = self.router(x).softmax(-1)
        chosen = (scores + nn.functional.one_hot(pushed, 3) * 10).argmax(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](x[rows]) * scores[rows, number].unsqueeze(1))
        return KINDS[self.kind](out, scores.mean(0).pow(2).sum())


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(5, 6), Experts(kind), nn.Linear(6, 3)

    def forward(self, x: Tensor, pushed: Tensor) -> Tensor:
        h = self.first(x)
        hidden, balance = parts_of(self.mixture(h, pushed))
        return self.last(h + hidden).square().mean() + 0.1 * balance


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Rank 0 uses two experts, each other one a single one."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    x = torch.randn(6, 5, generator=generator)
    return x, torch.randint(2, (6,), generator=generator) if rank == 0 else torch.full((6,), 2)


def trained(kind: str, stage: int, mode: str) -> list[str]:
    """Parameters whose gradient is not the mean over the ranks' batches."""
    torch.manual_seed(0)
    model = zgraph.shard(Net(kind), zero_stage=stage, units=[Experts])
    torch.manual_seed(0)
    plain, called = Net("tuple"), with_fx(model) if mode == "compile" else model
    wrong: list[str] = []
    for step in range(2):
        called(*batch_of(dist.get_rank(), step)).backward()
        losses = [plain(*batch_of(rank, step)) for rank in range(dist.get_world_size())]
        wanted = torch.autograd.grad(torch.stack(losses).mean(), [*plain.parameters()])
        for (name, parameter), grad in zip(model.named_parameters(), wanted, strict=True):
            assert parameter.grad is not None, name
            if not torch.allclose(whole(parameter.grad), grad, rtol=ROUNDING, atol=ROUNDING):
                wrong.append(f"{name} in step {step}")
            parameter.grad = None
    return wrong


@worlds(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_may_return_anything_that_holds_tensors(ranks: Ranks, kind: str) -> None:
    for wrong in ranks.run(trained, kind, 3, "eager"):
        assert wrong == []


@worlds(2)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("dataclass", 3),
        # Without a compiler every kind is fast; the rest differs in the stage.
        ("object", 2),
        ("slots", 3),
        ("holder", 3),
        ("beside", 3),
        *long(("dataclass", 0), ("dataclass", 1), ("frozen", 3)),
    ],
)
def test_a_compiled_mixture_may_return_anything_that_holds_tensors(ranks: Ranks, kind: str, stage: int) -> None:
    for wrong in ranks.run(trained, kind, stage, "compile"):
        assert wrong == []


class Keeping(nn.Module):
    """Hands its result over on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> None:
        self.kept = self.linear(x)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Keeping()

    def forward(self, x: Tensor) -> Tensor:
        self.part(x)
        return self.part.kept.sum()


def without_outputs(mode: str) -> str:
    model = zgraph.shard(Asking(), units=[Keeping])
    called = with_fx(model) if mode == "compile" else model
    with torch.no_grad():
        called(torch.ones(2, 4))  # no backward could come
    with pytest.raises(zgraph.ZgraphError) as error:
        called(torch.ones(2, 4))
    return str(error.value)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_unit_that_returns_no_tensor_is_refused_by_name(ranks: Ranks, mode: str) -> None:
    for text in ranks.run(without_outputs, mode):
        assert re.match(r"zgraph: the unit Keeping, which holds part\.linear\.weight, returns a NoneType", text)
        assert "Return a tensor from its forward" in text


class Copied(nn.Module):
    """Returns an object that it keeps, with more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last: Routed | None = None

    def forward(self, x: Tensor) -> Routed:
        self.last = Routed(self.linear(x), x.sum(), 7)
        return self.last


def copied() -> list[Any]:
    model = zgraph.shard(Copied(), units=[Copied])
    found = model(torch.ones(2, 4))
    kept = model.last
    assert kept is not None
    return [type(found).__name__, found.experts, found is kept, torch.equal(found.hidden, kept.hidden)]


def test_units_output_is_copied_and_not_changed(ranks: Ranks) -> None:
    assert ranks.run(copied) == [["Routed", 7, False, True]] * 2
