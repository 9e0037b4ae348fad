"""The parts of a model that a front end calls one by one: they are compiled, and their inputs cast, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zgraph.sharding.scope import state_of
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with parameters that are called: the entries of a ModuleList, not the list itself."""
    for part in module.children():
        if type(part).forward is nn.Module.forward and "forward" not in vars(part):
            yield from called_parts(part)
        elif next(part.parameters(), None) is not None:
            yield part


def cast_inputs_of_parts(module: nn.Module) -> None:
    """Cast the inputs of a sharded module's parts to its `param_dtype`, instead of those of the module itself.

    The module's inputs are a whole batch, whose targets must keep their dtype.
    """
    state = state_of(module)
    if state is None or state.input_dtype is None:
        return
    for part in called_parts(module):
        part.register_forward_pre_hook(partial(_cast, state.input_dtype), with_kwargs=True)
    state.input_dtype = None


def _cast(dtype: torch.dtype, part: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    cast = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return tree_unflatten(cast, spec)
