"""Checkpoints of Lightning's strategy: plain files as with DDP, or folders in which each rank writes its shards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from zgraph.checkpoint import SafePlanner, SafeReader, runtime_state
from zgraph.checkpoint.error_feedback import facts_of
from zgraph.errors import CheckpointError, ZgraphWarning
from zgraph.integrations.lightning_collectives import CheckedCollectives
from zgraph.integrations.sharding import unwrapped
from zgraph.integrations.whole_optimizers import load_whole_state_dict, whole_state_dict
from zgraph.sharding.state_dict import full_state_dict

RUNTIME = "zgraph"  # folder inside of Lightning's, for random generators and error feedback
SAVED = "Trainer.save_checkpoint"  # barrier that ends each save (lightning 2.6)
COMPLETE = ".metadata"  # torch.distributed.checkpoint writes it last


class CheckpointsOfShards(CheckedCollectives):
    """Lightning's strategy for DTensors, with one plain file as its checkpoint, or with a folder that is whole.

    Args:
        saves_folders: whether a checkpoint is a folder, in which each rank writes its shards, and which also has random
            generators and error feedback. False: a file that runs without sharding load and save, too.
        options: as for ModelParallelStrategy.

    Attributes:
        while_saving: returns a context manager that is entered when a save begins, and left when all ranks have saved.
    """

    def __init__(self, *, saves_folders: bool, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=saves_folders, **options)
        self.saves_folders = saves_folders
        self.while_saving: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self._saving = contextlib.ExitStack()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._saving.enter_context(self.while_saving())  # a save begins here
        return super().lightning_module_state_dict() if self.saves_folders else full_state_dict(self.module)

    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == SAVED:
            self._saving.close()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self.saves_folders:
            return super().optimizer_state(optimizer)
        return whole_state_dict(unwrapped(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        runtime = Path(self.broadcast(filepath)) / RUNTIME
        if self.saves_folders:
            if self.is_global_zero:  # a folder that is overwritten is incomplete until the end
                (runtime / COMPLETE).unlink(missing_ok=True)
        elif facts_of(self.module):
            warnings.warn(
                f"zgraph: the error feedback of compression is not in {filepath}, and will start as zeros; write "
                "ZgraphStrategy(save_distributed_checkpoint=True) to save it.",
                ZgraphWarning,
                stacklevel=2,
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.saves_folders:
            save({"runtime": runtime_state(self.module)}, checkpoint_id=runtime)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file, or read a folder into the model and its optimizers.

        Raises:
            CheckpointError: the folder lacks zgraph's state.
        """
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        runtime = path / RUNTIME
        if not (runtime / COMPLETE).is_file():
            raise CheckpointError(
                f"zgraph: {path} is not complete: the run that saved it was not sharded by zgraph, or was killed while "
                "saving; resume from another checkpoint."
            )
        found = super().load_checkpoint(path, weights_only)
        state = {"runtime": runtime_state(self.module, load_from=runtime)}
        load(state, storage_reader=SafeReader(runtime), planner=SafePlanner())
        return {**found, "optimizer_states": []}  # which are loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:
            self.module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):
            raise CheckpointError(
                f"zgraph: the checkpoint has the state of {len(states)} optimizers, but the model has "
                f"{len(self.optimizers)}; build them as they were when it was saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=False):  # a folder has loaded its own
            load_whole_state_dict(optimizer, state)
