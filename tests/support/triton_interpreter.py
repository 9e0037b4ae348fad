"""A process in which Triton's interpreter runs kernels on the CPU: it has to be chosen before Triton is imported."""

from __future__ import annotations

import importlib
import importlib.util
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
    if importlib.util.find_spec("triton") is not None:
        _round_fused_operations_once()


def _round_fused_operations_once() -> None:
    """Let `tl.fma` be what it is on a GPU: the interpreter (Triton 3.6 to 3.7) rounds the product, and then the sum.

    fp64 holds the product of two fp32 numbers, and 29 more bits of the sum than fp32 does.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype("float64") * y.data.astype("float64") + z.data.astype("float64")
        return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)

    assert hasattr(interpreter.InterpreterBuilder, "create_fma")
    interpreter.InterpreterBuilder.create_fma = create_fma
