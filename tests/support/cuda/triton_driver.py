"""A driver for Triton that names a device and runs nothing: what Triton and Inductor ask before they compile."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any


def pretend() -> None:
    """Make it this process's active driver."""
    triton: Any = importlib.import_module("triton")
    base: Any = importlib.import_module("triton.backends.driver").DriverBase
    target: Any = importlib.import_module("triton.backends.compiler").GPUTarget

    class Driver(base):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None: ...

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, type_name: str) -> str:
            return "int"

        def get_current_target(self) -> Any:
            return target("cuda", 90, 32)

        def get_active_torch_device(self) -> Any:
            return importlib.import_module("torch").device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise RuntimeError("nothing runs here")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

    # Kernels that Inductor has written look their driver up among the backends when they are loaded.
    registered: dict[str, Any] = importlib.import_module("triton.backends").backends
    registered["nvidia"] = dataclasses.replace(registered["nvidia"], driver=Driver)
    triton.runtime.driver.set_active(Driver())
