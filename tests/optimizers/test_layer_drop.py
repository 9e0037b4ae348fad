"""LayerDrop: equal to a plain twin that is told the masks, few graphs, and refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zgraph
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.dropped_blocks import (
    LAYERS,
    WIDTH,
    Block,
    Dropped,
    Net,
    accumulate,
    batch,
    compiled,
    expected_gradients,
    net,
    weights,
)
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole

STEPS = 5
ROUNDING = 1e-5  # of Inductor's arithmetic


def trained(stage: int, mode: str, micro_batches: int, repeats: bool | None = None) -> list[tuple[bool, ...]]:
    """Steps whose gradients and weights are the twin's; their masks. Momentum and decay move what has a gradient."""
    model, twin = net(), Dropped(net())
    model.repeats = repeats
    zgraph.shard(model, zero_stage=stage)
    drop = zgraph.LayerDrop(model.layers, theta=0.4, gamma=1.0, seed=5)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}
    optimizer, other = (torch.optim.SGD(one.parameters(), **options) for one in (model, twin))
    called, masks = compiled(model, mode), list[tuple[bool, ...]]()
    tolerance = ROUNDING if mode == "inductor" else 0.0
    for step in range(STEPS):
        assert drop.step == step
        kept, probabilities, before = drop.kept, drop.probabilities(step), weights(model)
        accumulate(model, called, step, micro_batches)
        expected = expected_gradients(twin, step, micro_batches, stage, kept, probabilities)
        for (name, parameter), plain, grad in zip(model.named_parameters(), twin.parameters(), expected, strict=True):
            plain.grad = grad
            assert (parameter.grad is None) == (grad is None), name
            if parameter.grad is not None and grad is not None:
                torch.testing.assert_close(whole(parameter.grad), grad, rtol=tolerance, atol=tolerance)
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 1e6) for one in (model, twin)]
        torch.testing.assert_close(whole(norms[0]), norms[1])  # summed in another order
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        for (name, weight), plain in zip(weights(model).items(), twin.parameters(), strict=True):
            torch.testing.assert_close(weight, plain.detach(), rtol=tolerance, atol=tolerance)
            block = int(name.split(".")[1]) if name.startswith("layers") else None
            if block is not None and not kept[block]:
                assert torch.equal(weight, before[name]), name
        masks.append(kept)
    model.eval()
    twin.eval()
    everything = [True] * LAYERS, [1.0] * LAYERS
    torch.testing.assert_close(called(batch(0, 9)), twin(batch(0, 9), *everything), rtol=tolerance, atol=tolerance)
    return masks


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode", "micro_batches"),
    [
        *((stage, "eager", 2) for stage in range(4)),
        (3, "whole", 1),
        (1, "whole", 2),
        (0, "blocks", 1),
        (2, "blocks", 2),
        (3, "inductor", 1),
        *long(
            (0, "whole", 2), (2, "whole", 2), (3, "whole", 2), (1, "blocks", 2), (3, "blocks", 2), (1, "inductor", 2)
        ),
    ],
)
def test_training_equals_a_twin_that_is_told_the_masks(ranks: Ranks, stage: int, mode: str, micro_batches: int) -> None:
    first, second = ranks.run(trained, stage, mode, micro_batches)
    assert first == second
    assert first[0] == (True,) * LAYERS
    assert len(set(first)) > 3 and all(first[step] != first[0] for step in range(2, STEPS))


@worlds(3)
@pytest.mark.parametrize("stage", [3, *long(1)])
def test_three_ranks_with_rows_that_do_not_divide(ranks: Ranks, stage: int) -> None:
    assert len(set(map(tuple, ranks.run(trained, stage, "whole", 2)))) == 1


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode", "reentrant"),
    [(3, "eager", True), (2, "eager", False), *long((3, "eager", False), (1, "eager", True))],
)
def test_a_recomputed_block_has_the_mask_of_its_forward(ranks: Ranks, stage: int, mode: str, reentrant: bool) -> None:
    first, second = ranks.run(trained, stage, mode, 2, reentrant)
    assert first == second


def bits_of(stage: int, mode: str, precision: str) -> dict[str, Tensor]:
    narrow: dict[str, Any] = {"param_dtype": torch.bfloat16} if precision == "bf16" else {}
    model = net()
    zgraph.shard(model, zero_stage=stage, **narrow)
    zgraph.LayerDrop(model.layers, theta=0.4, gamma=1.0, seed=5)
    optimizer, called = torch.optim.AdamW(model.parameters(), lr=0.05), compiled(model, mode)
    for step in range(4):
        accumulate(model, called, step, 1, precision == "autocast")
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def same_bits(stage: int, mode: str, precision: str) -> list[str]:
    first, second = bits_of(stage, "eager", precision), bits_of(stage, mode, precision)
    assert not all(torch.equal(one, two) for one, two in zip(first.values(), weights(net()).values(), strict=True))
    return [name for name in first if not torch.equal(first[name], second[name])]


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode", "precision"),
    [(3, "whole", "bf16"), (0, "blocks", "autocast"), *long((1, "blocks", "bf16"), (2, "whole", "autocast"))],
)
def test_compiled_blocks_have_the_bits_of_eager_mode_in_low_precision(
    ranks: Ranks, stage: int, mode: str, precision: str
) -> None:
    assert ranks.run(same_bits, stage, mode, precision) == [[], []]


# --- graphs and bytes -------------------------------------------------------------------------------------------------


def graphs_of(mode: str) -> tuple[int, ...]:
    """Masks that were drawn, graphs of a training with them, and graphs of the same training without LayerDrop."""
    counts: list[int] = []
    masks: set[tuple[bool, ...]] = set()
    for theta in (0.4, 1.0):
        torch.compiler.reset()
        model = net(8)
        zgraph.shard(model)
        drop = zgraph.LayerDrop(model.layers, theta=theta, gamma=1.0)
        optimizer, called = torch.optim.SGD(model.parameters(), lr=0.1), compiled(model, mode)
        for step in range(12):
            masks.add(drop.kept)
            accumulate(model, called, step, 1)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(zgraph.summary(model).graphs))
    return len(masks), *counts


@worlds(2)
@pytest.mark.parametrize(("mode", "expected"), [("whole", (6, 2)), ("blocks", (2, 2))])
def test_equal_blocks_share_two_graphs_whatever_the_masks(ranks: Ranks, mode: str, expected: tuple[int, int]) -> None:
    """As a whole: those of the first layer, of a block and of the last layer, each forward and backward."""
    for masks, *graphs in ranks.run(graphs_of, mode):
        assert masks > 6
        assert tuple(graphs) == expected


def sent_by(stage: int, mode: str) -> list[tuple[int, int]]:
    """(kept blocks, bytes that this rank sends) in a training step, for some masks; first the one that keeps all."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    zgraph.shard(model, zero_stage=stage)
    drop = zgraph.LayerDrop(model, theta=0.2, gamma=9.0)
    called = with_fx(model) if mode == "whole" else model
    found: list[tuple[int, int]] = []
    send, total = dist.ProcessGroup.send, [0]

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        total[0] += sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, dst, tag)

    def step() -> None:
        called(torch.full((2, WIDTH), 0.5, requires_grad=True)).sum().backward()
        model.zero_grad()

    for number in range(8):
        drop.step = number
        step()  # compiles, and compares the options of LayerDrop
        total[0] = 0
        with pytest.MonkeyPatch.context() as patch, profile(activities=[ProfilerActivity.CPU]):
            patch.setattr(dist.ProcessGroup, "send", counted)
            step()
        found.append((sum(drop.kept), total[0]))
    return found


@worlds(2)
@pytest.mark.parametrize(("stage", "mode"), [(0, "whole"), (3, "whole"), (3, "eager"), *long((1, "eager"))])
def test_bytes_are_those_of_the_kept_blocks(ranks: Ranks, stage: int, mode: str) -> None:
    least = 4 * sum(parameter.numel() for parameter in Block().parameters())  # 2P (N-1)/N
    for found in ranks.run(sent_by, stage, mode):
        assert len({kept for kept, _ in found}) > 2
        (blocks, of_all), *_ = found
        assert blocks == 4 and of_all >= 4 * least
        assert [sent for _, sent in found] == [kept * of_all // 4 for kept, _ in found]


def plain_and_all_kept(stage: int, mode: str) -> list[str]:
    found: list[dict[str, Tensor]] = []
    for is_plain in (True, False):
        model = net()
        zgraph.shard(model, zero_stage=stage)
        if not is_plain:
            zgraph.LayerDrop(model.layers, theta=1.0)
        optimizer, called = torch.optim.AdamW(model.parameters()), compiled(model, mode)
        for step in range(3):
            accumulate(model, called, step, 1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    return [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


@worlds(2)
@pytest.mark.parametrize(("stage", "mode"), [(0, "whole"), (3, "eager"), *long((3, "inductor"))])
def test_theta_of_one_is_the_plain_step(ranks: Ranks, stage: int, mode: str) -> None:
    assert ranks.run(plain_and_all_kept, stage, mode) == [[], []]


# --- resume -----------------------------------------------------------------------------------------------------------


def resumed(folder: str, stage: int, mode: str) -> list[str]:
    """Parameters that differ between a run of six steps and one that is saved after three and loaded."""

    def begin() -> tuple[Net, torch.optim.Optimizer, zgraph.LayerDrop, Any]:
        torch.compiler.reset()
        model = net(LAYERS, Pair)
        zgraph.shard(model, zero_stage=stage)
        drop = zgraph.LayerDrop(model.layers, theta=0.4, gamma=1.0, seed=5)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05), drop, compiled(model, mode)

    model, optimizer, drop, called = begin()
    for step in range(STEPS):
        if step == STEPS // 2:
            zgraph.save_checkpoint(folder, model, optimizer, step=step, extra={"drop": drop.state_dict()})
        accumulate(model, called, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    expected = weights(model)
    model, optimizer, drop, called = begin()
    latest = zgraph.latest_checkpoint(folder)
    assert latest is not None
    loaded = zgraph.load_checkpoint(latest, model, optimizer)
    drop.load_state_dict(loaded.extra["drop"])
    assert drop.step == loaded.step == STEPS // 2
    assert drop.kept != (True,) * LAYERS
    for step in range(loaded.step, STEPS):
        accumulate(model, called, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    return [name for name, weight in weights(model).items() if not torch.equal(weight, expected[name])]


class Pair(Block):
    """Returns a tuple, as some layers of Hugging Face do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@worlds(2)
@pytest.mark.parametrize(("stage", "mode"), [(3, "eager"), (1, "blocks")])
def test_a_resumed_run_goes_on_with_the_masks(ranks: Ranks, stage: int, mode: str, tmp_path: Path) -> None:
    assert ranks.run(resumed, str(tmp_path), stage, mode) == [[], []]


# --- without ranks ----------------------------------------------------------------------------------------------------


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_plain_model_without_ranks_is_its_twin() -> None:
    model, twin = net(), Dropped(net())
    drop = zgraph.LayerDrop(model.layers, theta=0.3, gamma=1.0)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin))
    for step in range(STEPS):
        x, kept = batch(0, step), drop.kept
        twin(x, kept, drop.probabilities(step)).square().mean().backward()
        other.step()
        other.zero_grad()
        step_of(model, optimizer, x)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_masks_are_kept_with_their_probabilities_and_differ_between_seeds() -> None:
    drops = [zgraph.LayerDrop(net().layers, theta=0.5, gamma=1e-3, seed=seed) for seed in (0, 1)]
    probabilities = drops[0].probabilities(10**6)
    assert probabilities == pytest.approx([1 - (number + 1) / LAYERS / 2 for number in range(LAYERS)])
    assert drops[0].probabilities(0) == [1.0] * LAYERS
    assert drops[0].probabilities(1000)[-1] == pytest.approx(0.5 * 2.718281828**-1 + 0.5)
    kept = [0] * LAYERS
    for step in range(10**6, 10**6 + 2000):
        for drop in drops:
            drop.step = step
        assert len(drops[0].kept) == LAYERS
        kept = [count + is_kept for count, is_kept in zip(kept, drops[0].kept, strict=True)]
    assert [count / 2000 for count in kept] == pytest.approx(probabilities, abs=0.04)  # 3.6 standard deviations
    assert drops[0].kept != drops[1].kept or drops[0].probabilities(0) == drops[1].kept


def test_only_steps_of_the_blocks_parameters_count_and_several_optimizers_count_once() -> None:
    model = net()
    drop = zgraph.LayerDrop(model.layers)
    elsewhere, first, second = (torch.optim.SGD(one.parameters()) for one in (model.first, *model.layers[:2]))
    model(batch(0, 0)).sum().backward()
    elsewhere.step()
    assert drop.step == 0
    first.step()
    second.step()
    assert drop.step == 1
    model.zero_grad()
    model(batch(0, 0))
    assert drop.step == 1


def test_a_copy_of_the_model_counts_its_own_steps() -> None:
    model = net()
    drop = zgraph.LayerDrop(model.layers, theta=0.1, gamma=50.0)
    step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(0, 0))
    copied = copy.deepcopy(model)
    seen: list[int] = []
    for number, block in enumerate(copied.layers):
        block.fc.register_forward_hook(lambda *_, number=number: seen.append(number))
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    for step in (1, 2, 3):
        seen.clear()
        step_of(copied, optimizer, batch(0, step))
        assert drop.step == 1
    drop.step = 3
    assert seen == [number for number, is_kept in enumerate(drop.kept) if is_kept] and len(seen) < LAYERS


class Keyword(nn.Module):
    """Calls its block by the name of the argument that layers of Hugging Face have."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(hidden_states=x)


class HiddenStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.block(hidden_states)


def test_hidden_states_may_be_given_by_name() -> None:
    torch.manual_seed(0)
    block, x = HiddenStates(), torch.randn(2, WIDTH)
    model = Keyword(block)
    plain = block(hidden_states=x)
    drop = zgraph.LayerDrop([block], theta=0.5, gamma=1.0)
    assert torch.equal(model(x), plain)
    steps = range(1, 20)
    for is_kept in (True, False):
        drop.step = next(step for step in steps if drop_at(drop, step) == (is_kept,))
        wanted = torch.lerp(x, plain, 1 / drop.probabilities(drop.step)[0]) if is_kept else x
        assert torch.equal(model(x), wanted)
    with pytest.raises(zgraph.ZgraphError, match="is called without hidden states"):
        block()


def test_optimizers_that_step_in_backward_do_not_change_the_mask_of_a_recomputation() -> None:
    model = net()
    model.repeats = False  # torch compares what the recomputation saves with what forward has saved
    drop = zgraph.LayerDrop(model.layers, theta=0.3, gamma=1.0)
    stepping: dict[Tensor, torch.optim.Optimizer] = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def step(parameter: Tensor) -> None:
        stepping[parameter].step()
        stepping[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    masks: set[tuple[bool, ...]] = set()
    for number in range(STEPS):
        assert drop.step == number
        masks.add(drop.kept)
        model(batch(0, number)).square().mean().backward()
    assert len(masks) > 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"theta": 0.0}, "theta=0.0 must be more than 0"),
        ({"theta": 1.5}, "at most 1"),
        ({"gamma": -1.0}, "gamma=-1.0 must be finite and not negative"),
        ({"gamma": float("inf")}, "gamma=inf"),
        ({"gamma": float("nan")}, "gamma=nan"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zgraph.LayerDrop(net().layers, **options)


def test_blocks_that_cannot_be_told_apart_are_refused() -> None:
    block = Block()
    with pytest.raises(ValueError, match="block 2 is the same module as block 0"):
        zgraph.LayerDrop([block, Block(), block])
    with pytest.raises(ValueError, match="there is no block"):
        zgraph.LayerDrop([])
    zgraph.LayerDrop([block])
    with pytest.raises(ValueError, match=r"block 1 \(Block\) is dropped by another"):
        zgraph.LayerDrop([Block(), block])


class Wider(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.fc(self.norm(x)))
        return x


class Attending(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.sum()


class Named(Block):
    def forward(self, x: Any) -> Any:
        return {"x": x}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Wider, r"block 0 \(Wider\) takes \[4, 8\] torch.float32 and returns \[4, 16\]"),
        (InPlace, "writes to its input"),
        (Attending, "a tuple with a Tensor after the hidden states"),
        (Named, "returns a dict"),
    ],
)
def test_blocks_whose_output_is_unlike_their_input_are_refused_in_the_first_step(
    kind: type[nn.Module], text: str
) -> None:
    model = net(LAYERS, kind)
    zgraph.LayerDrop(model.layers)
    with pytest.raises(zgraph.ZgraphError, match=text):
        model(batch(0, 0))


def test_gradients_of_before_are_refused_where_a_block_is_dropped() -> None:
    model = net()
    zgraph.LayerDrop(model.layers, theta=0.1, gamma=50.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(zgraph.ZgraphError, match=r"have a gradient of before.*optimizer.zero_grad\(\)"):
        model(batch(0, 1))


def drop_at(drop: zgraph.LayerDrop, step: int) -> tuple[bool, ...]:
    drop.step = step
    return drop.kept


def test_another_run_is_not_loaded_and_an_unknown_block_is_not_dropped() -> None:
    state = zgraph.LayerDrop(net().layers, seed=1).state_dict()
    model = net()
    drop = zgraph.LayerDrop(model.layers, theta=0.1, gamma=50.0)
    with pytest.raises(ValueError, match="the saved run has seed 1 and 4 blocks, and this one has seed 0 and 4"):
        drop.load_state_dict(state)
    drop.step = next(step for step in range(1, 100) if not drop_at(drop, step)[0])
    with pytest.raises(zgraph.ZgraphError, match=r"block 0 \(Block\) is dropped before it or a block of its class"):
        model(batch(0, 0))


def refused(kind: str, stage: int) -> str:
    model = net()
    zgraph.shard(model, zero_stage=stage, units=[model] if kind == "units" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run: Callable[[Tensor], None] = lambda x: step_of(model, optimizer, x)  # noqa: E731
    if kind in ("captured", "captured before"):
        run = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(run)
    if kind == "captured before":
        for step in range(3):
            run(batch(dist.get_rank(), step))
    drop = zgraph.LayerDrop(model.layers, theta=0.4, gamma=1.0, seed=dist.get_rank() if kind == "seeds" else 0)
    if kind == "staged":
        zgraph.PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    if kind == "steps" and dist.get_rank() == 1:
        drop.step = 1
    try:
        run(batch(dist.get_rank(), 0))
    except zgraph.ZgraphError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@worlds(2)
@pytest.mark.parametrize(
    ("kind", "stage", "text"),
    [
        ("seeds", 0, "AgreementError: .*theta=0.4, gamma=1.0, seed=1, step=0"),
        ("seeds", 3, "AgreementError: .*theta=0.4, gamma=1.0, seed=1, step=0"),
        ("steps", 1, "AgreementError: .*seed=0, step=1"),
        ("captured", 2, r"block 0 \(Block\) is in a step of zgraph.training_step.*torch.compile\(model, backend"),
        ("captured before", 3, r"block 0 \(Block\) is in a step of zgraph.training_step"),
        ("staged", 1, r"block 0 \(Block\) is in a stage of a pipeline"),
        ("units", 3, r"block 0 \(Block\) lies inside a module named in zgraph.shard\(units=...\)"),
    ],
)
def test_every_rank_is_told_what_cannot_be_dropped(ranks: Ranks, kind: str, stage: int, text: str) -> None:
    for found in ranks.run(refused, kind, stage):
        assert re.search(text, found), found


# --- with other features ----------------------------------------------------------------------------------------------


def beside(feature: str, stage: int, mode: str) -> list[str]:
    """Parameters whose weights are not those of the twin after some steps."""
    model, twin = net(), Dropped(net())
    if feature == "tied":
        for one in (model, twin.net):
            one.layers[3].fc.weight = one.layers[1].fc.weight
    drop = None
    if feature == "earlier":
        drop = zgraph.LayerDrop(model.layers, theta=0.4, gamma=1.0, seed=5)
        zgraph.shard(model.layers[0], zero_stage=stage)
    options: dict[str, Any] = {"optional": [*model.layers]} if feature == "optional" else {}
    options |= {"units": [Block]} if feature == "units" else {}
    zgraph.shard(model, zero_stage=stage, **options)
    if drop is None:
        drop = zgraph.LayerDrop(model.layers, theta=0.4, gamma=1.0, seed=5)
    if feature == "earlier":
        zgraph.shard(model)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.5) for one in (model, twin))
    called = compiled(model, mode)
    for step in range(STEPS):
        kept = drop.kept
        accumulate(model, called, step, 1)
        grads = expected_gradients(twin, step, 1, stage, kept, drop.probabilities(step))
        for parameter, grad in zip(twin.parameters(), grads, strict=True):
            parameter.grad = grad
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert drop.step == STEPS
    pairs = zip(weights(model).items(), twin.parameters(), strict=True)
    return [name for (name, weight), parameter in pairs if not torch.equal(weight, parameter.detach())]


@worlds(2)
@pytest.mark.parametrize(
    ("feature", "stage", "mode"),
    [
        ("tied", 3, "eager"),
        ("optional", 2, "whole"),
        ("units", 3, "whole"),
        ("earlier", 3, "whole"),
        ("earlier", 1, "eager"),
        *long(("tied", 0, "eager"), ("optional", 3, "eager"), ("units", 2, "eager")),
    ],
)
def test_tied_optional_named_and_earlier_sharded_blocks(ranks: Ranks, feature: str, stage: int, mode: str) -> None:
    assert ranks.run(beside, feature, stage, mode) == [[], []]
