"""Gathers side by side: one start, one wait, and one kernel that casts all members to what travels.

On NCCL such a group is one launch, whose kernel occupies multiprocessors for as long as it runs. Why copy engines do
not carry it instead, by symmetric memory (torch 2.13) or NCCL's NCCL_CTA_POLICY_ZERO (2.28):

- Both need what is sent, and NCCL what is received too, at equal offsets of windows that all ranks have registered
  together (ncclCommWindowRegister; torch's `rendezvous`). A gathered parameter lies where the caching allocator has
  room, which differs between ranks that hold different numbers of rows, and registering is a collective: a rank that
  compiles or grows alone would hang the others, as a lone collective does.
- `symm_mem._low_contention_all_gather` does without for results. It copies what is sent into a workspace that grows
  with the largest member, with a rendezvous at each growth, and puts a barrier of all ranks before and after each
  member; one member at a time, inside one host.

The way that fits here is an arena for each frame: live ranges of gathered parameters, which ranks agree on
(`storages.agreed_storages`), give offsets that are equal on all of them; the arena is allocated and registered once,
after the agreement on collectives and before the first call; the start becomes an all_gather of views on a
communicator whose `cta_policy` is zero, and the wait stays. It has to be shown on GPUs that a window is not written
while a slower rank still reads what lay there before, and that copy engines beat the kernel for the sizes at hand.
Without one neither can be, so there is no such mode, and `Hardware` has no field that chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.operators import copy_each, zero_each


def cast_each(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Copy each rank's rows into a chunk of its own, in another dtype and filled up with zeros: one kernel for all.

    Args:
        shards: [n, ...] this rank's rows, at most as many as its chunk has.
        rows: of each chunk.
        dtype: of the chunks.

    Returns:
        [rows, ...] of each, contiguous.
    """
    chunks = _empty_chunks(shards, rows, dtype)
    pairs = [(chunk[: len(shard)], shard) for chunk, shard in zip(chunks, shards, strict=True) if shard.numel()]
    if pairs:
        copy_each([chunk for chunk, _ in pairs], [shard for _, shard in pairs])
    padding = [chunk[len(shard) :] for chunk, shard in zip(chunks, shards, strict=True) if len(shard) < len(chunk)]
    if padding:
        zero_each(padding)
    return chunks


@torch.library.custom_op("zgraph::cast_shards", mutates_args=())
def cast_shards(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """As `cast_each`."""
    return cast_each(shards, rows, dtype)


@cast_shards.register_fake
def _(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return _empty_chunks(shards, rows, dtype)


def _empty_chunks(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [shard.new_empty((count, *shard.shape[1:]), dtype=dtype) for shard, count in zip(shards, rows, strict=True)]


# As `_c10d_functional::wait_tensor` it returns what it is given and does not say so; hence no `custom_op`, which would
# refuse that.
torch.library.define("zgraph::wait_group", "(Tensor[] started) -> Tensor[]")


@torch.library.impl("zgraph::wait_group", "CompositeExplicitAutograd")
def wait_group(started: Sequence[Tensor]) -> list[Tensor]:
    """The results of a grouped gather, usable, whoever has started it."""
    for one in started:
        wait(one)
    return list(started)


@torch.library.register_fake("zgraph::wait_group")
def _(started: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(one) for one in started]


def wait_group_op() -> Any:
    """zgraph::wait_group(started) -> the same tensors, usable"""
    return torch.ops.zgraph.wait_group.default
