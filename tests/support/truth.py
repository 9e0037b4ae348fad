"""Loops that are run twice: on a sharded model with each rank's own batch, and on the plain one with all batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.compiled import with_fx
from tests.support.whole_tensors import whole

Tensors = dict[str, Tensor]
# Of the model, what is called in its place, and a function that gives the batch of a step.
Loop = Callable[[nn.Module, Any, Callable[[int], tuple[Tensor, Tensor]]], Tensors]


def batch(step: int, ranks: list[int], features: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Rows and labels of a step, those of several ranks joined."""
    parts: list[tuple[Tensor, Tensor]] = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(7919 * step + 31 * rank)
        rows = torch.randn(4, features, generator=generator)
        parts.append((rows, torch.randint(classes, (4,), generator=generator)))
    return torch.cat([rows for rows, _ in parts]), torch.cat([labels for _, labels in parts])


def run_sharded(build: Callable[[], nn.Module], loop: Loop, mode: str, stage: int) -> Tensors:
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=stage)
    call = with_fx(model) if mode == "fx" else model
    return loop(model, call, lambda step: batch(step, [dist.get_rank()]))


def run_plain(build: Callable[[], nn.Module], loop: Loop) -> Tensors:
    torch.manual_seed(0)
    model = build()
    return loop(model, model, lambda step: batch(step, list(range(dist.get_world_size()))))


def logged(model: nn.Module) -> Tensors:
    """Whole parameters and gradients."""
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter).detach().clone()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = whole(parameter.grad).detach().clone()
    return found


def check_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def refusal(run: Callable[[], object]) -> str:
    """The text of the error of zgraph's own that a call ends with.

    Raises:
        AssertionError: it ends without one.
    """
    try:
        run()
    except (zgraph.ZgraphError, ValueError) as error:
        assert str(error).startswith("zgraph"), error
        return str(error)
    raise AssertionError("nothing was refused")
