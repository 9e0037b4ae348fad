"""Broadcast of rank 0's buffers to all ranks, for any dtype and strides."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def check_buffers(module: nn.Module) -> None:
    """Check that every buffer can be broadcast.

    Raises:
        ValueError: a buffer cannot be sent; the message names it.
    """
    for name, buffer in _buffers(module):
        if buffer.layout != torch.strided or buffer.is_quantized:
            kind = "quantized" if buffer.is_quantized else f"of layout {buffer.layout}"
            raise ValueError(
                f"zgraph.shard: the buffer {name} is {kind}, and only dense tensors can be sent from rank 0 to the "
                "others. Keep it as a plain attribute, which each rank makes alike, or register its components "
                "(indices and values, or codes and scales) as buffers and build it in forward."
            )


def broadcast_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Copy rank 0's buffers to all ranks, as `shard` copies rank 0's parameters."""
    for group in mesh.get_all_groups():  # along the first axis, then from there along the second
        for _, buffer in _buffers(module):
            if not buffer.is_meta:
                _broadcast(buffer, group, mesh.device_type)


def _buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor)]


@torch.no_grad()
def _broadcast(buffer: Tensor, group: ProcessGroup, device_type: str) -> None:
    """Broadcast a buffer as contiguous bytes, since backends do not support all dtypes, strides and overlaps."""
    own = distinct_elements(buffer).resolve_conj().resolve_neg()
    # Add a dimension for the view as bytes: the buffer's last one may be empty or not contiguous.
    elements = own.to(device_type, copy=True, memory_format=torch.contiguous_format).unsqueeze(-1)
    dist.broadcast(elements.view(torch.uint8), src=dist.get_global_rank(group, 0), group=group)
    distinct_elements(buffer).copy_(elements.squeeze(-1))


def distinct_elements(buffer: Tensor) -> Tensor:
    """Return a view of a buffer without the repetitions that `expand` makes."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
