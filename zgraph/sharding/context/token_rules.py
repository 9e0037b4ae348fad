"""Where the tokens are in the results of torch's operators, and which operators combine tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zgraph.torch_compat.operators import OpOverload


class CombinesTokens(Exception):
    """An operator combines tokens; the text is a clause that says how."""


class Place(NamedTuple):
    """Place of the tokens in a tensor.

    Attributes:
        dim: dim whose index i belongs to token (i // inner) % L, of L tokens; -1: a mean over all tokens.
        inner: number of consecutive indices of a token; above 1 where a view has merged dims.
    """

    dim: int
    inner: int = 1

    def moved(self, dim: int) -> Place:
        return Place(dim, self.inner)


TOTAL = Place(-1)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call of an operator at least one of whose tensors has tokens.

    Attributes:
        name: name of the operator, without namespace, overload and the underscore of in-place operators.
        given: arguments by name.
        operands: tensors among the arguments, each with the place of its tokens, or None.
        result: tensor that the operator returned, the first of several; None if it returned none.
        length: L, the number of tokens.
        constants: tensors of one value, such as torch.zeros, which have no own values for each token.
    """

    name: str
    given: Mapping[str, Any]
    operands: Sequence[tuple[Tensor, Place | None]]
    result: Tensor | None
    length: int
    constants: Mapping[Tensor, bool]

    def place_of(self, argument: str) -> Place | None:
        wanted = self.given[argument]
        return next((place for tensor, place in self.operands if tensor is wanted), None)

    @property
    def input(self) -> tuple[Tensor, Place]:
        """The only tensor with tokens.

        Raises:
            CombinesTokens: there are several.
        """
        found = [(tensor, place) for tensor, place in self.operands if place is not None]
        if len(found) > 1:
            raise CombinesTokens("combines several tensors of tokens")
        return found[0]

    def dims(self, argument: str = "dim") -> list[int]:
        """Return an argument that names dims of the input, as non-negative numbers; all dims if it is None or []."""
        ndim, value = self.input[0].dim(), self.given[argument]
        named = range(ndim) if value is None or value == [] else [value] if isinstance(value, int) else value
        return [dim % ndim for dim in named]


Rule = Callable[[Call], Place | None]

# Clauses of errors: the lines to write instead.
OUTSIDE = (
    "For one value of each sequence, such as a reward, return values of all tokens, and after forward write "
    'torch.distributed.nn.functional.all_reduce((values * mask).sum(1), group=mesh["cp"].get_group()), with mask among '
    "the tensors of zgraph.context_batch(..., uneven=True)"
)
PLACES = (
    "Give other tokens, such as those of an image, places in the sequence before it is cut: pass their features "
    "[batch, s, ...], padded to all s places, and a mask of these places to zgraph.context_batch, and choose by "
    "torch.where(mask[..., None], features, embeddings)"
)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def rule_of(operator: OpOverload, name: str) -> Rule | None:
    """Return the rule of an operator; None if it is unknown whether it combines tokens."""
    found = RULES.get(name)
    if found is None and torch.Tag.pointwise in operator.tags:
        return elementwise
    return found


# --- corresponding elements -------------------------------------------------------------------------------------------


def aligned(call: Call, operands: Sequence[tuple[Tensor, Place | None]], ndim: int) -> Place:
    """Return the place of tokens in a result of `ndim` dims, of an operator on corresponding elements.

    Raises:
        CombinesTokens: the tensors have different tokens there, or one has its own values for each position.
    """
    places = [(tensor, place) for tensor, place in operands if place is not None and place != TOTAL]
    found = {place.moved(place.dim + ndim - tensor.dim()) for tensor, place in places}
    if not found:
        return TOTAL
    if len(found) > 1:
        raise CombinesTokens(
            "combines each token with others. A mask that compares tokens, such as their documents, is made of whole "
            "sequences, [batch or 1, 1, s, s], and cut by zgraph.context_batch"
        )
    (place,) = found
    for tensor, own in operands:
        if own == TOTAL:
            raise CombinesTokens("uses a mean over this rank's tokens for each of them")
        dim = place.dim - ndim + tensor.dim()
        if own is None and dim >= 0 and _has_own_values(tensor, dim) and tensor not in call.constants:
            raise CombinesTokens(
                f"combines tokens with a tensor of shape {list(tensor.shape)} that has its own value for each of "
                f"{tensor.shape[dim]} positions, and that zgraph.context_batch has not cut. Position embeddings are "
                "looked up by torch.arange(number of tokens) or position_ids"
            )
    return place


def _has_own_values(tensor: Tensor, dim: int) -> bool:
    return tensor.shape[dim] > 1 and tensor.stride(dim) != 0  # 0: expanded


def elementwise(call: Call) -> Place:
    assert call.result is not None
    place = aligned(call, call.operands, call.result.dim())
    if place == TOTAL:
        of_totals = sum(own == TOTAL for _, own in call.operands)
        divides = call.name == "div" and call.place_of("self") != TOTAL
        if call.name not in LINEAR or divides or (of_totals > 1 and call.name not in ("add", "sub")):
            raise CombinesTokens("computes with a mean over this rank's tokens")
    return place


# Of a mean over tokens: the mean over ranks of the results is the result of the mean.
LINEAR = ("add", "sub", "mul", "div", "neg", "clone", "_to_copy", "detach", "alias", "copy", "lift_fresh")


def along_dim(call: Call) -> Place:
    """Rule of operators that work along a dim of tensors with corresponding elements, such as softmax and gather."""
    assert call.result is not None
    ndim = call.result.dim()
    place = aligned(call, call.operands, ndim)
    dim = call.given.get("dim", -1)
    if place == TOTAL or dim % ndim == place.dim:
        raise CombinesTokens("combines tokens")
    return place


def reduction(call: Call) -> Place | None:
    tensor, place = call.input
    dims = call.dims() if "dim" in call.given else [*range(tensor.dim())]
    if place == TOTAL:
        if call.name not in ("sum", "mean"):
            raise CombinesTokens("computes with a mean over this rank's tokens")
        return TOTAL
    if place.dim in dims:
        if len(dims) == tensor.dim() and call.name == "mean":
            return TOTAL
        raise CombinesTokens(
            f"reduces over this rank's tokens; a loss is a mean() over all of them, or cross_entropy. {OUTSIDE}"
        )
    return place.moved(place.dim if call.given.get("keepdim") else place.dim - sum(dim < place.dim for dim in dims))


# --- views ------------------------------------------------------------------------------------------------------------


def reshape(call: Call) -> Place:
    tensor, place = call.input
    assert call.result is not None
    if place == TOTAL:
        return TOTAL
    stride = math.prod(tensor.shape[place.dim + 1 :]) * place.inner
    behind = 1
    for dim in reversed(range(call.result.dim())):
        size = call.result.shape[dim]
        if behind <= stride and stride * call.length <= behind * size and stride % behind == 0:
            return Place(dim, stride // behind)
        behind *= size
    raise CombinesTokens(f"reshapes {list(tensor.shape)} to {list(call.result.shape)}, which divides the tokens")


def as_pairs(call: Call) -> Place:
    """Rule of views of complex numbers as pairs in a last dim, and back."""
    tensor, place = call.input
    if place.dim == tensor.dim() - 1 and call.name == "view_as_complex":
        raise CombinesTokens("makes complex numbers of pairs of tokens")
    return place


def permute(call: Call) -> Place:
    _, place = call.input
    return place.moved(call.dims("dims").index(place.dim))


def transpose(call: Call) -> Place:
    tensor, place = call.input
    one, other = ((call.given.get(name, default)) % tensor.dim() for name, default in (("dim0", 0), ("dim1", 1)))
    return place.moved({one: other, other: one}.get(place.dim, place.dim)) if tensor.dim() > 1 else place


def unsqueeze(call: Call) -> Place:
    tensor, place = call.input
    return _before(place, call.given["dim"] % (tensor.dim() + 1))


def _before(place: Place, dim: int) -> Place:
    return place if place == TOTAL else place.moved(place.dim + (dim <= place.dim))


def squeeze(call: Call) -> Place:
    tensor, place = call.input
    dims = [dim for dim in (call.dims() if "dim" in call.given else range(tensor.dim())) if tensor.shape[dim] == 1]
    return place.moved(place.dim - sum(dim < place.dim for dim in dims))


def expand(call: Call) -> Place:
    tensor, place = call.input
    assert call.result is not None
    if place == TOTAL:
        raise CombinesTokens("uses a mean over this rank's tokens for each of them")
    return place.moved(place.dim + call.result.dim() - tensor.dim())


def repeat(call: Call) -> Place:
    place = expand(call)
    if call.given["repeats"][place.dim] != 1:
        raise CombinesTokens("repeats the tokens")
    return place


def cut(call: Call) -> Place:
    """Rule of slices and splits."""
    tensor, place = call.input
    assert call.result is not None
    (dim,) = call.dims()
    if dim == place.dim and call.result.shape[dim] != tensor.shape[dim]:
        raise CombinesTokens(
            "selects some of this rank's tokens. Labels are shifted by zgraph.context_batch(labels=...), before the "
            "sequence is cut; other tensors that are shifted, such as the tokens after the next, are tensors of the "
            "batch. Generation needs a model without context"
        )
    return place


def select(call: Call) -> Place:
    _, place = call.input
    (dim,) = call.dims()
    if dim == place.dim:
        raise CombinesTokens(f"selects one of this rank's tokens. {OUTSIDE}")
    return place.moved(place.dim - (dim < place.dim))


def reversal(call: Call) -> Place:
    _, place = call.input
    if place.dim in call.dims("dims"):
        raise CombinesTokens("reorders this rank's tokens")
    return place


def padding(call: Call) -> Place:
    tensor, place = call.input
    pads = call.given["pad"]
    after = 2 * (tensor.dim() - 1 - place.dim)
    if any(pads[after : after + 2]):
        raise CombinesTokens("pads or crops this rank's tokens")
    return place


def concatenation(call: Call) -> Place:
    parts = [(tensor, place) for tensor, place in call.operands if tensor.numel()]
    assert call.result is not None
    dim = call.given.get("dim", 0) % call.result.dim()
    if len(parts) > 1 and any(place is not None and place.dim == dim for _, place in parts):
        raise CombinesTokens(f"appends other tokens to this rank's. {PLACES}")
    return aligned(call, parts, call.result.dim())


def stack(call: Call) -> Place:
    assert call.result is not None
    ndim = call.result.dim()
    return _before(aligned(call, call.operands, ndim - 1), call.given.get("dim", 0) % ndim)


def masked_scatter(call: Call) -> NoReturn:
    raise CombinesTokens(f"takes values in the order of this rank's tokens. {PLACES}")


def triangle(call: Call) -> Place:
    tensor, place = call.input
    if place.dim >= tensor.dim() - 2:
        raise CombinesTokens("selects by the place of tokens on this rank")
    return place


# --- products and lookups ---------------------------------------------------------------------------------------------


def product(call: Call) -> Place:
    """Rule of matrix products: [..., rows, k] @ [..., k, columns]."""
    left, right = ("batch1", "batch2") if "batch1" in call.given else ("self", "mat2")
    if "mat1" in call.given:
        left = "mat1"
    found: list[tuple[Place, bool]] = []  # each with whether it is the rows or columns, of which the result has both
    for name, own, contracted in ((left, -2, -1), (right, -1, -2)):
        place, ndim = call.place_of(name), call.given[name].dim()
        if place is None:
            continue
        if place == TOTAL or place.dim == ndim + contracted:
            raise CombinesTokens("sums products over this rank's tokens, as attention written by hand does")
        found.append((place, place.dim == ndim + own))
    if len(found) > 1 and (found[0] != found[1] or found[0][1]):
        raise CombinesTokens("multiplies each token by others, as attention written by hand does")
    assert call.result is not None
    ndim = call.result.dim()
    others = [(call.given["self"], call.place_of("self"))] if "self" not in (left, right) else []
    if found and not found[0][1]:  # in a dim of the batch
        others += [(call.given[name], call.place_of(name)) for name in (left, right)]
    return aligned(call, [*others, *((call.result, place) for place, _ in found[:1])], ndim)


def lookup(call: Call) -> Place:
    if call.place_of("weight") is not None:
        raise CombinesTokens("looks up tokens")
    if call.given["scale_grad_by_freq"]:
        raise CombinesTokens("counts this rank's tokens for scale_grad_by_freq; leave that out")
    return call.input[1]


def index(call: Call) -> Place:
    indices = [one for one in call.given["indices"] if one is not None]
    places = {id(tensor): place for tensor, place in call.operands}
    if call.place_of("self") is not None or any(one.dtype == torch.bool for one in indices):
        raise CombinesTokens("selects tokens by indices")
    given = [one is not None for one in call.given["indices"]]
    first = given.index(True)
    if given != [False] * first + [True] * len(indices) + [False] * (len(given) - first - len(indices)):
        raise CombinesTokens("selects by indices that are not in adjacent dims")
    ndim = max(one.dim() for one in indices)
    place = aligned(call, [(one, places.get(id(one))) for one in indices], ndim)
    return place.moved(first + place.dim)


def index_select(call: Call) -> Place:
    _, place = call.input
    dim = call.given["dim"] % call.given["self"].dim()
    if call.place_of("self") is None:
        return place.moved(dim)
    if dim == place.dim:
        raise CombinesTokens("selects tokens by indices")
    return place


def normalization(call: Call) -> Place:
    """Rule of norms over the last dims of their input."""
    place = call.place_of("input")
    if place is None or place.dim >= call.given["input"].dim() - len(call.given["normalized_shape"]):
        raise CombinesTokens("normalizes over this rank's tokens")
    return place


def loss(call: Call) -> Place:
    assert call.result is not None
    if call.given["reduction"] == 0:
        return aligned(call, call.operands, call.result.dim())
    aligned(call, call.operands, max(tensor.dim() for tensor, _ in call.operands))
    if call.given["reduction"] == 2:
        raise CombinesTokens('sums over this rank\'s tokens; write reduction="mean"')
    return TOTAL


def place_of_targets(place: Place) -> Place | None:
    """Return the place of tokens in targets [n, ...] of scores [n, classes, ...]; None if they are the classes."""
    return None if place.dim == 1 else place.moved(max(place.dim - 1, 0))


def class_loss(call: Call) -> Place:
    """Rule of `nll_loss`: scores [n, classes, ...], targets [n, ...]."""
    place, of_target = call.place_of("self"), call.place_of("target")
    expected = None if place is None else place_of_targets(place)
    if expected is None or expected != of_target:
        raise CombinesTokens("compares scores with targets of other tokens")
    if call.given["reduction"]:
        raise CombinesTokens(
            "sums over this rank's targets, and other ranks may have more of them. Call "
            "torch.nn.functional.cross_entropy, which counts those of all ranks"
        )
    return expected


def nothing(call: Call) -> None:
    return None


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        name: rule
        for rule, names in (
            (
                elementwise,
                "clone _to_copy copy detach alias lift_fresh native_dropout where masked_fill bernoulli fill",
            ),
            (elementwise, "zero zeros_like ones_like full_like empty_like rand_like randn_like nan_to_num _conj"),
            (elementwise, "floor_divide"),
            (as_pairs, "view_as_complex view_as_real"),
            (along_dim, "_softmax _log_softmax cumsum cumprod logcumsumexp sort topk glu"),
            (along_dim, "gather scatter scatter_add scatter_reduce"),
            (reduction, "sum mean prod amax amin max min argmax argmin var var_mean std norm linalg_vector_norm"),
            (reduction, "logsumexp any all count_nonzero"),
            (reshape, "view _unsafe_view reshape _reshape_alias"),
            (permute, "permute"),
            (transpose, "transpose t"),
            (unsqueeze, "unsqueeze"),
            (squeeze, "squeeze"),
            (expand, "expand"),
            (repeat, "repeat"),
            (cut, "slice split split_with_sizes unsafe_split unsafe_split_with_sizes"),
            (select, "select unbind"),
            (reversal, "flip roll"),
            (padding, "constant_pad_nd"),
            (concatenation, "cat"),
            (stack, "stack"),
            (masked_scatter, "masked_scatter"),
            (triangle, "tril triu"),
            (product, "mm bmm addmm baddbmm"),
            (lookup, "embedding"),
            (index, "index"),
            (index_select, "index_select"),
            (normalization, "native_layer_norm _fused_rms_norm"),
            (loss, "mse_loss huber_loss smooth_l1_loss binary_cross_entropy"),
            (class_loss, "nll_loss_forward nll_loss2d_forward"),
            (nothing, "_assert_async _assert_tensor_metadata new_zeros new_ones new_full new_empty"),
        )
        for name in names.split()
    }
)
