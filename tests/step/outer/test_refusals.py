"""Loops and options that `zgraph.OuterSteps` refuses, on all ranks and by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zgraph
from tests.support.models import Language
from tests.support.outer_runs import LOCO, Run, batches, loss_of
from tests.support.ranks import Ranks, worlds
from zgraph import passes


def check_other_options() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    for name, options in {"every": {"every": 4 + rank}, "codec": {"codec": None if rank else LOCO}}.items():
        with pytest.raises(zgraph.ZgraphError, match=f"{name} is .* on site 1, and .* on site 0"):
            zgraph.OuterSteps(Language(), group, **options)
    with pytest.raises(zgraph.ZgraphError, match="embed"):
        zgraph.OuterSteps(Language(width=12 + 2 * rank), group)


@worlds(2)
def test_sites_with_other_options_are_refused_on_all(ranks: Ranks) -> None:
    ranks.run(check_other_options)


def check_a_rank_that_skips() -> None:
    run = Run(1)
    run.outer = zgraph.OuterSteps(run.model, every=1, delay=0)
    with pytest.raises(zgraph.AgreementError, match=r"OuterSteps\.step"):
        for step in range(3):
            loss_of(run.model, *batches(step, dist.get_rank(), 0)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            if dist.get_rank() == 0:
                run.outer.step()


@worlds(2)
def test_a_rank_that_takes_no_outer_steps_is_named(ranks: Ranks) -> None:
    ranks.run(check_a_rank_that_skips)


def check_an_evaluation_on_one_rank() -> None:
    run = Run(1)
    with pytest.raises(zgraph.AgreementError, match=r"OuterSteps\.anchor"):
        if dist.get_rank() == 0:
            with run.outer.anchor():
                run.values()
        run.train(0, 1)


@worlds(2)
def test_a_rank_that_evaluates_the_anchor_by_itself_is_named(ranks: Ranks) -> None:
    ranks.run(check_an_evaluation_on_one_rank)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"codec": 4}, "codec is a int"),
        ({"codec": passes.LowRank(rank=1)}, "codec is a LowRank"),
        ({"fragments": 31}, "fragments=31 with every=30"),
        ({"delay": 31}, "delay=31 with every=30"),
        ({"sites": "mesh"}, "sites is a str"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"zgraph.OuterSteps: {text}"):
        zgraph.OuterSteps(nn.Linear(2, 2), **options)  # pyright: ignore


def check_windows() -> None:
    run = Run(1)
    with zgraph.no_sync(run.model):
        loss_of(run.model, *batches(0, 0, 0)).backward()
    with pytest.raises(zgraph.ZgraphError, match="no_sync window is open"):
        run.outer.step()


@worlds(2)
def test_a_step_in_a_window_is_refused(ranks: Ranks) -> None:
    ranks.run(check_windows)


def test_models_without_parameters_to_train_are_refused() -> None:
    with pytest.raises(zgraph.ZgraphError, match="no parameter of the model requires gradients"):
        zgraph.OuterSteps(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(zgraph.ZgraphError, match="weight has no values yet"):
        zgraph.OuterSteps(nn.Linear(2, 2, device="meta"))


def check_unequal_steps() -> None:
    """A site with fewer batches finishes while the other trains on: an error on both, with the steps of each."""
    model = nn.Linear(40, 40)
    outer = zgraph.OuterSteps(model, dist.group.WORLD, every=4, fragments=2)
    with pytest.raises(zgraph.ZgraphError, match=r"after 5 steps, and site 1 fragment \d after 6 steps"):
        for _ in range(5 if dist.get_rank() == 0 else 8):
            outer.step()
        outer.finish()
    assert len(outer.state_dict()["running"]) == 0, "what failed is forgotten"


@worlds(2)
def test_sites_with_unequal_numbers_of_steps_are_told(ranks: Ranks) -> None:
    ranks.run(check_unequal_steps)


def check_values_that_are_not_finite() -> None:
    model = nn.Linear(40, 40)
    outer = zgraph.OuterSteps(model, dist.group.WORLD, every=1, fragments=1, delay=0)
    before = model.weight.detach().clone()
    if dist.get_rank() == 1:
        model.weight.data[3, 4] = float("nan")
    with pytest.raises(zgraph.ZgraphError, match=r"site 1 has values that are not finite among weight, bias"):
        outer.step()
    assert outer.state_dict()["weights"] == [1.0], "the step counts in the next round"
    model.weight.data.copy_(before)
    outer.step()
    assert torch.equal(model.weight, before), "the anchor has kept no NaN"


@worlds(2)
def test_a_site_with_nan_is_named_and_changes_no_anchor(ranks: Ranks) -> None:
    ranks.run(check_values_that_are_not_finite)


def test_weights_are_finite_and_not_negative() -> None:
    outer = zgraph.OuterSteps(nn.Linear(2, 2), every=1)
    for weight in (-1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match="weight="):
            outer.step(weight=weight)  # pyright: ignore
    assert "0 steps" in str(outer)


def test_calls_inside_the_anchor_are_refused() -> None:
    outer = zgraph.OuterSteps(nn.Linear(2, 2), every=1)
    with outer.anchor(), pytest.raises(zgraph.ZgraphError, match=r"inside `with outer.anchor\(\)`"):
        outer.step()
    with pytest.raises(ArithmeticError), outer.anchor():
        raise ArithmeticError
    outer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied: Callable[[object], object]) -> None:
    outer = zgraph.OuterSteps(nn.Linear(2, 2))
    with pytest.raises(zgraph.ZgraphError, match=r"save outer\.state_dict"):
        copied(outer)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(zgraph.ZgraphError, match="weight is complex"):
        zgraph.OuterSteps(nn.Linear(2, 2, dtype=torch.complex64))
