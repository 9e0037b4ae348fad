"""A process in which Triton's interpreter runs kernels on the CPU: it has to be chosen before Triton is imported."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

LIMIT_S = 120.0


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls a function of a module in that process, and returns what it returns or raises what it raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _choose_interpreter) as process:
        yield lambda function, *args: process.submit(function, *args).result(LIMIT_S)


def _choose_interpreter() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # The interpreter computes both sides of tl.where with numpy, which warns of a division by zero in the other side.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
