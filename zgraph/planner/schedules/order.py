"""Order of forwards and backwards on each rank of a pipeline, for the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

V_SHAPED = "ZBVZeroBubble"
# As torch's get_schedule_class spells them.
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", V_SHAPED)
SPLITTING = ("InterleavedZeroBubble", V_SHAPED)  # the gradients of weights come later than those of inputs


@dataclass(frozen=True, slots=True)
class Action:
    """A forward or a backward of one micro-batch in one stage.

    Attributes:
        kind: "forward", "backward" or "weights". In schedules that split each backward, "backward" computes gradients
            of inputs, and "weights" those of weights.
        stage: index of the stage.
        micro_batch: index of the micro-batch.
    """

    kind: Literal["forward", "backward", "weights"]
    stage: int
    micro_batch: int


def schedules_for(ranks: int, stages: int, micro_batches: int) -> tuple[str, ...]:
    """Return the schedules that torch can run with these numbers of ranks, stages and micro-batches."""
    return tuple(name for name in SCHEDULES if not why_not(name, ranks, stages, micro_batches))


def why_not(schedule: str, ranks: int, stages: int, micro_batches: int) -> str:
    """Return why torch cannot run a schedule with these numbers of ranks, stages and micro-batches; "" if it can."""
    if schedule not in SCHEDULES:
        near = difflib.get_close_matches(schedule.removeprefix("Schedule"), SCHEDULES, 1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        return f"a plan knows the schedules {', '.join(SCHEDULES)}{guess}"
    rounds = max(1, micro_batches // ranks)
    if schedule == V_SHAPED:
        return "" if stages == 2 * ranks else f"it needs two stages on each rank, and there are {stages} on {ranks}"
    if schedule.startswith("Interleaved"):
        return f"it needs a multiple of {rounds} micro-batches, its number of rounds" if micro_batches % rounds else ""
    if stages != ranks:
        return f"it needs one stage on each rank, and there are {stages} on {ranks}; Interleaved1F1B accepts several"
    if schedule == "1F1B" and micro_batches < ranks:
        return f"it needs at least as many micro-batches as there are ranks, {ranks}"
    return ""


def ranks_of(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    Stage s is on rank s % ranks. In a V-shaped schedule, rank r has stage r and the r-th stage from the end.
    """
    if schedule == V_SHAPED:
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def order_of(schedule: str, ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """Return the list of actions of each rank, in order.

    Args:
        schedule: a schedule that `schedules_for` returns for these numbers.
        ranks: number of ranks in the pipeline.
        stages: number of stages, a multiple of `ranks`.
        micro_batches: number of micro-batches in a step.

    Source: GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B and interleaved 1F1B: Narayanan et al. 2021, arXiv
    2104.04473, section 2.2. Zero bubble: Qi et al. 2023, arXiv 2401.10241, ZB1P, and section 6, ZB-V. The length of
    each warm-up is that of torch 2.11 - 2.15.
    """
    if schedule == V_SHAPED:
        return [_of_v(rank, ranks, micro_batches) for rank in range(ranks)]
    return [_of_rank(schedule, rank, ranks, stages // ranks, micro_batches) for rank in range(ranks)]


def _of_rank(schedule: str, rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    in_a_round = micro_batches // max(1, micro_batches // ranks)  # micro-batches that pass one chunk before the next
    total = chunks * micro_batches
    if schedule == "GPipe":
        warm_up = total
    elif schedule == "1F1B":
        warm_up = ranks - rank - 1
    elif schedule == "Interleaved1F1B":
        warm_up = (chunks - 1) * in_a_round + 2 * (ranks - rank - 1)
    else:
        warm_up = (chunks - 1) * in_a_round + ranks - rank - 1

    def forward(turn: int) -> Action:
        lap, place = divmod(turn, in_a_round)
        return Action("forward", lap % chunks * ranks + rank, lap // chunks * in_a_round + place)

    def backward(turn: int) -> Action:
        lap, place = divmod(turn, in_a_round)
        return Action("backward", (chunks - 1 - lap % chunks) * ranks + rank, lap // chunks * in_a_round + place)

    ahead = min(warm_up, total)
    waits = rank if schedule in SPLITTING else total  # backwards whose weights have to wait
    order = [forward(turn) for turn in range(ahead)]
    for turn in range(total):
        order += [forward(ahead + turn)] if turn < total - ahead else []
        order += [backward(turn)]
        order += [replace(backward(turn - waits), kind="weights")] if turn >= waits else []
    last = range(max(0, total - waits), total) if schedule in SPLITTING else ()
    return order + [replace(backward(turn), kind="weights") for turn in last]


def _of_v(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank in a V-shaped schedule, where rank r has stage r and the r-th from the end."""
    down, up = rank, 2 * ranks - 1 - rank
    order: list[Action] = []
    done: dict[tuple[str, int], int] = {}

    def add(*actions: tuple[Literal["forward", "backward", "weights"], int]) -> None:
        for kind, stage in actions:
            turn = done.get((kind, stage), 0)
            done[kind, stage] = turn + 1
            order.append(Action(kind, stage, turn))

    def whole(stage: int) -> None:
        add(("backward", stage), ("weights", stage))

    # The order is made for enough micro-batches to fill the pipeline; those that do not exist are left out.
    total = max(2 * ranks - 1, micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        add(("forward", down))
    for _ in range(rank):
        add(("forward", up), ("forward", down))
    for _ in range(ranks - rank):
        add(("forward", up))
        whole(up)
    while done.get(("forward", up), 0) < total:
        if done["forward", down] < total:
            add(("forward", down))
        whole(down)
        add(("forward", up))
        whole(up)
    for _ in range(rank):
        add(("backward", down), ("backward", up))
    for _ in range(ranks - rank):
        whole(down)
    for stage in (up, down):
        while done["weights", stage] < total:
            add(("weights", stage))
    return [action for action in order if action.micro_batch < micro_batches]
