"""Differences between two reports, or two passes of one report: nodes, bytes, times, memory, parameters."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from zgraph.reporting.export.reading import line_text, texts_of
from zgraph.reporting.export.report_json import Document
from zgraph.reporting.tables import Table, duration, size

CAPTURED = "captured"  # name for the graph before any pass
TITLES = MappingProxyType(
    {
        "graphs": "graphs",
        "memory": "memory of a step",
        "operators": "nodes by operator",
        "passes": "after each pass",
        "parameters": "parameters",
    }
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value that differs between two reports.

    Attributes:
        section: section of the output: a key of TITLES.
        frame: name of the frame.
        subject: the graph, pass or parameter that the value belongs to.
        fact: name of the value, with its unit at the end, such as "sent_bytes".
        before, after: the value in the first and in the second report; None if the report lacks the subject.
    """

    section: str
    frame: str
    subject: str
    fact: str
    before: float | str | None
    after: float | str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        fact, text = _with_unit(self.fact)
        shown = ["-" if value is None else value if isinstance(value, str) else text(value) for value in self._values]
        return (self.frame, self.subject, fact, *shown, self._difference(text))

    @property
    def _values(self) -> tuple[float | str | None, float | str | None]:
        return self.before, self.after

    def _difference(self, text: Callable[[float], str]) -> str:
        if isinstance(self.before, str | None) or isinstance(self.after, str | None):
            return ""
        difference = self.after - self.before
        share = f" ({difference / self.before:+.1%})" if self.before else ""
        return f"{'+' if difference > 0 else ''}{text(difference)}{share}"


def compare(first: Document, second: Document) -> list[Change]:
    """Return the values that differ between two reports."""
    measured = [_measured(document) for document in (first, second)]
    found: list[Change] = []
    for pair in _pairs(first, second):
        names = [frame["frame"] if frame is not None else "" for frame in pair]
        name = " and ".join(dict.fromkeys(filter(None, names)))
        for section, facts_of in _SECTIONS.items():
            found += _changes(section, name, *(facts_of(frame) if frame is not None else {} for frame in pair))
        found += _changes("graphs", name, *(known.get(each, {}) for known, each in zip(measured, names, strict=True)))
    return found


def _pairs(first: Document, second: Document) -> list[tuple[Document | None, Document | None]]:
    """Return the pairs of frames to compare; None stands for a missing frame.

    Reports with equally many frames are compared in the order of compilation, because names differ between plans of one
    process: Dynamo calls the first plan's frame "0/0" and the second's "0/1". Other reports are compared by name.
    """
    frames = [document["frames"] for document in (first, second)]
    if len(frames[0]) == len(frames[1]):
        return list(zip(*frames, strict=True))
    named = [{frame["frame"]: frame for frame in each} for each in frames]
    return [(named[0].get(name), named[1].get(name)) for name in dict.fromkeys([*named[0], *named[1]])]


def compare_passes(document: Document, first: str, second: str) -> list[Change]:
    """Compare a report's graphs after two passes; return the values that differ.

    The name CAPTURED stands for the graphs before any pass.

    Raises:
        ValueError: the report has no such pass, or no graph had both passes.
    """
    known = dict.fromkeys([CAPTURED, *(entry["name"] for frame in document["frames"] for entry in frame["passes"])])
    for name in (first, second):
        if name not in known:
            raise ValueError(f"there is no pass {name!r} in this report; it has {', '.join(known)}.")
    found: list[Change] = []
    compared = False
    for frame in document["frames"]:
        before, after = (_after_pass(frame, name) for name in (first, second))
        both = [direction for direction in before if direction in after]
        compared = compared or bool(both)
        here = ({direction: facts[direction] for direction in both} for facts in (before, after))
        found += _changes("graphs", frame["frame"], *here)
    if not compared:
        raise ValueError(f"{first} and {second} ran on different graphs, which have nothing to compare.")
    return found


def lines_between(document: Document, first: str, second: str) -> list[str]:
    """Return a unified diff between each graph's text after one pass and its text after another pass."""
    found: list[str] = []
    for frame in document["frames"]:
        for direction in frame["captured"]:
            texts = {CAPTURED if entry is None else entry["name"]: lines for entry, lines in texts_of(frame, direction)}
            if first not in texts or second not in texts:
                continue
            before, after = ([line_text(frame, line) for line in texts[name]] for name in (first, second))
            graph = f"{frame['frame']} {direction}"
            found += difflib.unified_diff(before, after, f"{graph}: {first}", f"{graph}: {second}", lineterm="")
    return found


def tables_of(changes: Sequence[Change], first: str, second: str) -> list[Table]:
    """Return one table for each section; `first` and `second` are the titles of the columns of values."""
    columns = ("frame", "of", "fact", first, second, "difference")
    return [
        Table(title, columns, tuple(change.cells() for change in changes if change.section == section))
        for section, title in TITLES.items()
    ]


# --- facts of a frame: by subject and name ---------------------------------------------------------------------------

Facts = Mapping[str, Mapping[str, Any]]
_TOTALS = ("nodes", "sent_bytes", "peak_bytes", "predicted_us", "exposed_us")


def _graphs(frame: Document) -> Facts:
    names = ("sent_bytes", "received_bytes", "peak_bytes", "predicted_us", "exposed_us")
    return {
        graph["direction"]: {
            "nodes": len(graph["nodes"]["line"]),
            "collectives": len(graph["collectives"]["node"]),
            **{name: graph[name] for name in names},
        }
        for graph in frame["graphs"]
    }


def _memory(frame: Document) -> Facts:
    memory = frame["memory"]
    if memory is None:
        return {}
    return {"step": {name: memory[name] for name in ("peak_bytes", "held_bytes", "budget_bytes")}}


def _operators(frame: Document) -> Facts:
    found: dict[str, dict[str, int]] = {}
    for graph in frame["graphs"]:
        for target, count in Counter(graph["nodes"]["target"]).items():
            found[f"{graph['direction']}: {frame['strings'][target]}"] = {"nodes": count}
    return found


def _passes(frame: Document) -> Facts:
    """Return the totals of each graph after each pass. A repeated pass gets a number in its name, such as "#2"."""
    found: dict[str, dict[str, Any]] = {}
    for entry in frame["passes"]:
        name = f"{entry['direction']}: {entry['name']}"
        times = 1 + sum(each == name or each.startswith(f"{name} #") for each in found)
        found[name if times == 1 else f"{name} #{times}"] = {
            "options": entry["options"],
            "changed": "yes" if entry["changed"] else "no",
            **_totals(entry["after"]),
        }
    return found


def _after_pass(frame: Document, name: str) -> Facts:
    """Return the totals of a frame's graphs after the pass `name`, or before all passes for CAPTURED."""
    found: dict[str, Mapping[str, Any]] = {}
    for entry in frame["passes"]:
        if name == CAPTURED and entry["direction"] not in found:
            found[entry["direction"]] = _totals(entry["before"])
        elif entry["name"] == name:
            found[entry["direction"]] = _totals(entry["after"])
    return found


def _totals(found: Document | None) -> dict[str, Any]:
    """Return the totals of a graph as a dict; all values are None if passes were not recorded."""
    return {fact: (found or {}).get(fact) for fact in _TOTALS}


def _parameters(frame: Document) -> Facts:
    table, strings = frame["parameters"], frame["strings"]
    found: dict[str, dict[str, Any]] = {}
    for row, name in enumerate(table["name"]):
        texts = {fact: strings[table[fact][row]] for fact in ("shape", "dtype", "lifetime", "codec", "rests")}
        numbers = {fact: table[fact][row] for fact in ("zero_stage", "local_bytes", "feedback_bytes", "wire_bytes")}
        found[name] = texts | numbers | {"collectives": len(table["collectives"][row])}
    return found


_SECTIONS: Mapping[str, Callable[[Document], Facts]] = MappingProxyType(
    {
        "graphs": _graphs,
        "memory": _memory,
        "operators": _operators,
        "passes": _passes,
        "parameters": _parameters,
    }
)


def _measured(document: Document) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the measurements of `zgraph.measure`, by frame and graph."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in document.get("times", {}).get("measured", []):
        facts = {
            "measured_us": entry["us"],
            "blocked_us": sum(entry["blocked_us"].values()),
            "measured_peak_bytes": entry["peak_bytes"],
        }
        found.setdefault(entry["frame"], {})[entry["direction"]] = facts
    return found


def _changes(section: str, frame: str, first: Facts, second: Facts) -> Iterator[Change]:
    absent = 0 if section == "operators" else None
    for subject in dict.fromkeys([*first, *second]):
        before, after = first.get(subject, {}), second.get(subject, {})
        for fact in dict.fromkeys([*before, *after]):
            values = before.get(fact, absent), after.get(fact, absent)
            if values[0] != values[1]:
                yield Change(
                    section=section, frame=frame, subject=subject, fact=fact, before=values[0], after=values[1]
                )


def _with_unit(fact: str) -> tuple[str, Callable[[float], str]]:
    """Split a fact such as "sent_bytes" into its name without the unit, and a function that formats its values."""
    for unit, text in (("_bytes", size), ("_us", duration)):
        if fact.endswith(unit):
            return fact.removesuffix(unit).replace("_", " "), text
    return fact.replace("_", " "), lambda number: f"{number:g}"
