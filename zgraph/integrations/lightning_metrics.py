"""`ZgraphMetrics`: the values of `zgraph.Metrics` in Lightning's loggers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl

from zgraph.integrations.lightning import ZgraphStrategy
from zgraph.reporting.metrics.metrics import Metrics
from zgraph.reporting.metrics.writers import Writer


class ZgraphMetrics(pl.Callback):
    """Logs the values of `zgraph.Metrics` for each training step, under its names: `step_ms`, `sent_bytes` and so on.

        trainer = L.Trainer(strategy=ZgraphStrategy(), callbacks=[ZgraphMetrics(tokens=lambda batch: batch[0].numel())])

    A step is a batch after which an optimizer has stepped, with the batches before it since the last one. Times leave
    out evaluation and saving. Loggers receive every `log_every_n_steps`-th step, as of Lightning's own values.

    Args:
        tokens: returns the number of tokens of a batch. None: `tokens_per_s` is unknown.
        writers, error_norm_every: as for `zgraph.Metrics`.

    Attributes:
        metrics: the `zgraph.Metrics` of the latest fit; None before.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], int] | None = None,
        writers: Iterable[Writer] = (),
        error_norm_every: int = 100,
    ) -> None:
        super().__init__()
        self.metrics: Metrics | None = None
        self._count, self._writers, self._error_norm_every = tokens, list(writers), error_norm_every
        self._tokens = self._global_step = 0
        self._saved: Mapping[str, Any] = {"step": 0}
        self._pause = contextlib.ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies, which do not tell when they save.

        Raises:
            ValueError: the strategy is not ZgraphStrategy.
        """
        if not isinstance(trainer.strategy, ZgraphStrategy):
            raise ValueError(
                f"zgraph: ZgraphMetrics measures a model that zgraph has sharded, but the strategy is "
                f"{type(trainer.strategy).__name__}; write L.Trainer(strategy=ZgraphStrategy(...)), or leave it out."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        writers = [_Loggers(trainer), *self._writers]
        self.metrics = metrics = Metrics(pl_module, writers=writers, error_norm_every=self._error_norm_every)
        metrics.load_state_dict(self._saved)
        self._tokens, self._global_step = 0, trainer.global_step
        assert isinstance(trainer.strategy, ZgraphStrategy)
        trainer.strategy.while_saving = metrics.pause

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.metrics is not None
        if self._count is not None:
            self._tokens += self._count(batch)
        if trainer.global_step != self._global_step:
            self.metrics.step(tokens=None if self._count is None else self._tokens)
            self._tokens, self._global_step = 0, trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.metrics is not None and trainer.state.fn == "fit":
            self._pause.enter_context(self.metrics.pause())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause.close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._pause.close()
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._saved if self.metrics is None else self.metrics.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)


class _Loggers:
    """Writer to the loggers of a Trainer, at the steps and under the numbers of Lightning's own values."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        every: int = self.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if every and step % every == 0:
            known = {name: value for name, value in values.items() if value is not None and name != "step"}
            for logger in self.trainer.loggers:
                logger.log_metrics(known, step=step - 1)  # Lightning counts from 0

    def close(self) -> None:
        """Lightning closes its loggers."""
