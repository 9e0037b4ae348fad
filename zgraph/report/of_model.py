"""`zgraph.summary`: the report of a sharded model, wherever its frames were compiled."""

from __future__ import annotations

from torch import nn

from zgraph.errors import ZgraphError
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
    states = [state for part in without_compile(model).modules() if (state := state_of(part)) is not None]
    if not states:
        raise ZgraphError(
            "zgraph.summary: the model was not sharded, so nothing leads from it to what was compiled; pass "
            'options={"report": report} with a zgraph.Report() to torch.compile, and print that.'
        )
    report = states[0].scope.report
    if report is None:
        raise ZgraphError(
            'zgraph.summary: nothing was compiled yet; compile with backend="zgraph", and run a step first.'
        )
    return report
