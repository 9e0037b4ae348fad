"""`zgraph.AdamW8bit`: the same bits on any ranks, stages and tiers, checkpoints from fp32 and back, clear refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.budget import long
from tests.support.ranks import Ranks, RanksPool, every_world, worlds
from tests.support.resting import HOST, STATE, under
from tests.support.whole_steps import Case, compare
from tests.support.whole_tensors import whole

DISK = zgraph.Offload(params="disk", optimizer="disk", path="given by `under`")
STATE_ON_DISK = replace(DISK, params=None)
FLOATS, HALVES = torch.float32, torch.bfloat16
EIGHT_BIT = Case(optimizer="adamw_8bit", width=32, precision="bf16 weights")

# Any two of tier, stage, precision, window, plan and clipping that may meet stand together in some row.
CASES = {
    "stage 3, host": replace(EIGHT_BIT, at_rest=HOST, clip="torch", schedule=True),
    "stage 2, disk": replace(EIGHT_BIT, at_rest=DISK, stage=2, precision="bf16", clip="zgraph", accumulation=2),
    "stage 1, no codes": replace(EIGHT_BIT, at_rest=STATE, stage=1, width=10, accumulation=2, no_sync=True),
    "stage 0": replace(EIGHT_BIT, stage=0, precision="fp32", clip="torch", schedule=True),
    "loco": replace(EIGHT_BIT, at_rest=STATE, stage=2, loco=True, accumulation=2, no_sync=True, clip="torch"),
    "resumed": replace(EIGHT_BIT, at_rest=DISK, resume=True, precision="autocast", frozen=True),
    "planned": replace(EIGHT_BIT, at_rest=STATE_ON_DISK, frugal=True, stage=1, clip="zgraph", accumulation=2),
    "streamed": replace(EIGHT_BIT, at_rest=HOST, frugal=True, streamed=True, resume=True, no_sync=True, accumulation=2),
    "checkpointed": replace(EIGHT_BIT, checkpointed=True, on_shards=True, zero_first=True, planned=True),
}
LONG = ("stage 1, no codes", "stage 0", "streamed")


@worlds(2)
@pytest.mark.parametrize("name", [*(name for name in CASES if name not in LONG), *long(*LONG)])
def test_a_captured_step_equals_plain_lines(ranks: Ranks, name: str, tmp_path: Path) -> None:
    graphs = ranks.run(compare, replace(CASES[name], at_rest=under(tmp_path, CASES[name].at_rest)))
    assert CASES[name].resume or CASES[name].at_rest is not None or graphs == [1, 1], "state is made before the step"


# --- on any ranks -----------------------------------------------------------------------------------------------------

SHAPES = ((13, 64), (5, 4, 8), (7, 33), (40,), ())


def parameters_of(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients_of(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def stepped(dtype: torch.dtype, place: Callable[[Tensor], Tensor], steps: int = 4) -> zgraph.AdamW8bit:
    parameters = [nn.Parameter(place(one)) for one in parameters_of(dtype)]
    optimizer = zgraph.AdamW8bit(parameters, lr=0.1)
    for step in range(steps):
        for parameter, grad in zip(parameters, gradients_of(step, dtype), strict=True):
            parameter.grad = place(grad)
        optimizer.step()
    return optimizer


def contents(optimizer: zgraph.AdamW8bit) -> list[Tensor]:
    found = [one for group in optimizer.param_groups for one in group["params"]]
    return [whole(one.detach()).clone() for one in found] + [whole(optimizer.state[one]["packed"]) for one in found]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def on_any_mesh() -> None:
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    placings: list[Any] = [(flat, [Shard(0)]), (flat, [Replicate()])]
    if world == 2:
        placings.append((flat, [Shard(1)]))  # columns of matrices, in whole groups
    if world == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        placings += [(both, [Replicate(), Shard(0)]), (both, [Shard(0), Shard(1)])]
    for dtype in (FLOATS, HALVES):
        expected = contents(stepped(dtype, lambda one: one.clone()))
        for mesh, placements in placings:

            def place(one: Tensor, mesh: Any = mesh, placements: Any = placements) -> Tensor:
                # Codes of other tensors than matrices need whole rows.
                possible = [at if getattr(at, "dim", 0) == 0 or one.ndim == 2 else Replicate() for at in placements]
                possible = [at if one.ndim else Replicate() for at in possible]
                return distribute_tensor(one, mesh, possible)

            optimizer = stepped(dtype, place)
            assert_equal(contents(optimizer), expected)
            for one in optimizer.param_groups[0]["params"]:
                packed = optimizer.state[one]["packed"]
                assert isinstance(packed, DTensor) and packed.placements == one.placements


@every_world
def test_bits_do_not_depend_on_ranks_or_placements(ranks: Ranks) -> None:
    ranks.run(on_any_mesh)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 5), nn.LayerNorm(5))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.gain


Built = tuple[nn.Module, torch.optim.Optimizer]


def eight_bit(dtype: torch.dtype, **options: Any) -> tuple[nn.Module, zgraph.AdamW8bit]:
    model = zgraph.shard(Net().to(dtype), **options)
    return model, zgraph.AdamW8bit(model.parameters(), lr=1e-2)


def train(built: Built, first: int, last: int) -> list[float]:
    model, optimizer = built
    losses: list[float] = []
    for number in range(first, last):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x[:, :5].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(folder: str) -> None:
    for dtype in (FLOATS, HALVES):
        built = eight_bit(dtype)
        train(built, 0, 3)
        zgraph.save_checkpoint(f"{folder}/{dtype}", *built, step=3)
        torch.save(contents(built[1]), f"{folder}/{dtype}.pt")
        torch.save(train(built, 3, 6), f"{folder}/{dtype}.losses.pt")


def load(folder: str) -> None:
    for dtype in (FLOATS, HALVES):
        for stage in (0, 2, 3):
            built = eight_bit(dtype, zero_stage=stage)
            train(built, 7, 8)
            zgraph.load_checkpoint(f"{folder}/{dtype}/step_00000003", *built)
            assert_equal(contents(built[1]), torch.load(f"{folder}/{dtype}.pt"))
            losses = train(built, 3, 6)
            assert dist.get_world_size() == 3 or losses == torch.load(f"{folder}/{dtype}.losses.pt")


def test_any_number_of_ranks_resumes(pool: RanksPool, tmp_path: Path) -> None:
    pool.of(2).run(save, str(tmp_path))
    for world in (1, 2, 3):
        pool.of(world).run(load, str(tmp_path))


def full_precision(dtype: torch.dtype = FLOATS) -> Built:
    model = zgraph.shard(Net().to(dtype))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def from_fp32_and_back(folder: str, dtype: torch.dtype) -> None:
    exact = full_precision()
    train(exact, 0, 5)
    saved = zgraph.save_checkpoint(folder, *exact, step=5)
    built = eight_bit(dtype)
    zgraph.load_checkpoint(saved, *built)

    by_hand = eight_bit(dtype)
    state = exact[1].state_dict()
    pairs = zip(state["state"].values(), exact[0].parameters(), strict=True)
    state["state"] = dict(enumerate({**entries, "weight": weight.detach()} for entries, weight in pairs))
    by_hand[1].load_state_dict(state)
    assert_equal(contents(by_hand[1]), contents(built[1]))

    unpacked = built[1].unpacked_state_dict()
    before = contents(built[1])
    for entries in unpacked["state"].values():
        for value in copy.deepcopy(entries).values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
    assert_equal(contents(built[1]), before)
    for parameter, entries in zip(exact[0].parameters(), unpacked["state"].values(), strict=True):
        known = exact[1].state[parameter]
        relative = (whole(entries["weight"]) / whole(parameter.detach()) - 1).abs().max()
        assert relative <= (2**-16 if dtype is HALVES else 0)
        for key in ("exp_avg", "exp_avg_sq"):
            given, found = whole(known[key]), whole(entries[key])
            assert (found - given).abs().max() <= 0.02 * given.abs().max() if parameter.ndim > 1 else True
            assert parameter.ndim > 1 or torch.equal(found, given), "vectors keep their moments"

    # And back: the loop goes on in fp32 as if nothing had happened, but for the rounding.
    again = full_precision()
    with torch.no_grad():
        for parameter, entries in zip(again[0].parameters(), unpacked["state"].values(), strict=True):
            parameter.copy_(entries.pop("weight"))
    again[1].load_state_dict(unpacked)
    assert train(again, 5, 8) == pytest.approx(train(exact, 5, 8), rel=2e-2)


@worlds(2)
@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_checkpoints_of_fp32_are_loaded_and_made(ranks: Ranks, dtype: torch.dtype, tmp_path: Path) -> None:
    ranks.run(from_fp32_and_back, str(tmp_path), dtype)


def plain_state_into_shards() -> None:
    """A state dict of an unsharded model, equal on all ranks; torch's form of it, too."""
    unsharded = Net().bfloat16()
    optimizers: list[Any] = [zgraph.AdamW8bit(unsharded.parameters(), lr=1e-2)]
    train((unsharded, optimizers[0]), 0, 3)
    for state in (optimizers[0].state_dict(), optimizers[0].unpacked_state_dict()):
        model, optimizer = eight_bit(HALVES)
        model.load_state_dict(unsharded.state_dict())
        optimizer.load_state_dict(copy.deepcopy(state))
        found = [whole(one) for one in contents(optimizer)[: len(optimizer.state)]]
        assert_equal(found, [one.detach() for one in unsharded.parameters()])
        assert all(isinstance(entries["packed"], DTensor) for entries in optimizer.state.values())
    assert_equal(
        [whole(entries["packed"])[..., -1] for entries in eight_bit_of(optimizers[0].state_dict()).state.values()],
        [entries["packed"][..., -1] for entries in optimizers[0].state.values()],
    )


def eight_bit_of(state: dict[str, Any]) -> zgraph.AdamW8bit:
    _, optimizer = eight_bit(HALVES)
    optimizer.load_state_dict(state)
    return optimizer


@worlds(2)
def test_a_state_dict_of_an_unsharded_model_is_loaded(ranks: Ranks) -> None:
    ranks.run(plain_state_into_shards)


# --- in one process ---------------------------------------------------------------------------------------------------


def test_a_copy_of_an_optimizer_goes_on_with_the_same_bits() -> None:
    first = stepped(HALVES, torch.clone)
    second = copy.deepcopy(first)
    for optimizer in (first, second):
        for parameter, grad in zip(optimizer.param_groups[0]["params"], gradients_of(9, HALVES), strict=True):
            parameter.grad = grad
        assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    assert_equal(contents(first), contents(second))


def test_learning_rates_change_and_may_be_tensors() -> None:
    found: list[list[Tensor]] = []
    for lr in (0.1, torch.tensor(0.1)):
        parameters = [nn.Parameter(one) for one in parameters_of(FLOATS)]
        optimizer = zgraph.AdamW8bit(parameters[:2], lr=lr)
        optimizer.add_param_group({"params": parameters[2:], "weight_decay": 0.0})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            for parameter, grad in zip(parameters, gradients_of(step, FLOATS), strict=True):
                parameter.grad = grad
            optimizer.step()
            scheduler.step()
        found.append(contents(optimizer))
    assert_equal(*found)


def scaled(captured: bool) -> tuple[list[Tensor], float, float]:
    model, optimizer = eight_bit(HALVES)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def lines(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    step = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(lines) if captured else lines
    for number in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        step(x.bfloat16(), x[:, :5].sin() * (torch.inf if number == 2 else 1))
    counts = {whole(entries["step"]).item() for entries in optimizer.state.values()}
    assert counts == {4}, "an inf in the third batch changes nothing"
    return contents(optimizer), scaler.get_scale(), next(iter(counts))


def test_a_gradient_scaler_divides_and_skips() -> None:
    with loopback(1, Wire()):
        ours, theirs = scaled(True), scaled(False)
    assert_equal(ours[0], theirs[0])
    assert ours[1:] == theirs[1:] and ours[1] == 4


def test_state_takes_two_or_three_bytes_an_element() -> None:
    for dtype, most in ((FLOATS, 2.125), (HALVES, 3.125)):
        parameter = nn.Parameter(torch.randn(256, 512).to(dtype))
        optimizer = zgraph.AdamW8bit([parameter])
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert optimizer.state[parameter]["packed"].nbytes == most * parameter.numel()


def captured(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Callable[[Tensor], Tensor]:
    @zgraph.training_step(model, optimizer, options=options)
    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_updates_on_disk_move_less_than_half_of_the_bytes(tmp_path: Path) -> None:
    """Forward and backward read two bytes of a weight instead of four, each time that they need it."""
    moved: list[list[int]] = []
    for dtype in (FLOATS, HALVES):
        with loopback(1, Wire()):
            torch.manual_seed(0)
            layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).to(dtype)
            offload = zgraph.Offload(params="disk", optimizer="disk", path=tmp_path / str(dtype))
            model = zgraph.shard(layers, zero_stage=3, offload=offload)
            make: Any = zgraph.AdamW8bit if dtype is HALVES else torch.optim.AdamW
            optimizer = make(model.parameters(), **({} if dtype is HALVES else {"fused": True}))
            report = zgraph.Report()
            step = captured(model, optimizer, lowering="fx", report=report)
            for _ in range(2):
                step(torch.randn(8, 256, dtype=dtype))
            notes = [note for note in report.notes if "are brought to the device in" in note]
            moved.append(list(map(int, re.findall(r"(\d+) bytes", notes[-1]))))
    elements = 4 * 256 * 256
    assert moved == [[18 * elements, 12 * elements], [8.125 * elements, 5.125 * elements]]


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_second_moments_fall_as_in_fp32(dtype: torch.dtype) -> None:
    """Each step changes them by less than a code, so codes rounded to nearest would keep them where they are."""
    weight = nn.Parameter(torch.ones(8, 64, dtype=dtype))
    optimizer, found = zgraph.AdamW8bit([weight], lr=0.0), list[float]()
    for step in range(1001):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()
        if step in (0, 1000):
            found.append(optimizer.unpacked_state_dict()["state"][0]["exp_avg_sq"].mean().item())
    assert found[1] / found[0] == pytest.approx(0.999**1000, rel=0.1)


def losses(make: Any, dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    return train((model, make(model.parameters(), lr=1e-2)), 0, 300)


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_losses_stay_close_to_those_of_fp32(dtype: torch.dtype) -> None:
    """Over 300 steps."""
    found, exact = losses(zgraph.AdamW8bit, dtype), losses(torch.optim.AdamW, FLOATS)
    late = [sum(one[-50:]) / 50 for one in (found, exact)]
    assert late[1] < exact[0] / 2 and abs(late[0] / late[1] - 1) < 0.03


def test_a_step_that_inductor_compiles_is_close() -> None:
    found: list[list[float]] = []
    for lowering in ("fx", "inductor"):
        with loopback(1, Wire()):
            step = captured(*eight_bit(FLOATS), lowering=lowering)
            xs = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0))
            found.append([whole(step(x)).item() for x in xs])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0][-1] < found[0][0]


# --- what cannot be honoured ------------------------------------------------------------------------------------------


def test_bad_options_and_dtypes_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 32))
    for options in ({"lr": -1}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -1}):
        with pytest.raises(ValueError, match=r"zgraph\.AdamW8bit: lr=.*betas must be at least 0 and less than 1"):
            zgraph.AdamW8bit([weight], **options)  # pyright: ignore[reportArgumentType]
    optimizer = zgraph.AdamW8bit([weight])
    with pytest.raises(ValueError, match=r"zgraph\.AdamW8bit: amsgrad=True is no option of it; leave it out"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "amsgrad": True})
    with pytest.raises(ValueError, match=r"a parameter of shape \[3\] is torch.float16; make it torch.bfloat16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3).half())]})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_changed_are_refused_before_anything_is_updated() -> None:
    for change in (
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(FLOATS if model[0].weight.dtype is HALVES else HALVES),
        lambda model: setattr(model[1].weight, "data", torch.zeros(3, 64).to(model[1].weight.dtype)),
    ):
        for dtype in (FLOATS, HALVES):
            model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2)).to(dtype)
            optimizer = zgraph.AdamW8bit([{"params": one.parameters()} for one in model])
            for steps in range(2):
                if steps:
                    change(model)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                before = [one.detach().clone() for one in model.parameters()]
                if not steps:
                    optimizer.step()
            with pytest.raises(zgraph.ZgraphError, match="but its state is of another; create the optimizer after"):
                optimizer.step()
            assert_equal([one.detach() for one in model.parameters()], before)


def test_a_refused_gradient_leaves_other_groups_alone() -> None:
    weight, table = nn.Parameter(torch.ones(2, 32)), nn.Embedding(8, 32, sparse=True)
    optimizer = zgraph.AdamW8bit([{"params": [weight]}, {"params": table.parameters()}])
    weight.grad = torch.ones(2, 32)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(zgraph.ZgraphError, match=r"is torch\.sparse_coo"):
        optimizer.step()
    assert weight.eq(1).all()


def test_an_expanded_gradient_is_taken() -> None:
    found: list[Tensor] = []
    for grad in (torch.ones(()).expand(2, 32), torch.ones(2, 32)):
        weight = nn.Parameter(torch.ones(2, 32))
        weight.grad = grad
        zgraph.AdamW8bit([weight], lr=0.1).step()
        found.append(weight.detach())
    assert_equal(found[:1], found[1:])


def test_gradients_of_another_kind_are_refused() -> None:
    table = nn.Embedding(8, 32, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(zgraph.ZgraphError, match=r"gradient of a parameter of shape \[8, 32\] is torch.sparse_coo"):
        zgraph.AdamW8bit(table.parameters()).step()


Change = Callable[[dict[int, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, group: group.update(amsgrad=True), "an optimizer with amsgrad=True"),
        (lambda state, group: group.update(decoupled_weight_decay=False), "decoupled_weight_decay=False"),
        (lambda state, group: group.pop("betas"), "of another optimizer, because it has no betas"),
        (lambda state, group: state[0].pop("exp_avg"), "has no exp_avg; load the state dict of AdamW8bit or torch"),
        (lambda state, group: state[0].pop("step"), "has no step"),
        (lambda state, group: state[0].update(momentum_buffer=torch.zeros(())), r"has momentum_buffer of shape \[\]"),
        (lambda state, group: state[0].update(exp_avg=torch.zeros(3)), r"has exp_avg of shape \[3\]"),
        (lambda state, group: state[0].update(exp_avg=torch.zeros(2, 32).int()), r"exp_avg of shape .* torch.int32"),
        (lambda state, group: state.update({0: {"step": 1, "packed": torch.zeros(2, 17)}}), r"packed .* torch.float32"),
        (lambda state, group: state.update({0: {"step": 1, "packed": torch.zeros(3).int()}}), r"packed of shape \[3\]"),
    ],
)
def test_a_state_dict_of_another_optimizer_changes_nothing(change: Change, message: str) -> None:
    weight = nn.Parameter(torch.zeros(2, 32))
    optimizer, other = zgraph.AdamW8bit([weight]), torch.optim.AdamW([weight])
    weight.grad = torch.ones(2, 32)
    for one in (optimizer, other):
        one.step()
    state, before = other.state_dict(), contents(optimizer)
    change(state["state"], state["param_groups"][0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_equal(contents(optimizer), before)
    assert optimizer.state[weight]["step"] == 1


def test_hooks_see_the_whole_state_that_is_loaded() -> None:
    first, second = stepped(HALVES, torch.clone), stepped(HALVES, torch.clone, steps=1)
    seen: list[Any] = []
    second.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state["state"][0])))
    second.register_load_state_dict_post_hook(lambda one: seen.append(contents(one)))
    second.load_state_dict(first.state_dict())
    assert seen[0] == ["packed", "step"]
    assert_equal(seen[1][len(SHAPES) :], contents(first)[len(SHAPES) :])
    counts = [entries["step"] for one in (first, second) for entries in one.state.values()]
    assert {count.item() for count in counts} == {4} and len({count.data_ptr() for count in counts}) == len(counts)


def of_other_layout(folder: str) -> None:
    """State of another stage, or of a model that is not sharded, is no state of this rank's rows."""
    (whole_model, replicated), (sharded_model, sharded) = eight_bit(HALVES, zero_stage=0), eight_bit(HALVES)
    for built in ((whole_model, replicated), (sharded_model, sharded)):
        train(built, 0, 1)
    plain = zgraph.AdamW8bit(Net().bfloat16().parameters())
    for ours, theirs in ((sharded, replicated), (replicated, sharded), (plain, sharded)):
        for state in (theirs.state_dict(), theirs.unpacked_state_dict()):
            before = [entries["packed"].clone() for entries in ours.state.values()]
            with pytest.raises(
                ValueError, match=r"placed \(.*parameters that are placed alike, or write zgraph\.save_"
            ):
                ours.load_state_dict(state)
            after = [entries["packed"] for entries in ours.state.values()]
            assert_equal([whole(one) for one in after], [whole(one) for one in before])
    torch.save(sharded.unpacked_state_dict(), f"{folder}/{dist.get_rank()}.pt")
    saved = zgraph.save_checkpoint(folder, sharded_model, sharded, step=1)
    zgraph.load_checkpoint(saved, whole_model, replicated)
    assert_equal(contents(replicated), contents(sharded))


@worlds(2)
def test_a_state_dict_of_another_layout_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(of_other_layout, str(tmp_path))


def checkpoints_of_others(folder: str) -> None:
    makes: dict[str, Any] = {
        "adam": lambda given: torch.optim.Adam(given),
        "amsgrad": lambda given: torch.optim.AdamW(given, amsgrad=True),
        "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    }
    for name, make in makes.items():
        model = zgraph.shard(Net())
        other = make(model.parameters())
        train((model, other), 0, 1)
        saved = zgraph.save_checkpoint(f"{folder}/{name}", model, other, step=1)
        for dtype in (FLOATS, HALVES):
            built = eight_bit(dtype)
            before = [whole(one.detach()).clone() for one in built[0].parameters()]
            with pytest.raises(zgraph.CheckpointError, match=r"of another optimizer: .* Nothing was loaded"):
                zgraph.load_checkpoint(saved, *built)
            assert_equal([whole(one.detach()) for one in built[0].parameters()], before)
    built, exact = eight_bit(FLOATS), full_precision()
    train(built, 0, 1)
    saved = zgraph.save_checkpoint(f"{folder}/packed", *built, step=1)
    with pytest.raises(zgraph.CheckpointError, match=r"AdamW cannot read it.*whose unpacked_state_dict"):
        zgraph.load_checkpoint(saved, *exact)


@worlds(2)
def test_checkpoints_of_other_optimizers_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(checkpoints_of_others, str(tmp_path))


def load_other_weights(folder: str) -> None:
    first, second = eight_bit(HALVES), eight_bit(FLOATS)
    train(first, 0, 1)
    saved = zgraph.save_checkpoint(folder, *first, step=1)
    before = [whole(one.detach()).clone() for one in second[0].parameters()]
    with pytest.raises(zgraph.CheckpointError, match=r"torch\.bfloat16 in the checkpoint and .* torch\.float32"):
        zgraph.load_checkpoint(saved, *second)
    assert_equal([whole(one.detach()) for one in second[0].parameters()], before)


@worlds(1)
def test_a_checkpoint_of_bf16_weights_is_not_one_of_fp32(ranks: Ranks, tmp_path: Path) -> None:
    """Its state has remainders of the weights, which an fp32 weight does not have."""
    ranks.run(load_other_weights, str(tmp_path))
