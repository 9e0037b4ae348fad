"""`zgraph.context_batch`: cuts whole sequences into the parts of the ranks of a context axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.sharding.context.axis import ContextAxis
from zgraph.sharding.context.positions import own_tokens
from zgraph.sharding.scope import scopes_of

IGNORED = -100  # torch's default for targets without a loss


def context_batch(model: nn.Module, **tensors: Tensor) -> dict[str, Tensor]:
    """Cut whole sequences into this rank's tokens, for a model sharded with `zgraph.shard(..., context=...)`.

        batch = zgraph.context_batch(model, input_ids=ids, labels=ids)
        loss = model(**batch).loss

    All ranks of the context axis pass the same sequences. A rank's tokens are two chunks of each sequence, one from
    its first half and one from its second, see `zgraph.sharding.context.positions`.

    Args:
        model: the sharded model.
        tensors: tensors of the batch by name, each [batch, s, ...] with s tokens, a multiple of twice the axis; or
            masks [batch or 1, 1, s, s], whose rows are cut and whose columns stay whole. `labels` are, as in
            transformers, the input tokens themselves, with -100 for tokens without loss: they are shifted by one before
            they are cut, which a model could not do afterwards. An `attention_mask` [batch, s] of ones is left out.

    Returns:
        The parts by the same names. For `labels` also `shift_labels`, which are the same, as transformers calls labels
        that have been shifted; and `num_items_in_batch` (0-d), 1/N of the number of targets of all ranks, by which a
        sum of losses is divided.

    Raises:
        ZgraphError: the model has no context axis; or a tensor cannot be cut; or the ranks' tensors differ.
    """
    axis = _axis_of(model)
    length = _length(tensors, axis.size)
    axis.same_batch.check(tensors.values())
    _check_mask(tensors)
    axis.length = length // axis.size
    if "labels" in tensors:
        tensors["labels"] = _shifted(tensors["labels"], tensors.get("input_ids"))
    return _cut(tensors, axis)


def _axis_of(model: nn.Module) -> ContextAxis:
    found = next((scope.context for scope in scopes_of(model) if scope.context is not None), None)
    if found is None:
        raise ZgraphError(
            "zgraph.context_batch: the model has no context axis; shard it first: zgraph.shard(model, "
            'mesh["dp", "cp"], context="cp").'
        )
    return found


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3]


def _length(tensors: dict[str, Tensor], size: int) -> int:
    """Return the number of tokens of a sequence; check that each tensor has it in the right place.

    Raises:
        ZgraphError: a tensor cannot be cut.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            found = f"of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ZgraphError(
                f"zgraph.context_batch: {name} is {found}, and only tensors [batch, tokens, ...] are cut; pass it to "
                "the model as it is."
            )
    lengths = {name: tensor.shape[2 if _is_mask(tensor) else 1] for name, tensor in tensors.items()}
    if len(set(lengths.values())) != 1:
        raise ZgraphError(
            f"zgraph.context_batch: the tensors have different numbers of tokens, {lengths}; pass tensors [batch, "
            "tokens, ...] of the same sequences."
        )
    length = next(iter(lengths.values()))
    if length % (2 * size):
        raise ZgraphError(
            f"zgraph.context_batch: sequences of {length} tokens cannot be cut into two equal chunks for each of "
            f"{size} ranks; pad them to {-(-length // (2 * size)) * 2 * size} tokens (targets with {IGNORED})."
        )
    return length


def _check_mask(tensors: dict[str, Tensor]) -> None:
    """Remove a mask of padding without padding.

    Raises:
        ZgraphError: there is padding, of which the model would make a mask of this rank's tokens.
    """
    mask = tensors.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return
    if not bool(mask.all()):
        raise ZgraphError(
            "zgraph.context_batch: attention_mask marks padding, and each rank needs a mask of all keys. With padding "
            "on the right and a causal model, leave it out, and give padding the label -100. Otherwise pass, for a "
            "causal model, mask[:, None, None].bool() & torch.ones(s, s).tril().bool()."
        )
    del tensors["attention_mask"]


def _shifted(labels: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the next token's label for each token.

    Raises:
        ZgraphError: the labels are not the input tokens.
    """
    if tokens is not None and not bool(((labels == tokens) | (labels == IGNORED)).all()):
        raise ZgraphError(
            "zgraph.context_batch: labels differ from input_ids, so they may have been shifted already, and would be "
            "shifted again. Pass labels as transformers expects them (the input tokens, or -100), or pass shifted "
            "ones by another name, such as targets=."
        )
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _cut(tensors: dict[str, Tensor], axis: ContextAxis) -> dict[str, Tensor]:
    rank, size = axis.mesh.get_local_rank(), axis.size
    parts = {name: own_tokens(one, 2 if _is_mask(one) else 1, rank, size) for name, one in tensors.items()}
    if "labels" in parts:
        parts["shift_labels"] = parts["labels"]
        parts["num_items_in_batch"] = (tensors["labels"] != IGNORED).sum() / size
    return parts
