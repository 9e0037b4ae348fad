"""`zgraph.summary`, `explain` and `measure`: what was compiled for a sharded model, in whichever frames."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from zgraph.errors import ZgraphError
from zgraph.reporting.explanation import Explanation
from zgraph.reporting.summary import Report
from zgraph.runtime.profiler import StepProfiler
from zgraph.sharding.scope import sharded_parameters, state_of
from zgraph.torch_compat.dynamo import without_compile


def summary(model: nn.Module) -> Report:
    """What was compiled for a model so far: `print(zgraph.summary(model))` after the first step.

    Graphs, buckets, collectives and the bytes they send, recompiles, compile seconds by phase, and the bytes that error
    feedback keeps.

    Args:
        model: what `zgraph.shard` returned, or what torch.compile made of it.

    Raises:
        ZgraphError: it was not sharded, or nothing has been compiled.
    """
    report = _report_of(model, "summary")
    report.feedback_bytes = _feedback_bytes(model)
    return report


def explain(model: nn.Module) -> Explanation:
    """What its compiled graphs do, and why: `print(zgraph.explain(model))` after the first step.

    For each graph: how long each parameter is kept, buckets and their bytes, the predicted peak, and, where the
    pipeline was given hardware, the predicted time and why a collective is not hidden.

    Args:
        model: what `zgraph.shard` returned, or what torch.compile made of it.

    Raises:
        ZgraphError: it was not sharded, or nothing has been compiled.
    """
    report = _report_of(model, "explain")
    return Explanation(
        graphs=tuple(report.graphs), measured=dict(report.measured), feedback_bytes=_feedback_bytes(model)
    )


@contextmanager
def measure(model: nn.Module) -> Generator[None]:
    """Measure the compiled graphs that run inside, for `zgraph.explain`: time, waits and memory of each.

        with zgraph.measure(model):
            for batch in batches: train_step(batch)
        print(zgraph.explain(model))

    Write at least two whole steps: the first one is slowed down by torch.profiler, which sees what the CPU allocates,
    and then counts for memory alone; of the others explain shows medians. On CUDA memory is the allocator's peak, whose
    statistics are reset. Graphs run as they do outside, and what other ranks do does not matter; where nothing is
    measured nothing is slower.

    Args:
        model: sharded, compiled, and run at least once.

    Raises:
        ZgraphError: it was not sharded, nothing has been compiled, it is being measured already, or none of its graphs
            ran inside.
    """
    report = _report_of(model, "measure")
    if report.meter is not None:
        raise ZgraphError("zgraph.measure: the model is being measured already; leave out the inner `with`.")
    on_cpu = any(parameter.device.type == "cpu" for parameter in model.parameters())
    meter = report.meter = StepProfiler(watch_allocations=on_cpu)
    try:
        yield
    finally:
        report.meter = None
        meter.stop()
    found = meter.found()
    if not found:
        raise ZgraphError(
            "zgraph.measure: none of the model's compiled graphs ran; put whole training steps into the `with`, and "
            "call what torch.compile returned."
        )
    report.measured |= found


def _feedback_bytes(model: nn.Module) -> int:
    reads = sharded_parameters(without_compile(model)).values()
    return sum(read.state.feedbacks.kept_bytes for read in reads)


def _report_of(model: nn.Module, caller: str) -> Report:
    """The report of a model, or an error that names the function the user has called."""
    states = [state for part in without_compile(model).modules() if (state := state_of(part)) is not None]
    if not states:
        raise ZgraphError(
            f"zgraph.{caller}: the model was not sharded, so nothing leads from it to what was compiled; call "
            'zgraph.shard(model) before torch.compile, or pass options={"report": report} with a zgraph.Report() to '
            "torch.compile, and print that."
        )
    report = states[0].scope.report
    if not isinstance(report, Report):
        raise ZgraphError(
            f'zgraph.{caller}: nothing was compiled yet; compile with backend="zgraph", and run a step first.'
        )
    return report
