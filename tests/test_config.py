"""Options of the backend are checked when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zgraph.config import CompileOptions
from zgraph.passes import presets
from zgraph.pipeline import Pipeline
from zgraph.report.summary import Report


def test_defaults() -> None:
    for nothing in (None, {}):
        found = CompileOptions.parse(nothing)
        assert (found.pipeline, found.lowering, found.dump, found.report) == (None, "fx", None, None)


def test_what_is_given_arrives(tmp_path: Path) -> None:
    pipeline, report = Pipeline(presets.default()), Report()
    found = CompileOptions.parse({"pipeline": pipeline, "dump": str(tmp_path), "report": report})
    assert found.pipeline is pipeline and found.report is report and found.dump == tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipelin": None}, r"unknown option 'pipelin'; did you mean 'pipeline'\?"),
        ({"zzz": 1}, r"unknown option 'zzz'; the options are pipeline, lowering, dump, report, agreement_timeout_s"),
        ({"pipeline": presets.default()}, r'options\["pipeline"\] is a list; write \{"pipeline": zgraph\.Pipeline'),
        ({"lowering": "inductor"}, r"lowering='inductor' is not available; write \{\"lowering\": \"fx\"\}"),
        ({"dump": True}, r'options\["dump"\] is True; write the path of a directory'),
        ({"report": "out"}, r'options\["report"\] is a str; pass a zgraph\.Report\(\)'),
        ({"agreement_timeout_s": 0}, r"agreement_timeout_s=0 leaves no time; write a positive number"),
    ],
)
def test_a_bad_option_says_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileOptions.parse(options)
