"""Attention for models of transformers: `model.set_attn_implementation("zgraph")`.

By default, these models make a mask from positions if they are trained without a cache, as with gradient checkpointing.
The mask would be of one rank's tokens. With this implementation they make none, and say by `is_causal` which keys a
query sees.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.torch_compat.dynamo import raise_through_dynamo

NAME = "zgraph"


def register_attention() -> None:
    """Register the implementation with transformers, if that is imported; without it there are no such models."""
    if "transformers" in sys.modules:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' own "sdpa" does, for masks that the caller of the model has passed or none.

    Raises:
        ZgraphError: the layer sees a window of tokens, which without a mask it would not.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if sliding_window is not None and attention_mask is None:
        raise_through_dynamo(
            f'zgraph.shard(context=...): a layer has sliding_window={sliding_window}, and the attention "{NAME}" makes '
            "no masks. Add attention_mask to the batch that zgraph.context_batch cuts: [1, 1, tokens, tokens], True "
            "where a token sees another.",
            ZgraphError,
        )
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
