"""Finds what a training step should save from forward to backward under a memory limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zgraph.scheduling.lifetimes.lifetime_model import LifetimeModel, StepEstimate, Value, busy_us
from zgraph.tiers.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, Lane

MAX_ESTIMATES = 64  # estimates along a frontier; with more values, several are dropped between two estimates


@dataclass(frozen=True)
class Move:
    """A decision not to keep a value on the device from forward to backward, but to offload it or to recompute it."""

    value: Value
    offload: bool


@dataclass
class Path:
    """Estimates of steps that trade time for memory. They do not depend on a limit."""

    estimates: list[StepEstimate]

    def choose(self, target_bytes: int) -> StepEstimate:
        """Return the fastest step within the limit; if there is none, the step that uses the least memory.

        A larger limit never yields a slower step.
        """
        fitting = [estimate for estimate in self.estimates if estimate.peak_bytes <= target_bytes]
        if fitting:
            return min(fitting, key=lambda estimate: (estimate.step_us, estimate.busy_us, estimate.peak_bytes))
        return min(self.estimates, key=lambda estimate: (estimate.peak_bytes, estimate.step_us, estimate.busy_us))


def greedy_frontier(model: LifetimeModel) -> Path:
    """Estimate steps that save fewer and fewer values. Values that cost the least time per byte at the peak go first.

    Starts twice: from a step that saves everything, and from a step that saves no gathered parameter. Values that turn
    out not to be alive at the peak are saved again; the most expensive to recompute are tried first.

    Source: time per byte is the ratio of Chen et al. 2016, arXiv 1604.06174, and of Jain et al. 2020 (Checkmate), arXiv
    1910.02653, section 6; the search approaches Checkmate's optimum. Here gathered parameters are values, too, like
    activations, and only bytes that are alive at the peak count.
    """
    parameters = dict.fromkeys(value for value in model.values if value.gather is not None)
    estimates = _frontier_from(model, model.estimate({}))
    return Path(estimates + _frontier_from(model, model.estimate(parameters)) if parameters else estimates)


def first_within(model: LifetimeModel, estimate: StepEstimate, limit_bytes: int) -> StepEstimate:
    """Drop values, cheapest first, until a step fits; returns the step with the least memory if none does.

    Finds less than `greedy_frontier`, in a fraction of its time.
    """
    return Path(_frontier_from(model, estimate, limit_bytes)).choose(limit_bytes)


def _frontier_from(model: LifetimeModel, estimate: StepEstimate, enough_bytes: int = 0) -> list[StepEstimate]:
    """Return `estimate` and further estimates, each with more values dropped or offloaded and no higher peak.

    Ends when nothing is left to drop, or with the first peak of at most `enough_bytes`.
    """
    estimates = [estimate]
    at_once = max(1, len(model.values) // MAX_ESTIMATES)
    barred: dict[Move, None] = {}
    while estimate.peak_bytes > enough_bytes and (moves := _moves(model, estimate, barred)):
        count = at_once
        while (after := _after(model, estimate, moves[:count])).peak_bytes > estimate.peak_bytes:
            if count == 1:  # recomputing it needs more memory than dropping it frees
                break
            count = max(1, count // 4)
        if after.peak_bytes > estimate.peak_bytes:
            barred[moves[0]] = None
            continue
        estimates.append(after)
        estimate = _rollback(model, after) if after.peak_bytes < estimate.peak_bytes else after
        if estimate is not after:
            estimates.append(estimate)
    return estimates


def _after(model: LifetimeModel, estimate: StepEstimate, moves: Iterable[Move]) -> StepEstimate:
    dropped, offloaded = dict(estimate.dropped), dict(estimate.offloaded)
    for move in moves:
        (offloaded if move.offload else dropped)[move.value] = None
    return model.estimate(dropped, offloaded)


def _moves(model: LifetimeModel, estimate: StepEstimate, barred: Mapping[Move, None]) -> list[Move]:
    """For each value alive at the peak, the cheaper of its possible moves (drop or offload), sorted by cost."""
    peak = estimate.bytes_during.index(estimate.peak_bytes)
    busy = busy_us(model.costs[node] for node in (*model.backward, *estimate.recomputed))
    _, copying_back = model.copying(estimate.offloaded)
    busy |= copying_back
    ahead = {lane: us - busy.get(lane, 0.0) for lane, us in estimate.lane_us.items()}
    before, before_ahead = model.at_best(busy), model.at_best(ahead)
    priced: list[tuple[float, float, int, Move]] = []
    for number, value in enumerate(model.values):
        gap = estimate.gaps[value]
        if value in estimate.dropped or value in estimate.offloaded or peak not in gap:
            continue
        ways: list[tuple[float, float, int, Move]] = []
        size = model.bytes_of(value)
        drop, offload = Move(value, offload=False), Move(value, offload=True)
        chain = None if drop in barred else model.chain(value, estimate)
        if chain is not None:
            added = busy_us(model.costs[node] for node in chain if node in model.required)  # others only move
            after = model.at_best(_sum_of(busy, added))
            ways.append(((after - before) / size, sum(added.values()) / size, number, drop))
        out_us, back_us = (math.inf, math.inf) if offload in barred else model.copy_us(value)
        if out_us + back_us < math.inf:
            slower = model.at_best(_sum_of(ahead, {DEVICE_TO_HOST: out_us})) - before_ahead
            slower += model.at_best(_sum_of(busy, {HOST_TO_DEVICE: back_us})) - before
            # Between its readers there has to be time for both copies.
            slower = max(slower, out_us + back_us - (estimate.clock_us[gap.stop] - estimate.clock_us[gap.start]))
            ways.append((slower / size, (out_us + back_us) / size, number, offload))
        if ways:
            priced.append(min(ways, key=lambda way: way[:2]))
    return [move for *_, move in sorted(priced, key=lambda entry: entry[:3])]


def _sum_of(one: Mapping[Lane, float], other: Mapping[Lane, float]) -> dict[Lane, float]:
    return {lane: one.get(lane, 0.0) + other.get(lane, 0.0) for lane in [*one, *other]}


def _rollback(model: LifetimeModel, estimate: StepEstimate) -> StepEstimate:
    """Save dropped values again if they fit below the peak. Returns `estimate` unless the new step is faster."""
    during, dropped = list(estimate.bytes_during), dict(estimate.dropped)
    peak = during.index(estimate.peak_bytes)
    gain = {value: sum(model.costs[node].us for node in value.nodes) for value in dropped}
    for value in sorted(dropped, key=lambda value: -gain[value]):
        gap = estimate.gaps[value]
        size = sum(model.sizes[place] for place in model.lies_in[value.nodes[0]])
        if gap and peak not in gap and max(during[gap.start : gap.stop]) + size <= estimate.peak_bytes:
            for position in gap:
                during[position] += size
            del dropped[value]
    if len(dropped) == len(estimate.dropped):
        return estimate
    found = model.estimate(dropped, estimate.offloaded)
    better = (found.step_us, found.busy_us) < (estimate.step_us, estimate.busy_us)
    return found if better and found.peak_bytes <= estimate.peak_bytes else estimate
