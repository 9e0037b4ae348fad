"""Messages between the ranks at one position in the members of a round."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from zgraph.torch_compat.groups import gloo_group


class Peers:
    """A gloo group of members, made without the process groups of the run: `zgraph.step.outer.rounds.Links`.

    Args:
        store: store under a prefix of its own; all members create the group, and wait for the others.
        rank, count: number of this member, and of all.
        timeout_s: seconds after which creating the group, or a message, fails with a RuntimeError.

    Attributes:
        sent_bytes: bytes sent to other members.
        until: time on the monotonic clock after which exchanges fail with a RuntimeError.
    """

    def __init__(self, store: Store, rank: int, count: int, timeout_s: float) -> None:
        self.rank, self.count, self.sent_bytes, self.until = rank, count, 0, math.inf
        self._group = gloo_group(store, rank, count, timeout_s) if count > 1 else None

    def all_to_all(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        received[self.rank] = rows[self.rank]
        others = [one for one in range(self.count) if one != self.rank]
        self.swap({one: rows[one] for one in others}, {one: received[one] for one in others})
        return received

    def all_gather(self, row: Tensor) -> Tensor:
        return self.all_to_all(row.expand(self.count, *row.shape))

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Exchange tensors with other members, and wait: send `sends[i]` to member i, which has to receive it.

        Args:
            sends: tensor for each member.
            receives: tensor to fill from each member, of the size that the member sends.
        """
        if self._group is None:
            return
        landing = {one: torch.empty_like(tensor, device="cpu") for one, tensor in receives.items()}
        works = [self._group.recv([tensor], one, 0) for one, tensor in landing.items()]
        leaving = {one: tensor.contiguous().cpu() for one, tensor in sends.items()}
        works += [self._group.send([tensor], one, 0) for one, tensor in leaving.items()]
        for work in works:
            work.wait()
        if time.monotonic() > self.until:
            raise RuntimeError("the exchange took longer than the deadline of the meeting")
        for one, tensor in receives.items():
            tensor.copy_(landing[one])
        self.sent_bytes += sum(tensor.nbytes for tensor in leaving.values())
