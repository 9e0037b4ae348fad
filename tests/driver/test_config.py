"""Options of the backend are checked when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zgraph
from zgraph.compiler.pass_list import PassList
from zgraph.driver.options import CompileOptions
from zgraph.passes import presets
from zgraph.reporting.summary import Report


@dataclass
class Form:
    """A path of another library."""

    text: str

    def __fspath__(self) -> str:
        return self.text


def test_defaults() -> None:
    for nothing in (None, {}):
        found = CompileOptions.parse(nothing)
        assert (found.passes, found.lowering, found.dump, found.report) == (None, "inductor", None, None)
        assert found.agreement_timeout_s == 120


@pytest.mark.parametrize("form", [str, Path, Form], ids=lambda form: form.__name__)
def test_a_dump_directory_comes_in_any_form_of_path(form: Callable[[str], Any]) -> None:
    found = CompileOptions.parse({"dump": form("some/where")}).dump
    assert isinstance(found, Path) and found == Path("some/where")


def test_an_empty_dump_path_is_refused() -> None:
    with pytest.raises(ValueError, match="write the path of a directory"):
        CompileOptions.parse({"dump": ""})


def test_dump_may_be_none_and_options_stay_unchanged() -> None:
    given = {"dump": None}
    assert CompileOptions.parse(given).dump is None
    given = {"dump": "here"}
    CompileOptions.parse(given)
    assert given == {"dump": "here"}


def test_options_are_parsed_unchanged(tmp_path: Path) -> None:
    pipeline, report = PassList(presets.default()), Report()
    found = CompileOptions.parse({"passes": pipeline, "dump": str(tmp_path), "report": report})
    assert found.passes is pipeline and found.report is report and found.dump == tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passe": None}, r"unknown option 'passe'; did you mean 'passes'\?"),
        (
            {"zzz": 1},
            r"unknown option 'zzz'; the options are passes, lowering, dump, report, agreement_timeout_s, cuda",
        ),
        (
            {"passes": presets.default},
            r'options\["passes"\] is a function; write a list of passes, .* or zgraph\.PassList',
        ),
        ({"lowering": "tvm"}, r"lowering='tvm' is not available; write \{\"lowering\": \"inductor\"\} or"),
        ({"dump": True}, r'options\["dump"\] is True; write the path of a directory'),
        ({"dump": b"here"}, r'options\["dump"\] is b\'here\'; write the path of a directory'),
        ({"report": "out"}, r'options\["report"\] is a str; pass a zgraph\.Report\(\)'),
        ({"agreement_timeout_s": 0}, r"agreement_timeout_s=0 leaves no time; write a positive number"),
        ({"agreement_timeout_s": -1.5}, r"agreement_timeout_s=-1.5 leaves no time; write a positive number"),
        ({"agreement_timeout_s": float("nan")}, r"agreement_timeout_s=nan leaves no time; write a positive number"),
        ({"agreement_timeout_s": "9"}, r"agreement_timeout_s='9' is a str; write a positive number of seconds\."),
        ({"cuda_graph": 1}, r"cuda_graph must be True or False, not 1\."),
        ({"agreement_timeout_s": None}, r"agreement_timeout_s=None is a NoneType; write a positive number of seconds"),
    ],
)
def test_a_bad_option_says_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileOptions.parse(options)


def test_former_names_of_the_list_of_passes_go_on_with_a_warning() -> None:
    plain = presets.default()
    with pytest.warns(zgraph.ZgraphWarning, match=r'options\["pipeline"\] is now options\["passes"\]'):
        found = CompileOptions.parse({"pipeline": plain})
    assert found.passes == PassList(plain) == CompileOptions.parse({"passes": plain}).passes
    with pytest.warns(zgraph.ZgraphWarning, match="zgraph.Pipeline is now zgraph.PassList"):
        assert zgraph.Pipeline is PassList
    message = r'options\["pipeline"\] is the former name of options\["passes"\]; write one'
    with pytest.warns(zgraph.ZgraphWarning), pytest.raises(ValueError, match=message):
        CompileOptions.parse({"pipeline": plain, "passes": plain})
