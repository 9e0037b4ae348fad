"""Operators of gathers that send how a parameter has changed since the last gather.

    difference = weight_difference(shard, handle, ...)                  this rank's rows minus its copy of them
    ...                                                                 quantized, gathered, dequantized
    unsharded = add_difference(step, handle, ...)                       the copy plus what all ranks have sent

What quantization loses of one difference is part of the next one, so the copy does not drift from the parameter.

Source: Jia et al. 2024, "SDP4Bit", arXiv 2410.15526, section 3.1. We differ in sending only zeros where nothing has
changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.chunks import pad_rows
from zgraph.runtime.exchanges.collectives import start_all_gather
from zgraph.runtime.handle import name_of
from zgraph.runtime.weight_copy import WeightCopy
from zgraph.runtime.window_state import state_behind
from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.groups import resolve_group


@torch.library.custom_op("zgraph::weight_difference", mutates_args=())
def weight_difference(shard: Tensor, handle: Tensor, numel: int, dtype: torch.dtype, group_name: str) -> Tensor:
    """Compute this rank's shard minus what every rank's copy of the parameter has in its place.

    The first call for a parameter gathers the copy uncompressed, on all ranks alike, and its difference is zero.

    Args:
        shard: this rank's rows.
        handle: handle of the parameter, whose state keeps the copy.
        numel: elements of the longest shard of any rank.
        dtype: dtype of the copy.
        group_name: name of the group over which the parameter is sharded.

    Returns:
        [numel] fp32.

    Raises:
        ZgraphError: the copy has another dtype, or was made for another number of ranks.
    """
    group = resolve_group(group_name)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    state = state_behind(handle)
    if state.weight_copy is None:
        own = pad_rows(shard.reshape(-1).to(dtype), numel)
        unsharded = wait(start_all_gather(own, world, group_name))
        state.weight_copy = WeightCopy(unsharded, shard.clone(), shard)
    copy = state.weight_copy
    if (copy.unsharded.numel(), copy.unsharded.dtype) != (world * numel, dtype):
        raise ZgraphError(
            f"zgraph: {name_of(handle)} keeps a copy of {copy.unsharded.numel()} elements of {copy.unsharded.dtype} to "
            f"send differences from, and is now gathered as {world * numel} of {dtype}. Compile all that reads it with "
            "one param_dtype and one mesh."
        )
    return copy.difference(shard, numel, rank)


@weight_difference.register_fake
def _(shard: Tensor, handle: Tensor, numel: int, dtype: torch.dtype, group_name: str) -> Tensor:
    return shard.new_empty((numel,), dtype=torch.float32)


@torch.library.custom_op("zgraph::add_difference", mutates_args=())
def add_difference(step: Tensor, handle: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    """Add the differences that all ranks have sent to the copy of the parameter.

    Args:
        step: [N * numel] fp32.
        handle: handle of the parameter, whose state keeps the copy.
        dtype: dtype of the copy.
        stays: whether the result becomes the copy from which further differences are taken. False inside a window,
            whose other forwards add the same codes to it, and where nothing is trained.

    Returns:
        [N * numel] in `dtype`; not to be written to if it stays.
    """
    copy = state_behind(handle).weight_copy
    assert copy is not None, "weight_difference has made it"
    unsharded = copy.plus(step)
    if stays:
        copy.become(unsharded)
    return unsharded.view(unsharded.shape)  # a new tensor: autograd writes to what an operator returns


@add_difference.register_fake
def _(step: Tensor, handle: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    return step.new_empty(step.shape, dtype=dtype)
