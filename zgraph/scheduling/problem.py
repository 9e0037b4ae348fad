"""The scheduling problem of a graph: dependencies between nodes, queues of collectives, and memory limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zgraph.analysis.liveness import Ledger
from zgraph.analysis.storages import Storage
from zgraph.scheduling.dependencies import Dependencies
from zgraph.scheduling.queues import Queues
from zgraph.scheduling.simulate import Work

SAME = 1e-2  # share of the step within which two times count as equal: predictions are no more precise


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory limits of a schedule.

    Attributes:
        budget_bytes: most bytes alive at any moment; None: no limit.
        in_flight_bytes: most bytes of collectives in flight, as `limited_bytes` counts them. Two collectives may always
            be in flight: the awaited one and the next.
    """

    budget_bytes: int | None = None
    in_flight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The scheduling problem of a graph. Nodes are numbers, see `Work`.

    Attributes:
        work: the nodes with their lanes and times.
        ledger: storages of the nodes, before any node is issued.
        dependencies: dependencies between the nodes, including the order of the queues.
        queues: queues of the movable collectives.
        limits: memory limits.
        output_chains: see `Dependencies.output_chains`.
        output_chains_of: for each start, the keys of `output_chains` that contain it.
        compute_at: microseconds of compute before each slot (gap between compute nodes); the last entry is the total.
            Movable copies count in the slot where their result is needed.
        compute_order_at: like `compute_at`, but without movable copies.
    """

    work: Work
    ledger: Ledger
    dependencies: Dependencies
    queues: Queues
    limits: Limits
    output_chains: Mapping[tuple[int, ...], list[int]]
    output_chains_of: Mapping[int, Sequence[tuple[int, ...]]]
    compute_at: Sequence[float]
    compute_order_at: Sequence[float]

    @classmethod
    def of(cls, work: Work, storages: Iterable[Storage], limits: Limits) -> Problem:
        by_data = Dependencies.of(work)
        queues = Queues.of(work, by_data)
        dependencies = by_data.in_queues(queues.queues)
        rank, use = dependencies.rank, dependencies.use
        output_chains = dependencies.output_chains()
        output_chains_of: dict[int, list[tuple[int, ...]]] = {}
        for after in output_chains:
            for start in after:
                output_chains_of.setdefault(start, []).append(after)
        at_use = {n: use[n] if moves else rank.get(n, 0) for n, moves in enumerate(dependencies.movable)}
        return cls(
            work=work,
            ledger=Ledger.of(work.numbers, storages),
            dependencies=dependencies,
            queues=queues,
            limits=limits,
            output_chains=output_chains,
            output_chains_of=output_chains_of,
            compute_at=_compute_before(work, at_use, len(rank)),
            compute_order_at=_compute_before(work, rank, len(rank)),
        )

    def by_numbers(self) -> Problem:
        """Return the problem without its nodes; if the results are equal, so are the schedules, as lists of numbers."""
        return replace(self, work=replace(self.work, nodes=(), numbers={}))


def _compute_before(work: Work, slot_of: Mapping[int, int], slots: int) -> list[float]:
    spent = [0.0] * (slots + 1)
    for number, slot in slot_of.items():
        if work.lane[number] == Work.ON_COMPUTE:
            spent[slot + 1] += work.us[number]
    return list(accumulate(spent))
