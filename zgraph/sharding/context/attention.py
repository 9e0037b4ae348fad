"""Attention over sequences whose tokens are spread over the ranks of a context axis.

Three ways, all of them exact; the one that sends the fewest bytes is taken. Two are built on one exchange (an
all_to_all of equal parts, whose gradient is the same exchange):

- by heads, if the axis divides the heads of queries: ranks exchange tokens for heads, compute attention over whole
  sequences for 1/N of the heads, and exchange back (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509,
  section 3). Heads of keys that are fewer than the ranks are sent to each rank that needs them;
- by a ring (`zgraph.sharding.context.ring`), on CPUs, without masks and dropout: keys and values pass by;
- by keys otherwise: each rank gathers the keys and values of all tokens, and computes the rows of its own queries (as
  Llama 3, Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2), under a causal mask with twice the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.sharding.context.positions import token_positions
from zgraph.sharding.context.ring import keeps_keys, ring_attention
from zgraph.torch_compat.collectives import all_to_all_op, wait
from zgraph.torch_compat.dynamo import constant_in_graphs, raise_through_dynamo


class _Exchange(torch.autograd.Function):
    """Autograd function that sends part i of a tensor to rank i, and returns the parts received, by rank."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return _exchanged(parts, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0].contiguous(), ctx.group_name), None


def _exchanged(parts: Tensor, group_name: str) -> Tensor:
    ones = [1] * parts.shape[0]
    return wait(all_to_all_op()(parts, ones, ones, group_name))


def exchange(parts: Tensor, group_name: str) -> Tensor:
    """Send part i of a tensor to rank i of a group.

    Args:
        parts: [N, ...], one part for each rank.
        group_name: process group of N ranks.

    Returns:
        [N, ...]: the parts received from each rank.
    """
    return _Exchange.apply(parts.contiguous(), group_name)


def gathered(own: Tensor, dim: int, group_name: str, size: int) -> Tensor:
    """Gather the tokens of all ranks in natural order; the gradient is summed over the ranks.

    Args:
        own: tensor whose dim `dim` are this rank's tokens.
        group_name, size: process group of the context axis, and number of its ranks.

    Returns:
        The same tensor with `size` times the tokens.
    """
    moved = own.movedim(dim, 0)
    received = exchange(moved.expand(size, *moved.shape), group_name)
    first, second = received.chunk(2, 1)
    return torch.cat((first, second.flip(0))).flatten(0, 1).movedim(0, dim)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    group_name: str,
    size: int,
    has_ring: bool,
) -> Tensor:
    """Compute `scaled_dot_product_attention` of this rank's queries and the keys and values of all ranks.

    Args:
        query: [batch, heads, L, features], this rank's L tokens in the order of `zgraph.sharding.context.positions`.
        key, value: [batch, key heads, L, features].
        mask: None, or [batch or 1, 1, L or 1, N * L]: this rank's queries, and all keys in natural order.
        dropout_p, is_causal, scale, enable_gqa: as for torch's function.
        group_name, size: process group of the context axis, and N.
        has_ring: whether tensors are on CPUs, whose kernel the ring needs; in a plan, whether they will be.

    Returns:
        [batch, heads, L, features of value].
    """
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    query, key, value = _cast([query, key, value])
    way = _way(query, key, value, mask, dropout_p, enable_gqa, size, has_ring)
    if way == "ring":
        return ring_attention(query, key, value, is_causal, scale, group_name, size)
    if way == "keys":
        keys, values = (gathered(one, 2, group_name, size) for one in (key, value))
        if is_causal:
            rows = token_positions(query.shape[2], group_name, size, query.device)
            mask = rows[:, None] >= torch.arange(keys.shape[2], device=query.device)
        return attend(query, keys, values, attn_mask=mask)
    if mask is not None and mask.shape[2] > 1:
        mask = gathered(mask, 2, group_name, size)
    copies = size // math.gcd(key.shape[1], size)
    keys, values = (one.unsqueeze(2).expand(-1, -1, copies, -1, -1).flatten(1, 2) for one in (key, value))
    heads = _to_heads([query, keys, values], group_name, size)
    return _to_tokens(attend(*heads, attn_mask=mask, is_causal=is_causal), group_name, size)


def _cast(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cast tensors to the dtype of autocast, as attention does, so that fewer bytes are exchanged."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [one if one.dtype == torch.float64 else one.to(dtype) for one in tensors]


def _way(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
    size: int,
    has_ring: bool,
) -> str:
    """Choose "heads", "ring" or "keys": of the ways that can compute this attention, the one that sends the least.

    With h heads of queries and k of keys, forward and backward send, in units of (N - 1) / N x batch x tokens x
    features elements: "heads" 4 (h + k) / N, where k is at least N; "ring" 4 k, or 6 k if keys are sent twice. "keys"
    sends 4 k, too, and computes more, but can use a mask and dropout.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    is_divided = heads % size == 0
    is_plain = mask is None and dropout_p == 0 and has_ring and size > 1
    is_grouped = heads % key_heads == 0 and (enable_gqa or key_heads in (1, heads))
    is_alike = key.shape == value.shape and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    by_ring = (4 if keeps_keys(heads, key_heads, size) else 6) * key_heads
    is_least = not is_divided or by_ring * size < 4 * (heads + math.lcm(key_heads, size))
    if is_plain and is_grouped and is_alike and is_least:
        return "ring"
    return "heads" if is_divided else "keys"


def _to_heads(tensors: Sequence[Tensor], group_name: str, size: int) -> list[Tensor]:
    """Exchange tokens for heads: [batch, heads, L, features] -> [batch, heads / N, N * L, features], in order."""
    if len({one.shape[-1] for one in tensors}) > 1:
        return [_to_heads([one], group_name, size)[0] for one in tensors]
    parts = torch.cat([one.unflatten(1, (size, -1)).movedim(1, 0) for one in tensors], 2)
    received = exchange(parts, group_name).unflatten(3, (2, -1)).movedim(0, 2)  # [batch, heads, N, 2, L / 2, features]
    whole = torch.cat((received.select(3, 0), received.select(3, 1).flip(2)), 2).flatten(2, 3)
    return list(whole.split([one.shape[1] // size for one in tensors], 1))


def _to_tokens(whole: Tensor, group_name: str, size: int) -> Tensor:
    """Exchange heads for tokens, the inverse of `_to_heads`."""
    chunks = whole.unflatten(2, (2, size, -1)).movedim(3, 0)  # [N, batch, heads / N, 2, L / 2, features]
    parts = torch.stack((chunks.select(3, 0), chunks.select(3, 1).flip(0)), 3).flatten(3, 4)
    return exchange(parts, group_name).movedim(0, 1).flatten(1, 2)


@constant_in_graphs
def _refuse(found: str) -> None:
    raise_through_dynamo(f"zgraph.shard(context=...): attention with {found}.", ZgraphError)


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, length: int, size: int
) -> None:
    """Check the arguments of `attention`.

    Args:
        query, key, value, mask, is_causal, size: as for `attention`.
        length: number of this rank's tokens.

    Raises:
        ZgraphError: a shape is not supported; the message says which and what to write.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        _refuse(f"queries of shape {list(query.shape)}; write [batch, heads, tokens, features]")
    if not query.shape[2] == key.shape[2] == value.shape[2] == length:
        _refuse(
            f"{query.shape[2]} queries and {key.shape[2]} keys, and zgraph.context_batch has cut this rank's {length} "
            "tokens. Attention is exchanged only if queries and keys are the tokens of one sequence, cut by it: "
            "for attention to tokens that all ranks have, such as an encoder's, shard the model without context; for "
            "generation, shard another model without it, and call other.load_state_dict(model.state_dict())"
        )
    if mask is None:
        return
    if is_causal:
        _refuse("both a mask and is_causal=True; torch takes one of them")
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, length) or mask.shape[3] != size * length:
        _refuse(
            f"a mask of shape {list(mask.shape)}, and this rank needs the rows of its {length} queries, with columns "
            f"for all {size * length} keys. Pass is_causal=True in place of a causal mask (models of transformers do "
            'after model.set_attn_implementation("zgraph")); or pass the mask of whole sequences, [batch, 1, tokens, '
            "tokens], to zgraph.context_batch, which cuts its rows"
        )
    if mask.requires_grad:
        _refuse("a mask with gradients, such as a learned bias, which is not supported")
