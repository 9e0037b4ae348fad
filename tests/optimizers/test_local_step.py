"""Steps and clipping on local shards: the same bits as on DTensors, the same state, and DTensor is left out."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

import zgraph
from tests.support import models
from tests.support.budget import long
from tests.support.ranks import Ranks, every_world, worlds
from tests.support.whole_tensors import kind_of, whole
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.memory import DispatchMode

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MAX_NORM = 0.5
CLIPS: tuple[Callable[..., Tensor], ...] = (zgraph.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
STEPS = 5

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "sgd_momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov_foreach": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.1, amsgrad=True),
    "adam_maximize_foreach": lambda given: torch.optim.Adam(given, lr=0.1, maximize=True, foreach=True),
    "adam_fused": lambda given: torch.optim.Adam(given, lr=0.1, fused=True),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.1),
    "adamw_foreach": lambda given: torch.optim.AdamW(given, lr=0.1, foreach=True),
    "adamw_fused": lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.1), fused=True),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1),
    "adamax": lambda given: torch.optim.Adamax(given, lr=0.1),
    "nadam": lambda given: torch.optim.NAdam(given, lr=0.1),
    "radam": lambda given: torch.optim.RAdam(given, lr=0.1),
    "adadelta": lambda given: torch.optim.Adadelta(given, lr=0.1),
    "asgd": lambda given: torch.optim.ASGD(given, lr=0.1),
}


def sharded(stages: str) -> nn.Module:
    """models.Uneven: 13, 5, 2 and 1 rows and a scalar, so that some ranks have no rows."""
    torch.manual_seed(5)
    model = models.Uneven()
    if stages == "mixed":
        zgraph.shard(model.layers[0], zero_stage=0)
        zgraph.shard(model.layers[2], zero_stage=1)
        zgraph.shard(model.layers[4], zero_stage=2)
    return zgraph.shard(model, zero_stage=0 if stages == "replicated" else 3)


def groups_of(model: nn.Module) -> list[Any]:
    """Two groups, one with options of its own; the scalar has no gradient in every fourth step (`backward`)."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices}, {"params": others, "lr": 0.05}]


def backward(model: nn.Module, step: int, scale: float | Tensor = 1.0) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank() + 10 * step)
    (model(torch.randn(8, 6, generator=generator)).square().sum() * 10 * scale).backward()
    if step % 4 == 0:
        dict(model.named_parameters())["shift"].grad = None


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Equal bit for bit, and of the same types, layouts and keys."""
    if isinstance(expected, Tensor):
        assert kind_of(found) == kind_of(expected), f"{where}: {kind_of(found)}, not {kind_of(expected)}"
        if isinstance(expected, DTensor):
            assert isinstance(found, DTensor)
            assert found.placements == expected.placements and found.shape == expected.shape, where
            assert found.stride() == expected.stride(), where
        assert found.dtype == expected.dtype and found.requires_grad == expected.requires_grad, where
        assert torch.allclose(whole(found), whole(expected), rtol=0, atol=0, equal_nan=True), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {list(found)}, not {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{where}.{number}")
    else:
        assert found == expected, f"{where}: {found}, not {expected}"


def assert_same_runs(
    ours: tuple[nn.Module, torch.optim.Optimizer], theirs: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    assert_same(dict(ours[0].named_parameters()), dict(theirs[0].named_parameters()), "parameters")
    assert_same(ours[1].state_dict(), theirs[1].state_dict(), "state_dict")
    assert all(isinstance(parameter, DTensor) for group in ours[1].param_groups for parameter in group["params"])
    assert {id(parameter) for parameter in ours[1].state} <= {id(parameter) for parameter in ours[0].parameters()}


def train_both(optimizer: str, stages: str) -> None:
    runs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    schedules: list[Any] = []
    for _ in range(2):
        model = sharded(stages)
        made = OPTIMIZERS[optimizer](groups_of(model))
        runs.append((model, made))
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(made, 0.9))
    zgraph.step_on_shards(runs[0][1])
    for step in range(STEPS):
        for (model, made), clip, schedule in zip(runs, CLIPS, schedules, strict=True):
            backward(model, step)
            clip(model.parameters(), MAX_NORM)
            made.step()
            made.zero_grad()
            schedule.step()
        assert_same_runs(*runs)


# On three ranks some parameters have ranks without rows; other numbers only tell whether the number matters.
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        *((3, name) for name in [*OPTIMIZERS][::2]),
        *((3, name) for name in [*OPTIMIZERS][1::2]),
        *((world, name) for world in (1, 2, 4) for name in ("adam", "adamw_fused")),
    ],
    indirect=["ranks"],
    scope="session",
)
@pytest.mark.parametrize("stages", ["mixed", *long("sharded")])  # of the mixed ones some are sharded
def test_a_step_on_shards_is_a_step_on_dtensors(ranks: Ranks, optimizer: str, stages: str) -> None:
    ranks.run(train_both, optimizer, stages)


def _first(optimizer: torch.optim.Optimizer) -> Tensor:
    return optimizer.param_groups[0]["params"][0]


def _replace_a_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[_first(optimizer)]
    state["exp_avg"] = state["exp_avg"] * 2


def _load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state_dict = copy.deepcopy(optimizer.state_dict())
    for entries in state_dict["state"].values():
        entries["exp_avg"] *= 3
    optimizer.load_state_dict(state_dict)


def _move_the_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As `Module.to` does: another tensor in the place of a parameter, which stays the same object."""
    parameter = _first(optimizer)
    grad = parameter.grad
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))
    parameter.grad = grad


def _move_the_shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    local = local_of(cast(DTensor, _first(optimizer)))
    local.data = local.data * 2


def _replace_a_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter = _first(optimizer)
    other = nn.Parameter(parameter.detach() * 2)
    other.grad = parameter.grad
    optimizer.state[other] = optimizer.state.pop(parameter)
    optimizer.param_groups[0]["params"][0] = other


def _add_a_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    added = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer.add_param_group({"params": added})


def _make_a_gradient_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][-1]
    assert parameter.placements == parameter.grad.placements == (Shard(0),)
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])


def _drop_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _first(optimizer).grad = None


CHANGES: tuple[Callable[[nn.Module, torch.optim.Optimizer], None], ...] = (
    _replace_a_moment,
    _load,
    _move_the_parameter,
    _move_the_shard,
    _replace_a_parameter,
    _add_a_group,
    _make_a_gradient_whole,
    _drop_gradients,
)


def change_both(position: int) -> None:
    """Two steps, a change between backward and the third, and another step."""
    runs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for ours in (True, False):
        model = sharded("mixed")
        optimizer = OPTIMIZERS["adamw"](groups_of(model))
        if ours:
            zgraph.step_on_shards(optimizer)
        for step in (1, 2, 3, 5):
            backward(model, step)
            zgraph.clip_grad_norm_(model.parameters(), MAX_NORM)
            if step == 3:
                CHANGES[position](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_same(dict(runs[0][0].named_parameters()), dict(runs[1][0].named_parameters()), "parameters")
    assert_same(runs[0][1].param_groups, runs[1][1].param_groups, "groups")
    assert_same(runs[0][1].state_dict(), runs[1][1].state_dict(), "state_dict")


@pytest.mark.parametrize("change", [*CHANGES[::2], *CHANGES[1::2]], ids=lambda change: change.__name__.strip("_"))
def test_a_change_between_two_steps_is_seen(ranks: Ranks, change: Any) -> None:
    ranks.run(change_both, CHANGES.index(change))


def freeze_both(set_to_none: bool) -> None:
    """Two steps, two with a frozen parameter, and two with all of them again."""
    runs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for ours in (True, False):
        model = sharded("mixed")
        optimizer = OPTIMIZERS["adamw"](groups_of(model))
        if ours:
            zgraph.step_on_shards(optimizer)
        frozen = _first(optimizer)
        for step in (1, 2, 3, 5, 6, 7):
            frozen.requires_grad_(step not in (3, 5))
            backward(model, step)
            assert (frozen.grad is None) == (set_to_none and not frozen.requires_grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        runs.append((model, optimizer))
    assert_same_runs(*runs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_is_frozen_and_trained_again(ranks: Ranks, set_to_none: bool) -> None:
    """Frozen it has no gradient, or one of zeros, with which weight decay goes on."""
    ranks.run(freeze_both, set_to_none)


def test_a_step_on_replicas_is_a_step_on_dtensors(ranks: Ranks) -> None:
    ranks.run(train_both, "adamw_fused", "replicated")


def clip_both(stages: str) -> None:
    for norm_type in (1.0, 2.0, 3.5):
        for foreach in (None, True, False):
            found: list[tuple[Tensor, list[Tensor | None]]] = []
            for clip in CLIPS:
                model = sharded(stages)
                backward(model, 1)
                norm = clip(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
                found.append((norm, [parameter.grad for parameter in model.parameters()]))
            assert_same(found[0], found[1], f"{norm_type}, foreach={foreach}")


@pytest.mark.parametrize("stages", ["sharded", "mixed", "replicated"])
@every_world
def test_clipping_on_shards_is_clipping_on_dtensors(ranks: Ranks, stages: str) -> None:
    ranks.run(clip_both, stages)


def clip_on_a_hybrid_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    found: list[Any] = []
    for clip in CLIPS:
        torch.manual_seed(5)
        model = models.Uneven()
        zgraph.shard(model.layers[2], mesh, zero_stage=0)
        zgraph.shard(model, mesh)
        backward(model, 1)
        found.append((clip(model.parameters(), MAX_NORM), [parameter.grad for parameter in model.parameters()]))
    assert_same(found[0], found[1], "hybrid")


@worlds(4)
def test_clipping_on_a_hybrid_mesh(ranks: Ranks) -> None:
    """Two hosts of two ranks."""
    ranks.run(clip_on_a_hybrid_mesh)


class DTensorCalls(DispatchMode):
    """Counts the operators that are called with a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_of_a_step() -> tuple[list[str], list[str], list[str]]:
    model = sharded("mixed")
    optimizer = zgraph.step_on_shards(OPTIMIZERS["adamw"](groups_of(model)))
    backward(model, 1)
    with DTensorCalls() as first:
        optimizer.step()
    with DTensorCalls() as second:
        optimizer.step()
    with DTensorCalls() as clipping:
        zgraph.clip_grad_norm_(model.parameters(), MAX_NORM)
    return first.seen, second.seen, clipping.seen


def test_dtensor_sees_no_step_and_no_norm(ranks: Ranks) -> None:
    assert ranks.run(calls_of_a_step) == [([], [], [])] * 2


def scaled_steps(optimizer: str) -> list[float]:
    """One rank overflows in the second step, which none of them may take."""
    runs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    scales: list[float] = []
    for ours in (True, False):
        model = sharded("mixed")
        made = OPTIMIZERS[optimizer](groups_of(model))
        if ours:
            zgraph.step_on_shards(made)
        scaler = zgraph.GradScaler("cpu", init_scale=1024.0)
        for step in (1, 2, 3):
            overflow = math.inf if step == 2 and dist.get_rank() == 0 else 1.0
            backward(model, step, scaler.scale(torch.tensor(overflow)))
            if step == 3:
                scaler.unscale_(made)
            scaler.step(made)
            scaler.update()
            made.zero_grad()
        scales.append(float(scaler.get_scale()))
        runs.append((model, made))
    assert_same_runs(*runs)
    return scales


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_momentum"])
def test_a_scaler_scales_and_skips_as_before(ranks: Ranks, optimizer: str) -> None:
    assert ranks.run(scaled_steps, optimizer) == [[512.0, 512.0]] * 2


def resume(directory: str, saved_on_shards: bool) -> None:
    """Three steps in one go, and with a checkpoint behind the second, each half on another road."""
    model = sharded("mixed")
    expected = (model, OPTIMIZERS["adamw_fused"](groups_of(model)))
    for step in range(3):
        backward(model, step)
        expected[1].step()
        expected[1].zero_grad()
    model = sharded("mixed")
    optimizer = OPTIMIZERS["adamw_fused"](groups_of(model))
    if saved_on_shards:
        zgraph.step_on_shards(optimizer)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    zgraph.save_checkpoint(directory, model, optimizer, step=2)
    in_memory = copy.deepcopy(optimizer.state_dict())
    at_two = [parameter.detach().clone() for parameter in model.parameters()]
    for from_disk in (True, False):
        model = sharded("mixed")
        optimizer = OPTIMIZERS["adamw_fused"](groups_of(model))
        if not saved_on_shards:
            zgraph.step_on_shards(optimizer)
        if from_disk:
            latest = zgraph.latest_checkpoint(directory)
            assert latest is not None
            assert zgraph.load_checkpoint(latest, model, optimizer).step == 2
        else:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), at_two, strict=True):
                    parameter.copy_(value)
            optimizer.load_state_dict(in_memory)
        backward(model, 2)
        optimizer.step()
        optimizer.zero_grad()
        assert_same_runs((model, optimizer), expected)


@pytest.mark.parametrize("saved_on_shards", [True, False])
@every_world
def test_checkpoints_do_not_tell_the_roads_apart(ranks: Ranks, tmp_path: Path, saved_on_shards: bool) -> None:
    ranks.run(resume, str(tmp_path), saved_on_shards)


class Broken(RuntimeError):
    pass


def failing_step() -> None:
    model = sharded("sharded")
    optimizer = zgraph.step_on_shards(OPTIMIZERS["sgd_momentum"](groups_of(model)))
    backward(model, 1)
    optimizer.step()
    before = optimizer.state_dict()

    def refuse(*_: object) -> None:
        raise Broken

    hook = optimizer.register_step_pre_hook(refuse)
    with pytest.raises(Broken):
        optimizer.step()
    hook.remove()
    assert_same(optimizer.state_dict(), before, "after a step that raised")
    with DTensorCalls() as calls:
        loss = optimizer.step(lambda: 3.0)
    assert loss == 3.0
    assert not calls.seen


def test_a_step_that_raises_leaves_all_as_it_was(ranks: Ranks) -> None:
    ranks.run(failing_step)


def test_twice_is_once_and_plain_tensors_go_along() -> None:
    def stepped(times: int) -> list[Tensor]:
        torch.manual_seed(5)
        model = models.Uneven()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(times):
            zgraph.step_on_shards(optimizer)
        for _ in range(2):
            model(torch.ones(4, 6)).square().sum().backward()
            optimizer.step()
        return list(model.parameters())

    assert_same(stepped(1), stepped(0), "once")
    assert_same(stepped(2), stepped(0), "twice")


def test_an_optimizer_that_looks_at_whole_matrices_is_refused() -> None:
    class Mine(torch.optim.SGD):
        pass

    weight = nn.Parameter(torch.ones(2, 2))
    for optimizer in (torch.optim.LBFGS([weight]), Mine([weight], lr=0.1)):
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__} is not known to update each element"):
            zgraph.step_on_shards(optimizer)


def collected_in_a_step() -> None:
    """A model that is gone is collected while another one's optimizer steps, which iterates over torch's hooks."""
    gc.disable()
    old = sharded("sharded")
    old.itself = [old]  # a cycle, as compiled models are
    del old
    handle = register_optimizer_step_post_hook(lambda *_: gc.collect() and None)
    try:
        model = sharded("sharded")
        optimizer = OPTIMIZERS["adamw"](groups_of(model))
        backward(model, 1)
        optimizer.step()
    finally:
        handle.remove()
        gc.enable()


def test_a_model_may_be_collected_in_a_step(ranks: Ranks) -> None:
    ranks.run(collected_in_a_step)
