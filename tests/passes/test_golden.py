"""What each pass makes of two small graphs, line by line: tests/passes/golden holds the graphs before and after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.golden import CASES, FOLDER, PASSES, difference
from zgraph import passes
from zgraph.compiler.graph_pass import GraphPass

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
RELEASE = torch.__version__.partition("+")[0]


@pytest.mark.skipif(
    f"torch=={RELEASE}\n" not in CONSTRAINTS.read_text(),
    reason="another torch may trace other nodes: the files are written with the release in constraints.txt",
)
@pytest.mark.parametrize("name", PASSES)
def test_graphs_are_those_of_the_golden_file(name: str) -> None:
    """After a change that is meant to change them: python -m tests.support.golden."""
    changed = difference(name)
    assert not changed, f"\n{changed}\nIf it is meant to be so: python -m tests.support.golden"


def test_every_pass_has_two_cases_and_no_file_remains() -> None:
    exported = [getattr(passes, name) for name in passes.__all__]
    known = {entry.name for entry in exported if isinstance(entry, type) and issubclass(entry, GraphPass)}
    assert set(PASSES) == known - {GraphPass.name}
    names = [case.graph_pass.name for case in CASES]
    assert all(names.count(name) >= 2 for name in PASSES)
    assert {path.name for path in Path(FOLDER).iterdir()} == {f"{name}.txt" for name in PASSES}
