"""Operators that copy tensors between memory spaces: a start and a wait each, like collectives.

    out   = offload_start(activation)     on its way to the host; the activation must not be written to
    kept  = wait_copy(out)                on the host; the activation may be freed
    back  = reload_start(kept, device)    on its way back
    again = wait_copy(back)               the same values, in new memory of the device

    back  = store_start(again, kept)      on its way over kept; neither may be written to, nor kept be read
    done  = wait_copy(back)               stored in kept; again may be freed

    back  = return_start(kept, tensor)    on its way over a device tensor, for example after an update on the host

The result of a start is read only by its wait. In a compiled graph these copies run concurrently with compute
(`zgraph.tiers`); the kernels here copy immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.tiers.copy_lanes import lanes_of


@torch.library.custom_op("zgraph::offload_start", mutates_args=())
def offload_start(tensor: Tensor) -> Tensor:
    """Copy a device tensor to host memory, which is pinned on CUDA: same shape, dtype and, if dense, strides."""
    return lanes_of(tensor.device).offload(tensor).wait()


@offload_start.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


@torch.library.custom_op("zgraph::reload_start", mutates_args=())
def reload_start(kept: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor into new memory of a device: same shape, dtype and strides."""
    return lanes_of(device).reload(kept).wait()


@reload_start.register_fake
def _(kept: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(kept, device=device)


@torch.library.custom_op("zgraph::spill_start", mutates_args=())
def spill_start(tensor: Tensor, folder: str) -> Tensor:
    """Copy a device tensor to a new, contiguous one on disk, in a folder that a model uses."""
    return lanes_of(tensor.device).spill(tensor, folder).wait()


@spill_start.register_fake
def _(tensor: Tensor, folder: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@torch.library.custom_op("zgraph::store_start", mutates_args=("kept",))
def store_start(source: Tensor, kept: Tensor) -> Tensor:
    """Copy a device tensor over the one that it was reloaded from.

    Args:
        source: tensor on the device.
        kept: tensor of the same shape and dtype, on the host or on disk.

    Returns:
        [0] for the wait.
    """
    lanes_of(source.device).store(source, kept).wait()
    return source.new_empty(0)


@store_start.register_fake
def _(source: Tensor, kept: Tensor) -> Tensor:
    return source.new_empty(0)


@torch.library.custom_op("zgraph::return_start", mutates_args=("tensor",))
def return_start(kept: Tensor, tensor: Tensor) -> Tensor:
    """Copy a host tensor back over the device tensor that it was copied from before an update on the host.

    Args:
        kept: tensor on the host.
        tensor: tensor of the same shape and dtype, on the device.

    Returns:
        [0] for the wait.
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
    """Wait for a copy: the same tensor, usable."""
    return started


@torch.library.register_fake("zgraph::wait_copy")
def _(started: Tensor) -> Tensor:
    return torch.empty_like(started)


@torch.library.custom_op("zgraph::wait_update", mutates_args=("written",))
def wait_update(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Wait for an update that runs concurrently with compute, on the host.

    Args:
        written: tensors that the update writes to; they may be read after this.
        read: other tensors that it reads, such as gradients; they may be freed after this.
    """


@wait_update.register_fake
def _(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    pass


def wait_update_op() -> Any:
    """zgraph::wait_update(written, read)"""
    return torch.ops.zgraph.wait_update.default


def offload_op() -> Any:
    """zgraph::offload_start(tensor) -> its copy on the host"""
    return torch.ops.zgraph.offload_start.default


def reload_op() -> Any:
    """zgraph::reload_start(kept, device) -> its copy on the device"""
    return torch.ops.zgraph.reload_start.default


def spill_op() -> Any:
    """zgraph::spill_start(tensor, folder) -> its copy on disk"""
    return torch.ops.zgraph.spill_start.default


def return_op() -> Any:
    """zgraph::return_start(kept, tensor) -> a tensor whose wait ends when the device tensor holds the kept values"""
    return torch.ops.zgraph.return_start.default


def store_op() -> Any:
    """zgraph::store_start(source, kept) -> a tensor whose wait ends when kept holds the values of the source"""
    return torch.ops.zgraph.store_start.default


def wait_copy_op() -> Any:
    """zgraph::wait_copy(started) -> the same tensor, usable"""
    return torch.ops.zgraph.wait_copy.default
