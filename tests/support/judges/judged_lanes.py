"""Copy lanes of which a judge hears, as it does of collectives; a copy arrives when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks.loopback import Transfer
from tests.support.judges.happens_before import HappensBefore
from zgraph.torch_compat.modules import tree_flatten
from zgraph.torch_compat.operators import written_tensors


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
class JudgedUpdate:
    """An update that has been started, and runs when it is waited for."""

    judge: HappensBefore
    transfer: Transfer
    run: Callable[[], None]

    def result(self) -> None:
        self.transfer.was_waited_for = True
        self.judge.waited(self.transfer)
        self.run()


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

    def give_back(self, kept: Tensor, tensor: Tensor) -> JudgedCopy:
        return self._start("return", kept, tensor.detach())

    def update(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JudgedUpdate:
        written = written_tensors(operator, args, kwargs)
        read = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        sent = [one for one in read if not any(one is other for other in written)]
        transfer = Transfer(kind="update", number=0, sent=sent, filled=written, copy=None, sent_bytes=0)
        self.judge.started(transfer)
        return JudgedUpdate(self.judge, transfer, lambda: operator(*args, **kwargs))

    def _start(self, kind: str, source: Tensor, filled: Tensor) -> JudgedCopy:
        transfer = Transfer(kind=kind, number=0, sent=[source], filled=[filled], copy=None, sent_bytes=source.nbytes)
        self.judge.started(transfer)
        return JudgedCopy(self.judge, transfer)
