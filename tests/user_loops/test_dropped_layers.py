"""LayerDrop: each rank draws which layers it skips; a named unit gathers and reduces all of them on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.passes import presets

ROUNDING = 1e-5  # the truth sums over ranks in another order
Kept = tuple[bool, ...]

# By rank: no rank ever compiles all that its peers do, and one reads nothing where its peers read everything.
# Each is a graph on each rank.
PLAN = (("1100", "1100", "0011"), ("1010", "0101", "1000"), ("0000", "1111", "1011"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        for block, is_kept in zip(self.blocks, kept, strict=True):
            if is_kept:
                x = block(x)
        return x


class Net(nn.Module):
    """A unit between layers that are none, so that their gathers and reductions stand before and after the unit's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(5, 8), Layers(), nn.Linear(8, 3)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        return self.last(self.layers(self.first(x), kept))


def loss_of(output: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), classes)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(31 * step + rank))


def classes_of(rank: int, step: int) -> Tensor:
    return torch.randint(3, (4,), generator=torch.Generator().manual_seed(97 * step + rank))


def kept_of(rank: int, step: int) -> Kept:
    """Flags and not positions, as Dynamo makes symbols of those."""
    return tuple(one == "1" for one in PLAN[step % len(PLAN)][rank])


def gradients_of_plain(model: nn.Module, steps: Sequence[int]) -> list[Tensor]:
    """Means over the ranks of the micro-batches of one step; zeros for what no rank has read."""
    ranks = dist.get_world_size()
    losses = [
        loss_of(model(batch_of(r, step), kept_of(r, step)), classes_of(r, step)) / ranks
        for step in steps
        for r in range(ranks)
    ]
    found = torch.autograd.grad(torch.stack(losses).sum(), [*model.parameters()], allow_unused=True)
    return [
        torch.zeros_like(parameter) if grad is None else grad
        for parameter, grad in zip(model.parameters(), found, strict=True)
    ]


def built(stage: int, units: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zgraph.shard(Net(), zero_stage=stage, units=[units], **options)


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, mode: str, *, autocast: bool = False, **options: Any
) -> Callable[[int], None]:
    """A function that runs a step by number, and clears gradients only before it."""
    rank = dist.get_rank()
    lowering = {"lowering": "inductor" if mode == "inductor" else "fx", **options}
    called = torch.compile(model, backend="zgraph", options=lowering) if mode in ("compile", "inductor") else model

    def step(x: Tensor, classes: Tensor, kept: Kept) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = called(x, kept)
        loss_of(output, classes).backward()
        optimizer.step()

    run = zgraph.training_step(model, optimizer, options=lowering)(step) if mode == "step" else step
    return lambda number: run(batch_of(rank, number), classes_of(rank, number), kept_of(rank, number))


def trained(stage: int, mode: str, units: type[nn.Module], planned: bool) -> int:
    """Steps whose gradients are those of the plain model on the batches of all ranks; how many agreed."""
    model = built(stage, units)
    torch.manual_seed(0)
    plain = Net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, plain)]
    options: dict[str, Any] = {}
    if planned:
        target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"))
        options["passes"] = zgraph.PassList(presets.planned(), target=target)
    step = stepping(model, optimizers[0], mode, **options)
    for number in range(len(PLAN)):
        step(number)
        expected = gradients_of_plain(plain, [number])
        for parameter, grad in zip(plain.parameters(), expected, strict=True):
            parameter.grad = grad
        optimizers[1].step()
        for (name, parameter), grad in zip(model.named_parameters(), expected, strict=True):
            assert parameter.grad is not None, f"{name} has no gradient in step {number}"
            torch.testing.assert_close(
                whole(parameter.grad), grad, rtol=ROUNDING, atol=ROUNDING, msg=lambda text, name=name: f"{name}: {text}"
            )
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), other.detach(), rtol=ROUNDING, atol=ROUNDING)
    return len(PLAN)


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        *((stage, "eager") for stage in range(4)),
        (0, "step"),
        # Graphs of each way through the layers. Three ranks have compiled stage 3 below.
        (2, "compile"),
        (3, "step"),
        *long((0, "compile"), (1, "compile"), (3, "compile"), (1, "step"), (2, "step")),
    ],
)
def test_ranks_dropping_different_layers_average_their_gradients(ranks: Ranks, stage: int, mode: str) -> None:
    assert ranks.run(trained, stage, mode, Layers, False) == [len(PLAN)] * 2


def frames_of_a_unit(stage: int) -> tuple[list[tuple[str, str]], bool]:
    """(frame, direction) of each graph of a model with a named unit; whether anything was gathered outside of them."""
    model = built(stage, Layers)
    step = stepping(model, torch.optim.SGD(model.parameters(), lr=0.5), "compile")
    step(0)
    report = zgraph.summary(model)
    return [(graph.frame, graph.direction) for graph in report.graphs], bool(report.uncompiled)


@worlds(2)
@pytest.mark.parametrize("stage", [2, *long(3)])  # the same frames
def test_a_named_unit_breaks_no_graph(ranks: Ranks, stage: int) -> None:
    for graphs, gathers_outside in ranks.run(frames_of_a_unit, stage):
        assert graphs == [("0/0", "forward"), ("0/0", "backward")]
        assert not gathers_outside


@worlds(2)
@pytest.mark.parametrize("mode", ["compile", *long("step")])  # units of which the model consists are above
def test_a_unit_may_be_the_whole_model(ranks: Ranks, mode: str) -> None:
    assert ranks.run(trained, 3, mode, Net, False) == [len(PLAN)] * 2


@worlds(3)
@pytest.mark.parametrize(
    ("stage", "mode"),
    # Two ranks have stage 0, and what reduces at the others is what they have without a compiler.
    [(3, "compile"), (0, "eager"), (1, "compile"), (2, "step"), *long((2, "compile"), (3, "step"))],
)
def test_three_ranks_with_rows_that_do_not_divide(ranks: Ranks, stage: int, mode: str) -> None:
    assert ranks.run(trained, stage, mode, Layers, False) == [len(PLAN)] * 3


@worlds(2)
@pytest.mark.parametrize("stage", [3, *long(2)])  # compiles C++; what drops gathers is before the lowering
def test_inductor_drops_no_gather_either(ranks: Ranks, stage: int) -> None:
    assert ranks.run(trained, stage, "inductor", Layers, False) == [len(PLAN)] * 2


def planned_or_refused(stage: int, mode: str) -> str:
    """Plans by costs, which are not those of the peer's graph, may interleave gathers and reductions in other ways."""
    try:
        trained(stage, mode, Layers, True)
    except zgraph.AgreementError as error:
        return str(error)
    return "right"


@worlds(2)
@pytest.mark.parametrize("mode", ["compile", "step"])
def test_planned_order_is_right_or_refused_before_sending(ranks: Ranks, mode: str) -> None:
    found = ranks.run(planned_or_refused, 3, mode)
    assert found == ["right"] * 2 or all("compiled different communication" in text for text in found)


def accumulated(stage: int, mode: str) -> int:
    """Windows of two micro-batches that read other layers each."""
    model = built(stage, Layers)
    torch.manual_seed(0)
    plain, rank = Net(), dist.get_rank()
    called = torch.compile(model, backend="zgraph", options={"lowering": "fx"}) if mode == "compile" else model
    for window in range(3):
        numbers = [window, window + 1]
        for number in numbers:
            with zgraph.no_sync(model) if number is numbers[0] else contextlib.nullcontext():
                output = called(batch_of(rank, number), kept_of(rank, number))
            loss_of(output, classes_of(rank, number)).backward()
        for (name, parameter), grad in zip(model.named_parameters(), gradients_of_plain(plain, numbers), strict=True):
            assert parameter.grad is not None, name
            torch.testing.assert_close(whole(parameter.grad), grad, rtol=ROUNDING, atol=ROUNDING)
            parameter.grad = None
    return window


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode"),
    # Compiled, a window is three graphs more for each rank; stage 1 keeps sums apart.
    [(1, "eager"), (2, "eager"), (1, "compile"), *long((2, "compile"), (3, "compile"))],
)
def test_windows_may_drop_other_layers_in_each_micro_batch(ranks: Ranks, stage: int, mode: str) -> None:
    assert ranks.run(accumulated, stage, mode) == [2, 2]


def same_bits(stage: int, mode: str, narrow: str) -> list[str]:
    """Parameters whose bits after some steps in low precision are not those of eager mode."""
    options = {"param_dtype": torch.bfloat16} if narrow == "bf16" else {}
    models = [built(stage, Layers, **options) for _ in range(2)]
    for model, way in zip(models, ("eager", mode), strict=True):
        step = stepping(model, torch.optim.SGD(model.parameters(), lr=0.5), way, autocast=narrow == "autocast")
        for number in range(len(PLAN)):
            step(number)
    first, second = (dict(model.named_parameters()) for model in models)
    return [name for name in first if not torch.equal(whole(first[name]), whole(second[name]))]


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode", "narrow"),
    [
        # Two models, each compiled for every way through the layers; that ranks exchange as many bytes is seen above.
        (3, "compile", "bf16"),
        (0, "step", "autocast"),
        # Their modes and precisions at other stages.
        *long((3, "step", "autocast"), (2, "compile", "autocast"), (2, "step", "bf16"), (3, "compile", "autocast")),
    ],
)
def test_sent_dtype_is_equal_on_ranks_without_reads(ranks: Ranks, stage: int, mode: str, narrow: str) -> None:
    assert ranks.run(same_bits, stage, mode, narrow) == [[], []]


def evaluated(stage: int, mode: str) -> list[bool]:
    """Without gradients, and of a unit whose parameters are frozen."""
    model = built(stage, Layers)
    torch.manual_seed(0)
    plain, rank = Net(), dist.get_rank()
    called = torch.compile(model, backend="zgraph", options={"lowering": "fx"}) if mode == "compile" else model
    found: list[bool] = []
    with torch.no_grad():
        for number in range(len(PLAN)):
            given = batch_of(rank, number), kept_of(rank, number)
            found.append(torch.allclose(called(*given), plain(*given)))
    model.layers.requires_grad_(False)
    plain.layers.requires_grad_(False)
    for number in range(len(PLAN)):
        loss_of(called(batch_of(rank, number), kept_of(rank, number)), classes_of(rank, number)).backward()
        trainable = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        losses = [loss_of(plain(batch_of(r, number), kept_of(r, number)), classes_of(r, number)) for r in range(2)]
        wanted = torch.autograd.grad(sum(losses) / 2, trainable)
        grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        found += [torch.allclose(whole(grad), one, atol=ROUNDING) for grad, one in zip(grads, wanted, strict=True)]
        found.append(all(parameter.grad is None for parameter in model.layers.parameters()))
        model.zero_grad()
    return found


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode"),
    # Compiled, each way through the layers is two graphs more, and a unit gathers as it does above.
    [(2, "eager"), (3, "eager"), (3, "compile"), *long((2, "compile"))],
)
def test_a_unit_gathers_alike_without_gradients_and_with_frozen_parameters(ranks: Ranks, stage: int, mode: str) -> None:
    for found in ranks.run(evaluated, stage, mode):
        assert found == [True] * (len(PLAN) * 6)
