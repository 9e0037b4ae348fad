"""What is said while islands are compiled: a line on a terminal, lines in the log, and nothing elsewhere."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from zgraph.codegen.progress import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_counts_islands_on_a_line_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(shown("ab", "frame 0/0 forward")) == ["a", "b"]
    before, *lines, after = terminal.getvalue().split("\r\033[K")
    assert (before, after) == ("", "") and len(lines) == 2
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"zgraph: compiling frame 0/0 forward: island {number} of 2, \d+ s", line)


def test_the_line_is_gone_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    islands = shown("ab", "frame 0/0 forward")
    next(islands)
    with pytest.raises(RuntimeError):
        islands.throw(RuntimeError())  # pyright: ignore[reportAttributeAccessIssue]
    assert terminal.getvalue().endswith("\r\033[K")


def test_elsewhere_the_log_tells_who_asks(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    list(shown("ab", "frame 0/0 forward"))
    assert caplog.messages == []
    with caplog.at_level(logging.INFO, logger="zgraph"):
        list(shown("", "frame 0/0 forward"))
        list(shown("ab", "frame 0/0 backward"))
    first, second = caplog.messages
    assert first == "zgraph: compiling frame 0/0 backward: 2 islands"
    assert second.startswith("zgraph: compiled frame 0/0 backward in ")
    assert capfd.readouterr() == ("", "")
