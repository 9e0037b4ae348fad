"""The directory of a run: finds complete checkpoints, and reads and writes their manifests.

A manifest is the file `zgraph.json` of a checkpoint, with the size and CRC-32 of every other file.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zgraph.checkpoint.all_ranks import group_of, rank_and_world, run_on_all_ranks
from zgraph.errors import CheckpointError

FORMAT = "zgraph checkpoint"
VERSION = 1
MANIFEST = "zgraph.json"


def latest_checkpoint(
    directory: str | os.PathLike[str], *, group: DeviceMesh | ProcessGroup | None = None
) -> Path | None:
    """Return the path of the newest complete checkpoint in a directory; None if there is none.

    Every rank of the group, by default all ranks, calls this, and gets the answer of its first rank.

    Raises:
        CheckpointError: the directory cannot be read.
    """

    ranks = group_of(group)

    def look() -> str | None:
        if rank_and_world(ranks)[0] != 0:
            return None
        root = Path(directory).absolute()
        recover(root)
        found = complete_checkpoints(root)
        return str(found[-1][1]) if found else None

    found = run_on_all_ranks("latest_checkpoint", look, group=ranks, all=True)[0]
    return None if found is None else Path(found)


def recover(root: Path) -> None:
    """Restore an old checkpoint whose replacement was interrupted between its two renames."""
    for hidden in root.glob(".step_*.replaced"):
        final = root / hidden.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            hidden.rename(final)


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each complete checkpoint, sorted by step.

    Incomplete checkpoints have hidden names; complete ones are named `step_...`.
    """
    if not root.is_dir():
        return []
    steps = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in steps if match and (path / MANIFEST).is_file())


def write_manifest(folder: Path, step: int, ranks: int, files: Mapping[str, Sequence[int]]) -> None:
    """Write a checkpoint's manifest, its last file.

    Args:
        folder: folder of the checkpoint.
        step: step of the checkpoint.
        ranks: number of ranks that saved the checkpoint.
        files: [size in bytes, CRC-32] of every other file, by name.
    """
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "ranks": ranks, "torch": torch.__version__}
    with (folder / MANIFEST).open("w") as stream:
        json.dump({**manifest, "files": dict(sorted(files.items()))}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"zgraph: there is no checkpoint {folder}; zgraph.latest_checkpoint finds the newest one."
        )
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(
            f"zgraph: {folder} is not a complete checkpoint, {MANIFEST} is missing. Pass a directory that "
            "zgraph.save_checkpoint returned (step_...), or load it with torch.distributed.checkpoint if that wrote it."
        )
    try:
        found = json.loads(manifest.read_text())
    except ValueError as error:
        raise CheckpointError(f"zgraph: {manifest} is damaged ({error}); resume from another checkpoint.") from error
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
        raise CheckpointError(f"zgraph: {manifest} is damaged, entries are missing; resume from another checkpoint.")
    return found


def measure(path: Path) -> list[int]:
    """Return [size in bytes, CRC-32] of a file."""
    size, crc = 0, 0
    with path.open("rb") as stream:
        while part := stream.read(2**20):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return [size, crc]


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, so that they survive a power failure."""
    if os.name == "nt":
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
