"""Reads checkpoints of torch.distributed.checkpoint without executing code that they contain.

torch's own reader unpickles the file `.metadata` and every entry that is not a tensor, so that a checkpoint from an
unknown source can run arbitrary code. Here `.metadata` is unpickled into stand-ins, objects that only store what the
pickle gives them; they are checked and converted to torch's classes. Nothing that a pickle names is called. All other
entries are read by torch's weights-only loader.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from zgraph.errors import CheckpointError
from zgraph.torch_compat.modules import storage_info

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    {
        *(
            (f"{_TORCH}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_TORCH}.filesystem", "_StorageInfo"),
    }
)
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"})


class SafeReader(FileSystemReader):
    """torch's FileSystemReader, but without executing code from the checkpoint; use it together with `SafePlanner`.

        dcp.load(state, storage_reader=zgraph.SafeReader(path), planner=zgraph.SafePlanner())

    Raises:
        CheckpointError: during the load, if `.metadata` is damaged or names an unexpected class or function. torch
            wraps this error in a CheckpointException, like every error of a load.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the file `.metadata`, which lists the checkpoint's entries."""
        rank = kwargs.get("rank")
        metadata = read_metadata(Path(self.path), METADATA if rank is None else f"__{rank}{METADATA}")
        cast(StorageMeta, metadata.storage_meta).load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's DefaultLoadPlanner, restricted to entries with tensors, plain values and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Rewritten from the result of the safe loader, because torch loads these bytes without a check.
        written = io.BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), written)
        written.seek(0)
        super().load_bytes(read_item, written)


class _StandIn:
    """Replacement for one of torch's classes; stores arguments and state from a pickle, and does nothing else."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __new__(cls, *arguments: Any) -> _StandIn:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self.path = path
        # New classes for each read: a pickle can set attributes of a class that it names.
        self.stand_ins: dict[tuple[str, str], type[_StandIn]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = (module_name, global_name)
        if name in _CLASSES:
            return self.stand_ins.setdefault(name, type(global_name, (_StandIn,), {"kind": global_name}))
        if module_name == "torch" and isinstance(found := getattr(torch, global_name, None), torch.dtype):
            return found
        if name in (("torch", "Size"), ("collections", "OrderedDict")):
            return tuple if global_name == "Size" else dict
        if name == ("torch.serialization", "_get_layout") or (
            module_name.split(".")[0] == "pathlib" and global_name in _PATHS
        ):
            return lambda *parts: "/".join(str(part) for part in parts)
        raise CheckpointError(
            f"zgraph: {self.path} names {module_name}.{global_name}, which no checkpoint needs; the file is damaged "
            "or was made to run code of its own. Nothing of it was executed. Use a checkpoint from a source you trust."
        )


def read_metadata(folder: Path, name: str = METADATA) -> Metadata:
    """Read the file `.metadata` of a DCP checkpoint without calling anything that it names.

    Raises:
        CheckpointError: the file is missing, damaged, or not in the format of DCP.
    """
    path = folder / name
    try:
        with path.open("rb") as stream:
            return _Converter(path).metadata(_Reader(stream, path).load())
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"zgraph: {folder} is not a checkpoint: {name} is missing; a save that was interrupted leaves none."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"zgraph: {path} is damaged ({type(error).__name__}: {error}); resume from another checkpoint."
        ) from error


class _Converter:
    """Converts stand-ins to objects of torch's classes, and checks each field."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def metadata(self, found: Any) -> Metadata:
        state = self._state(found, "Metadata")
        storage = self._dict(state.get("storage_data"))
        version = state.get("version")
        return Metadata(
            state_dict_metadata={
                self._is(key, str): self._entry(entry)
                for key, entry in self._dict(state.get("state_dict_metadata")).items()
            },
            planner_data={
                self._is(key, str): tuple(self._is(part, (str, int)) for part in self._is(path, tuple))
                for key, path in self._dict(state.get("planner_data") or {}).items()
            },
            storage_data={self._index(key): self._info(value) for key, value in storage.items()},
            storage_meta=StorageMeta(),
            version=None if version is None else self._is(version, str),
        )

    def _entry(self, found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if getattr(found, "kind", None) == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = self._state(found, "TensorStorageMetadata")
        properties = getattr(state.get("properties"), "state", None)
        dtype = self._is(self._is(properties, tuple)[0], torch.dtype)
        chunks = [self._state(chunk, "ChunkStorageMetadata") for chunk in self._is(state.get("chunks"), list)]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=self._size(state.get("size")),
            chunks=[
                ChunkStorageMetadata(offsets=self._size(chunk.get("offsets")), sizes=self._size(chunk.get("sizes")))
                for chunk in chunks
            ],
        )

    def _index(self, found: Any) -> MetadataIndex:
        state = self._state(found, "MetadataIndex")
        offset, index = state.get("offset"), state.get("index")
        return MetadataIndex(
            self._is(state.get("fqn"), str),
            None if offset is None else self._size(offset),
            None if index is None else self._is(index, int),
        )

    def _info(self, found: Any) -> Any:
        state = self._state(found, "_StorageInfo")
        name = self._is(state.get("relative_path"), str)
        if name in ("", ".", "..") or name != os.path.basename(name) or "\\" in name:
            self._refuse(f"a file outside of the checkpoint, {name!r}")
        if state.get("transform_descriptors"):
            self._refuse("transformed files, which zgraph does not read")
        return storage_info(name, self._is(state.get("offset"), int), self._is(state.get("length"), int))

    def _state(self, found: Any, kind: str) -> dict[str, Any]:
        if not isinstance(found, _StandIn) or found.kind != kind:
            self._refuse(f"{type(found).__name__} where {kind} belongs")
        return self._dict(found.state)

    def _dict(self, found: Any) -> dict[Any, Any]:
        return self._is(found, dict)

    def _size(self, found: Any) -> torch.Size:
        return torch.Size([self._is(length, int) for length in self._is(found, tuple)])

    def _is(self, found: Any, kind: Any) -> Any:
        if not isinstance(found, kind):
            self._refuse(f"{type(found).__name__} where {getattr(kind, '__name__', 'str or int')} belongs")
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"zgraph: {self.path} is damaged: it holds {what}. Resume from another checkpoint.")


def decode(data: bytes, where: str) -> Any:
    """Decode bytes from `encode`; only tensors, numbers, strings and containers of them are accepted.

    Args:
        data: bytes to decode.
        where: description of their origin, for error messages.

    Raises:
        CheckpointError: the data contains other objects, or is damaged.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"zgraph: {where} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}); nothing of it was "
            "executed. Resume from another checkpoint."
        ) from error


def encode(value: Any) -> bytes:
    """Encode plain values (see `check_plain`) as bytes."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def check_plain(value: Any, where: str, refuse: Callable[[str], NoReturn]) -> None:
    """Call `refuse` with a description if `value` has parts that torch's weights-only loader cannot read."""
    if isinstance(value, dict):
        for key, entry in cast("dict[Any, Any]", value).items():
            check_plain(key, f"a key of {where}", refuse)
            check_plain(entry, f"{where}[{key!r}]", refuse)
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(cast("list[Any]", value)):
            check_plain(entry, f"{where}[{position}]", refuse)
    elif value is not None and type(value) not in (bool, int, float, complex, str, bytes, torch.Tensor):
        refuse(f"{where} is a {type(value).__module__}.{type(value).__qualname__}")
