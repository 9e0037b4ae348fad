"""Every tensor that this process holds, and the bytes of their storages."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def live_tensors(smallest_numel: int) -> list[Tensor]:
    """Every plain tensor that the process holds and that is as large as a shard."""
    gc.collect()
    return [
        entry
        for entry in gc.get_objects()
        if type(entry) in (Tensor, nn.Parameter) and entry.device.type == "cpu" and entry.numel() >= smallest_numel
    ]


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def local(tensor: Any) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor
