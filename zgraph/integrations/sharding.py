"""Sharding as front ends need it: after the optimizers were created, and with the options of one plugin."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.checkpoint import latest_checkpoint, load_checkpoint
from zgraph.checkpoint.all_ranks import rank_and_world, run_on_all_ranks
from zgraph.checkpoint.directory import MANIFEST
from zgraph.errors import CheckpointError
from zgraph.optimizers.gradients import GradScaler
from zgraph.optimizers.local_step import ELEMENT_WISE, step_on_shards
from zgraph.sharding.scope import state_of
from zgraph.sharding.shard import shard


class Sharding:
    """Options of a front end's adapter: how it shards and compiles the models that it is given.

    Args:
        options: options of the backend, as for `torch.compile(model, backend="zgraph", options=...)`.
        compile: whether the models are compiled; False: they run eagerly.
        shard: arguments of `zgraph.shard`, without the module.

    Raises:
        TypeError: `zgraph.shard` has no such argument.
    """

    def __init__(self, *, options: Mapping[str, Any] | None = None, compile: bool = True, **shard_options: Any) -> None:
        unknown = shard_options.keys() - inspect.signature(shard).parameters.keys() | shard_options.keys() & {"module"}
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: zgraph.shard has no argument {', '.join(sorted(unknown))}; options of the "
                "backend are written options={...}."
            )
        self.options, self.compile, self.shard_options = dict(options or {}), compile, shard_options

    def apply(self, model: nn.Module, optimizers: Iterable[optim.Optimizer], **defaults: Any) -> None:
        """Shard a model, in place; the optimizers then step its shards, without DTensors if they can.

        Args:
            model: model to shard.
            optimizers: optimizers that were created with the model's parameters, or with those of other models.
            defaults: arguments of `zgraph.shard` that apply unless the user has given them.

        Raises:
            ValueError: as `shard_with_optimizers`.
        """
        optimizers = list(optimizers)
        shard_with_optimizers(model, optimizers, **{**defaults, **self.shard_options})
        let_ranks_generate_together(model)
        step_on_shards_if_possible(optimizers)

    def compile_in_place(self, model: nn.Module) -> None:
        """Compile the forward of a model, which keeps its class and the keys of its state dict."""
        if self.compile:
            model.compile(backend="zgraph", options=self.options)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `zgraph.shard` has sharded the model or a part of it."""
    return any(state_of(part) is not None for part in model.modules())


def let_ranks_generate_together(model: nn.Module) -> None:
    """Let `generate` of transformers run on all ranks until the last has ended, as it does under its own FSDP.

    Ranks that generate different numbers of tokens would call the sharded model differently often.
    """
    for part in model.modules():
        method = getattr(type(part), "generate", None)
        if callable(method) and "synced_gpus" in inspect.signature(method).parameters:
            vars(part)["generate"] = MethodType(generate, part)


def generate(self: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
    """Replaces a model's own method, whose `synced_gpus` it turns on unless it is given (transformers 5.23)."""
    together = dist.is_initialized() and dist.get_world_size() > 1
    return type(self).generate(self, *args, synced_gpus=together if synced_gpus is None else synced_gpus, **kwargs)


def step_on_shards_if_possible(optimizers: Iterable[optim.Optimizer]) -> None:
    """Let those optimizers step on local shards that update each element by itself."""
    for optimizer in optimizers:
        if type(optimizer) in ELEMENT_WISE:
            step_on_shards(optimizer)


def shard_with_optimizers(
    model: nn.Module, optimizers: Sequence[optim.Optimizer], mesh: DeviceMesh | None = None, **options: Any
) -> nn.Module:
    """Shard a model by `zgraph.shard`, and put its new parameters into optimizers that were created before.

    The optimizers' groups, and their lists of parameters, stay the same objects, to which schedulers and optimizers
    keep references. Parameters of other models stay as they are.

    Args:
        model: model to shard, in place.
        optimizers: optimizers without state for the model's parameters.
        mesh, options: as for `zgraph.shard`.

    Returns:
        The model.

    Raises:
        ValueError: an optimizer has state for a parameter of the model; nothing is sharded. Or as `zgraph.shard`.
    """
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    names = {number: name for name, number in before.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if state and id(parameter) in names:
                raise ValueError(
                    f"zgraph: {type(optimizer).__name__} has state for {names[id(parameter)]} already, which would not "
                    "be sharded; shard the model, or prepare it, before the first step and before load_state_dict of "
                    "the optimizer."
                )
    shard(model, mesh, **options)
    after = dict(model.named_parameters(remove_duplicate=False))
    new = {number: after[name] for name, number in before.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    return model


def checkpoints_in(
    location: str | Path, models: Iterable[nn.Module], optimizers: Iterable[optim.Optimizer]
) -> Iterator[tuple[Path, nn.Module, list[optim.Optimizer] | None]]:
    """Yield the folder of each model, the model, and the optimizers that step its parameters; None: there are none."""
    known = list(map(unwrapped, optimizers))
    for number, model in enumerate(models):
        own = {id(parameter) for parameter in model.parameters()}
        found = [one for one in known if any(id(p) in own for group in one.param_groups for p in group["params"])]
        yield Path(location) / f"zgraph_{number}", model, found or None


def unwrapped(optimizer: Any) -> optim.Optimizer:
    """Return the optimizer inside of a front end's wrapper, or the optimizer itself."""
    return getattr(optimizer, "optimizer", optimizer)


def find_complete(folder: str | Path, model: nn.Module) -> Path:
    """Return the newest complete checkpoint in a folder.

    Raises:
        CheckpointError: there is none.
    """
    latest = latest_checkpoint(folder)
    if latest is None:
        raise CheckpointError(
            f"zgraph: {folder} has no complete checkpoint of {type(model).__name__}: the run that saved it was not "
            "sharded by zgraph, or was killed while saving; resume from another folder."
        )
    return latest


def load_complete(folder: str | Path, model: nn.Module, optimizers: Sequence[optim.Optimizer] | None) -> None:
    """Load the newest complete checkpoint in a folder.

    Raises:
        CheckpointError: there is none, or it does not fit.
    """
    load_checkpoint(find_complete(folder, model), model, optimizers)


def discard(folders: Iterable[Path]) -> None:
    """Remove folders of checkpoints; every rank calls this, and goes on when they are gone.

    Manifests go first, since a checkpoint without one is not complete, so that a run that is killed meanwhile leaves
    nothing that looks complete.

    Raises:
        CheckpointError: on all ranks, if a folder cannot be removed.
    """

    def remove() -> None:
        if rank_and_world()[0] == 0:
            for folder in folders:
                for manifest in folder.glob(f"step_*/{MANIFEST}"):
                    manifest.unlink()
                shutil.rmtree(folder)

    run_on_all_ranks("save_checkpoint", remove)


def agreeing(scaler: torch.amp.GradScaler, device: torch.device | str) -> GradScaler:
    """Return a scaler in the state of one of torch's, by which all ranks skip the same steps."""
    if isinstance(scaler, GradScaler):
        return scaler
    found = GradScaler(torch.device(device).type, enabled=scaler.is_enabled())
    found.load_state_dict(scaler.state_dict())
    return found


def plain(value: Any) -> Any:
    """Return a replicated DTensor as a plain tensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
