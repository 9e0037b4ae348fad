"""A report as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Each frame is a process of the trace, and has a second process if it was measured; lanes are threads. Backward comes
after forward, as in a step. An arrow leads from each start to its wait or, if the wait does not block, to the next
compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zgraph.reporting.export.reading import bytes_by_class, rows_of
from zgraph.reporting.export.report_json import Document

Event = dict[str, Any]
COMPUTE = "compute"


def chrome_trace(document: Document) -> Document:
    """Return a Chrome trace of all frames of a document; empty if nothing was predicted or measured."""
    return {"displayTimeUnit": "ns", "traceEvents": list(_events(document))}


def _events(document: Document) -> Iterator[Event]:
    for number, frame in enumerate(document["frames"]):
        predicted, measured = 2 * number + 1, 2 * number + 2
        title = f"rank {document['rank']}, frame {frame['frame']}"
        if all(graph["predicted_us"] is not None for graph in frame["graphs"]):
            yield _named("process_name", predicted, f"{title}: predicted")
            yield from _Predicted(document, frame, predicted).events()
        found = [each for each in document.get("times", {}).get("measured", ()) if each["frame"] == frame["frame"]]
        if found:
            yield _named("process_name", measured, f"{title}: measured")
            yield from _measured(found, measured)


def _named(kind: str, process: int, name: str, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


class _Predicted:
    """Trace events of one frame's simulated timeline."""

    def __init__(self, document: Document, frame: Document, process: int) -> None:
        self.document = document
        self.frame = frame
        self.process = process
        self.threads: dict[tuple[str, int], int] = {}  # thread of each row of a lane
        self.until: dict[tuple[str, int], float] = {}
        self.flows = 0

    def events(self) -> Iterator[Event]:
        begins: list[float] = []
        offset = 0.0
        events: list[Event] = []
        for graph in self.frame["graphs"]:
            rows = list(rows_of(self.document, self.frame, graph))
            begins += [offset + row["start_us"] for row in rows]
            events += self._graph(graph, rows, offset)
            offset += graph["predicted_us"]
        for (lane, row), thread in self.threads.items():
            yield _named("thread_name", self.process, lane if not row else f"{lane} ({row + 1})", thread)
        yield from events
        if self.frame["memory"] is not None and self.frame["memory"]["nodes"] == len(begins):
            yield from self._memory(begins)

    def _graph(self, graph: Document, rows: Sequence[Mapping[str, Any]], offset: float) -> Iterator[Event]:
        columns = graph["collectives"]
        wait_of = {start: wait for start, wait in zip(columns["node"], columns["wait"], strict=True) if wait >= 0}
        why = {
            node: self.frame["strings"][reason] for node, reason in zip(columns["node"], columns["reason"], strict=True)
        }
        slices: dict[int, tuple[int, float]] = {}  # thread and begin of each drawn node
        for row in rows:
            begin, end = offset + row["start_us"], offset + row["end_us"]
            if row["lane"] is None and end <= begin:
                continue
            # A wait takes its time from compute, and is drawn there.
            thread = self._thread(row["lane"] or COMPUTE, begin, end)
            slices[row["position"]] = thread, begin
            args = {key: row[key] for key in ("code", "module", "source", "parameters", "bytes", "exposed_us")}
            args |= {"direction": graph["direction"], "why_exposed": why.get(row["position"], "")}
            yield {
                "ph": "X",
                "name": row["name"],
                "cat": row["storage"] if row["lane"] else "exposed",
                "pid": self.process,
                "tid": thread,
                "ts": begin,
                "dur": end - begin,
                "args": {key: value for key, value in args.items() if value},
            }
        computes = [number for number in slices if rows[number]["lane"] in (COMPUTE, None)]
        for start, wait in wait_of.items():
            to = wait if wait in slices else next((number for number in computes if number > wait), None)
            if start in slices and to is not None:
                yield from self._flow(slices[start], slices[to], rows[start]["name"])

    def _thread(self, lane: str, begin: float, end: float) -> int:
        """Return the trace thread for an interval on a lane; overlapping intervals of a lane get different threads."""
        row = 0
        while self.until.get((lane, row), 0.0) > begin + 1e-3:  # times are rounded to the nanosecond
            row += 1
        self.until[lane, row] = end
        return self.threads.setdefault((lane, row), len(self.threads) + 1)

    def _flow(self, source: tuple[int, float], target: tuple[int, float], name: str) -> Iterator[Event]:
        self.flows += 1
        common: Event = {"cat": "wait", "name": name, "id": self.process << 32 | self.flows, "pid": self.process}
        yield common | {"ph": "s", "tid": source[0], "ts": source[1]}
        yield common | {"ph": "f", "bp": "e", "tid": target[0], "ts": target[1]}

    def _memory(self, begins: Sequence[float]) -> Iterator[Event]:
        """Yield a counter event for each change of the live bytes by memory class."""
        classes = bytes_by_class(self.document, self.frame)
        last: Event | None = None
        for position, begin in enumerate(begins):
            alive = {name: counts[position] for name, counts in classes.items()}
            if alive != last:
                last = alive
                yield {"ph": "C", "name": "memory", "pid": self.process, "tid": 0, "ts": begin, "args": alive}


def _measured(found: Sequence[Mapping[str, Any]], process: int) -> Iterator[Event]:
    """Yield a trace slice for each measured graph, and in it a slice for each wait that blocked.

    Times are medians over all calls.
    """
    yield _named("thread_name", process, COMPUTE, 1)
    order = ("step", "forward", "inference", "backward")
    offset = 0.0
    for graph in sorted(found, key=lambda each: order.index(each["direction"])):
        common: Event = {"ph": "X", "pid": process, "tid": 1}
        about = {"calls": graph["calls"], "peak_bytes": graph["peak_bytes"]}
        yield common | {"name": graph["direction"], "cat": "call", "ts": offset, "dur": graph["us"], "args": about}
        until = 0.0
        begun = sorted(graph["waited_at_us"].items(), key=lambda each: each[1])
        for name, begin in begun:
            begin = max(begin, until)  # medians of different calls may overlap
            until = min(begin + graph["blocked_us"].get(name, 0.0), graph["us"])
            if until > begin:
                slice_: Event = {
                    "name": f"wait for {name}",
                    "cat": "exposed",
                    "ts": offset + begin,
                    "dur": until - begin,
                }
                yield common | slice_
        offset += graph["us"]
