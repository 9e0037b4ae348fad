"""A simulated step of a pipeline: its time, its bubble, and the peak memory of each rank.

The bytes that live between two actions depend on the schedule and are listed here; `analysis` computes the peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zgraph.analysis.liveness import alive_bytes
from zgraph.analysis.micro_batches import MicroBatchMemory
from zgraph.planner.schedules.order import SPLITTING, Action, order_of, ranks_of
from zgraph.torch_compat.groups import stages_hold_messages


@dataclass(frozen=True, kw_only=True)
class SplitCost:
    """Costs of one stage's backward in two halves: first the gradients of inputs, then those of weights.

    Attributes:
        inputs_us, weights_us: time of each half, [micro_batches].
        memory: memory of the halves. Its `closing_kept_bytes` are the part of `StageCost.memory.closing_kept_bytes`
            that stays until the second half of the last backward.
    """

    inputs_us: tuple[float, ...]
    weights_us: tuple[float, ...]
    memory: MicroBatchMemory = field(default_factory=MicroBatchMemory)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Bytes of one stage's gradients.

    Attributes:
        grad_bytes: bytes of `.grad`, from the first backward on.
        own_bytes: the part of `grad_bytes` that holds this rank's own sums until the last backward.
        waiting_bytes: bytes of gradient sums that wait to be reduced, from the first backward to the last.
    """

    grad_bytes: int = 0
    own_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Bytes of one stage's buffers for messages.

    Attributes:
        activation_bytes, gradient_bytes: send buffers of one micro-batch. 1F1B holds a buffer until it sends again, but
            the last activation of its warm-up until all forwards have run. Other schedules hold all to the step's end.
        received_bytes: torch's receive buffers for activations and gradients, and the outputs that the stage returns.
    """

    activation_bytes: int = 0
    gradient_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Costs of one stage's micro-batches, in the order in which they run.

    Attributes:
        forward_us, backward_us: time of each forward and backward, [micro_batches].
        send_us: time to send an activation to the next stage, or a gradient to the previous one.
        resting_bytes: bytes of parameters, buffers and the optimizer's state.
        memory: memory of a forward and its backward. Kept parameters live from the first forward to the last; the
            part counted in `closing_kept_bytes` lives to the last backward.
        gradients: gradients in `.grad` and elsewhere.
        messages: buffers for messages.
        split: costs of a backward in two halves; None: it is not split, and "weights" takes no time.
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    send_us: float = 0.0
    resting_bytes: int = 0
    memory: MicroBatchMemory = field(default_factory=MicroBatchMemory)
    gradients: Gradients = Gradients()
    messages: Messages = Messages()
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
    memory, messages, split = cost.memory, cost.messages, cost.split
    activation = messages.activation_bytes if has_next else 0
    gradient = messages.gradient_bytes if has_previous else 0
    sent, received = messages.activation_bytes - activation, messages.received_bytes
    memory = replace(memory, saved_bytes=memory.saved_bytes - activation)
    if not stages_hold_messages():
        received -= activation + gradient * len(cost.forward_us)  # nothing is received from this rank itself
        if number + 1 < len(places):  # an output is freed as soon as it is sent
            memory = memory.without(sent)
            if split is not None:
                peak_bytes = split.memory.peak_bytes - sent
                split = replace(split, memory=replace(split.memory, peak_bytes=peak_bytes))
            sent = 0
    messages = Messages(
        activation_bytes=sent, gradient_bytes=messages.gradient_bytes - gradient, received_bytes=received
    )
    return replace(cost, memory=memory, messages=messages, split=split)


def _memory(
    order: Sequence[Action], costs: Sequence[StageCost], places: Sequence[int], *, holds_sent: bool, splits: bool
) -> tuple[int, int]:
    """Return the peak bytes of a rank, and its most micro-batches in flight."""
    if not splits:
        costs = [replace(cost, split=None) for cost in costs]
    order = [one for one in order if one.kind != "weights" or costs[one.stage].split is not None]
    ran: dict[int, dict[str, list[int]]] = {}  # positions of actions, by stage and kind
    for place, action in enumerate(order):
        ran.setdefault(action.stage, {}).setdefault(action.kind, []).append(place)
    held = [
        entry
        for stage, at in ran.items()
        for entry in _ranges(_beside(costs[stage], stage, places), at, len(order) - 1, holds_sent=holds_sent)
    ]
    flying = [
        (1, begun, ended - 1) for at in ran.values() for begun, ended in zip(at["forward"], at["backward"], strict=True)
    ]
    return max(alive_bytes(held, len(order))), max(alive_bytes(flying, len(order)))


def _ranges(
    cost: StageCost, at: Mapping[str, Sequence[int]], end: int, *, holds_sent: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (bytes, first position, last position) for all that a stage holds; positions count actions."""
    forwards, backwards = at["forward"], at["backward"]
    halves = [(cost.memory, forwards, backwards)]
    if cost.split is not None:
        halves.append((cost.split.memory, backwards, at["weights"]))
    yield cost.resting_bytes + cost.messages.received_bytes, 0, end
    kept_bytes = cost.memory.kept_bytes
    for memory, begun, ended in halves:
        yield from ((memory.peak_bytes, place, place) for place in begun)
        yield from ((memory.saved_bytes, first + 1, last - 1) for first, last in zip(begun, ended, strict=True))
        yield kept_bytes - memory.closing_kept_bytes, forwards[0], begun[-1]
        kept_bytes = memory.closing_kept_bytes
    memory, _, ends = halves[-1]
    yield kept_bytes, forwards[0], ends[-1] - 1
    yield memory.closing_peak_bytes, ends[-1], ends[-1]
    yield cost.gradients.grad_bytes, ends[0] + 1, end
    if len(ends) > 1:
        yield memory.first_peak_bytes, ends[0], ends[0]
        yield from ((memory.later_peak_bytes, place, place) for place in ends[1:-1])
        yield cost.gradients.waiting_bytes, ends[0] + 1, ends[-1] - 1
        yield -cost.gradients.own_bytes, ends[-1], ends[-1]  # the closing peak includes them
    sent, warm_up = cost.messages.activation_bytes, backwards[0]
    if holds_sent:
        yield from ((sent + cost.messages.gradient_bytes, place + 1, end) for place in backwards)
    elif 0 <= warm_up - 2 < len(forwards) - warm_up:
        # torch's loop of 1F1B holds the last message of its warm-up until all forwards have run.
        yield sent, backwards[warm_up - 2] + 1, backwards[len(forwards) - warm_up]
