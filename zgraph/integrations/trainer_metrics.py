"""Metrics of each step in the logs of Hugging Face's Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn
from transformers import TrainerCallback

from zgraph.reporting.metrics.metrics import Metrics


class Measured:
    """Methods that `sharded(..., metrics=True)` puts before those of a trainer (transformers 5.23)."""

    add_callback: Any
    remove_callback: Any
    _steps: _StepsOfTrainer | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._steps = _StepsOfTrainer()
        self.add_callback(self._steps)
        try:
            return self._sharded().train(*args, **kwargs)
        finally:
            self.remove_callback(self._steps)
            self._steps.close()
            self._steps = None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; a log of training gets the values of the last step."""
        if self._steps is not None and "loss" in logs:
            logs |= self._steps.known()
        self._sharded().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._paused():
            return self._sharded().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._paused():
            return self._sharded()._save_checkpoint(*args, **kwargs)

    @contextlib.contextmanager
    def _paused(self) -> Generator[None]:
        metrics = None if self._steps is None else self._steps.metrics
        with contextlib.nullcontext() if metrics is None else metrics.pause():
            yield

    def _sharded(self) -> Any:
        """Return the methods that come after those of this class."""
        return super()


class _StepsOfTrainer(TrainerCallback):
    """Ends a step of `zgraph.Metrics` after each step of the optimizer; `metrics` is None before the first."""

    metrics: Metrics | None = None
    tokens_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        self.metrics = Metrics(model)
        self.metrics.load_state_dict({"step": state.global_step})
        self.tokens_before = int(state.num_input_tokens_seen)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.metrics is not None
        seen = int(state.num_input_tokens_seen)  # stays 0 unless include_num_input_tokens_seen counts them
        self.metrics.step(tokens=seen - self.tokens_before or None)
        self.tokens_before = seen

    def known(self) -> dict[str, float]:
        """Return the known values of the last completed step."""
        last = None if self.metrics is None else self.metrics.last
        values = {} if last is None else last.as_dict()
        return {name: value for name, value in values.items() if value is not None and name != "step"}

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
