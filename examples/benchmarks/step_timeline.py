"""One recorded step of each strategy as a Chrome trace, for ui.perfetto.dev, and as lines of text."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

COLUMNS = 90
_LEVELS = " ▁▂▃▄▅▆▇█"

# What `step_recorder.Recording` has recorded: of each rank the spans, and how much had been sent by when.
Recorded = Sequence[Mapping[str, Any]]


def chrome_trace(steps: Mapping[str, Recorded], titles: Sequence[str]) -> dict[str, Any]:
    """Each rank of each strategy is a process, which begins at 0.

    Args:
        steps: what each strategy's ranks have recorded.
        titles: of the ranks.
    """
    return {"displayTimeUnit": "ms", "traceEvents": [event for step in _traced(steps, titles) for event in step]}


def _traced(steps: Mapping[str, Recorded], titles: Sequence[str]) -> Iterator[Iterator[dict[str, Any]]]:
    for number, (strategy, ranks) in enumerate(steps.items()):
        begin, _ = _extent(ranks)
        for rank, recorded in enumerate(ranks):
            yield _process(recorded, begin, number * len(ranks) + rank, f"{strategy}: {titles[rank]}")


def _process(recorded: Mapping[str, Any], begin: float, process: int, title: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
    for name, first, last, cpu_s in recorded["spans"]:
        times = {"ts": 1e6 * (first - begin), "dur": 1e6 * (last - first)}
        yield {"ph": "X", "name": name, "pid": process, "tid": 0, **times, "args": {"cpu_ms": 1e3 * cpu_s}}
    for (before, old), (now, new) in pairwise(recorded["sent"]):
        rate = {"MB/s": (new - old) / (now - before) / 1e6}
        yield {"ph": "C", "name": "sent to the other host", "pid": process, "ts": 1e6 * (before - begin), "args": rate}


def picture(ranks: Recorded, titles: Sequence[str], bytes_per_s: float) -> list[str]:
    """Two lines for each rank: what it computes, and how much of the link's rate it gets.

    Args:
        ranks: what they have recorded.
        titles: of the ranks.
        bytes_per_s: rate of the link, which the ranks of a host share.
    """
    begin, end = _extent(ranks)
    column_s = (end - begin) / COLUMNS
    width = max(map(len, titles))
    lines: list[str] = [f"{1e3 * (end - begin):.0f} ms, a column is {1e3 * column_s:.0f} ms"]
    for title, recorded in zip(titles, ranks, strict=True):
        middles = [begin + (column + 0.5) * column_s for column in range(COLUMNS)]
        computes = "".join(_letter_at(recorded["spans"], middle) for middle in middles)
        sent = [_sent_by(recorded["sent"], begin + column * column_s) for column in range(COLUMNS + 1)]
        shares = [(after - before) / column_s / bytes_per_s for before, after in pairwise(sent)]
        link = "".join(_LEVELS[round(min(1.0, share) * (len(_LEVELS) - 1))] for share in shares)
        lines += [f"{title:<{width}}  {computes}".rstrip(), f"{'':<{width}}  {link}".rstrip()]
    return lines


def phases(ranks: Recorded) -> dict[str, float]:
    """Milliseconds of a step, of the slowest rank each, and CPU milliseconds, of all ranks together."""
    begin, end = _extent(ranks)
    moments = [_active(recorded["sent"]) for recorded in ranks]
    last = max(int(name[1:]) for recorded in ranks for name, *_ in recorded["spans"] if name[0] == "B")

    def cpu_ms(*names: str) -> float:
        return 1e3 * sum(cpu for recorded in ranks for name, _, _, cpu in recorded["spans"] if name in names)

    return {
        "step_ms": 1e3 * (end - begin),
        "first_byte_ms": 1e3 * (min(first for first, _ in moments) - begin),
        "last_byte_ms": 1e3 * (max(final for _, final in moments) - begin),
        "cpu_forwards_ms": cpu_ms(*(f"F{one}" for one in range(last + 1))),
        "cpu_backwards_ms": cpu_ms(*(f"B{one}" for one in range(last))),
        "cpu_last_backward_ms": cpu_ms(f"B{last}"),
        "cpu_update_ms": cpu_ms("U"),
    }


def _extent(ranks: Recorded) -> tuple[float, float]:
    spans = [span for recorded in ranks for span in recorded["spans"]]
    return min(first for _, first, _, _ in spans), max(last for _, _, last, _ in spans)


def _letter_at(spans: Sequence[tuple[str, float, float, float]], moment: float) -> str:
    name = next((name for name, first, last, _ in spans if first <= moment < last), "")
    if name.startswith("F"):
        return name[1:][-1]
    return chr(ord("a") + int(name[1:])) if name.startswith("B") else "U" if name else "."


def _sent_by(samples: Sequence[tuple[float, int]], moment: float) -> float:
    """Bytes sent by then, in between samples in proportion."""
    for (before, old), (now, new) in pairwise(samples):
        if moment < before:
            return old
        if moment < now:
            return old + (new - old) * (moment - before) / (now - before)
    return samples[-1][1]


def _active(samples: Sequence[tuple[float, int]], least_bytes: int = 4096) -> tuple[float, float]:
    """When a rank begins to send more than acknowledgements of the pipeline, and when it ends."""
    moments = [now for (_, old), (now, new) in pairwise(samples) if new - old >= least_bytes]
    return (moments[0], moments[-1]) if moments else (samples[0][0], samples[0][0])
