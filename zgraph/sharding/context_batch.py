"""`zgraph.context_batch`: cuts whole sequences into the parts of the ranks of a context axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.sharding.context.axis import ContextAxis
from zgraph.sharding.context.positions import own_tokens
from zgraph.sharding.scope import scopes_of
from zgraph.torch_compat.fake_values import is_fake

IGNORED = -100  # torch's default for targets without a loss


def context_batch(model: nn.Module, batch: Mapping[str, Tensor], *, uneven: bool = False) -> dict[str, Tensor]:
    """Cut whole sequences into this rank's tokens, for a model sharded with `zgraph.shard(..., context=...)`.

        own = zgraph.context_batch(model, {"input_ids": ids, "labels": ids})
        loss = model(**own).loss

    All ranks of the context axis pass the same sequences. A rank's tokens are two chunks of each sequence, one from
    its first half and one from its second, see `zgraph.sharding.context.positions`. Call it before each forward, and
    outside of a step that `zgraph.training_step` captures.

    Args:
        model: the sharded model.
        batch: tensors by name, each [batch, s, ...] with s tokens, a multiple of twice the axis; or masks [batch or 1,
            1, s, s], whose rows are cut and whose columns stay whole. `labels` are, as in transformers, the input
            tokens themselves, with -100 for tokens without loss: they are shifted by one before they are cut, which a
            model could not do afterwards. An `attention_mask` [batch, s] of ones is left out.
        uneven: whether a loss outside the model's forward may have targets of which the ranks have different numbers
            (integers other than -100, or ones of a mask), or other sums of weights (numbers [batch, s] that are not
            negative). A mean over each rank's targets would weigh them wrongly, so
            such a loss divides N times its sum by the number of targets of all ranks. False: they are refused, unless
            they are passed to the model, in whose forward `torch.nn.functional.cross_entropy` counts those of all.
            Under `torch.no_grad()` it holds for forwards without gradients only.

    Returns:
        The parts by the same names. For `labels` also `shift_labels`, which are the same, as transformers calls labels
        that have been shifted; and `num_items_in_batch` (0-d), the number of targets of all ranks, by which
        transformers divides the sum of the losses.

    Raises:
        ZgraphError: the model has no context axis; or a tensor cannot be cut; or the ranks' tensors differ.
    """
    axis, tensors = _axis_of(model), dict(batch)
    length = _length(tensors, axis.size)
    if axis.same_batch.is_due:
        _check_shifted(tensors)
    axis.same_batch.check(tensors.values())
    _check_mask(tensors)
    if "labels" in tensors:
        tensors["labels"] = _shifted(tensors["labels"], [one for name, one in tensors.items() if name != "labels"])
    unequal = {name: counts for name, one in tensors.items() if len(set(counts := _targets(one, axis.size))) > 1}
    axis.length = length // axis.size
    if uneven:
        _note_uneven(axis, ())
    elif unequal:  # and it stays so: batches of a step may be cut ahead
        _note_uneven(axis, (*unequal, len(tensors)))
    return _cut(tensors, axis)


def _note_uneven(axis: ContextAxis, found: tuple[str | int, ...]) -> None:
    """Note for the next forwards which targets must be passed to the model."""
    axis.inside_eval = found
    if torch.is_grad_enabled():  # a batch for evaluation says nothing of training
        axis.inside = found


def expect_parts(model: nn.Module, parts: Iterable[object], is_gpu: bool) -> None:
    """Prepare a model for tensors [batch, tokens, ...] that are a rank's parts already, those of a plan.

    Args:
        is_gpu: whether the plan is for GPUs.
    """
    length = next((one.shape[1] for one in parts if isinstance(one, Tensor) and one.dim() > 1), 0)
    for scope in scopes_of(model):
        if scope.context is not None:
            scope.context.length, scope.context.has_ring = length, not is_gpu


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
    if not tensors:
        raise ZgraphError("zgraph.context_batch: an empty batch; pass its tensors by name.")
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and is_fake(tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ZgraphError(
                "zgraph.context_batch: called inside a step that is captured, where tensors have no values; call it "
                "before the step, and pass its tensors to the step."
            )
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


def _check_shifted(tensors: dict[str, Tensor]) -> None:
    """Refuse tokens without targets of their own, whose loss would need the first token of another rank's chunk.

    Raises:
        ZgraphError: there are no targets, or they are the tokens themselves.
    """
    others = {name: one for name, one in tensors.items() if name not in ("labels", "attention_mask", "position_ids")}
    tokens = {name: one for name, one in others.items() if not one.is_floating_point() and one.dtype != torch.bool}
    equal = [(a, b) for (a, one), (b, other) in itertools.combinations(tokens.items(), 2) if torch.equal(one, other)]
    if equal:
        a, b = equal[0]
        raise ZgraphError(
            f"zgraph.context_batch: {a} and {b} are equal. Targets are the next tokens, and the one after a chunk's "
            f"last one is on another rank: pass torch.nn.functional.pad({a}[:, 1:], (0, 1), value={IGNORED}) as {b}."
        )
    if len(tokens) == 1 and len(others) == 1 and "labels" not in tensors and torch.is_grad_enabled():
        (a,) = tokens
        raise ZgraphError(
            f"zgraph.context_batch: only {a}, and no targets. The next token of a chunk's last one is on another rank, "
            f"so add targets: torch.nn.functional.pad({a}[:, 1:], (0, 1), value={IGNORED}); or, for a model of "
            "transformers, labels. Without a loss, call it under torch.no_grad()."
        )


def _targets(tensor: Tensor, size: int) -> list[float]:
    """Return the number of targets that each rank gets: integers other than -100, or the sum of a mask or of weights.

    [] for other tensors.
    """
    if _is_mask(tensor):
        return []
    counted = tensor != IGNORED
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        if tensor.dim() != 2 or not bool((tensor >= 0).all()):
            return []
        counted = tensor.double()
    of_chunks = counted.unflatten(1, (2 * size, -1)).movedim(1, 0).flatten(1).sum(1).tolist()
    return [of_chunks[rank] + of_chunks[-1 - rank] for rank in range(size)]


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


def _shifted(labels: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the next token's label for each token.

    Args:
        labels: the input tokens, or -100.
        others: the other tensors of the batch, of which one has the input tokens.

    Raises:
        ZgraphError: none of them has the labels.
    """
    alike = [one for one in others if one.shape == labels.shape and not one.is_floating_point()]
    if not any(bool(((labels == one) | (labels == IGNORED)).all()) for one in alike):
        raise ZgraphError(
            "zgraph.context_batch: labels differ from the input tokens, so they may have been shifted already, and "
            "would be shifted again. Pass labels as transformers expects them (the input tokens, or -100), or pass "
            "shifted ones by another name, such as targets."
        )
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _cut(tensors: dict[str, Tensor], axis: ContextAxis) -> dict[str, Tensor]:
    rank, size = axis.mesh.get_local_rank(), axis.size
    parts = {name: own_tokens(one, 2 if _is_mask(one) else 1, rank, size) for name, one in tensors.items()}
    if "labels" in parts:
        parts["shift_labels"] = parts["labels"]
        parts["num_items_in_batch"] = (tensors["labels"] != IGNORED).sum()
    return parts
