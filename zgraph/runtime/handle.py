"""Handles: small tensors that tell a compiled graph which parameter it is working for.

Equal blocks share one compiled graph, so the graph itself may not name a parameter. Instead each call passes handles as
tensor arguments. A handle holds its parameter's qualified name, which the error of a failed collective reports.
"""

from __future__ import annotations

import torch
from torch import Tensor

# One size for all handles: otherwise two blocks whose names differ in length would not share a graph.
HANDLE_BYTES = 96


def make_handle(name: str) -> Tensor:
    """Make a uint8 CPU tensor that holds `name`. If `name` is too long, its start is cut off. Shape: [96]."""
    encoded = name.encode()
    if len(encoded) > HANDLE_BYTES:
        encoded = b"..." + encoded[3 - HANDLE_BYTES :]
    return torch.tensor(list(encoded.ljust(HANDLE_BYTES, b"\0")), dtype=torch.uint8)


def name_of(handle: object) -> str:
    """The name that a handle holds; "?" for unreadable tensors, such as fake ones."""
    if type(handle) is not Tensor or handle.dtype != torch.uint8 or handle.shape != (HANDLE_BYTES,):
        return "?"
    if handle.is_meta or handle.layout != torch.strided:
        return "?"
    return bytes(handle.tolist()).rstrip(b"\0").decode(errors="replace")
