"""`load_checkpoint`: checks and reads a whole checkpoint before it changes the model."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zgraph.checkpoint import error_feedback as error_feedback
from zgraph.checkpoint.all_ranks import dcp_errors, gathered, group_of, rank_and_world, run_on_all_ranks
from zgraph.checkpoint.directory import MANIFEST, measure, read_manifest
from zgraph.checkpoint.optimizer_names import group_names, names_by_index
from zgraph.checkpoint.runtime_state import RuntimeState
from zgraph.checkpoint.safe_reader import SafePlanner, SafeReader, decode, read_metadata
from zgraph.checkpoint.several_optimizers import Checkpointed, as_one, parts_of
from zgraph.checkpoint.stages import names_of_no_rank, of_this_stage
from zgraph.errors import CheckpointError
from zgraph.optimizers.adamw_8bit import AdamW8bit
from zgraph.optimizers.packed_entries import PACKED, WEIGHT, packed_zeros
from zgraph.sharding.model.dry_run_load import COMPILED
from zgraph.sharding.scope import window_is_open
from zgraph.sharding.state_dict import meet
from zgraph.torch_compat.dynamo import without_compile
from zgraph.torch_compat.groups import is_distributed_ready

SHOWN = 5  # names of a kind in one error


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Facts about a checkpoint that `load_checkpoint` has loaded.

    Attributes:
        path: directory of the checkpoint.
        step: step at which it was saved.
        ranks: number of ranks that saved it.
        extra: the `extra` that this rank saved. If the number of ranks has changed, rank r gets the `extra` of rank r
            modulo `ranks`.
    """

    path: Path
    step: int
    ranks: int
    extra: dict[str, Any]


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    group: DeviceMesh | ProcessGroup | None = None,
) -> Checkpoint:
    """Load a checkpoint written by `save_checkpoint`; called by every rank.

    If as many ranks load as have saved, the run continues with bitwise equal results; otherwise see `runtime_state`.
    Either everything is loaded or nothing: names, shapes, dtypes, and the size and CRC-32 of every file are checked
    first; then everything is read into new tensors, which are copied into the model at the end. No code in a file is
    executed (see `SafeReader`).

    Args:
        path: directory of the checkpoint, for example from `latest_checkpoint`.
        model: model built and sharded like the saved one; the mesh may differ.
        optimizer: optimizer with the same groups, or a list of optimizers in the same order. None: the optimizer state
            in the checkpoint is ignored.
        group: ranks that load together, as for `save_checkpoint`. None: all ranks.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, of another model or of another format version. Raised on
            all ranks; model and optimizer are unchanged.
    """
    folder = Path(path).absolute()
    module, stepping, together = without_compile(model), as_one(optimizer), group_of(group)
    run = partial(run_on_all_ranks, "load_checkpoint", group=together)
    meet(module, "zgraph.load_checkpoint()")
    rank, world = rank_and_world(together)
    halves = _with_remainders(module, optimizer)

    def inspect() -> tuple[dict[str, Any], Metadata, dict[str, Any], list[str], str]:
        if window_is_open(module):
            raise CheckpointError(
                "zgraph.load_checkpoint: a no_sync window is open, and its gradients belong to the old values; run the "
                "last forward and backward outside of no_sync first."
            )
        manifest = read_manifest(folder)
        metadata = read_metadata(folder)
        wanted, others = _wanted(folder, metadata, module, stepping, halves)
        wanted[f"rank.{rank % manifest['ranks']}"] = None
        _check_kinds(folder, metadata, wanted)
        return manifest, metadata, wanted, others, json.dumps(manifest)

    inspected = run(inspect)
    manifest, metadata, wanted, others, text = inspected
    if len(set(gathered(zlib.crc32(text.encode()), together))) > 1:
        raise CheckpointError(f"zgraph.load_checkpoint: ranks see different checkpoints in {folder}; share the folder.")
    unexpected = names_of_no_rank(others, together)  # each stage of a pipeline has its own

    def refuse_unexpected() -> None:
        if unexpected:
            _refuse_model(folder, {"Unexpected key(s)": unexpected})

    run(refuse_unexpected)
    run(lambda: _check_files(folder, metadata, manifest["files"], rank, world))

    def fill(tensors: dict[str, Any]) -> None:
        with dcp_errors("load_checkpoint"):
            reader = _Opened(folder, metadata)
            alone = not is_distributed_ready()
            load(tensors, storage_reader=reader, planner=SafePlanner(), process_group=together, no_dist=alone)

    fill(wanted)

    def read_own() -> dict[str, Any]:
        own = decode(
            wanted[f"rank.{rank % manifest['ranks']}"], f"the state of rank {rank % manifest['ranks']} in {folder}"
        )
        return of_this_stage(own, set(others))

    own = run(read_own)
    sizes = error_feedback.sizes_in(metadata)
    # All ranks of a mesh restore errors together. A rank's errors are of one stage, which may be on other ranks now.
    facts = own["runtime"].get(error_feedback.KEY, {})
    here = {name for name in sizes if name not in others}
    from_stages = any(gathered(bool(here - facts.keys()) or not facts.keys().isdisjoint(others), together))

    def prepare() -> tuple[dict[str, Any] | None, list[error_feedback.Part], list[str]]:
        RuntimeState(module, group=together).check(own["runtime"])
        optimizer_state = None
        if stepping is not None:
            optimizer_state = restored_state(folder, metadata, wanted, module, stepping, own)
            _keep_last_bits(optimizer_state, wanted, module, stepping, halves)
            _check_states(folder, optimizer, optimizer_state)
        if from_stages:
            own["runtime"][error_feedback.KEY] = {}
            return optimizer_state, [], [f"{name} ({slot})" for name in sorted(here) for slot in sizes[name]]
        return optimizer_state, *error_feedback.plan_restore(facts, sizes, module)

    optimizer_state, parts, dropped = run(prepare)
    errors = error_feedback.read_parts(parts, lambda tensors: fill({error_feedback.KEY: tensors}))
    prefix = "model."
    module.load_state_dict({key.removeprefix(prefix): wanted[key] for key in wanted if key.startswith(prefix)})
    if stepping is not None and optimizer_state is not None:
        stepping.load_state_dict(optimizer_state)
    RuntimeState(module, group=together).restore(own["runtime"], manifest["ranks"], errors)
    error_feedback.warn_of_dropped(dropped)
    return Checkpoint(path=folder, step=manifest["step"], ranks=manifest["ranks"], extra=own["extra"])


class _Opened(SafeReader):
    """Reader for several loads from one checkpoint; reuses the metadata read before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.known


def _wanted(
    folder: Path, metadata: Metadata, module: nn.Module, optimizer: Checkpointed | None, halves: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """Create new tensors for everything that must be read; weights named in `halves` are read as fp32 if saved so.

    Returns:
        The new tensors by their names in the checkpoint, then the names in the checkpoint that this rank's model lacks.

    Raises:
        CheckpointError: the checkpoint lacks an entry, or has optimizer state for a parameter that is not stepped.
    """
    held = metadata.state_dict_metadata
    wanted: dict[str, Any] = {
        f"model.{name}": _new_like(value) if isinstance(value, Tensor) else None
        for name, value in module.state_dict().items()
    }
    for key, value in wanted.items():
        entry = held.get(key)
        is_whole = isinstance(entry, TensorStorageMetadata) and entry.properties.dtype == torch.float32
        if is_whole and key.removeprefix("model.") in halves:
            wanted[key] = _new_like(value, torch.float32)
    missing = [name.removeprefix("model.") for name in wanted if name not in held]
    unexpected = [name.removeprefix("model.") for name in held if name.startswith("model.") and name not in wanted]
    if missing:
        _refuse_model(folder, {"Missing key(s)": missing, "Unexpected key(s)": unexpected})
    if optimizer is None:
        return wanted, unexpected
    others = set(unexpected)
    parameters = {name.replace(COMPILED, ""): parameter for name, parameter in module.named_parameters()}
    stepped = {name for group in group_names(module, optimizer) for name in group}
    paths = entry_paths(metadata)
    if not paths:
        raise CheckpointError(f"zgraph: {folder} was saved without an optimizer; load it with optimizer=None.")
    for key, path in paths.items():
        if path[1] == "param_groups":
            entry = held[key]
            wanted[key] = (
                torch.empty(entry.size, dtype=entry.properties.dtype)
                if isinstance(entry, TensorStorageMetadata)
                else None
            )
            continue
        name, entry = str(path[2]), held[key]
        if name in others:
            continue
        if name not in stepped:
            _refuse_model(folder, {"Optimizer state for parameters that this optimizer does not step": [name]})
        parameter = parameters[name]
        if not isinstance(entry, TensorStorageMetadata):
            wanted[key] = None
        elif path[-1] == PACKED:
            wanted[key] = packed_zeros(parameter)
        elif path[-1] != "step" and entry.size == parameter.shape:
            wanted[key] = _new_like(parameter, entry.properties.dtype)
        else:
            wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return wanted, unexpected


def _with_remainders(module: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> frozenset[str]:
    """Return the names of bf16 parameters whose optimizer keeps further bits of them."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
    groups = [group for one in optimizers if isinstance(one, AdamW8bit) for group in one.param_groups]
    stepped = {id(one) for group in groups for one in group["params"] if one.dtype == torch.bfloat16}
    named = module.named_parameters()
    return frozenset(name.replace(COMPILED, "") for name, one in named if id(one) in stepped)


def _check_states(folder: Path, optimizer: Optimizer | Sequence[Optimizer] | None, state: Mapping[str, Any]) -> None:
    """Check that AdamW8bit, and no other optimizer, gets state that is packed, or can be.

    Raises:
        CheckpointError: the state is of another optimizer.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*(optimizer or ())]
    for one, own in parts_of(state, optimizers):
        if isinstance(one, AdamW8bit):
            try:
                one.check_state_dict(own)
            except ValueError as error:
                text = f"zgraph: {folder} is of another optimizer: {error} Nothing was loaded."
                raise CheckpointError(text) from None
        elif any(PACKED in entries for entries in own["state"].values()):
            raise CheckpointError(
                f"zgraph: {folder} has the state of zgraph.AdamW8bit, and {type(one).__name__} cannot read it. Nothing "
                "was loaded; load it into AdamW8bit, whose unpacked_state_dict torch.optim.AdamW can load."
            )


def _keep_last_bits(
    state: Mapping[str, Any],
    loaded: Mapping[str, Any],
    module: nn.Module,
    optimizer: Checkpointed,
    halves: Container[str],
) -> None:
    """Add weights that were read as fp32 to the optimizer state of their bf16 parameters."""
    by_index = names_by_index(state["param_groups"], group_names(module, optimizer))
    for index, entries in state["state"].items():
        weight = loaded[f"model.{by_index[index]}"]
        if by_index[index] in halves and weight.dtype == torch.float32 and PACKED not in entries:
            entries[WEIGHT] = weight


def _new_like(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(value.detach(), dtype=dtype or value.dtype)


def _check_kinds(folder: Path, metadata: Metadata, wanted: Mapping[str, Any]) -> None:
    """Check that the checkpoint has each tensor in `wanted` with the same shape and dtype.

    Raises:
        CheckpointError: an entry is missing or differs.
    """
    wrong: list[str] = []
    for key, value in wanted.items():
        entry = metadata.state_dict_metadata.get(key)
        if entry is None:
            raise CheckpointError(
                f"zgraph: {folder} is damaged, it has no entry {key}; resume from another checkpoint."
            )
        if isinstance(entry, TensorStorageMetadata) != isinstance(value, Tensor):
            wrong.append(f"{key} is a tensor on one side only")
        elif isinstance(entry, TensorStorageMetadata) and (entry.size, entry.properties.dtype) != (
            value.shape,
            value.dtype,
        ):
            wrong.append(
                f"{key.removeprefix('model.')} is {list(entry.size)} {entry.properties.dtype} in the checkpoint and "
                f"{list(value.shape)} {value.dtype} in the model"
            )
    if wrong:
        _refuse_model(folder, {"Size or dtype mismatch": wrong})


def _refuse_model(folder: Path, found: Mapping[str, Sequence[str]]) -> NoReturn:
    parts = [
        f"{what}: {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for what, names in found.items()
        if names
    ]
    raise CheckpointError(
        f"zgraph: {folder} is of another model. {'; '.join(parts)}. Nothing was loaded; build model and optimizer as "
        "they were when it was saved."
    )


def _check_files(folder: Path, metadata: Metadata, files: Mapping[str, Sequence[int]], rank: int, world: int) -> None:
    """Compare the files in a checkpoint's folder with the manifest; each rank checks the CRC-32 of some files.

    Raises:
        CheckpointError: a file is missing, or differs in size or CRC-32.
    """
    needed = {info.relative_path for info in metadata.storage_data.values()}
    for name in sorted(needed - files.keys()):
        raise CheckpointError(f"zgraph: {folder / MANIFEST} does not list {name}; resume from another checkpoint.")
    for position, name in enumerate(sorted(files)):
        path, (written, crc) = folder / name, files[name]
        if name != os.path.basename(name) or not path.is_file():
            raise CheckpointError(f"zgraph: {path} is missing; resume from another checkpoint.")
        if path.stat().st_size != written:
            raise CheckpointError(
                f"zgraph: {path} has {path.stat().st_size} bytes, and {written} were written; it was truncated or "
                "changed. Resume from another checkpoint."
            )
        if position % world == rank and measure(path)[1] != crc:
            raise CheckpointError(
                f"zgraph: {path} has another checksum than when it was written; the file was changed. Resume from "
                "another checkpoint."
            )


def entry_paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each optimizer entry, such as ("optimizer", "state", "head.weight", "exp_avg")."""
    paths = cast("dict[str, tuple[str | int, ...]]", metadata.planner_data or {})
    return {
        key: path
        for key, path in paths.items()
        if len(path) > 3 and path[0] == "optimizer" and path[1] in ("state", "param_groups")
    }


def restored_state(
    folder: Path,
    metadata: Metadata,
    loaded: Mapping[str, Any],
    module: nn.Module,
    optimizer: Checkpointed,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the optimizer's state dict from the loaded entries.

    Raises:
        CheckpointError: the optimizer has other groups than the saved one.
    """
    names = group_names(module, optimizer)
    tree = _nested({path[1:]: loaded[key] for key, path in entry_paths(metadata).items() if key in loaded})
    saved: list[dict[str, Any]] = tree["param_groups"]
    here = {name for group in names for name in group}
    elsewhere = {name for name in metadata.state_dict_metadata if name.startswith("model.") and name not in loaded}
    found = [
        [name for name in group.get("params") or () if name in here or f"model.{name}" not in elsewhere]
        for group in saved
    ]
    if found != names:
        differing = [
            f"group {position}: {_shown(theirs)} in the checkpoint, {_shown(ours)} here"
            for position, (theirs, ours) in enumerate(zip([*found, *[None] * len(names)], names, strict=False))
            if theirs != ours
        ] or [f"{len(found)} groups in the checkpoint, {len(names)} here"]
        _refuse_model(folder, {"Parameters in other groups of the optimizer": differing})
    numbered = optimizer.state_dict()["param_groups"]
    by_index = names_by_index(numbered, names)
    state: dict[str, dict[str, Any]] = tree.get("state", {})
    for name, entries in own["optimizer"].items():
        for key, value in entries.items():
            state[name][key].to_local().copy_(value)
    return {
        "state": {index: state[name] for index, name in by_index.items() if name in state},
        "param_groups": [{**group, "params": here["params"]} for group, here in zip(saved, numbered, strict=True)],
    }


def _shown(names: Any) -> str:
    if not names:
        return "none"
    return f"{len(names)} parameters from {names[0]} to {names[-1]}"


def _nested(flat: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Build nested dicts and lists from values keyed by path; a number in a path is a list index."""
    if () in flat:
        return flat[()]
    branches: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in flat.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in branches):
        return [_nested(branches[key]) for key in sorted(cast("dict[int, Any]", branches))]
    return {key: _nested(branch) for key, branch in branches.items()}
