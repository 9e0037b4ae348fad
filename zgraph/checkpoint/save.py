"""`save_checkpoint`: writes a checkpoint under a hidden name, and renames it when complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zgraph.checkpoint import error_feedback as error_feedback
from zgraph.checkpoint.all_ranks import dcp_errors, gathered, group_of, rank_and_world, run_on_all_ranks
from zgraph.checkpoint.directory import complete_checkpoints, measure, recover, sync_directory, write_manifest
from zgraph.checkpoint.optimizer_names import group_names, ignored_states, names_by_index
from zgraph.checkpoint.runtime_state import RuntimeState
from zgraph.checkpoint.safe_reader import METADATA, check_plain, encode
from zgraph.checkpoint.several_optimizers import Checkpointed, as_one
from zgraph.checkpoint.stages import check_names, merged_groups
from zgraph.errors import CheckpointError
from zgraph.sharding.scope import window_is_open
from zgraph.sharding.state_dict import meet
from zgraph.torch_compat.dynamo import without_compile
from zgraph.torch_compat.groups import is_distributed_ready


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    group: DeviceMesh | ProcessGroup | None = None,
) -> Path:
    """Write `directory/step_<step>` with model, optimizer, runtime state (see `runtime_state`) and `extra`.

    Every rank calls this, and all ranks write to the same file system. Files are written and fsynced in a hidden
    directory, which is renamed at the end, so an interrupted save leaves no incomplete checkpoint.

    Args:
        directory: directory for the checkpoints of one run; created if missing.
        model: model, sharded or not, compiled or not. The parameters of a pipeline's chunks need unique names across
            all stages, as in `nn.ModuleDict({str(number): chunk for ...})`.
        optimizer: optimizer of the model's parameters, or a list of optimizers of different parameters. Gradients are
            not saved: call this after a step, not in a `no_sync` window.
        step: number that names the checkpoint; a complete checkpoint of the same step is replaced.
        extra: anything else to save, such as a scheduler's state_dict or the position in the data; may differ between
            ranks. Plain tensors, numbers, strings, None, and dicts, lists and tuples of them.
        keep: number of complete checkpoints to keep; older ones are deleted.
        group: ranks that save together. None: all ranks. Each site of `zgraph.OuterSteps` saves its own checkpoints, in
            a directory of its own.

    Returns:
        Directory of the checkpoint.

    Raises:
        ValueError: `step` is negative, or `keep` is less than 1.
        CheckpointError: a rank could not write the checkpoint, or something cannot be saved. Raised on all ranks;
            earlier checkpoints are intact.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"zgraph.save_checkpoint: step={step} must not be negative, and keep={keep} at least 1.")
    root = Path(directory).absolute()
    final, unfinished = root / f"step_{step:08d}", root / f".step_{step:08d}.partial"
    module, stepping, together = without_compile(model), as_one(optimizer), group_of(group)
    run = partial(run_on_all_ranks, "save_checkpoint", group=together)
    meet(module, "zgraph.save_checkpoint()")
    state = run(lambda: _state_to_save(module, stepping, dict(extra or {})))
    rank, ranks = rank_and_world(together)
    if len(set(steps := gathered(step, together))) > 1:
        raise CheckpointError(f"zgraph.save_checkpoint: ranks save different steps {steps}; pass the same everywhere.")
    check_names(state["model"], together)
    if stepping is not None:
        state["optimizer"]["param_groups"] = merged_groups(state["optimizer"]["param_groups"], together)
    own: dict[str, Any] = {"runtime": RuntimeState(module, group=together).own(), "extra": dict(extra or {})}
    own["optimizer"] = {} if stepping is None else ignored_states(module, stepping)
    state["rank"] = {str(rank): encode(own)}
    errors = error_feedback.tensors_of(module, copies=False)  # written before training goes on
    if errors:
        state[error_feedback.KEY] = errors

    def prepare() -> None:
        if rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            recover(root)
            for left_over in root.glob(".step_*"):  # from a run that was killed
                shutil.rmtree(left_over)
            unfinished.mkdir()

    def finish(files: list[dict[str, list[int]]]) -> None:
        if rank != 0:
            return
        write_manifest(unfinished, step, ranks, {name: entry for of_rank in files for name, entry in of_rank.items()})
        sync_directory(unfinished)
        if final.exists():
            final.rename(root / f".{final.name}.replaced")
        unfinished.rename(final)
        sync_directory(root)
        for _, old in complete_checkpoints(root)[:-keep]:
            hidden = root / f".{old.name}.old"
            old.rename(hidden)  # first, because a half-deleted one would look complete
            shutil.rmtree(hidden)
        shutil.rmtree(root / f".{final.name}.replaced", ignore_errors=True)

    run(prepare)
    with dcp_errors("save_checkpoint"):
        writer = FileSystemWriter(unfinished)
        save(state, storage_writer=writer, process_group=together, no_dist=not is_distributed_ready())
    names = [f"__{rank}_*.distcp", *([METADATA] if rank == 0 else [])]
    files = run(lambda: {path.name: measure(path) for name in names for path in unfinished.glob(name)}, all=True)
    run(lambda: finish(files))
    return final


def _state_to_save(module: nn.Module, optimizer: Checkpointed | None, extra: dict[str, Any]) -> dict[str, Any]:
    def refuse(what: str) -> NoReturn:
        raise CheckpointError(
            f"zgraph.save_checkpoint: {what}, which a load without pickles cannot bring back; save tensors, numbers, "
            "strings, None, and dicts, lists and tuples of them."
        )

    if window_is_open(module):
        raise CheckpointError(
            "zgraph.save_checkpoint: a no_sync window is open, and its gradients would be lost; save after the "
            "optimizer step that closes it."
        )
    check_plain(extra, "extra", refuse)
    state: dict[str, Any] = {"model": module.state_dict()}
    for name, value in state["model"].items():
        if not isinstance(value, Tensor):
            check_plain(value, name, refuse)
    if optimizer is not None:
        saved = optimizer.state_dict()
        names = group_names(module, optimizer)
        by_index = names_by_index(saved["param_groups"], names)
        for index, entries in saved["state"].items():
            for key, value in entries.items():
                if not isinstance(value, Tensor):
                    check_plain(value, f"the optimizer's {key} of {by_index[index]}", refuse)
        groups = [{**group, "params": own} for group, own in zip(saved["param_groups"], names, strict=True)]
        check_plain(groups, "optimizer.param_groups", refuse)
        state["optimizer"] = {
            "state": {by_index[index]: entries for index, entries in saved["state"].items()},
            "param_groups": groups,
        }
    return state
