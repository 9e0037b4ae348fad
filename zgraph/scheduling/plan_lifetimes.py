"""Finds what a training step should keep from forward to backward, under a limit on its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zgraph.scheduling.lifetime_model import Look, Model, Value, busy_us

LOOKS = 64  # at whole steps while a path is walked; between two of them several values are dropped


@dataclass
class Path:
    """Steps from the fastest to the most frugal; which they are does not depend on what is looked for."""

    looks: list[Look]

    def choose(self, target_bytes: int) -> Look:
        """The fastest step that holds no more; where there is none, the one that holds least.

        Of more bytes the answer is never a slower one.
        """
        fitting = [look for look in self.looks if look.peak_bytes <= target_bytes]
        if fitting:
            return min(fitting, key=lambda look: (look.step_us, look.busy_us, look.peak_bytes))
        return min(self.looks, key=lambda look: (look.peak_bytes, look.step_us, look.busy_us))


def walk(model: Model) -> Path:
    """Steps that drop ever more, of what costs the least time for each byte at the peak.

    Twice: from a step that keeps everything, and from one that keeps no parameter. What turns out to lie beside the
    peak is taken back, the most expensive first.

    Source: the ratio is that of Chen et al. 2016, arXiv 1604.06174, and of Jain et al. 2020 (Checkmate), arXiv
    1910.02653, section 6, whose optimum it approaches; here parameters are values like any other, and only bytes that
    are alive at the peak count.
    """
    parameters = dict.fromkeys(value for value in model.values if value.gather is not None)
    looks = _walk_from(model, model.look({}))
    return Path(looks + _walk_from(model, model.look(parameters)) if parameters else looks)


def _walk_from(model: Model, look: Look) -> list[Look]:
    """As long as one move lowers the peak, or leaves it."""
    looks = [look]
    at_once = max(1, len(model.values) // LOOKS)
    barred: dict[Value, None] = {}
    while moves := _moves(model, look, barred):
        count = at_once
        while (after := model.look({**look.dropped, **dict.fromkeys(moves[:count])})).peak_bytes > look.peak_bytes:
            if count == 1:  # what is made again needs more than what it leaves
                break
            count = max(1, count // 4)
        if after.peak_bytes > look.peak_bytes:
            barred[moves[0]] = None
            continue
        looks.append(after)
        look = _take_back(model, after) if after.peak_bytes < look.peak_bytes else after
        if look is not after:
            looks.append(look)
    return looks


def _moves(model: Model, look: Look, barred: Mapping[Value, None]) -> list[Value]:
    """What can be dropped that covers the peak, in the order of its price."""
    peak = look.bytes_during.index(look.peak_bytes)
    busy = busy_us(model.costs[node] for node in (*model.backward, *look.again))
    before = model.at_best(busy)
    priced: list[tuple[float, float, int, Value]] = []
    for number, value in enumerate(model.values):
        if value in look.dropped or value in barred or peak not in look.gaps[value]:
            continue
        chain = model.chain(value, look)
        if chain is None:
            continue
        added = busy_us(model.costs[node] for node in chain if node in model.required)  # the others move, at no cost
        after = model.at_best({lane: busy.get(lane, 0.0) + added.get(lane, 0.0) for lane in [*busy, *added]})
        size = sum(model.sizes[place] for place in model.lies_in[value.nodes[0]])
        priced.append(((after - before) / size, sum(added.values()) / size, number, value))
    return [value for *_, value in sorted(priced, key=lambda entry: entry[:3])]


def _take_back(model: Model, look: Look) -> Look:
    """The same step with values kept again where there is room for them below the peak."""
    during, dropped = list(look.bytes_during), dict(look.dropped)
    peak = during.index(look.peak_bytes)
    gain = {value: sum(model.costs[node].us for node in value.nodes) for value in dropped}
    for value in sorted(dropped, key=lambda value: -gain[value]):
        gap = look.gaps[value]
        size = sum(model.sizes[place] for place in model.lies_in[value.nodes[0]])
        if gap and peak not in gap and max(during[gap.start : gap.stop]) + size <= look.peak_bytes:
            for position in gap:
                during[position] += size
            del dropped[value]
    if len(dropped) == len(look.dropped):
        return look
    found = model.look(dropped)
    better = (found.step_us, found.busy_us) < (look.step_us, look.busy_us)
    return found if better and found.peak_bytes <= look.peak_bytes else look
