"""Checks of a LightningModule, and its parts, which are compiled and whose inputs are cast one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from zgraph.sharding.scope import sharded_parameters, state_of
from zgraph.torch_compat.dynamo import is_compiled_in_place
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten


def refuse_averaging(trainer: pl.Trainer) -> None:
    """Raise ValueError if a callback copies the weights before they are sharded, and averages the copies."""
    for callback in cast("list[Any]", getattr(trainer, "callbacks", [])):
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"zgraph: {type(callback).__name__} copies the weights before they are sharded, and cannot average "
                "them; make a torch.optim.swa_utils.AveragedModel(pl_module) in on_fit_start, and call its "
                "update_parameters(pl_module) in on_train_batch_end."
            )


def refuse_compiled(module: pl.LightningModule) -> None:
    """Raise ValueError if `module.compile()` was called; Lightning itself refuses what `torch.compile` returns."""
    if is_compiled_in_place(module):
        raise ValueError(
            f"zgraph: {type(module).__name__}.compile() was called, but the strategy compiles the children; leave the "
            "call out, and write ZgraphStrategy(options={...}) for options of the backend."
        )


def refuse_other_options(module: pl.LightningModule, given: Mapping[str, Any]) -> None:
    """Raise ValueError if a module that is sharded already has no parameter that was sharded with the given options."""
    specs = [param.spec for param in sharded_parameters(module).values() if param.spec.shape and not param.spec.ignored]
    used: dict[str, set[Any]] = {
        "zero_stage": {spec.layout.zero_stage for spec in specs},
        "param_dtype": {spec.compute_dtype for spec in specs},
        "reduce_dtype": {spec.wire_dtype for spec in specs},
        "mean_dtype": {spec.mean_dtype for spec in specs},
        "reduction": {spec.reduction for spec in specs},
    }
    for name in used.keys() & given.keys() if specs else ():
        value = str(given[name]) if name == "reduction" else given[name]
        if value not in used[name] and not (name == "param_dtype" and value is None):
            raise ValueError(
                f"zgraph: ZgraphStrategy({name}={given[name]!r}): {type(module).__name__} was sharded with {name}="
                f"{', '.join(map(str, used[name]))} before, and stays so; leave {name} out, or make a new "
                f"{type(module).__name__}."
            )


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
