"""What backward of a whole step computes again changes no bit, whatever else the step does.

Any two features meet. A case takes some seconds, because two ranks trace two or three loops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from covertable import make

from tests.support.budget import long
from tests.support.ranks import Ranks, worlds
from tests.support.whole_steps import Case, assert_same, train

LEVELS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "precision": ["fp32", "bf16", "autocast"],
    "windows": [{}, {"accumulation": 2}, {"accumulation": 2, "no_sync": True}],
    # Checkpointing with dropout inside is refused.
    "layers": [{}, {"checkpointed": True}, {"dropout": 0.5}],
    "loco": [False, True],
}
CASES = [
    Case(stage=stage, precision=precision, **windows, **layers, loco=loco, gated=True, optimizer="sgd")
    for stage, precision, windows, layers, loco in make(list(LEVELS.values()), strength=2, salt="28")
]

QUICK = [
    next(one for one in CASES if one.checkpointed and one.accumulation > 1 and not one.loco),
    next(one for one in CASES if one.dropout and not one.loco),
]
OTHERS = [case for case in CASES if case not in QUICK]


def title(case: Case) -> str:
    features = (case.no_sync and "no_sync", case.checkpointed and "checkpointed", case.dropout and "dropout")
    named = [str(one) for one in (*features, case.loco and "loco") if one]
    return "-".join([str(case.stage), case.precision, str(case.accumulation), *named])


def recomputed(case: Case) -> list[bool]:
    """Compare a step with the plain loop; for each of its graphs, whether backward computes something again."""
    found, expected = train(case, whole_step=True), train(case, whole_step=False)
    if case.lowering == "fx":
        assert_same(found, expected)
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    notes = [note for note in found.notes if note.startswith("recompute_activations")]
    return [" activations again: " in note for note in notes]


@worlds(2)
@pytest.mark.parametrize(
    "case",
    [*QUICK, *OTHERS[::2], *long(*OTHERS[1::2])],
    ids=title,
)
def test_a_step_that_computes_again_equals_the_plain_loop(ranks: Ranks, case: Case) -> None:
    for found in ranks.run(recomputed, replace(case, started=case is not QUICK[0])):
        assert found and all(found) != case.checkpointed


@worlds(2)
def test_inductor_step_that_recomputes_is_close_to_plain_loop(ranks: Ranks) -> None:
    """But for rounding."""
    case = Case(gated=True, lowering="inductor", optimizer="sgd", clip="zgraph", started=True)
    for found in ranks.run(recomputed, case):
        assert found and all(found)
