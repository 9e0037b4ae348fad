"""Checkpoints and state dicts of an Accelerator whose models are sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import accelerate
from torch import nn

from zgraph.checkpoint import load_checkpoint, save_checkpoint
from zgraph.integrations.sharding import checkpoints_in, discard, find_complete, is_sharded
from zgraph.sharding.state_dict import full_state_dict


class CheckpointsOfShards(accelerate.Accelerator):
    """An Accelerator that saves and loads models and optimizers by zgraph, and everything else as Accelerate does.

    The checkpoints of zgraph are the last part of a save, and those of an earlier save are removed before it begins: a
    folder that has all of them is complete.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepared: tuple[list[nn.Module], list[Any]] = ([], [])
        self._found: list[tuple[Path, nn.Module, Any]] = []
        super().register_save_state_pre_hook(self._begin_to_save)
        super().register_load_state_pre_hook(self._begin_to_load)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the whole weights on the main process, and nothing elsewhere; every process must call it."""
        return full_state_dict(model) if is_sharded(model) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        with self._without_models():
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        for folder, model, optimizers in checkpoints_in(location, self._models, self._optimizers):
            save_checkpoint(folder, model, optimizers, step=self.step)
        return location

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """As Accelerate's; raises CheckpointError if the folder lacks a complete checkpoint of a model."""
        with self._without_models():
            super().load_state(input_dir, load_kwargs, **kwargs)
        found, self._found = self._found, []
        for folder, model, optimizers in found:
            load_checkpoint(folder, model, optimizers)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """As Accelerate's; the hook gets all models, and on the main process their whole weights."""

        def call(models: Any, weights: Any, folder: str) -> None:
            prepared = self._prepared[0]
            hook(list(prepared), [self.get_state_dict(model) for model in prepared], folder)

        return super().register_save_state_pre_hook(call)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """As Accelerate's; the hook gets all models, which are loaded afterwards."""
        return super().register_load_state_pre_hook(lambda models, folder: hook(list(self._prepared[0]), folder))

    def _begin_to_save(self, models: Any, weights: Any, folder: str) -> None:
        discard(Path(folder).glob("zgraph_*"))

    def _begin_to_load(self, models: Any, folder: str) -> None:
        """Find all checkpoints before anything is loaded."""
        self._found = [
            (find_complete(place, model), model, optimizers)
            for place, model, optimizers in checkpoints_in(folder, *self._prepared)
        ]

    @contextlib.contextmanager
    def _without_models(self) -> Generator[None]:
        """Hide models and optimizers from Accelerate, which saves or loads everything else (accelerate 1.15)."""
        self._prepared = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = self._prepared
            self._prepared = [], []
