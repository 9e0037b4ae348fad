"""A simulated step of a pipeline: its time, its bubble, and the peak memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zgraph.planner.schedules.order import SPLITTING, Action, order_of, ranks_of
from zgraph.torch_compat.groups import stages_hold_messages


@dataclass(frozen=True, kw_only=True)
class SplitCost:
    """Costs of one stage's backward in two halves: first the gradients of inputs, then those of weights.

    Attributes:
        inputs_us, weights_us: time of each half, [micro_batches].
        left_bytes: bytes that one micro-batch keeps from its first half to its second.
        closing_kept_bytes: the part of `StageCost.closing_kept_bytes` that stays until the second half of the last
            backward.
        inputs_peak_bytes: most bytes of a micro-batch while its first half runs, including its saved values.
        first_peak_bytes, weights_peak_bytes, closing_peak_bytes: peaks while the second half runs, including
            `left_bytes`; each is defined like the field of `StageCost` with the same name.
    """

    inputs_us: tuple[float, ...]
    weights_us: tuple[float, ...]
    left_bytes: int = 0
    closing_kept_bytes: int = 0
    inputs_peak_bytes: int = 0
    first_peak_bytes: int = 0
    weights_peak_bytes: int = 0
    closing_peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Costs of one stage's micro-batches, in the order in which they run.

    Attributes:
        forward_us, backward_us: time of each forward and backward, [micro_batches].
        send_us: time to send an activation to the next stage, or a gradient to the previous one.
        resting_bytes: bytes of parameters, buffers and the optimizer's state.
        gradient_bytes: bytes of `.grad`, from the first backward on.
        own_gradient_bytes: the part of `gradient_bytes` that holds this rank's own sums until the last backward.
        waiting_bytes: bytes of gradient sums that wait to be reduced, from the first backward to the last.
        kept_bytes: bytes of gathered parameters that are kept from the first forward on.
        closing_kept_bytes: the part of `kept_bytes` that stays after the last forward, until the last backward.
        saved_bytes: bytes that one micro-batch keeps from its forward to its backward.
        forward_peak_bytes, backward_peak_bytes: most bytes of a micro-batch while its forward or backward runs,
            including its saved values.
        first_peak_bytes: most bytes in the first backward, including the gradient sums that this backward leaves.
        closing_peak_bytes: most bytes in the last backward, which may be the only one, including kept parameters and
            earlier sums.
        left_bytes: send buffers of one micro-batch, for activation and gradient. torch's schedules hold them until the
            end of the step. 1F1B holds them until it sends again, except the last activation sent before the first
            backward.
        left_activation_bytes: the activation's part of `left_bytes`.
        buffer_bytes: torch's receive buffers for activations and gradients, and the outputs that the stage returns.
        split: costs of a backward in two halves; None: the whole backward runs in place of the first half.
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    send_us: float = 0.0
    resting_bytes: int = 0
    gradient_bytes: int = 0
    own_gradient_bytes: int = 0
    waiting_bytes: int = 0
    kept_bytes: int = 0
    closing_kept_bytes: int = 0
    saved_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    first_peak_bytes: int = 0
    closing_peak_bytes: int = 0
    left_bytes: int = 0
    left_activation_bytes: int = 0
    buffer_bytes: int = 0
    split: SplitCost | None = None

    def us(self, action: Action, *, splits: bool) -> float:
        """Return the time of an action; `splits` tells whether the schedule runs each backward in halves."""
        if action.kind == "forward":
            return self.forward_us[action.micro_batch]
        if not splits or self.split is None:
            return self.backward_us[action.micro_batch] if action.kind == "backward" else 0.0
        halves = self.split.inputs_us if action.kind == "backward" else self.split.weights_us
        return halves[action.micro_batch]


@dataclass(frozen=True, slots=True)
class TimedAction:
    """Begin and end of an action on a rank, in microseconds from the beginning of the step."""

    rank: int
    action: Action
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """A step under one schedule.

    Attributes:
        schedule: name of the schedule.
        actions: actions of all ranks; those of one rank are in order.
        step_us: time until the last rank is done.
        busy_us: time in which each rank runs a forward or backward, [ranks].
        peak_bytes: most bytes that each rank holds, including parameters and state, [ranks].
        in_flight: most micro-batches that each rank has between forward and backward, over its stages, [ranks].
    """

    schedule: str
    actions: tuple[TimedAction, ...]
    step_us: float
    busy_us: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time (0 to 1) in which they wait for other stages."""
        return 1 - sum(self.busy_us) / (len(self.busy_us) * self.step_us) if self.step_us else 0.0


def simulate_pipeline(schedule: str, ranks: int, costs: Sequence[StageCost]) -> PipelineRun:
    """Simulate a step under a schedule.

    Each rank starts its next action as soon as the input has arrived. Sending occupies only the link, which carries one
    message at a time in each direction.

    Args:
        schedule: a schedule that `schedules_for` returns for these numbers.
        ranks: number of ranks in the pipeline.
        costs: cost of each stage.
    """
    order = order_of(schedule, ranks, len(costs), len(costs[0].forward_us))
    places = ranks_of(schedule, ranks, len(costs))
    free = [0.0] * ranks  # when each rank becomes free
    links: dict[tuple[int, int], float] = {}  # when each becomes free, by sender and receiver
    arrived: dict[Action, float] = {}
    done: list[TimedAction] = []
    busy, position = [0.0] * ranks, [0] * ranks
    while any(position[rank] < len(order[rank]) for rank in range(ranks)):
        before = list(position)
        for rank in range(ranks):
            while position[rank] < len(order[rank]):
                action = order[rank][position[rank]]
                needed = _needs(action, len(costs))
                if needed is not None and needed not in arrived:
                    break
                cost = costs[action.stage]
                us = cost.us(action, splits=schedule in SPLITTING)
                begun = max(free[rank], 0.0 if needed is None else arrived[needed])
                free[rank] = begun + us
                done.append(TimedAction(rank, action, begun, free[rank]))
                busy[rank] += us
                position[rank] += 1
                arrived[action] = _arrival(action, free[rank], places, costs, links)
        assert position != before, f"the order of {schedule} waits for itself"
    found = [rank_memory(schedule, rank, ranks, costs) for rank in range(ranks)]
    return PipelineRun(
        schedule=schedule,
        actions=tuple(done),
        step_us=max(free),
        busy_us=tuple(busy),
        peak_bytes=tuple(peak for peak, _ in found),
        in_flight=tuple(most for _, most in found),
    )


def rank_memory(schedule: str, rank: int, ranks: int, costs: Sequence[StageCost]) -> tuple[int, int]:
    """Return the most bytes that a rank holds, including parameters and state, and its most micro-batches in flight.

    Args:
        schedule: a schedule that `schedules_for` returns for these numbers.
        rank: rank in the pipeline.
        ranks: number of ranks in the pipeline.
        costs: cost of each stage.
    """
    order = order_of(schedule, ranks, len(costs), len(costs[0].forward_us))[rank]
    places = ranks_of(schedule, ranks, len(costs))
    return _memory(order, costs, places, holds_sent=schedule != "1F1B", splits=schedule in SPLITTING)


def _needs(action: Action, stages: int) -> Action | None:
    """Return the other stage's action whose result `action` needs; None if `action` needs no other stage."""
    if action.kind == "weights":
        return None
    if action.kind == "forward":
        return Action("forward", action.stage - 1, action.micro_batch) if action.stage else None
    return Action("backward", action.stage + 1, action.micro_batch) if action.stage + 1 < stages else None


def _arrival(
    action: Action,
    ended: float,
    places: Sequence[int],
    costs: Sequence[StageCost],
    links: dict[tuple[int, int], float],
) -> float:
    """Return the time at which an action's result arrives where it is needed; keep the link busy until then."""
    other = action.stage + {"forward": 1, "backward": -1, "weights": len(costs)}[action.kind]
    if not 0 <= other < len(costs) or places[other] == places[action.stage]:
        return ended
    link = places[action.stage], places[other]
    links[link] = max(ended, links.get(link, 0.0)) + costs[min(action.stage, other)].send_us
    return links[link]


def _beside(cost: StageCost, number: int, places: Sequence[int]) -> StageCost:
    """Return a stage's cost, without buffers for messages between neighbour stages on the same rank."""
    has_next = number + 1 < len(places) and places[number + 1] == places[number]
    has_previous = number > 0 and places[number - 1] == places[number]
    activation = cost.left_activation_bytes if has_next else 0
    gradient = cost.left_bytes - cost.left_activation_bytes if has_previous else 0
    beside = replace(
        cost, saved_bytes=cost.saved_bytes - activation, left_bytes=cost.left_bytes - activation - gradient
    )
    if stages_hold_messages():
        return beside
    if number + 1 < len(places) and not has_next:
        beside = _without_sent(beside)
    # Nothing is received from a neighbour on the same rank.
    return replace(beside, buffer_bytes=cost.buffer_bytes - activation - gradient * len(cost.forward_us))


def _without_sent(cost: StageCost) -> StageCost:
    """Return the cost of a stage that frees each output as soon as it is sent."""
    sent, split = cost.left_activation_bytes, cost.split
    return replace(
        cost,
        saved_bytes=cost.saved_bytes - sent,
        left_bytes=cost.left_bytes - sent,
        left_activation_bytes=0,
        backward_peak_bytes=cost.backward_peak_bytes - sent,
        first_peak_bytes=cost.first_peak_bytes - sent,
        closing_peak_bytes=cost.closing_peak_bytes - sent,
        split=None if split is None else replace(split, inputs_peak_bytes=split.inputs_peak_bytes - sent),
    )


def _memory(
    order: Sequence[Action], costs: Sequence[StageCost], places: Sequence[int], *, holds_sent: bool, splits: bool
) -> tuple[int, int]:
    """Return the peak bytes of a rank, and its most micro-batches in flight."""
    stages = {action.stage: _beside(costs[action.stage], action.stage, places) for action in order}
    held = sum(cost.resting_bytes + cost.buffer_bytes for cost in stages.values())
    done = {(kind, stage): 0 for kind in ("forward", "backward", "weights") for stage in stages}
    peak, flying, most = held, 0, 0
    first = next(place for place, action in enumerate(order) if action.kind == "backward")
    for action in order:
        cost = stages[action.stage]
        split = cost.split if splits else None
        turn = done[action.kind, action.stage]
        done[action.kind, action.stage] += 1
        is_last = turn + 1 == len(cost.forward_us)
        if action.kind == "forward":
            held += 0 if turn else cost.kept_bytes
            peak = max(peak, held + cost.forward_peak_bytes)
            held += cost.saved_bytes
            if is_last:
                held -= cost.kept_bytes - cost.closing_kept_bytes
            flying += 1
            most = max(most, flying)
            continue
        if action.kind == "backward":
            held -= cost.saved_bytes
            flying -= 1
            if split is not None:
                peak = max(peak, held + split.inputs_peak_bytes)
                held += split.left_bytes + (cost.left_bytes if holds_sent else 0)
                held -= cost.closing_kept_bytes - split.closing_kept_bytes if is_last else 0
                continue
        elif split is None:
            continue  # the whole backward has run already
        else:
            held -= split.left_bytes
        of_all: StageCost | SplitCost = cost if split is None else split
        if is_last:
            held -= of_all.closing_kept_bytes + (cost.waiting_bytes if turn else 0)
            peak = max(peak, held + of_all.closing_peak_bytes - (cost.own_gradient_bytes if turn else 0))
        elif turn:
            peak = max(peak, held + (cost.backward_peak_bytes if split is None else split.weights_peak_bytes))
        else:
            peak = max(peak, held + of_all.first_peak_bytes)
            held += cost.waiting_bytes
        held += cost.left_bytes if holds_sent and split is None else 0
        held += 0 if turn else cost.gradient_bytes
        if not holds_sent and first - 2 < len(cost.forward_us) - first:
            # torch's loop of 1F1B holds the last message of its warm-up until all forwards have run.
            held += cost.left_activation_bytes if turn == first - 2 else 0
            held -= cost.left_activation_bytes if turn == len(cost.forward_us) - first and first > 1 else 0
    return peak, most
