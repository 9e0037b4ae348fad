"""Order of a sequence's tokens over the ranks of a context axis.

A sequence of 2 * N * c tokens is cut into 2 * N chunks of c tokens. Rank i of N has the chunks i and 2 * N - 1 - i, in
this order. Under causal attention, the queries of each rank then see equally many keys (Llama 3, Grattafiori et al.
2024, arXiv 2407.21783, section 3.3.2). "Natural order" is the order of the tokens in the sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.torch_compat.groups import resolve_group


def own_tokens(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Return a rank's tokens of a whole sequence.

    Args:
        tensor: tensor whose dim `dim` are the tokens in natural order; a multiple of 2 * size.
        rank, size: rank in the context axis, and number of its ranks.

    Returns:
        A contiguous copy with 1 / size of the tokens.
    """
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


@torch.library.custom_op("zgraph::token_positions", mutates_args=())
def token_positions(length: int, group_name: str, size: int, device: torch.device) -> Tensor:
    """Return the natural positions of this rank's tokens.

    An operator, so that the graphs of all ranks are equal: only its value depends on the rank.

    Args:
        length: number of tokens that each rank has.
        group_name, size: process group of the context axis, and number of its ranks.
        device: device of the result.

    Returns:
        [length] int64.
    """
    rank = dist.get_rank(resolve_group(group_name))
    return own_tokens(torch.arange(length * size, device=device), 0, rank, size)


@token_positions.register_fake
def _(length: int, group_name: str, size: int, device: torch.device) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device=device)
