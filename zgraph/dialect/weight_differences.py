"""The operators of gathers that send what has changed in a parameter since the last one.

    difference = weight_difference(shard, handle, ...)                  this rank's rows less its copy of them
    ...                                                                 quantized, gathered, dequantized
    whole = add_difference(step, handle, ...)                           the copy, and what all ranks have sent

What quantization loses of a difference is part of the next one: the copy never drifts from the parameter.

Source: Jia et al. 2024, "SDP4Bit", arXiv 2410.15526, section 3.1. We differ in sending nothing but zeros where nothing
has changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.chunks import pad_rows
from zgraph.runtime.collectives import start_all_gather
from zgraph.runtime.handle import name_of
from zgraph.runtime.weight_copy import WeightCopy
from zgraph.runtime.window_state import state_behind
from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.groups import resolve_group


@torch.library.custom_op("zgraph::weight_difference", mutates_args=())
def weight_difference(shard: Tensor, handle: Tensor, numel: int, dtype: torch.dtype, group_name: str) -> Tensor:
    """What every rank's copy of the parameter lacks of this rank's shard.

    Where there is no copy yet, the parameter is gathered whole, here and now, and the difference is zero: once for each
    parameter, on all ranks alike.

    Args:
        shard: this rank's rows.
        handle: of the parameter, whose state keeps the copy.
        numel: of the longest shard of any rank.
        dtype: of the copy.
        group_name: of the group over which the parameter is sharded.

    Returns:
        [numel] fp32.

    Raises:
        ZgraphError: the copy is one of another dtype, or of another number of ranks.
    """
    group = resolve_group(group_name)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    state = state_behind(handle)
    if state.weight_copy is None:
        own = pad_rows(shard.reshape(-1).to(dtype), numel)
        whole = wait(start_all_gather(own, world, group_name))
        state.weight_copy = WeightCopy(whole, shard.clone(), shard)
    copy = state.weight_copy
    if (copy.whole.numel(), copy.whole.dtype) != (world * numel, dtype):
        raise ZgraphError(
            f"zgraph: {name_of(handle)} keeps a copy of {copy.whole.numel()} elements of {copy.whole.dtype} to send "
            f"differences from, and is now gathered as {world * numel} of {dtype}. Compile all that reads it with one "
            "param_dtype and one mesh."
        )
    return copy.difference(shard, numel, rank)


@weight_difference.register_fake
def _(shard: Tensor, handle: Tensor, numel: int, dtype: torch.dtype, group_name: str) -> Tensor:
    return shard.new_empty((numel,), dtype=torch.float32)


@torch.library.custom_op("zgraph::add_difference", mutates_args=())
def add_difference(step: Tensor, handle: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    """The parameter, after the differences that all ranks have sent.

    Args:
        step: [N * numel] fp32.
        handle: of the parameter, whose state keeps the copy.
        dtype: of the copy.
        stays: whether the result is the copy from which further differences are taken. Not inside a window, whose
            other forwards add the same codes again, nor where nothing is trained.

    Returns:
        [N * numel] in `dtype`; where it stays, not to be written to.
    """
    copy = state_behind(handle).weight_copy
    assert copy is not None, "weight_difference has made it"
    whole = copy.plus(step)
    if stays:
        copy.become(whole)
    return whole.view(whole.shape)  # a tensor of its own: autograd writes on what an operator returns


@add_difference.register_fake
def _(step: Tensor, handle: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    return step.new_empty(step.shape, dtype=dtype)
