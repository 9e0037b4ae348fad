"""Copy lanes of which a judge hears, as it does of collectives; a copy arrives when it is waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.benchmarks.loopback import Transfer
from tests.support.judges.happens_before import HappensBefore


@dataclass(eq=False)
class JudgedCopy:
    """A copy that has been started."""

    judge: HappensBefore
    transfer: Transfer

    def wait(self) -> Tensor:
        self.transfer.was_waited_for = True
        self.judge.waited(self.transfer)
        return self.transfer.filled[0].copy_(self.transfer.sent[0])


@dataclass(eq=False)
class JudgedLanes:
    """In place of the lanes of a device."""

    judge: HappensBefore

    def offload(self, tensor: Tensor) -> JudgedCopy:
        return self._start("offload", tensor.detach(), torch.empty_like(tensor))

    def reload(self, kept: Tensor) -> JudgedCopy:
        return self._start("reload", kept, torch.empty_like(kept))

    def store(self, source: Tensor, kept: Tensor) -> JudgedCopy:
        return self._start("store", source.detach(), kept)

    def _start(self, kind: str, source: Tensor, filled: Tensor) -> JudgedCopy:
        transfer = Transfer(kind=kind, number=0, sent=[source], filled=[filled], copy=None, sent_bytes=source.nbytes)
        self.judge.started(transfer)
        return JudgedCopy(self.judge, transfer)
