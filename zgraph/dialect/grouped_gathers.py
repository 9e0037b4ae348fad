"""Grouped gathers: one start, one wait, and one kernel that casts all members to the wire dtype.

On NCCL a grouped gather is one kernel, which occupies multiprocessors while it runs. Copy engines could transfer the
data instead, through symmetric memory (torch 2.13) or NCCL's NCCL_CTA_POLICY_ZERO (NCCL 2.28). Neither is used:

- On all ranks, sent tensors (with NCCL, also received tensors) must lie at equal offsets of windows that the ranks have
  registered together (ncclCommWindowRegister; torch's `rendezvous`). The caching allocator places a gathered parameter
  wherever it has room, which differs between ranks with different numbers of rows. Registering is a collective: if only
  one rank compiles, or allocates more, the others hang.
- `symm_mem._low_contention_all_gather` needs no such windows for results. But it copies the sent tensors into a
  workspace that grows with the largest member, with a rendezvous each time the workspace grows. It also puts a barrier
  of all ranks before and after each member, and gathers one member at a time, within one host.

A possible design is one arena for each compiled frame. All ranks can compute equal offsets in it from the live ranges
of gathered parameters (`storages.as_all_ranks_count`). The arena is allocated and registered once, after the ranks'
agreement on collectives and before the first call. The start becomes an all_gather of views on a communicator whose
`cta_policy` is zero, and the wait stays. Two things must first be shown on several GPUs: that no window is written
while a slower rank still reads its previous contents, and that copy engines are faster than the kernel at these sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.operators import copy_each, zero_each


def cast_each(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Copy shards into chunks of another dtype, padded with zeros, in one kernel for all of them.

    Args:
        shards: [n, ...] this rank's rows of each parameter; n is at most the number of rows of the parameter's chunk.
        rows: number of rows of each chunk.
        dtype: dtype of the chunks.

    Returns:
        [rows, ...] for each shard, contiguous.
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
    """Copy shards into chunks of another dtype, padded with zeros: the operator for `cast_each`."""
    return cast_each(shards, rows, dtype)


@cast_shards.register_fake
def _(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return _empty_chunks(shards, rows, dtype)


def _empty_chunks(shards: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [shard.new_empty((count, *shard.shape[1:]), dtype=dtype) for shard, count in zip(shards, rows, strict=True)]


# Like `_c10d_functional::wait_tensor` it returns its argument without declaring the alias, which `custom_op` refuses.
torch.library.define("zgraph::wait_group", "(Tensor[] started) -> Tensor[]")


@torch.library.impl("zgraph::wait_group", "CompositeExplicitAutograd")
def wait_group(started: Sequence[Tensor]) -> list[Tensor]:
    """Wait for all results of a grouped gather, and return the results."""
    for one in started:
        wait(one)
    return list(started)


@torch.library.register_fake("zgraph::wait_group")
def _(started: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(one) for one in started]


def wait_group_op() -> Any:
    """Return the operator `zgraph::wait_group(started)`, which waits for tensors and returns them."""
    return torch.ops.zgraph.wait_group.default
