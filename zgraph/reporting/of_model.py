"""`zgraph.summary`, `explain` and `measure`: reports on all frames compiled for a sharded model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from zgraph.errors import ZgraphError
from zgraph.reporting.explanation import Explanation
from zgraph.reporting.summary import Report
from zgraph.runtime.profiler import StepProfiler
from zgraph.sharding.scope import compute_devices, sharded_parameters, state_of
from zgraph.torch_compat.dynamo import without_compile


def summary(model: nn.Module) -> Report:
    """Summarize what has been compiled for a model: `print(zgraph.summary(model))` after the first step.

    The summary lists graphs, buckets, collectives with the bytes that they send, recompiles, compile time by phase, and
    the size of the error-feedback state.

    Args:
        model: module returned by `zgraph.shard` or `torch.compile`.

    Raises:
        ZgraphError: the model was not sharded, or nothing has been compiled.
    """
    report = report_of(model, "summary")
    report.feedback_bytes = _feedback_bytes(model)
    report.uncompiled = _uncompiled(model)
    return report


def explain(model: nn.Module) -> Explanation:
    """Explain what the compiled graphs of a model do, and why: `print(zgraph.explain(model))` after the first step.

    Shows for each graph how long each parameter is kept, buckets and their bytes, the predicted peak and, if the
    pipeline has a target, the predicted time and why collectives are exposed.

    Args:
        model: module returned by `zgraph.shard` or `torch.compile`.

    Raises:
        ZgraphError: the model was not sharded, or nothing has been compiled.
    """
    report = report_of(model, "explain")
    return Explanation(
        graphs=tuple(report.graphs), measured=dict(report.measured), feedback_bytes=_feedback_bytes(model)
    )


@contextmanager
def measure(model: nn.Module) -> Generator[None]:
    """Measure time, waits and memory of each compiled graph that runs inside the `with`, for `zgraph.explain`.

        with zgraph.measure(model):
            for batch in batches: train_step(batch)
        print(zgraph.explain(model))

    Run at least two whole steps; `explain` shows medians. On a CPU, torch.profiler records the allocations of the first
    step, which makes this step slow, so its times do not count. On CUDA, memory is the allocator's peak, and the
    allocator's peak statistics are reset. Results of the model stay the same, and other ranks need not measure.

    Args:
        model: sharded and compiled model that has run at least once.

    Raises:
        ZgraphError: the model was not sharded, nothing has been compiled, the model is being measured already, or none
            of its graphs ran inside the `with`.
    """
    report = report_of(model, "measure")
    if report.profiler is not None:
        raise ZgraphError("zgraph.measure: the model is being measured already; leave out the inner `with`.")
    on_cpu = any(device.type == "cpu" for device in compute_devices(without_compile(model)))
    profiler = report.profiler = StepProfiler(watch_allocations=on_cpu)
    try:
        yield
    finally:
        report.profiler = None
        profiler.stop()
    found = profiler.found()
    if not found:
        raise ZgraphError(
            "zgraph.measure: none of the model's compiled graphs ran; put whole training steps into the `with`, and "
            "call what torch.compile returned."
        )
    report.measured |= found


def _uncompiled(model: nn.Module) -> str:
    states = [state for part in without_compile(model).modules() if (state := state_of(part)) is not None]
    return "; ".join(dict.fromkeys(str(state.scope.uncompiled) for state in states if state.scope.uncompiled.modules))


def _feedback_bytes(model: nn.Module) -> int:
    reads = sharded_parameters(without_compile(model)).values()
    return sum(read.state.feedbacks.kept_bytes for read in reads)


def report_of(model: nn.Module, caller: str) -> Report:
    """Return the report of a model.

    Args:
        model: module returned by `zgraph.shard` or `torch.compile`.
        caller: name of the function that the user has called, for error messages.

    Raises:
        ZgraphError: the model was not sharded, or nothing has been compiled.
    """
    states = [state for part in without_compile(model).modules() if (state := state_of(part)) is not None]
    if not states:
        raise ZgraphError(
            f"zgraph.{caller}: the model was not sharded, so its compiled graphs cannot be found; call "
            'zgraph.shard(model) before torch.compile, or pass options={"report": report} with a zgraph.Report() to '
            "torch.compile, and print that."
        )
    report = states[0].scope.report
    if not isinstance(report, Report):
        raise ZgraphError(
            f'zgraph.{caller}: nothing was compiled yet; compile with backend="zgraph", and run a step first. If a '
            "step has run, Dynamo has reused the graphs of an equal model of this process, or has reached its limit of "
            "recompiles and runs this model uncompiled; call torch.compiler.reset() before this model's first step."
        )
    return report
