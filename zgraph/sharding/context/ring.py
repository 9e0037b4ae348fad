"""Attention over keys that arrive from the ranks of a context axis one after another, with memory for one rank's.

Each rank keeps its queries, and in hop h sends its keys and values to the rank h places further. The results of the
blocks are merged by their log-sum-exps (Liu et al. 2023, "Ring Attention", arXiv 2310.01889; Milakov and Gimelshein
2018, "Online normalizer calculation for softmax", arXiv 1805.02867). Backward computes each block with the log-sum-exp
of the whole row (Dao 2023, arXiv 2307.08691, section 3.1.2), and returns the gradients of keys and values to their
rank. It reads keys and values that forward has kept if they take no more memory than this rank's queries, and
otherwise has them sent again.

Rank i has the chunks i and 2N - 1 - i of a sequence (`zgraph.sharding.context.positions`). So under causal attention it
needs half of the products with the block of each other rank j, and all ranks compute equally many:

    j < i    both chunks of queries see the first chunk of keys
    j > i    the second chunk of queries sees both chunks of keys

The second chunk of queries and the first chunk of keys meet in both cases. The chunks of the other product are chosen
by a tensor, so that the graphs of all ranks are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.dialect.dependence import depend
from zgraph.sharding.context.positions import token_positions
from zgraph.torch_compat.collectives import all_to_all_op, wait
from zgraph.torch_compat.groups import resolve_group
from zgraph.torch_compat.operators import attend_block, attend_block_backward

_Part = tuple[Tensor, Tensor]  # results of attention to some of the keys, and log-sum-exps [batch, heads, L]


def keeps_keys(heads: int, key_heads: int, size: int) -> bool:
    """Return whether forward keeps the keys and values of the other ranks: they take no more than this rank's queries.

    Args:
        heads, key_heads: number of heads of queries, and of keys.
        size: number of ranks that share each sequence.
    """
    return 2 * key_heads * (size - 1) <= heads


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, group_name: str, size: int
) -> Tensor:
    """Compute attention of this rank's queries and the keys and values of all ranks, on the CPU.

    Args:
        query: [batch, heads, L, features]; L is even.
        key, value: [batch, key heads, L, features], of the same dtype.
        is_causal: whether a query sees only keys at its position and before.
        scale: as for `scaled_dot_product_attention`.
        group_name, size: process group of the context axis, and number N of its ranks.

    Returns:
        [batch, heads, L, features].
    """
    return _Ring.apply(query, key, value, is_causal, scale, group_name, size)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float | None,
        group_name: str,
        size: int,
    ) -> Tensor:
        own, kept = torch.stack((key, value)), []
        keeps = keeps_keys(query.shape[1], key.shape[1], size)
        started = _shift(own, 1, group_name, size)
        out, lse = attend_block(query, key, value, is_causal, scale)
        parts = _halves((out.to(lse.dtype), lse)) if is_causal else [(out.to(lse.dtype), lse)]
        for hop in range(1, size):
            keys, values = arrived = wait(started)[0]
            if keeps:
                kept.append(arrived)
            if hop + 1 < size:
                started = _shift(own, hop + 1, group_name, size)
            if is_causal:
                are_earlier = _are_earlier(hop, query, group_name, size)
                parts = _attend_causally(parts, query, keys, values, are_earlier, scale)
            else:
                parts = [_merged(parts[0], attend_block(query, keys, values, False, scale))]
        out, lse = (torch.cat(one, 2) for one in zip(*parts, strict=True))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse, *kept)
        ctx.options = is_causal, scale, group_name, size
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse, *kept = ctx.saved_tensors
        is_causal, scale, group_name, size = ctx.options
        grad = grads[0].contiguous()
        # Or else compiled graphs would send keys again in forward, and keep copies of queries and keys.
        query, key, value = (depend(one, [grad]) for one in (query, key, value))
        own = torch.stack((key, value))
        started, returned = None if kept else _shift(own, 1, group_name, size), None
        of_own = attend_block_backward(grad, query, key, value, result, lse, is_causal, scale)
        of_queries, of_both = list(of_own[0].to(lse.dtype).chunk(2, 2)), torch.stack(of_own[1:]).to(lse.dtype)
        for hop in range(1, size):
            if started is None:
                keys, values = kept[hop - 1]
            else:
                keys, values = wait(started)[0]
                if hop + 1 < size:
                    started = _shift(own, hop + 1, group_name, size)
            if is_causal:
                are_earlier = _are_earlier(hop, query, group_name, size)
                found = _attend_causally_backward((grad, query, keys, values, result, lse), are_earlier, scale)
            else:
                of_query, *found = attend_block_backward(grad, query, keys, values, result, lse, False, scale)
                found = of_query.chunk(2, 2), *found
            of_queries = [one + other for one, other in zip(of_queries, found[0], strict=True)]
            if returned is not None:
                of_both = of_both + wait(returned)[0]
            returned = _shift(torch.stack(found[1:]).to(own.dtype), -hop, group_name, size)
        if returned is not None:
            of_both = of_both + wait(returned)[0]
        of_key, of_value = of_both.to(own.dtype)
        return torch.cat(of_queries, 2).to(query.dtype), of_key, of_value, None, None, None, None


def _are_earlier(hop: int, query: Tensor, group_name: str, size: int) -> Tensor:
    """Return, as a 0-d bool, whether the keys of a hop are of a lower rank."""
    length = query.shape[2]
    first = token_positions(length, group_name, size, query.device)[0]  # this rank times length / 2
    return first >= hop * (length // 2)


def _halves(part: _Part) -> list[_Part]:
    """Return the results of each chunk of queries."""
    (out, out_2), (lse, lse_2) = (one.chunk(2, 2) for one in part)
    return [(out, lse), (out_2, lse_2)]


def _attend_causally(
    parts: list[_Part], query: Tensor, keys: Tensor, values: Tensor, are_earlier: Tensor, scale: float | None
) -> list[_Part]:
    """Merge two products of chunks: all that causal attention needs of another rank's keys.

    Args:
        parts: results of each chunk of queries so far.
    """
    choose = partial(torch.where, are_earlier)
    q, k, v = (one.chunk(2, 2) for one in (query, keys, values))
    first, second = parts
    second = _merged(second, attend_block(q[1], k[0], v[0], False, scale))
    chosen = choose(first[0], second[0]), choose(first[1], second[1])
    merged = _merged(chosen, attend_block(choose(*q), choose(*k), choose(*v), False, scale))
    return [
        (choose(merged[0], first[0]), choose(merged[1], first[1])),
        (choose(second[0], merged[0]), choose(second[1], merged[1])),
    ]


def _attend_causally_backward(
    tensors: Sequence[Tensor], are_earlier: Tensor, scale: float | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return gradients of each chunk of queries, of keys and of values of `_attend_causally`.

    Args:
        tensors: gradient of the result, queries, keys, values, results and log-sum-exps.
    """
    choose = partial(torch.where, are_earlier)
    chunks = [one.chunk(2, 2) for one in tensors]
    grad, q, k, v, result, lse = chunks
    of_q, of_k, of_v = attend_block_backward(grad[1], q[1], k[0], v[0], result[1], lse[1], False, scale)
    grad, *others = (choose(*pair) for pair in chunks)
    chosen_q, chosen_k, chosen_v = attend_block_backward(grad, *others, is_causal=False, scale=scale)
    return (
        (choose(chosen_q, 0), of_q + choose(0, chosen_q)),
        torch.cat((of_k + choose(chosen_k, 0), choose(0, chosen_k)), 2),
        torch.cat((of_v + choose(chosen_v, 0), choose(0, chosen_v)), 2),
    )


def _merged(whole: _Part, part: _Part) -> _Part:
    """Merge attention to two sets of keys."""
    (out, lse), (part_out, part_lse) = whole, part
    both = torch.logaddexp(lse, part_lse)
    share, part_share = ((one - both).exp().unsqueeze(-1) for one in (lse, part_lse))
    return out * share + part_out * part_share, both


def _shift(sent: Tensor, hop: int, group_name: str, size: int) -> Tensor:
    """Start sending a tensor to the rank `hop` places further; a wait gives that of the rank as far back, [1, ...]."""
    rank = dist.get_rank(resolve_group(group_name))
    target, source = (rank + hop) % size, (rank - hop) % size
    received, given = ([int(place == one) for place in range(size)] for one in (source, target))
    return all_to_all_op()(sent.unsqueeze(0), received, given, group_name)
