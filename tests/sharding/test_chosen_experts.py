"""Experts on disk that are compiled one by one: only the chosen ones are read, as codes or as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.budget import long
from tests.support.memory.live_tensors import local
from tests.support.ranks import Ranks, worlds
from zgraph.tiers.copy_lanes import lanes_of

EXPERTS, WIDTH, HIDDEN = 8, 64, 128


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Two experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, self.experts[number](x[token]) * shares[token, place, None])
        return out


class Stacked(nn.Module):
    """Stacked experts: one weight contains all of them, and each token selects a slice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return torch.einsum("nd,ndh->nh", x, self.up[chosen])


def reads(folder: Path) -> dict[str, int]:
    """Bytes of each tensor that is read from the folder from now on, by name."""
    found: dict[str, int] = {}
    disk: Any = lanes_of(torch.device("cpu")).stores.by_key[str(folder)]
    mover = disk.folder._reads
    transfer = mover.read

    def counted(part: Any, *rest: int) -> None:
        found[part.slot.name] = found.get(part.slot.name, 0) + part.nbytes
        transfer(part, *rest)

    mover.read = counted
    return found


def tokens(seed: int) -> Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))


def sharded(model: nn.Module, zero_stage: int, folder: Path, bits: Any) -> Any:
    offload = zgraph.Offload(params="disk", path=folder, param_bits=bits)
    return zgraph.shard(model.eval(), zero_stage=zero_stage, offload=offload)


@torch.no_grad()
def serve(zero_stage: int, folder: Path, bits: Any, lowering: Any) -> None:
    model = sharded(Mixture(), zero_stage, folder, bits)
    for expert in model.experts:
        expert.compile(backend="zgraph", options={"lowering": lowering}, dynamic=True)
    read = reads(folder)
    for turn in range(3):
        x = tokens(3 * turn + (0 if zero_stage else dist.get_rank()))  # from stage 1 on, ranks gather what all choose
        expected = Mixture()(x) if bits is None else None
        chosen = model.gate(x).topk(2).indices.flatten().tolist()
        read.clear()
        found = model(x)
        parameters = {f"experts.{one}.{name}": p for one in chosen for name, p in model.experts[one].named_parameters()}
        assert {name.removesuffix(".shard") for name in read} == {*parameters}
        assert sum(read.values()) == sum(local(parameter).nbytes for parameter in parameters.values())
        if expected is not None:
            torch.testing.assert_close(found, expected)


@worlds(1, 2)
@pytest.mark.parametrize(
    ("zero_stage", "bits", "lowering"),
    [(0, 4, "fx"), (3, None, "fx"), *long((3, 8, "inductor"), (0, None, "inductor"))],
)
def test_only_chosen_experts_are_read(ranks: Ranks, zero_stage: int, bits: Any, lowering: str, tmp_path: Path) -> None:
    ranks.run(serve, zero_stage, tmp_path, bits, lowering)


@torch.no_grad()
def differ(folder: Path) -> None:
    model = sharded(Mixture(), 3, folder, 4)
    for expert in model.experts:
        expert.compile(backend="zgraph", options={"lowering": "fx"}, dynamic=True)
    with pytest.raises(zgraph.AgreementError, match=r"all_gather of experts\.\d.*optional=\[\.\.\.\]"):
        for turn in range(3):
            model(tokens(3 * turn + dist.get_rank()))


@worlds(2)
def test_ranks_that_choose_other_experts_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(differ, tmp_path)


@torch.no_grad()
def serve_stacked(folder: Path) -> None:
    model = sharded(Stacked(), 0, folder, 4)
    compiled: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    read, x, chosen = reads(folder), tokens(0), torch.tensor([5])
    torch.testing.assert_close(compiled(x, chosen), model(x, chosen))
    assert read == {"up.shard": local(model.up).nbytes}


def test_stacked_experts_are_read_as_a_whole(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(serve_stacked, tmp_path)
