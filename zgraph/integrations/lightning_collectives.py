"""Collectives of Lightning's strategy: ranks with different numbers of batches get an error instead of waiting."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from zgraph.sharding.scope import sharded_parameters, state_of

ADVICE = "which all ranks must come to after equally many batches"


class CheckedCollectives(ModelParallelStrategy):
    """Lightning's strategy for DTensors, in which ranks with different numbers of batches get an AgreementError.

    A rank that has run out of batches would go on to Lightning's next collective, while the others gather parameters
    for their next batch; both would wait until the timeout of the process group. On gloo, ranks therefore compare their
    numbers of batches at the start of each epoch and evaluation. For iterable datasets, whose number is not known, each
    collective of Lightning starts with an exchange of zgraph, which notices ranks that wait for different ones.
    """

    @property
    def module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def meet(self, call: str, batches: Any = None) -> None:
        """Wait until all ranks have come to the same call, if the model is sharded.

        Args:
            call: name of the call.
            batches: number of batches to come, which must be equal on all ranks; None: not compared.

        Raises:
            AgreementError: a rank has come to another call, or with another number of batches.
        """
        module = self.lightning_module
        state = None if module is None else state_of(module)
        detail = f", {ADVICE}" if batches is None else f" of {batches} batches, which must be equally many on all ranks"
        for model in () if state is None else state.scope.models:
            model.meet(f"Lightning's {call}", number=crc32(str(batches).encode()), detail=detail)

    def evaluate(self, call: str, batches: Any) -> None:
        """Compare the numbers of batches of an evaluation, unless its forwards do without the other ranks (stage 0)."""
        found = sharded_parameters(self.module).values()
        gathers = any(param.spec.layout.zero_stage for param in found)
        self.meet(f"start of {call}", batches if gathers else None)

    def barrier(self, name: str | None = None) -> None:
        self.meet("barrier")
        super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.meet("broadcast")
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is None:
            self.meet("reduce")
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if group is None:
            self.meet("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # not in each step, which it would slow down
            self.meet("start of an epoch", self.module.trainer.num_training_batches)

    def on_train_end(self) -> None:
        self.meet("end of training")

    def on_validation_start(self) -> None:
        self.evaluate("validation", self.module.trainer.num_val_batches)

    def on_validation_end(self) -> None:
        self.meet("end of validation")

    def on_test_start(self) -> None:
        self.evaluate("testing", self.module.trainer.num_test_batches)

    def on_test_end(self) -> None:
        self.meet("end of testing")

    def on_predict_start(self) -> None:
        self.evaluate("prediction", self.module.trainer.num_predict_batches)

    def on_predict_end(self) -> None:
        self.meet("end of prediction")
