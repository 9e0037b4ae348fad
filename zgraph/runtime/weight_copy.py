"""The whole parameter that every rank keeps where differences of weights travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class WeightCopy:
    """Copy of one parameter, equal on all ranks of its group, for all have added up the same codes.

    Attributes:
        whole: [N * numel] in the dtype that forwards read; never written to, for a backward may still need it.
        sent: this rank's shard when `whole` was made.
        pending: the shard whose difference is under way.
    """

    whole: Tensor
    sent: Tensor
    pending: Tensor

    def difference(self, shard: Tensor, numel: int, rank: int) -> Tensor:
        """What the copy lacks of a shard: [numel] fp32, zeros behind its end.

        Zeros where the shard is what it was: a gather that is repeated before the next optimizer step, as activation
        checkpointing does, or an evaluation before a forward, then yields the same bits again.
        """
        self.pending = shard.clone()
        held = self.whole[rank * numel : rank * numel + shard.numel()]
        lacking = shard.reshape(-1).to(torch.float32) - _finite(held.to(torch.float32))
        lacking = torch.where((shard == self.sent).all(), torch.zeros_like(lacking), lacking)
        return torch.nn.functional.pad(lacking, (0, numel - shard.numel()))

    def plus(self, step: Tensor) -> Tensor:
        """The copy and what the ranks have sent of their differences, in the copy's dtype."""
        return (_finite(self.whole.to(torch.float32)) + step).to(self.whole.dtype)

    def become(self, whole: Tensor) -> None:
        """Further differences are taken from this."""
        self.whole = whole
        self.sent = self.pending


def _finite(values: Tensor) -> Tensor:
    """Zero where a diverged step has left no number: from there a restored parameter is reached again."""
    return values.nan_to_num(0.0, 0.0, 0.0)
