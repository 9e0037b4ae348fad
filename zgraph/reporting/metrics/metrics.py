"""`zgraph.Metrics`: time, bytes and memory of each step, while a model trains."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError, check_kind, check_least, is_count
from zgraph.reporting.metrics.error_norm import error_norm
from zgraph.reporting.metrics.step_clock import CalledGraph, StepClock
from zgraph.reporting.metrics.step_values import NAMES, StepValues
from zgraph.reporting.metrics.writers import Writer
from zgraph.reporting.summary import Report
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.profiler import elapsed_us, now
from zgraph.sharding.scope import Scope, ShardedParam, compute_devices, sharded_parameters, state_of
from zgraph.tiers.devices import is_gpu, module_of
from zgraph.torch_compat.dynamo import without_compile

_log = logging.getLogger(__name__)
Number = Tensor | float
Span = tuple[Any, Any]


class Metrics:
    """Collects metrics of each training step and passes them to writers; call `step` at the end of each step.

        metrics = zgraph.Metrics(model, writers=[zgraph.metrics.JsonLines("run.jsonl")])
        for x, y in batches:
            loss(model(x), y).backward()
            norm = zgraph.clip_grad_norm_(model.parameters(), 1.0)
            opt.step(); opt.zero_grad()
            metrics.step(tokens=x.numel(), grad_norm=norm)
        metrics.close()

    Values describe this rank only; nothing is communicated. On an accelerator, the host does not wait for the device: a
    step is written after the device has completed it, usually when the next step ends. Bytes and wait times cover only
    compiled graphs. On CUDA the allocator's peak statistics are reset at each step.

    Create the object after `zgraph.shard` and just before the first step: creation starts the step's time.

    Args:
        model: module returned by `zgraph.shard` or `torch.compile`. For an unsharded model, only times and the values
            passed to `step` are known.
        writers: writers such as `zgraph.metrics.JsonLines`. If a writer fails, a warning is logged and the writer is
            dropped.
        error_norm_every: number of steps from one norm of the error-feedback state to the next. Each norm reads the
            whole state. 0: no norms.

    Attributes:
        last: values of the last step that the device has completed; None before the first.
    """

    last: StepValues | None

    def __init__(self, model: nn.Module, *, writers: Iterable[Writer] = (), error_norm_every: int = 100) -> None:
        check_kind("zgraph.Metrics: model", model, nn.Module, "pass what zgraph.shard returned")
        instead = "a number of steps, such as 100, or 0"
        check_least("zgraph.Metrics", 0, instead, error_norm_every=error_norm_every)
        self.last = None
        self._writers = [*writers]
        for writer in self._writers:
            if not callable(getattr(writer, "write", None)):
                raise ValueError(
                    f"zgraph.Metrics: writers has a {type(writer).__name__}, which cannot write; pass such as "
                    'zgraph.metrics.JsonLines("run.jsonl").'
                )
        self._model = without_compile(model)
        self._error_norm_every = error_norm_every
        self._device = _accelerator_of(self._model)
        self._scopes = _scopes_of(self._model)
        self._parameters: Sequence[ShardedParam] | None = None
        self._clock = StepClock()
        for scope in self._scopes:
            scope.clocks.append(self._clock)
        self._detach = weakref.finalize(self, _detach, self._clock, [scope.clocks for scope in self._scopes])
        self._steps = 0
        self._pending: deque[_Step] = deque()
        self._pauses: list[Span] = []
        self._peak_bytes = 0
        self._compiled_s = _compile_seconds(self._scopes)
        _reset_peak(self._device)
        self._begun = now(self._device)

    def step(self, *, tokens: int | None = None, grad_norm: Number | None = None, **own: Number) -> None:
        """End a step, and write all steps that the device has completed.

        Values may be tensors that the device has yet to compute; this method does not wait for them.

        Args:
            tokens: number of tokens of the step, on this rank or on all ranks.
            grad_norm: result of `clip_grad_norm_`.
            own: further numbers to write, such as `loss=loss`.

        Raises:
            ValueError: a value is not a single number, or is sharded over ranks.
            ZgraphError: the model was sharded after this object was created, or `close` was called.
        """
        self._check(tokens, own)
        given = {name: _local(name, value) for name, value in own.items()}
        if grad_norm is not None:
            given["grad_norm"] = _local("grad_norm", grad_norm)
        self._steps += 1
        owed = self._error_norm()
        if owed is not None:
            given["error_norm"] = owed
        counted = self._clock.take()
        peak_bytes = self._take_peak(counted.profiled)
        compiled_s, self._compiled_s = self._compiled_s, _compile_seconds(self._scopes)
        graph_peak, share = _graph_peak(counted.calls, _reports_of(self._scopes))
        values = StepValues(
            step=self._steps,
            step_ms=0.0,  # known at the end
            compile_ms=1e3 * (self._compiled_s - compiled_s) if self._scopes else None,
            sent_bytes=counted.sent_bytes if counted.calls else None,
            site_bytes=counted.site_bytes,
            site_wait_ms=None if counted.site_bytes is None else 1e3 * counted.site_wait_s,
            peak_bytes=peak_bytes,
            graph_peak_bytes=graph_peak,
            budget_share=share,
        )
        host, names, coming = _split(given, self._device)
        begun, self._begun = self._begun, now(self._device)
        pauses, self._pauses = self._pauses, []
        span = begun, self._begun
        waits = counted.waits if counted.calls else None
        self._pending.append(_Step(values, tokens, span, pauses, waits, host, names, coming))
        self._write_known()

    @contextmanager
    def pause(self) -> Generator[None]:
        """Exclude the code inside the `with`, such as an evaluation, from the enclosing step."""
        if self._clock.paused:
            yield
            return
        peak_bytes = self._take_peak(profiled=False)
        begin, compiled_s = now(self._device), _compile_seconds(self._scopes)
        self._clock.paused = True
        try:
            yield
        finally:
            self._clock.paused = False
            self._compiled_s += _compile_seconds(self._scopes) - compiled_s
            self._take_peak(profiled=False)
            self._peak_bytes = peak_bytes or 0
            self._pauses.append((begin, now(self._device)))

    def close(self) -> None:
        """Wait for the device, write the remaining steps, close the writers and stop watching the model."""
        if not self._detach.alive:
            return
        if self._pending and self._device is not None:
            self._pending[-1].span[1].synchronize()
        self._write_known()
        self._detach()
        for writer in self._writers:
            self._try(writer, writer.close)
        self._writers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *caught: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps so far, to be saved in a checkpoint."""
        return {"step": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue counting steps from the number in a saved state.

        Raises:
            ValueError: the state has no number of steps.
        """
        step = state_dict.get("step")
        if not is_count(step, 0):
            raise ValueError(f"zgraph.Metrics.load_state_dict: {dict(state_dict)!r} has no number of steps.")
        self._steps = step

    def _check(self, tokens: int | None, own: Mapping[str, Number]) -> None:
        if not self._detach.alive:
            raise ZgraphError("zgraph.Metrics.step: it was closed; make another zgraph.Metrics to go on.")
        if tokens is not None and not is_count(tokens, 0):
            raise ValueError(f"zgraph.Metrics.step: tokens={tokens!r}; write how many, such as x.numel().")
        taken = [name for name in own if name in NAMES]
        if taken:
            raise ValueError(f"zgraph.Metrics.step: {taken[0]} is one of zgraph's own values; give yours another name.")
        if not self._scopes and not self._steps and _scopes_of(self._model):
            raise ZgraphError(
                "zgraph.Metrics: the model was sharded after its Metrics was made; make it after zgraph.shard(model)."
            )

    def _error_norm(self) -> Tensor | None:
        every = self._error_norm_every
        if not self._scopes or not every or self._steps % every:
            return None
        if self._parameters is None:
            self._parameters = [*sharded_parameters(self._model).values()]
        return error_norm(_feedbacks_of(self._parameters))

    def _take_peak(self, profiled: bool) -> int | None:
        """Return the allocator's peak bytes since the last call, and reset the peak.

        None without CUDA, or if `zgraph.measure` has reset the peak meanwhile.
        """
        if self._device is None or not is_gpu(self._device):
            return None
        peak_bytes = max(self._peak_bytes, module_of(self._device).max_memory_allocated(self._device))
        self._peak_bytes = 0
        _reset_peak(self._device)
        return None if profiled else peak_bytes

    def _write_known(self) -> None:
        while self._pending and (self._device is None or self._pending[0].span[1].query()):
            self.last = self._pending.popleft().found()
            for writer in [*self._writers]:
                self._try(writer, lambda writer=writer, last=self.last: writer.write(last.step, last.as_dict()))

    def _try(self, writer: Writer, call: Any) -> None:
        """Call a writer; if it fails, log a warning and drop the writer, so that training continues."""
        try:
            call()
        except Exception as error:
            if writer in self._writers:
                self._writers.remove(writer)
            _log.warning("zgraph.Metrics: %s failed and is not used again: %s", type(writer).__name__, error)


@dataclass(frozen=True)
class _Step:
    """A step that the host has ended, but the device perhaps not.

    Attributes:
        values: values that were known at the end of the step.
        tokens: number of tokens; None: not given.
        span: begin and end of the step, as returned by `now`.
        pauses: begin and end of each pause in the step.
        waits: begin and end of each wait of a compiled graph; None: no compiled graph ran.
        host: numbers known on the host, by name.
        names: names of the numbers that the device computes.
        coming: host tensor to which these numbers are copied; None if there are none.
    """

    values: StepValues
    tokens: int | None
    span: Span
    pauses: list[Span]
    waits: list[Span] | None
    host: dict[str, float]
    names: list[str]
    coming: Tensor | None

    def found(self) -> StepValues:
        """Return all values of the step; call this only after the device has completed the step."""
        step_us = elapsed_us(*self.span) - sum(elapsed_us(*pause) for pause in self.pauses)
        arrived = [] if self.coming is None else self.coming.tolist()
        numbers = self.host | dict(zip(self.names, arrived, strict=True))
        return replace(
            self.values,
            step_ms=1e-3 * step_us,
            tokens_per_s=None if self.tokens is None or step_us <= 0 else 1e6 * self.tokens / step_us,
            exposed_ms=None if self.waits is None else 1e-3 * sum(elapsed_us(*wait) for wait in self.waits),
            grad_norm=numbers.pop("grad_norm", None),
            error_norm=numbers.pop("error_norm", None),
            own=numbers,
        )


def _accelerator_of(model: nn.Module) -> torch.device | None:
    return next((device for device in compute_devices(model) if device.type not in ("cpu", "meta")), None)


def _scopes_of(model: nn.Module) -> list[Scope]:
    states = (state_of(part) for part in model.modules())
    return list(dict.fromkeys(state.scope for state in states if state is not None))


def _detach(clock: StepClock, lists: Iterable[list[StepClock]]) -> None:
    for clocks in lists:
        clocks.remove(clock)


def _reports_of(scopes: Iterable[Scope]) -> list[Report]:
    return [scope.report for scope in scopes if isinstance(scope.report, Report)]


def _compile_seconds(scopes: Iterable[Scope]) -> float:
    return sum(sum(report.seconds.values()) for report in _reports_of(scopes))


def _feedbacks_of(parameters: Iterable[ShardedParam]) -> Iterator[Feedback]:
    for parameter in parameters:
        yield from parameter.state.feedbacks.by_slot.values()


def _graph_peak(calls: Sequence[CalledGraph], reports: Iterable[Report]) -> tuple[int | None, float | None]:
    """Return the highest peak bytes of the called graphs, and the highest ratio of a peak to its budget."""
    measured = {key: found.peak_bytes for report in reports for key, found in report.measured.items()}
    peaks: list[int | None] = []
    shares: list[float] = []
    for call in dict.fromkeys(calls):
        seen = measured.get((call.frame, call.direction))
        peaks.append(call.peak_bytes if seen is None else seen)
        counted = call.frame_peak_bytes if seen is None else seen
        if call.budget_bytes is not None and counted is not None:
            shares.append(counted / call.budget_bytes)
    known = [peak for peak in peaks if peak is not None]
    return (max(known) if known and len(known) == len(peaks) else None), max(shares, default=None)


def _local(name: str, value: object) -> Number:
    """Return a value as a number or a one-element tensor; replicated DTensors become their local tensors.

    Raises:
        ValueError: the value is neither a number nor a one-element tensor, or is sharded over ranks.
    """
    if isinstance(value, DTensor):
        if not all(placement.is_replicate() for placement in value.placements):
            raise ValueError(
                f"zgraph.Metrics.step: {name} is spread over ranks ({value.placements}), which would have to "
                f"communicate to know it; pass {name}.full_tensor(), or for a norm what zgraph.clip_grad_norm_ returns."
            )
        value = value.to_local()
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"zgraph.Metrics.step: {name} has {value.numel()} elements; pass one number.")
        return value.detach()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"zgraph.Metrics.step: {name} is a {type(value).__name__}; pass a number, or a tensor of one.")
    return value


def _split(
    given: Mapping[str, Number], device: torch.device | None
) -> tuple[dict[str, float], list[str], Tensor | None]:
    """Separate numbers known on the host from numbers on the device, and start copying the latter to the host.

    Returns:
        The host's numbers by name; the names of the device's numbers; and the host tensor to which they are copied.
    """
    there = {
        name: value.reshape(()).to(device, torch.float32)
        for name, value in given.items()
        if device is not None and isinstance(value, Tensor) and value.device.type != "cpu"
    }
    host = {name: float(value) for name, value in given.items() if name not in there}
    coming = torch.stack([*there.values()]).to("cpu", non_blocking=True) if there else None
    return host, [*there], coming


def _reset_peak(device: torch.device | None) -> None:
    if device is not None and is_gpu(device):
        module_of(device).reset_peak_memory_stats(device)
