"""`zgraph.summary` and `zgraph.explain`: what was compiled for a sharded model, in whichever frames."""

from __future__ import annotations

from torch import nn

from zgraph.errors import ZgraphError
from zgraph.report.explanation import Explanation
from zgraph.report.summary import Report
from zgraph.torch_compat import without_compile
from zgraph.unit import state_of


def summary(model: nn.Module) -> Report:
    """What was compiled for a model so far: `print(zgraph.summary(model))` after the first step.

    Graphs, buckets, collectives and the bytes they send, recompiles, and compile seconds by phase.

    Args:
        model: what `zgraph.shard` returned, or what torch.compile made of it.

    Raises:
        ZgraphError: it was not sharded, or nothing has been compiled.
    """
    return report_of(model, "summary")


def explain(model: nn.Module) -> Explanation:
    """What its compiled graphs do, and why: `print(zgraph.explain(model))` after the first step.

    For each graph: how long each parameter is kept, buckets and their bytes, the predicted peak, and, where the
    pipeline was given hardware, the predicted time and why a collective is not hidden.

    Args:
        model: what `zgraph.shard` returned, or what torch.compile made of it.

    Raises:
        ZgraphError: it was not sharded, or nothing has been compiled.
    """
    return Explanation(graphs=tuple(report_of(model, "explain").graphs))


def report_of(model: nn.Module, caller: str) -> Report:
    """The report of a model, or an error that names the function the user has called."""
    states = [state for part in without_compile(model).modules() if (state := state_of(part)) is not None]
    if not states:
        raise ZgraphError(
            f"zgraph.{caller}: the model was not sharded, so nothing leads from it to what was compiled; call "
            'zgraph.shard(model) before torch.compile, or pass options={"report": report} with a zgraph.Report() to '
            "torch.compile, and print that."
        )
    report = states[0].scope.report
    if report is None:
        raise ZgraphError(
            f'zgraph.{caller}: nothing was compiled yet; compile with backend="zgraph", and run a step first.'
        )
    return report
