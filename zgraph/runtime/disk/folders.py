"""The folders on disk to which the tensors of one device are offloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch import Tensor

from zgraph.runtime.disk.folder import DiskFolder


@dataclass
class DiskFolders:
    """Folders that live as long as something refers to them.

    Attributes:
        by_path: the live folders.
    """

    by_path: WeakValueDictionary[str, DiskFolder] = field(default_factory=WeakValueDictionary[str, DiskFolder])

    def at(self, path: str, rank: int = 0) -> DiskFolder:
        """The folder at a path, made on first use.

        Raises:
            DiskError: the folder cannot be used.
        """
        found = self.by_path.get(path)
        if found is None:
            found = self.by_path[path] = DiskFolder(path, rank=rank)
        return found

    def of(self, tensor: Tensor) -> DiskFolder | None:
        """The folder that stores a tensor; None: it is not on disk."""
        return next((folder for folder in [*self.by_path.values()] if folder.is_on_disk(tensor)), None)
