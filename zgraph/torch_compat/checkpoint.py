"""Entries of torch.distributed.checkpoint."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any


def storage_info(name: str, offset: int, length: int) -> Any:
    """Where a DCP checkpoint keeps an entry (`_StorageInfo`, 2.11 - 2.13); torch's reader looks for this class."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)
