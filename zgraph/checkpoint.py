"""Checkpoints that are complete or absent: written beside, renamed when whole, checked before anything is loaded.

A checkpoint is a directory that torch.distributed.checkpoint wrote, with a page `zgraph.json` that lists size and
CRC-32 of every file. Any number of ranks can load it. Parameters and optimizer state have the names that torch's own
`get_state_dict` gives ("model.<name>", "optimizer.state.<name>.<key>"), so torch's tools read it too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zgraph.errors import CheckpointError
from zgraph.rehearsal import COMPILED
from zgraph.runtime.state import RuntimeState, gathered
from zgraph.safe_reader import METADATA, SafePlanner, SafeReader, check_plain, decode, encode, read_metadata
from zgraph.torch_compat import is_distributed_ready, local_parameters, without_compile
from zgraph.unit import state_of

FORMAT = "zgraph checkpoint"
VERSION = 1
PAGE = "zgraph.json"
SHOWN = 5  # names of a kind in one error


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What `load_checkpoint` has loaded.

    Attributes:
        path: its directory.
        step: as it was saved.
        ranks: how many ranks saved it.
        extra: what this rank saved as `extra`; where the number of ranks has changed, what rank r modulo `ranks` did.
    """

    path: Path
    step: int
    ranks: int
    extra: dict[str, Any]


# --- save ---------------------------------------------------------------------------------------------------------


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write `directory/step_<step>`: model, optimizer, random generators and `extra`. Every rank calls it.

    Files are written and fsynced in a hidden directory beside, which is renamed at the end: whenever the run is killed,
    a checkpoint is there completely or not at all. All ranks write into the same file system.

    Args:
        directory: made where it is missing; holds the checkpoints of one run.
        model: sharded or not, compiled or not.
        optimizer: of the model's parameters. Gradients are not saved: call after a step, not inside a `no_sync` window.
        step: names the checkpoint; a complete one of the same step is replaced.
        extra: what else to remember, such as a scheduler's state_dict or the data position. May differ between ranks.
            Plain tensors, numbers, strings, None, and dicts, lists and tuples of them.
        keep: complete checkpoints that stay, the newest ones.

    Returns:
        The checkpoint's directory.

    Raises:
        ValueError: an option cannot be honoured.
        CheckpointError: it could not be written; raised on all ranks, whichever failed. Earlier ones are untouched.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"zgraph.save_checkpoint: step={step} must not be negative, and keep={keep} at least 1.")
    root = Path(directory).absolute()
    final, partial = root / f"step_{step:08d}", root / f".step_{step:08d}.partial"
    module = without_compile(model)
    state = _together("save_checkpoint", lambda: _state_to_save(module, optimizer, dict(extra or {})))
    rank, ranks = _rank_and_world()
    if len(set(steps := gathered(step))) > 1:
        raise CheckpointError(f"zgraph.save_checkpoint: ranks save different steps {steps}; pass the same everywhere.")
    own: dict[str, Any] = {"runtime": RuntimeState(module).own(), "extra": dict(extra or {})}
    own["optimizer"] = {} if optimizer is None else _ignored_states(module, optimizer)
    state["rank"] = {str(rank): encode(own)}

    def prepare() -> None:
        if rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            _recover(root)
            for left_over in root.glob(".step_*"):  # by a run that was killed
                shutil.rmtree(left_over)
            partial.mkdir()

    def finish(files: list[dict[str, list[int]]]) -> None:
        if rank != 0:
            return
        page = {"format": FORMAT, "version": VERSION, "step": step, "ranks": ranks, "torch": torch.__version__}
        listed = {name: entry for of_rank in files for name, entry in of_rank.items()}
        with (partial / PAGE).open("w") as stream:
            json.dump({**page, "files": dict(sorted(listed.items()))}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_directory(partial)
        if final.exists():
            final.rename(root / f".{final.name}.replaced")
        partial.rename(final)
        _sync_directory(root)
        for _, old in _complete(root)[:-keep]:
            hidden = root / f".{old.name}.old"
            old.rename(hidden)  # first: half deleted it would look complete
            shutil.rmtree(hidden)
        shutil.rmtree(root / f".{final.name}.replaced", ignore_errors=True)

    _together("save_checkpoint", prepare)
    with _dcp_errors("save_checkpoint"):
        save(state, storage_writer=FileSystemWriter(partial), no_dist=not is_distributed_ready())
    names = [f"__{rank}_*.distcp", *([METADATA] if rank == 0 else [])]
    files = _together(
        "save_checkpoint",
        lambda: {path.name: _measure(path) for name in names for path in partial.glob(name)},
        all=True,
    )
    _together("save_checkpoint", lambda: finish(files))
    return final


def _state_to_save(module: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]) -> dict[str, Any]:
    def refuse(what: str) -> NoReturn:
        raise CheckpointError(
            f"zgraph.save_checkpoint: {what}, which a load without pickles cannot bring back; save tensors, numbers, "
            "strings, None, and dicts, lists and tuples of them."
        )

    _check_no_window(module)
    check_plain(extra, "extra", refuse)
    state: dict[str, Any] = {"model": module.state_dict()}
    for name, value in state["model"].items():
        if not isinstance(value, Tensor):
            check_plain(value, name, refuse)
    if optimizer is not None:
        saved = optimizer.state_dict()
        names = _group_names(module, optimizer)
        by_index = _by_index(saved["param_groups"], names)
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


def _check_no_window(module: nn.Module) -> None:
    for part in module.modules():
        state = state_of(part)
        if state is not None and state.scope.opened:
            raise CheckpointError(
                "zgraph.save_checkpoint: a no_sync window is open, and its gradients would be lost; save after the "
                "optimizer step that closes it."
            )


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters."""
    names = {id(parameter): name.replace(COMPILED, "") for name, parameter in module.named_parameters()}
    groups: list[list[str]] = []
    for position, group in enumerate(optimizer.param_groups):
        strange = [list(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if strange:
            raise CheckpointError(
                f"zgraph: group {position} of the optimizer holds {len(strange)} tensors that are no parameters of the "
                f"model, the first of shape {strange[0]}; pass the model that it steps, and create it after "
                "zgraph.shard."
            )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def _by_index(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[int, str]:
    """An optimizer's state dict numbers its parameters."""
    return {
        index: name
        for group, own in zip(groups, names, strict=True)
        for index, name in zip(group["params"], own, strict=True)
    }


def _ignored_states(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Optimizer state of parameters that each rank steps for itself."""
    ignored = _ignored_names(module)
    saved = optimizer.state_dict()
    by_index = _by_index(saved["param_groups"], _group_names(module, optimizer))
    return {
        by_index[index]: {key: value.to_local().cpu() for key, value in entries.items() if isinstance(value, DTensor)}
        for index, entries in saved["state"].items()
        if by_index[index] in ignored
    }


def _ignored_names(module: nn.Module) -> frozenset[str]:
    ignored = {
        id(local_parameters(part)[attribute])
        for part in module.modules()
        if (state := state_of(part)) is not None
        for attribute, read in state.by_attribute.items()
        if read.spec.ignored
    }
    return frozenset(
        name.replace(COMPILED, "") for name, parameter in module.named_parameters() if id(parameter) in ignored
    )


# --- find ---------------------------------------------------------------------------------------------------------


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a directory, or None. Every rank calls it, and gets what rank 0 sees.

    Raises:
        CheckpointError: the directory cannot be read.
    """

    def look() -> str | None:
        if _rank_and_world()[0] != 0:
            return None
        root = Path(directory).absolute()
        _recover(root)
        found = _complete(root)
        return str(found[-1][1]) if found else None

    found = _together("latest_checkpoint", look, all=True)[0]
    return None if found is None else Path(found)


def _recover(root: Path) -> None:
    """Put a checkpoint back whose replacement was killed between its two renames."""
    for hidden in root.glob(".step_*.replaced"):
        final = root / hidden.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            hidden.rename(final)


def _complete(root: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by step. One has its name, and its page, only from the rename on."""
    if not root.is_dir():
        return []
    steps = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in steps if match and (path / PAGE).is_file())


# --- load ---------------------------------------------------------------------------------------------------------


def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Checkpoint:
    """Load what `save_checkpoint` wrote, on any number of ranks. Every rank calls it.

    On as many ranks as saved it the run continues bitwise. Nothing is loaded unless all can be: names, shapes, dtypes
    and the size and CRC-32 of every file are checked first, then all is read into new tensors, and only then copied.
    Nothing stored is executed (see `SafeReader`).

    Args:
        path: a checkpoint, such as `latest_checkpoint` returns.
        model: built and sharded as the saved one was; the mesh may be another.
        optimizer: with the same groups. None: what the checkpoint has of one is left alone.

    Raises:
        CheckpointError: it is incomplete, damaged, of another model or of another format version; raised on all ranks,
            whichever found it, with model and optimizer unchanged.
    """
    folder = Path(path).absolute()
    module = without_compile(model)
    rank, world = _rank_and_world()

    def inspect() -> tuple[dict[str, Any], Metadata, dict[str, Any], str]:
        page = _read_page(folder)
        metadata = read_metadata(folder)
        wanted = _wanted(folder, metadata, module, optimizer)
        wanted[f"rank.{rank % page['ranks']}"] = None
        _check_kinds(folder, metadata, wanted)
        return page, metadata, wanted, json.dumps(page)

    inspected = _together("load_checkpoint", inspect)
    page, metadata, wanted, text = inspected
    if len(set(gathered(zlib.crc32(text.encode())))) > 1:
        raise CheckpointError(f"zgraph.load_checkpoint: ranks see different checkpoints in {folder}; share the folder.")
    _together("load_checkpoint", lambda: _check_files(folder, metadata, page["files"], rank, world))
    with _dcp_errors("load_checkpoint"):
        load(wanted, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=not is_distributed_ready())

    def prepare() -> tuple[dict[str, Any], dict[str, Any] | None]:
        own = decode(wanted[f"rank.{rank % page['ranks']}"], f"what rank {rank % page['ranks']} kept in {folder}")
        RuntimeState(module).check(own["runtime"])
        return own, None if optimizer is None else _optimizer_state(folder, metadata, wanted, module, optimizer, own)

    own, optimizer_state = _together("load_checkpoint", prepare)
    prefix = "model."
    module.load_state_dict({key.removeprefix(prefix): wanted[key] for key in wanted if key.startswith(prefix)})
    if optimizer is not None and optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    RuntimeState(module).restore(own["runtime"], page["ranks"])
    return Checkpoint(path=folder, step=page["step"], ranks=page["ranks"], extra=own["extra"])


def _read_page(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"zgraph: there is no checkpoint {folder}; zgraph.latest_checkpoint finds the newest one."
        )
    page = folder / PAGE
    if not page.is_file():
        raise CheckpointError(
            f"zgraph: {folder} is no complete checkpoint, {PAGE} is missing. Pass a directory that "
            "zgraph.save_checkpoint returned (step_...), or load it with torch.distributed.checkpoint if that wrote it."
        )
    try:
        found = json.loads(page.read_text())
    except ValueError as error:
        raise CheckpointError(f"zgraph: {page} is damaged ({error}); resume from another checkpoint.") from error
    found = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise CheckpointError(
            f"zgraph: {folder} has format {found.get('format')!r} version {found.get('version')!r}, and this zgraph "
            f"reads {FORMAT!r} version {VERSION}; load it with the zgraph that wrote it."
        )
    files = found.get("files")
    sound = isinstance(files, dict) and all(
        isinstance(entry, list) and [type(part) for part in cast("list[Any]", entry)] == [int, int]
        for entry in cast("dict[str, Any]", files).values()
    )
    if not sound or any(type(found.get(key)) is not int for key in ("step", "ranks")) or found["ranks"] < 1:
        raise CheckpointError(f"zgraph: {page} is damaged, entries are missing; resume from another checkpoint.")
    return found


def _wanted(folder: Path, metadata: Metadata, module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """New tensors for all that is to be read, by name in the checkpoint. Names must agree with the model's."""
    held = metadata.state_dict_metadata
    wanted: dict[str, Any] = {
        f"model.{name}": _new_like(value) if isinstance(value, Tensor) else None
        for name, value in module.state_dict().items()
    }
    missing = [name.removeprefix("model.") for name in wanted if name not in held]
    unexpected = [name.removeprefix("model.") for name in held if name.startswith("model.") and name not in wanted]
    if missing or unexpected:
        _refuse_model(folder, {"Missing key(s)": missing, "Unexpected key(s)": unexpected})
    if optimizer is None:
        return wanted
    parameters = {name.replace(COMPILED, ""): parameter for name, parameter in module.named_parameters()}
    stepped = {name for group in _group_names(module, optimizer) for name in group}
    paths = _optimizer_paths(metadata)
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
        if name not in stepped:
            _refuse_model(folder, {"Optimizer state for parameters that this optimizer does not step": [name]})
        parameter = parameters[name]
        if not isinstance(entry, TensorStorageMetadata):
            wanted[key] = None
        elif path[-1] != "step" and entry.size == parameter.shape:
            wanted[key] = _new_like(parameter, entry.properties.dtype)
        else:
            wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return wanted


def _new_like(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(value.detach(), dtype=dtype or value.dtype)


def _optimizer_paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Entries of the optimizer, with the places they had: ("optimizer", "state", "head.weight", "exp_avg")."""
    paths = cast("dict[str, tuple[str | int, ...]]", metadata.planner_data or {})
    return {
        key: path
        for key, path in paths.items()
        if len(path) > 3 and path[0] == "optimizer" and path[1] in ("state", "param_groups")
    }


def _check_kinds(folder: Path, metadata: Metadata, wanted: Mapping[str, Any]) -> None:
    """Tensors must be tensors in the checkpoint, of the same shape and dtype."""
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
    """Compare the files with what was written, before anything is loaded. Ranks share the reading for checksums."""
    needed = {info.relative_path for info in metadata.storage_data.values()}
    for name in sorted(needed - files.keys()):
        raise CheckpointError(f"zgraph: {folder / PAGE} does not list {name}; resume from another checkpoint.")
    for position, name in enumerate(sorted(files)):
        path, (written, crc) = folder / name, files[name]
        if name != os.path.basename(name) or not path.is_file():
            raise CheckpointError(f"zgraph: {path} is missing; resume from another checkpoint.")
        if path.stat().st_size != written:
            raise CheckpointError(
                f"zgraph: {path} has {path.stat().st_size} bytes, and {written} were written; it was truncated or "
                "changed. Resume from another checkpoint."
            )
        if position % world == rank and _measure(path)[1] != crc:
            raise CheckpointError(
                f"zgraph: {path} has another checksum than when it was written; the file was changed. Resume from "
                "another checkpoint."
            )


def _optimizer_state(
    folder: Path,
    metadata: Metadata,
    loaded: Mapping[str, Any],
    module: nn.Module,
    optimizer: Optimizer,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """The optimizer's state dict out of what was read."""
    names = _group_names(module, optimizer)
    tree = _nested({path[1:]: loaded[key] for key, path in _optimizer_paths(metadata).items()})
    saved: list[dict[str, Any]] = tree["param_groups"]
    found = [group.get("params") for group in saved]
    if found != names:
        differing = [
            f"group {position}: {_shown(theirs)} in the checkpoint, {_shown(ours)} here"
            for position, (theirs, ours) in enumerate(zip([*found, *[None] * len(names)], names, strict=False))
            if theirs != ours
        ] or [f"{len(found)} groups in the checkpoint, {len(names)} here"]
        _refuse_model(folder, {"Parameters in other groups of the optimizer": differing})
    numbered = optimizer.state_dict()["param_groups"]
    by_index = _by_index(numbered, names)
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
    """Dicts and lists out of values by path; a number in a path is a place in a list."""
    if () in flat:
        return flat[()]
    branches: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in flat.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in branches):
        return [_nested(branches[key]) for key in sorted(cast("dict[int, Any]", branches))]
    return {key: _nested(branch) for key, branch in branches.items()}


# --- files and ranks --------------------------------------------------------------------------------------------


def _measure(path: Path) -> list[int]:
    """Size in bytes and CRC-32."""
    size, crc = 0, 0
    with path.open("rb") as stream:
        while part := stream.read(2**20):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return [size, crc]


def _sync_directory(path: Path) -> None:
    """Make names in a directory survive a power failure."""
    if os.name == "nt":
        return  # a directory cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if is_distributed_ready() else (0, 1)


def _together(who: str, action: Callable[[], Any], *, all: bool = False) -> Any:
    """Run an action that does not communicate; where it fails on one rank, raise on every one, or the others hang.

    Returns:
        What it returned here; with `all` a list of what it returned on each rank.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        mine, failure = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        cause: Exception | None = mine
    else:
        cause = None
    outcomes = gathered((failure, result if all else None))
    failed = [(rank, text) for rank, (text, _) in enumerate(outcomes) if text is not None]
    if failed:
        rank, text = failed[0]
        others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"zgraph.{who} failed on rank {rank}{others}: {text}") from cause
    return [value for _, value in outcomes] if all else result


@contextmanager
def _dcp_errors(who: str) -> Generator[None]:
    """torch raises a BaseException on every rank, with each failing rank's own inside."""
    try:
        with warnings.catch_warnings():
            if not is_distributed_ready():  # one process is what was meant
                warnings.filterwarnings("ignore", message="torch.distributed is ")
            yield
    except CheckpointException as error:
        rank, (cause, _) = sorted(error.failures.items())[0]
        raise CheckpointError(f"zgraph.{who} failed on rank {rank}: {type(cause).__name__}: {cause}") from error
