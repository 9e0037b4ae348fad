"""Compiles C++ sources and loads functions from them; without a compiler, shows one warning and loads nothing."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from zgraph.errors import ZgraphWarning
from zgraph.torch_compat.inductor import load_cpp


def function_of(source: str, name: str, argtypes: tuple[Any, ...]) -> Any:
    """Compile `source` and return its void function `name`; None if the source cannot be compiled."""
    try:
        kernel = getattr(load_cpp(source), name)
    except (RuntimeError, OSError) as error:
        said = str(error).strip().splitlines()
        _warn_once(next((line for line in said if "error:" in line), said[0]))
        return None
    kernel.argtypes, kernel.restype = argtypes, None
    return kernel


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"zgraph.codegen: the kernels for CPUs cannot be compiled ({reason}), so plain PyTorch compresses gradients "
        "and rounds moments, with bitwise equal results but many times more slowly; install g++, or name a C++ "
        "compiler in the environment variable CXX.",
        ZgraphWarning,
        stacklevel=2,
    )
