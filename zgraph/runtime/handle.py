"""Handles: small tensors that tell a compiled graph which parameter it works for.

Equal blocks of a model share one compiled graph, so the graph cannot contain parameter names. Instead, each call passes
handles as tensor arguments. A handle contains its parameter's qualified name, for error messages of collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

# One size for all handles: otherwise two blocks whose names differ in length would not share a graph.
HANDLE_BYTES = 96


def make_handle(name: str) -> Tensor:
    """Encode a name as a uint8 CPU tensor of shape [96]; a name that is too long loses its start."""
    encoded = name.encode()
    if len(encoded) > HANDLE_BYTES:
        encoded = b"..." + encoded[3 - HANDLE_BYTES :]
    return torch.tensor(list(encoded.ljust(HANDLE_BYTES, b"\0")), dtype=torch.uint8)


def name_of(handle: object) -> str:
    """Return the name that a handle contains; "?" for tensors without readable values, such as fake tensors."""
    if type(handle) is not Tensor or handle.dtype != torch.uint8 or handle.shape != (HANDLE_BYTES,):
        return "?"
    if handle.is_meta or handle.layout != torch.strided:
        return "?"
    return bytes(handle.tolist()).rstrip(b"\0").decode(errors="replace")
