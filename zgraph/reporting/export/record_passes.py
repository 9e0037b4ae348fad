"""Records what each pass changed in each graph: code lines, number of nodes, bytes, peak memory and predicted times."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

from zgraph.analysis.liveness import memory_curve
from zgraph.analysis.storages import mortal_inputs
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext
from zgraph.compiler.pass_list import PassRun
from zgraph.graph import nodes
from zgraph.graph.sizes import size_hint
from zgraph.graph.text import safely, shown
from zgraph.graph.traffic import transfers
from zgraph.reporting.data.frame import PassData, Strings, Totals
from zgraph.reporting.data.line_pool import LinePool, Runs, hunks_between, runs_of
from zgraph.scheduling.simulate import simulate


class PassRecorder:
    """Records what the passes of one frame changed.

    Attributes:
        pool: code lines of all graphs.
        captured: lines of each direction's graph before any pass, as runs of line numbers (first, count).
        passes: one entry for each pass on each graph, in execution order.
    """

    def __init__(self) -> None:
        self.pool = LinePool(Strings())
        self.captured: dict[str, Runs] = {}
        self.passes: list[PassData] = []
        self._lines: dict[str, list[int]] = {}
        self._totals: dict[str, Totals] = {}

    def observe(self, graph_pass: GraphPass | None, ctx: PassContext, graph: fx.Graph) -> None:
        """Record a graph after a pass, or before all passes if `graph_pass` is None."""
        direction = ctx.direction
        lines = self.pool.lines_of(graph)
        if graph_pass is None:
            self.captured[direction] = runs_of(lines)
            self._lines[direction], self._totals[direction] = lines, totals_of(graph, ctx)
            return
        before = self._lines.get(direction, [])
        hunks = hunks_between(before, lines)
        was = self._totals.get(direction)
        # A change that the lines do not show, such as a tag, affects neither times nor bytes.
        totals = was if was is not None and not hunks else totals_of(graph, ctx)
        notes = [text for name, where, text in ctx.notes if (name, where) == (graph_pass.name, direction)]
        self.passes.append(
            PassData(
                name=graph_pass.name,
                options=options_text(graph_pass),
                direction=direction,
                changed=bool(hunks),
                notes=[_note(text) for text in notes],
                before=was,
                after=totals,
                hunks=hunks,
            )
        )
        self._lines[direction], self._totals[direction] = lines, totals


def unrecorded(runs: Iterable[PassRun], notes: Iterable[tuple[str, Direction, str]]) -> list[PassData]:
    """Return the data of passes that ran without a `PassRecorder`: name, direction, changed or not, and notes."""
    said = list(notes)
    return [
        PassData(
            name=run.name,
            options="",
            direction=run.direction,
            changed=run.changed,
            notes=[_note(text) for name, where, text in said if (name, where) == (run.name, run.direction)],
            before=None,
            after=None,
            hunks=[],
        )
        for run in runs
    ]


def _note(text: object) -> str:
    return " ".join(shown(lambda: str(text), text).split())


def options_text(graph_pass: GraphPass) -> str:
    """Return the repr of a pass without memory addresses, so that the text is the same in every run."""
    return safely(lambda: re.sub(r" at 0x[0-9a-f]+", "", repr(graph_pass)), graph_pass.name)


def totals_of(graph: fx.Graph, ctx: PassContext) -> Totals:
    """Return traffic, peak memory and predicted time of a graph between two passes; unknown values are None."""
    found = Totals(nodes=len(graph.nodes), sent_bytes=0)
    try:
        found.sent_bytes = size_hint(sum(transfer.sent_bytes for transfer in transfers(graph)))
        owned = mortal_inputs(graph.nodes) if ctx.direction == "backward" else ()
        found.peak_bytes = memory_curve(graph, owned=owned).peak_bytes
        if ctx.cost_of is not None:
            costs = {node: ctx.cost_of(node) for node in nodes.call_functions(graph, lambda _: True)}
            timeline = simulate(list(graph.nodes), costs, ctx.sharing, storages=())  # the peak is known
            found.predicted_us = round(timeline.step_us, 3)
            found.exposed_us = round(sum(timeline.exposed_us.values()), 3)
    except Exception:  # the graph may be half built, or have unknown values
        pass
    return found
