"""Which tests `make test` runs, chosen by their durations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import budget
from tests.support.budget import Row, chosen
from tests.support.mutations import drawn, mutations_of
from tests.support.sources import PRODUCT


def test_each_value_of_each_parameter_is_chosen_before_a_second_pair_of_values() -> None:
    rows = [Row(1.0, {"stage": stage, "dtype": dtype}) for stage in (0, 3) for dtype in ("fp32", "bf16")]
    assert chosen(rows, budget_s=2.0, most_s=0.0) == {0, 3}
    assert chosen(rows, budget_s=4.0, most_s=0.0) == {0, 1, 2, 3}


def test_the_cheaper_of_two_equal_rows_is_chosen() -> None:
    rows = [Row(0.9, {"name": "a"}), Row(0.2, {"name": "b"}), Row(0.9, {"name": "c"})]
    assert chosen(rows, budget_s=1.0, most_s=0.0) == {1}


@pytest.mark.parametrize(("most_s", "expected"), [(5.0, {1}), (3.0, set())])
def test_a_function_over_its_budget_runs_its_cheapest_row(most_s: float, expected: set[int]) -> None:
    assert chosen([Row(9.0, {"n": 1}), Row(4.0, {"n": 2})], budget_s=1.0, most_s=most_s) == expected


def test_durations_are_written_by_function_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FILE", tmp_path / "durations.json")
    budget.write({"a.py::one[3-fp32]": 2.04, "a.py::one[0-fp32]": 0.01, "a.py::two": 1.0})
    assert json.loads(budget.FILE.read_text()) == {"a.py::one": {"3-fp32": 2.0}, "a.py::two": {"": 1.0}}


def test_mutations_change_one_expression_of_the_product() -> None:
    for mutation in drawn(seed=3, count=20):
        source = PRODUCT[mutation.path]
        changed = mutation.applied_to(source)
        compile(changed, mutation.path, "exec")
        start = len(source.encode()[: mutation.start].decode())
        assert changed[:start] == source[:start] and changed != source


def test_texts_of_errors_are_not_mutated() -> None:
    source = 'def f(x):\n    if x > 1:\n        raise ValueError(f"{x + 1} is {not x}")\n    return [x]\n'
    assert [str(one) for one in mutations_of("f.py", source)] == ["f.py:2: x > 1 -> (x >= 1)", "f.py:2: 1 -> (2)"]
