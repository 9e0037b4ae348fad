"""Refuse draws of Python's and numpy's random numbers in a captured step."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator
from typing import Any

import torch

from zgraph.errors import ZgraphError


@contextlib.contextmanager
def same_random_numbers() -> Generator[None]:
    """Refuse draws from Python's and numpy's generators inside the `with`: drawn numbers would become constants.

    Raises:
        ZgraphError: the step has drawn a number; the generators are restored.
    """
    numpy: Any = sys.modules.get("numpy")
    before, seed = (random.getstate(), None if numpy is None else numpy.random.get_state()), torch.initial_seed()
    yield
    after = random.getstate(), None if numpy is None else numpy.random.get_state()
    if torch.initial_seed() != seed:
        raise ZgraphError(
            f"zgraph.training_step: the step sets torch's seed ({torch.initial_seed()}), which would happen only while "
            "it is captured; call torch.manual_seed before the step."
        )
    names = [name for name, a, b in zip(("random", "numpy.random"), before, after, strict=True) if str(a) != str(b)]
    if names:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
        raise ZgraphError(
            f"zgraph.training_step: the step draws from {names[0]}, whose number would be a constant of its graph; "
            "draw outside and pass the number, or draw a tensor (torch.rand) and choose with torch.where."
        )
