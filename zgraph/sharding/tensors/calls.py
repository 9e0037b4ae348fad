"""Call operators through DTensor on shards, or on whole tensors if DTensor refuses or would draw wrong numbers.

Random numbers are drawn for the whole tensor. On CPUs DTensor does not manage generators and draws each shard from the
rank's generator: equal seeds repeat rows on every rank, and different seeds let replicas drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.sharding.tensors.meet import Meeting, meet
from zgraph.sharding.tensors.tracked import Tracked, model_of, plain_among
from zgraph.sharding.tensors.whole import all_gathered, check_equal, laid_out, of_first
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten
from zgraph.torch_compat.operators import OpOverload


def on_dtensors(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: Sequence[Tracked]) -> Any:
    """Call an operator with `sharded` tensors as plain DTensors, since C++ dispatch accepts no subclass of DTensor."""
    model = model_of(sharded[0])
    meeting: Any = nullcontext()
    if model is not None and model.changes.are_noted:
        meeting = Meeting(model, sharded[0], func)
    kind = type(sharded[0])
    for one in cast("Sequence[Tensor]", sharded):
        one.__class__ = DTensor
    try:
        with meeting:
            return func(*args, **kwargs)
    finally:
        for one in sharded:
            one.__class__ = kind


def of_whole(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: Tracked) -> Any:
    """Gather the arguments of an operator that DTensor refuses, and call it; the result is the same on all ranks."""
    meet(like, f"reading all parts ({func})")
    check_equal([*plain_among((*args, *kwargs.values()))], like.device_mesh, func)
    with torch.no_grad():
        whole, named = all_gathered(args, kwargs)
        results, tree = tree_flatten(func(*whole, **named))
        return tree_unflatten([laid_out(one, like) if isinstance(one, Tensor) else one for one in results], tree)


def draws_here(tensor: DTensor) -> bool:
    """Return whether zgraph has to draw a tensor's random numbers, because DTensor manages no generators on CPUs."""
    return tensor.device_mesh.device_type == "cpu"


@torch.no_grad()
def drawn(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: Sequence[Tracked]) -> Any:
    """Call a random operator on the whole tensor; None if DTensor itself draws consistently."""
    like = sharded[0]
    if not draws_here(like):
        return None
    meet(like, f"drawing random numbers ({func})")
    whole, named = all_gathered(args, kwargs)
    results, tree = tree_flatten(func(*whole, **named))
    return tree_unflatten([laid_out(of_first(result, like.device_mesh), like) for result in results], tree)
