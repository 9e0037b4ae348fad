"""Follows the tokens of a sequence through a model's forward, and refuses operators that combine them.

Each rank of a context axis has a part of each sequence. Attention exchanges what it needs; an operator that combines
tokens in another way, such as a convolution over the sequence or attention written as products, would silently see
this rank's tokens only. So one forward of each kind runs under a mode that knows which dim of each tensor is the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.graph.sizes import size_hint
from zgraph.sharding.context.attention import attention
from zgraph.sharding.context.mean_loss import mean_cross_entropy, sum_cross_entropy
from zgraph.sharding.context.token_rules import (
    TOTAL,
    Call,
    CombinesTokens,
    Place,
    cut,
    elementwise,
    expand,
    permute,
    place_of_targets,
    repeat,
    reshape,
    rule_of,
    select,
    squeeze,
    tensors_in,
    transpose,
    unsqueeze,
)
from zgraph.torch_compat.dynamo import checkpoint_operator, dynamo_fake, is_of_module, is_to_local, raise_through_dynamo
from zgraph.torch_compat.fake_values import data_dependent_errors, fake_mode, fake_storage_key
from zgraph.torch_compat.memory import DispatchMode
from zgraph.torch_compat.operators import OpOverload, bound_arguments, is_higher_order, is_mutable, plain_name

CONSTANTS = ("zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty")

# Rules of operators that make tensors of one value from such.
KEEP_CONSTANTS = (elementwise, reshape, permute, transpose, unsqueeze, squeeze, expand, repeat, cut, select)
EXCHANGED = (attention, mean_cross_entropy, sum_cross_entropy)


class FollowTokens(DispatchMode):
    """Knows which dim of each tensor is the tokens, while a forward runs.

    Args:
        length: number of tokens of a sequence that each rank has.
    """

    supports_higher_order_operators = True  # torch then calls this mode, and does not raise an error of its own

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.places = WeakIdKeyDictionary()
        self.constants = WeakIdKeyDictionary()  # tensors of one value
        self.is_paused = False

    def begin(self, inputs: Iterable[object]) -> None:
        """Find the tokens in the inputs of a forward: dim 1, or the only dim of their number.

        Raises:
            ZgraphError: it could be any of several dims.
        """
        for value in tensors_in(inputs):
            found = [dim for dim, size in enumerate(value.shape) if size == self.length]
            if not found:
                continue
            if len(found) > 1 and 1 not in found:
                raise ZgraphError(
                    f"zgraph.shard(context=...): an input of shape {list(value.shape)} has several dims of "
                    f"{self.length} elements, the number of this rank's tokens; pass inputs [batch, tokens, ...]."
                )
            self.places[value] = Place(1 if 1 in found else found[0])

    def exchanged(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a function that may see other tokens; its result has those of its first argument, or is their sum.

        Raises:
            ZgraphError: its tensors do not have the tokens in the same places.
        """
        place, *others = [self.places.get(one) for one in (args[:3] if function is attention else args[:2])]
        expected = Place(2) if function is attention else None if place is None else place_of_targets(place)
        if place is None or any(other != expected for other in others):
            of = ", ".join(str(list(one.shape)) for one in args[:3] if isinstance(one, Tensor))
            raise ZgraphError(
                f"zgraph.shard(context=...): {function.__name__} of tensors {of} that are not all this rank's tokens; "
                "cut all tensors of sequences by zgraph.context_batch."
            )
        self.is_paused = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.is_paused = False
        self.places[result] = place if result.dim() else TOTAL
        return result

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if is_higher_order(func):
            self._refuse(func.name(), "calls functions, which are not followed")
        if self.is_paused or func.namespace == "prim":  # such as a fake tensor's device
            return func(*args, **options)
        given, name = bound_arguments(func, args, options), plain_name(func)
        operands = [(one, self.places.get(one)) for one in tensors_in(given.values())]
        has_tokens = any(place is not None for _, place in operands)
        rule = rule_of(func, name)
        if has_tokens and rule is None:
            with self:
                parts = func.decompose(*args, **options)  # as torch itself does outside of inference mode
            if parts is not NotImplemented:
                return parts
            self._refuse(".item()" if name == "_local_scalar_dense" else name, "is not known to keep tokens apart")
        if has_tokens and is_mutable(func):
            self._check_written(given.get("self"))
        result = func(*args, **options)
        results = tensors_in([result])
        if has_tokens and rule is not None:
            first = results[0] if results else None
            call = Call(
                name=name,
                given=given,
                operands=operands,
                result=first,
                length=self.length,
                constants=self.constants,
            )
            try:
                place = rule(call)
            except CombinesTokens as error:
                self._refuse(name, str(error))
            if place is not None:
                for one in results:
                    self.places[one] = place
        elif name == "token_positions":
            self.places[result] = Place(0)
        is_constant = bool(operands) and not has_tokens and all(one in self.constants for one, _ in operands)
        if is_mutable(func):
            self._forget_constants(results)
        if name in CONSTANTS or (is_constant and rule in KEEP_CONSTANTS):
            for one in results:
                self.constants[one] = True
        return result

    def _check_written(self, written: object) -> None:
        """Refuse writes of tokens into a part of a tensor, whose other parts would not be known to have tokens."""
        if not isinstance(written, Tensor) or self.places.get(written) is not None:
            return
        if written.numel() * written.element_size() < written.untyped_storage().nbytes():
            self._refuse("a line", "writes tokens into a part of a tensor; join the parts by torch.cat or stack")

    def _forget_constants(self, written: Sequence[Tensor]) -> None:
        """Forget that tensors have one value, after an operator has written to their memory."""
        memory = {fake_storage_key(one) for one in written}
        for one in [one for one in self.constants if fake_storage_key(one) in memory]:
            del self.constants[one]

    def _refuse(self, name: str, found: str) -> NoReturn:
        raise ZgraphError(
            f"zgraph.shard(context=...): {name} {found}. Each rank has a part of each sequence, and only "
            "torch.nn.functional.scaled_dot_product_attention sees the others: write attention with it (models of "
            'transformers: model.set_attn_implementation("zgraph")), and leave context out if the model combines '
            "tokens in other ways."
        )


class _FollowGraph(fx.Interpreter):
    """Runs a graph of Dynamo's on its fake values, while tokens are followed."""

    def __init__(self, gm: fx.GraphModule, follow: FollowTokens) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.follow = follow

    def run_node(self, n: fx.Node) -> Any:
        if is_to_local(n):
            return None  # read by gathers only
        if nodes.is_unshard(n):
            return _stand_in(dynamo_fake(n))
        try:
            return super().run_node(n)
        except ZgraphError as error:
            line = meta.source_line(n)
            raise_through_dynamo(f"{error} At {line}." if line else str(error), ZgraphError)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # A loss outside the model is left as it is: `ContextAxis.check_targets` has seen that its mean is right.
        if target in (*EXCHANGED, F.cross_entropy):
            return self.follow.exchanged(target, *args, **kwargs)
        if is_higher_order(target) and target.name() == "register_hook":
            return args[0]  # hooks run in backward, which is not followed
        if target is checkpoint_operator():
            return _FollowGraph(args[0], self.follow).run(*args[1:])
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and self.follow.places.get(args[0]) is None:
            return 1.0 if args[0].is_floating_point() else 1  # a number of Python's that Dynamo has made an input
        return super().call_method(target, args, kwargs)


def follow_graph(gm: fx.GraphModule, length: int) -> None:
    """Follow tokens through a graph of Dynamo's.

    Raises:
        ZgraphError: the graph combines tokens; the message names the line.
    """
    follow = FollowTokens(length)
    with fake_mode(), torch.no_grad():
        given = {node: _stand_in(dynamo_fake(node)) for node in gm.graph.find_nodes(op="placeholder")}
        follow.begin(value for node, value in given.items() if not is_of_module(node))
        try:
            with follow:
                _FollowGraph(gm, follow).run(*given.values())
        except data_dependent_errors():
            raise_through_dynamo(
                "zgraph.shard(context=...): the graph has sizes or numbers that are known only when it runs, so tokens "
                "cannot be followed; leave dynamic=True out of torch.compile.",
                ZgraphError,
            )


def _stand_in(value: object) -> object:
    """Return a fake tensor of the same kind, or a number for a symbolic one; None for a DTensor, which gathers read."""
    if isinstance(value, DTensor):
        return None
    if isinstance(value, Tensor):
        shape, stride = ([size_hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return size_hint(value) if isinstance(value, torch.SymInt) else value
