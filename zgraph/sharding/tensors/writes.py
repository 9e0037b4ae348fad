"""Writes to sharded tensors: to the shards where the result is the same, otherwise to the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.sharding.tensors.calls import draws_here, on_dtensors
from zgraph.sharding.tensors.meet import meet
from zgraph.sharding.tensors.tracked import Tracked, View, is_partial, plain_among
from zgraph.sharding.tensors.traits import Traits, traits_of
from zgraph.sharding.tensors.views import is_copy, note_write, shown
from zgraph.sharding.tensors.whole import all_gathered, check_equal, gathered, laid_out, of_first
from zgraph.torch_compat.dtensor import have_one_layout, local_of, put_local, put_whole
from zgraph.torch_compat.operators import OpOverload, is_elementwise_over_lists, is_tagged_random, written_tensors

aten = torch.ops.aten
RESHAPED = (
    "zgraph: {func} changes the shape of a sharded tensor in place; write view = view.t(), and the like, without the "
    "underscore. Where torch calls it, as in torch.quantile(parameter, numbers), pass parameter.full_tensor()."
)


def write(
    func: OpOverload, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: Sequence[Tracked]
) -> Any:
    """Call an operator whose schema says that it writes to its first argument, to lists, or to `out=`."""
    if traits.assigns:  # only traced by Dynamo, whose graph is refused later
        func, traits = aten.copy_.default, traits_of(aten.copy_.default)
    outputs = written_tensors(func, args, kwargs)
    written = [one for one in outputs if isinstance(one, Tracked)]
    if not any(isinstance(one, DTensor) for one in outputs):
        return _write_to_plain(func, args, kwargs, sharded[0])
    target = written[0] if len(written) == 1 and any(one is written[0] for one in (*args, *kwargs.values())) else None
    if traits.reshapes and any(one.viewed is not None for one in written):
        raise ZgraphError(RESHAPED.format(func=func))
    if target is None and any(map(is_copy, written)):
        raise ZgraphError(
            f"zgraph: {func} writes to several views of sharded rows in one call, and these are copies. Write to one "
            "after another: for rows in ...: rows.mul_(2)."
        )
    is_for_whole = (
        target is not None
        and (
            is_copy(target)
            or target is not args[0]  # DTensor may leave `out=` with wrong placements
            or (traits.is_random and draws_here(target))
            or any(plain.ndim > 0 for plain in plain_among((*args[1:], *kwargs.values())))
        )
    )
    if target is None and _lie_alike(func, args, kwargs):
        result = func(*_with_local_parts(args), **kwargs)  # DTensor would give the same, parameter by parameter
        note_write(written)
        return result
    if target is None or not is_for_whole:
        try:
            result = on_dtensors(func, args, kwargs, sharded)
        except (NotImplementedError, RuntimeError) as error:
            # DTensor determines placements before it runs anything, so nothing has been written yet.
            if isinstance(error, ZgraphError):
                raise
            if traits.reshapes:
                raise ZgraphError(RESHAPED.format(func=func)) from error
            if target is not None:
                return _write_to_whole(target, func, args, kwargs)
            if partial := [one for one in sharded if is_partial(one)]:  # norms that are not summed yet
                for one in partial:
                    meet(one, f"writing to a number ({func})")
                    put_whole(one, gathered(one))
                return write(func, traits, args, kwargs, sharded)
            raise
        note_write(written)
        return result
    return _write_to_whole(target, func, args, kwargs)


@torch.no_grad()
def _write_to_plain(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: Tracked) -> Any:
    """Call an operator that writes to plain tensors, as in `teacher.lerp_(p, 0.1)`; gather its sharded arguments."""
    meet(like, f"writing to a plain tensor ({func})")
    given, named = all_gathered(args, kwargs)
    return func(*given, **named)


def _lie_alike(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator over lists may run on shards: elementwise, on equal layouts, without plain tensors."""
    if not is_elementwise_over_lists(func):
        return False
    lists = [[one for one in arg if isinstance(one, DTensor)] for arg in args if type(arg) in (list, tuple)]
    lists = [one for one in lists if one]
    return (
        len({len(one) for one in lists}) == 1
        and not any(isinstance(arg, DTensor) for arg in (*args, *kwargs.values()))
        and not any(plain.ndim for plain in plain_among((*args, *kwargs.values())))  # not compared across ranks
        and all(
            not is_partial(first) and all(have_one_layout(first, one) for one in others)
            for first, *others in zip(*lists, strict=True)
        )
    )


def _with_local_parts(args: Sequence[Any]) -> list[Any]:
    return [
        [local_of(one) if isinstance(one, DTensor) else one for one in arg] if type(arg) in (list, tuple) else arg
        for arg in args
    ]


@torch.no_grad()
def _write_to_whole(target: Tracked, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tracked:
    """Run `func`, which writes to `target`, on the whole tensor behind `target`; each rank then keeps its part.

    Raises:
        AgreementError: ranks pass different plain tensors.
        ZgraphError: a captured step passes a plain tensor, which cannot be compared.
    """
    sharded, steps, _ = target.viewed or View(target, ())
    meet(target, f"writing to parts ({func})")
    check_equal([*plain_among((*args, *kwargs.values()))], sharded.device_mesh, func)
    whole = gathered(sharded)
    view = shown(whole, steps)
    given, named = all_gathered(args, kwargs, {id(target): view})
    result = func(*given, **named)
    if is_tagged_random(func):
        whole = of_first(whole, sharded.device_mesh)
    if is_partial(sharded):
        put_whole(sharded, whole)
    else:
        local_of(sharded).copy_(local_of(laid_out(whole, sharded)))
    note_write((target,))
    if is_copy(target):
        put_local(target, shown(whole, steps))
        target.seen = sharded.writes or 0
    # `rrelu` writes its noise to an argument and returns another tensor.
    return laid_out(result, sharded) if isinstance(result, Tensor) and result is not view else target
