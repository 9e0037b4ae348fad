"""Operators that copy tensors between device, host and disk: each copy is a start and a wait, like a collective.

    out   = offload_start(activation)     starts a copy to the host; the activation must not change until the wait
    kept  = wait_copy(out)                the copy on the host; the activation may be freed
    back  = reload_start(kept, device)    starts a copy to the device
    again = wait_copy(back)               the same values, in new memory of the device

    back  = store_start(again, kept)      starts a copy of `again` over `kept`; do not use either until the wait
    done  = wait_copy(back)               `kept` has the values; `again` may be freed

    back  = return_start(kept, tensor)    starts a copy over a device tensor, for example after an update on the host

Only the wait may read the result of a start. In a compiled graph these copies run concurrently with compute
(`zgraph.tiers`); the eager kernels in this file copy immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.tiers.copy_lanes import lanes_of


@torch.library.custom_op("zgraph::offload_start", mutates_args=())
def offload_start(tensor: Tensor) -> Tensor:
    """Copy a device tensor to new host memory, pinned if the device is a GPU.

    The copy has the same shape and dtype, and the same strides if the tensor is dense.
    """
    return lanes_of(tensor.device).offload(tensor).wait()


@offload_start.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


@torch.library.custom_op("zgraph::reload_start", mutates_args=())
def reload_start(kept: Tensor, device: torch.device) -> Tensor:
    """Copy a host or disk tensor to new memory of a device, with the same shape, dtype and strides."""
    return lanes_of(device).reload(kept).wait()


@reload_start.register_fake
def _(kept: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(kept, device=device)


@torch.library.custom_op("zgraph::spill_start", mutates_args=())
def spill_start(tensor: Tensor, folder: str) -> Tensor:
    """Copy a device tensor to a new, contiguous tensor on disk, in a folder that a model already uses."""
    return lanes_of(tensor.device).spill(tensor, folder).wait()


@spill_start.register_fake
def _(tensor: Tensor, folder: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@torch.library.custom_op("zgraph::store_start", mutates_args=("kept",))
def store_start(source: Tensor, kept: Tensor) -> Tensor:
    """Copy a device tensor over the host or disk tensor that it was reloaded from.

    Args:
        source: tensor on the device.
        kept: tensor of the same shape and dtype, on the host or on disk.

    Returns:
        A tensor [0] for `wait_copy`; after this wait `kept` has the values.
    """
    lanes_of(source.device).store(source, kept).wait()
    return source.new_empty(0)


@store_start.register_fake
def _(source: Tensor, kept: Tensor) -> Tensor:
    return source.new_empty(0)


@torch.library.custom_op("zgraph::return_start", mutates_args=("tensor",))
def return_start(kept: Tensor, tensor: Tensor) -> Tensor:
    """Copy a host tensor back, after an update on the host, over the device tensor that it was copied from.

    Args:
        kept: tensor on the host.
        tensor: tensor of the same shape and dtype, on the device.

    Returns:
        A tensor [0] for `wait_copy`; after this wait `tensor` has the values.
    """
    lanes_of(tensor.device).give_back(kept, tensor).wait()
    return tensor.new_empty(0)


@return_start.register_fake
def _(kept: Tensor, tensor: Tensor) -> Tensor:
    return tensor.new_empty(0)


# Like `_c10d_functional::wait_tensor` it returns its argument without declaring the alias, which `custom_op` refuses.
torch.library.define("zgraph::wait_copy", "(Tensor started) -> Tensor")


@torch.library.impl("zgraph::wait_copy", "CompositeExplicitAutograd")
def wait_copy(started: Tensor) -> Tensor:
    """Wait for a started copy, and return its result, which may be read from now on."""
    return started


@torch.library.register_fake("zgraph::wait_copy")
def _(started: Tensor) -> Tensor:
    return torch.empty_like(started)


@torch.library.custom_op("zgraph::wait_update", mutates_args=("written",))
def wait_update(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Wait for an optimizer update that runs on the host concurrently with compute. In eager mode this does nothing.

    Args:
        written: tensors that the update writes to; they may be read after the wait.
        read: other tensors that the update reads, such as gradients; they may be freed after the wait.
    """


@wait_update.register_fake
def _(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    pass


def wait_update_op() -> Any:
    """Return the operator `zgraph::wait_update(written, read)`."""
    return torch.ops.zgraph.wait_update.default


def offload_op() -> Any:
    """Return the operator `zgraph::offload_start(tensor)`, whose result is a copy on the host."""
    return torch.ops.zgraph.offload_start.default


def reload_op() -> Any:
    """Return the operator `zgraph::reload_start(kept, device)`, whose result is a copy on the device."""
    return torch.ops.zgraph.reload_start.default


def spill_op() -> Any:
    """Return the operator `zgraph::spill_start(tensor, folder)`, whose result is a copy on disk."""
    return torch.ops.zgraph.spill_start.default


def return_op() -> Any:
    """Return the operator `zgraph::return_start(kept, tensor)`, which copies `kept` over `tensor`."""
    return torch.ops.zgraph.return_start.default


def store_op() -> Any:
    """Return the operator `zgraph::store_start(source, kept)`, which copies `source` over `kept`."""
    return torch.ops.zgraph.store_start.default


def wait_copy_op() -> Any:
    """Return the operator `zgraph::wait_copy(started)`, which waits for a copy and returns its result."""
    return torch.ops.zgraph.wait_copy.default
