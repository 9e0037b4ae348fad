"""Compiles with a folder of saved plans, as successive runs of a script do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zgraph

VARIABLE = "ZGRAPH_CACHE_DIR"


@contextlib.contextmanager
def plans_in(folder: Path | str) -> Generator[None]:
    """Save plans in a folder, and find them there; "" for nowhere."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def runs(folder: Path, once: Callable[[], tuple[Any, zgraph.Report]], number: int = 2) -> list[tuple[Any, int, int]]:
    """The results of a script in successive runs, each with the numbers of frames and of plans found on disk."""
    found: list[tuple[Any, int, int]] = []
    with plans_in(folder):
        for _ in range(number):
            torch.compiler.reset()
            torch.manual_seed(0)
            result, report = once()
            found.append((result, len({graph.frame for graph in report.graphs}), report.cached_plans))
    return found


def whole(values: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients or parameters by name, unsharded."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in values.items()
        if value is not None
    }


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: one.grad for name, one in model.named_parameters()})


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
