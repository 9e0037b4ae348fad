"""`torch.compile` as most tests use it."""

from __future__ import annotations

from typing import Any

import torch


def with_fx(function: Any, **options: Any) -> Any:
    """Compiled by zgraph with the fx lowering: Inductor's C++ compiler takes seconds for each kernel."""
    return torch.compile(function, backend="zgraph", options={"lowering": "fx", **options})
