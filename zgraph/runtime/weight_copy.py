"""Copy of the unsharded parameter that every rank keeps where gathers send differences of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class WeightCopy:
    """Copy of one parameter, equal on all ranks of its group because all of them have added the same codes.

    Attributes:
        unsharded: [N * numel] in the dtype that forwards read; never written to, as a backward may still need it.
        sent: this rank's shard when `unsharded` was made.
        pending: the shard whose difference is in flight.
    """

    unsharded: Tensor
    sent: Tensor
    pending: Tensor

    def difference(self, shard: Tensor, numel: int, rank: int) -> Tensor:
        """Difference between a shard and its copy: [numel] fp32, padded with zeros.

        All zeros where the shard has not changed: a gather that is repeated before the next optimizer step (by
        activation checkpointing, or by an evaluation before a forward) then yields the same bits.
        """
        self.pending = shard.clone()
        held = self.unsharded[rank * numel : rank * numel + shard.numel()]
        lacking = shard.reshape(-1).to(torch.float32) - _finite(held.to(torch.float32))
        lacking = torch.where((shard == self.sent).all(), torch.zeros_like(lacking), lacking)
        return torch.nn.functional.pad(lacking, (0, numel - shard.numel()))

    def plus(self, step: Tensor) -> Tensor:
        """The copy plus the differences that the ranks have sent, in the copy's dtype."""
        return (_finite(self.unsharded.to(torch.float32)) + step).to(self.unsharded.dtype)

    def become(self, unsharded: Tensor) -> None:
        """Take further differences from this value."""
        self.unsharded = unsharded
        self.sent = self.pending


def _finite(values: Tensor) -> Tensor:
    """Zeros in place of NaN and inf, so that the copy recovers when a diverged parameter is restored."""
    return values.nan_to_num(0.0, 0.0, 0.0)
