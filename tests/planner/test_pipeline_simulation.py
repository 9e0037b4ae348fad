"""Schedules of a pipeline on the simulator: torch's orders, bubbles by formula, memory by what is in flight."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import get_schedule_class

from zgraph.analysis.micro_batches import MicroBatchMemory
from zgraph.planner.schedules.keep_gathered import (
    beside_rest,
    first_fit,
    keep_within,
    kept_bytes,
    most_kept,
    next_room,
)
from zgraph.planner.schedules.order import (
    SCHEDULES,
    SPLITTING,
    Action,
    order_of,
    ranks_of,
    schedules_for,
    why_not,
)
from zgraph.planner.schedules.pipeline_run import (
    Gradients,
    Messages,
    PipelineRun,
    SplitCost,
    StageCost,
    simulate_pipeline,
)
from zgraph.torch_compat.groups import stages_hold_messages

SHAPES = [
    *[(1, 1, 1), (3, 1, 1), (4, 1, 2), (2, 1, 4), (4, 1, 4), (4, 1, 9), (3, 1, 8), (4, 3, 6), (2, 3, 3)],
    *[(1, 2, 2), (2, 2, 4), (3, 2, 9), (4, 2, 8), (4, 2, 3)],
]


Listed = list[tuple[str, int, int | None]]


def of_torch(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> Listed:
    """What one of torch's interleaved schedules lists for a rank, by the class's own code."""
    rounds = max(1, micro_batches // ranks)
    numbers: Any = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=ranks,
        num_stages=ranks * chunks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    numbers.number_of_rounds = rounds
    make: Any = get_schedule_class(schedule)
    listed = make._calculate_single_rank_operations(numbers, rank)
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward"}
    kinds["BACKWARD_WEIGHT"] = "weights"
    return [
        (kinds[one.computation_type.name], one.stage_index, one.microbatch_index) for one in listed if one is not None
    ]


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), SHAPES)
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_orders_of_several_stages_are_those_of_torch(
    schedule: str, ranks: int, chunks: int, micro_batches: int
) -> None:
    if why_not(schedule, ranks, ranks * chunks, micro_batches):
        assert chunks != 2 if schedule == "ZBVZeroBubble" else micro_batches % max(1, micro_batches // ranks)
        return
    found = order_of(schedule, ranks, ranks * chunks, micro_batches)
    for rank in range(ranks):
        listed = [(one.kind, one.stage, one.micro_batch) for one in found[rank]]
        assert listed == of_torch(schedule, ranks, chunks, micro_batches, rank)


@pytest.mark.parametrize(("schedule", "style"), [("Interleaved1F1B", "loop"), ("ZBVZeroBubble", "v")])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_stages_lie_where_torch_puts_them(ranks: int, schedule: str, style: str) -> None:
    placed = generate_stage_to_rank_mapping(ranks, 2 * ranks, style=style)
    assert list(ranks_of(schedule, ranks, 2 * ranks)) == [placed[stage] for stage in range(2 * ranks)]
    for rank, actions in enumerate(order_of(schedule, ranks, 2 * ranks, 2 * ranks)):
        assert {placed[action.stage] for action in actions} == {rank}


def test_the_orders_of_one_stage_on_each_rank() -> None:
    """As torch's loops of GPipe and 1F1B run: the last rank alternates from the start."""
    short = [[f"{one.kind[0]}{one.micro_batch}" for one in actions] for actions in order_of("1F1B", 2, 2, 3)]
    assert short == [["f0", "f1", "b0", "f2", "b1", "b2"], ["f0", "b0", "f1", "b1", "f2", "b2"]]
    assert [[f"{one.kind[0]}{one.micro_batch}" for one in actions] for actions in order_of("GPipe", 2, 2, 2)] == [
        ["f0", "f1", "b0", "b1"]
    ] * 2


def runs(forward_us: float = 2.0, backward_us: float = 4.0, **more: Any) -> Iterator[tuple[int, int, int, PipelineRun]]:
    for ranks, chunks, micro_batches in SHAPES:
        for schedule in schedules_for(ranks, ranks * chunks, micro_batches):
            cost = StageCost(
                forward_us=(forward_us,) * micro_batches, backward_us=(backward_us,) * micro_batches, **more
            )
            yield ranks, chunks, micro_batches, simulate_pipeline(schedule, ranks, [cost] * (ranks * chunks))


def test_equal_stages_have_the_bubble_of_the_formula() -> None:
    """(p-1) / (v m + p-1) of p ranks with v chunks, where whole rounds of micro-batches keep all ranks busy."""
    seen: set[str] = set()
    for ranks, chunks, micro_batches, run in runs():
        if run.schedule in SPLITTING:
            continue
        if micro_batches % ranks == 0 or chunks == 1:
            seen.add(run.schedule)
            if run.schedule == "Interleaved1F1B" and chunks == 1 and micro_batches % ranks:
                continue
            assert run.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1)), run
    assert seen == set(SCHEDULES) - set(SPLITTING)


def test_actions_begin_when_rank_and_input_are_ready() -> None:
    """Messages take less than any action, so that none waits for the one before it."""
    send_us = 1.0
    for ranks, chunks, _, run in runs(send_us=send_us):
        ended = {one.action: one.end_us for one in run.actions}
        places = ranks_of(run.schedule, ranks, ranks * chunks)
        free, busy = [0.0] * ranks, [0.0] * ranks
        for one in run.actions:
            other = one.action.stage + {"forward": -1, "backward": 1, "weights": ranks * chunks}[one.action.kind]
            begun = free[one.rank]
            if 0 <= other < ranks * chunks:
                sent_us = 0.0 if places[other] == one.rank else send_us
                begun = max(begun, ended[replace(one.action, stage=other)] + sent_us)
            assert one.start_us == begun, (run.schedule, one)
            free[one.rank] = one.end_us
            busy[one.rank] += one.end_us - one.start_us
        assert max(free) == run.step_us and tuple(busy) == run.busy_us


def test_gradients_of_weights_fill_the_bubble() -> None:
    """What is left is (p-1) (f + b - w), as of ZB-H1 (arXiv 2401.10241); whole backwards fill nothing."""
    cost = StageCost(forward_us=(2.0,) * 8, backward_us=(4.0,) * 8)
    halves = SplitCost(inputs_us=(2.0,) * 8, weights_us=(2.0,) * 8)
    split, plain = ([replace(cost, split=one)] * 4 for one in (halves, None))
    whole = simulate_pipeline("1F1B", 4, plain).step_us
    assert simulate_pipeline("1F1B", 4, split).step_us == whole == 8 * 6 + 3 * 6
    assert simulate_pipeline("InterleavedZeroBubble", 4, split).step_us == 8 * 6 + 3 * (2 + 2 - 2)
    assert simulate_pipeline("InterleavedZeroBubble", 4, plain).step_us >= whole


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 9), (4, 7), (4, 8)])
def test_zbv_waits_only_for_the_first_micro_batch(ranks: int, micro_batches: int) -> None:
    """Where forwards, gradients of inputs, and of weights take equally long: as in arXiv 2401.10241, section 6."""
    halves = SplitCost(inputs_us=(1.0,) * micro_batches, weights_us=(1.0,) * micro_batches)
    cost = StageCost(forward_us=(1.0,) * micro_batches, backward_us=(2.0,) * micro_batches, split=halves)
    run = simulate_pipeline("ZBVZeroBubble", ranks, [cost] * (2 * ranks))
    assert run.step_us == 6 * micro_batches + ranks - 1
    assert run.busy_us == (6.0 * micro_batches,) * ranks
    assert run.in_flight == (2 * ranks,) * ranks  # in halves of what a rank has: as much as 1F1B's first rank


def test_messages_within_a_rank_use_no_link_time() -> None:
    """The last rank has two stages that follow each other: a micro-batch crosses 2 (p - 1) links each way."""
    cost = StageCost(forward_us=(1.0,), backward_us=(1.0,), send_us=10.0)
    assert simulate_pipeline("ZBVZeroBubble", 3, [cost] * 6).step_us == 6 + 2 * 4 * 10 + 6
    assert simulate_pipeline("Interleaved1F1B", 3, [cost] * 6).step_us == 6 + 2 * 5 * 10 + 6


def test_a_slow_stage_sets_the_pace() -> None:
    """Its rank never waits once it has begun, and the others wait for it."""
    usual = StageCost(forward_us=(1.0,) * 8, backward_us=(2.0,) * 8)
    slow = StageCost(forward_us=(3.0,) * 8, backward_us=(6.0,) * 8)
    run = simulate_pipeline("1F1B", 3, [usual, slow, usual])
    assert run.step_us == 1 + 8 * (3 + 6) + 2  # until it begins, its work, the first stage's last backward
    assert run.busy_us == (24.0, 72.0, 24.0)


def test_sending_delays_the_first_and_the_last_micro_batch() -> None:
    """In between it hides behind compute, as long as it is shorter."""
    cost = StageCost(forward_us=(2.0,) * 4, backward_us=(4.0,) * 4, send_us=1.0)
    alone = StageCost(forward_us=(2.0,) * 4, backward_us=(4.0,) * 4)
    sent, plain = (simulate_pipeline("GPipe", 4, [one] * 4) for one in (cost, alone))
    assert sent.step_us == plain.step_us + 2 * 3
    # Messages of one direction queue: with slow links the last of four arrives after four messages on each hop.
    slow = StageCost(forward_us=(2.0,) * 4, backward_us=(4.0,) * 4, send_us=100.0)
    assert simulate_pipeline("GPipe", 2, [slow] * 2).step_us == 2 + 4 * 100 + 2 + 4 + 4 * 100 + 4


def judge(order: list[Action], costs: list[StageCost], places: tuple[int, ...], holds_sent: bool, splits: bool) -> int:
    """Peak of a rank by asking, at each action, what has run before it."""
    ends = "weights" if splits else "backward"
    holds = stages_hold_messages()
    peak = 0

    def left_behind(stage: int) -> int:
        """Of an output that goes to another rank: what is no longer there once it is sent, in newer torch."""
        is_sent = stage + 1 < len(places) and places[stage] != places[stage + 1]
        return costs[stage].messages.activation_bytes if is_sent and not holds else 0

    for place, action in enumerate(order):
        before = order[:place]
        held = 0
        for stage in {one.stage for one in order}:
            of_stage = costs[stage]
            whole, gradients, messages = of_stage.memory, of_stage.gradients, of_stage.messages
            halves = of_stage.split.memory if of_stage.split else MicroBatchMemory()
            count = len(of_stage.forward_us)
            ran, returned, ended = (
                [one.micro_batch for one in before if (one.kind, one.stage) == (kind, stage)]
                for kind in ("forward", "backward", ends)
            )
            now = action.kind if action.stage == stage else ""
            # What the next stage gets on the same rank lies in its buffer's place, and so does what comes back.
            handed_on = messages.activation_bytes if places[stage : stage + 2].count(places[stage]) == 2 else 0
            handed_back = messages.gradient_bytes if stage and places[stage - 1] == places[stage] else 0
            running = {action.micro_batch} if action.stage == stage else set[int]()
            closes = now == ends and len(ended) == count - 1
            held += of_stage.resting_bytes + messages.received_bytes
            held -= 0 if holds else handed_on + handed_back * count  # there are no buffers for these
            held += (whole.saved_bytes - handed_on - left_behind(stage)) * len(
                set(ran) - set(returned) - (running if now == "backward" else set())
            )
            if splits:
                held += halves.saved_bytes * len(set(returned) - set(ended) - (running if now == "weights" else set()))
            if (ran or now == "forward") and len(ran) < count:
                held += whole.kept_bytes
            elif len(ended) < count and not closes:
                is_behind = splits and len(returned) == count
                held += halves.closing_kept_bytes if is_behind else whole.closing_kept_bytes
            if ended and len(ended) < count and not closes:
                held += gradients.waiting_bytes
            held += gradients.grad_bytes if ended else 0
            held -= gradients.own_bytes if ended and closes else 0
            left = messages.activation_bytes + messages.gradient_bytes - handed_on - handed_back - left_behind(stage)
            held += left * len(returned) if holds_sent else 0
            if holds and not holds_sent:
                # 1F1B: the last but one that was sent before the first backward, as long as forwards run
                warm_up = [one.kind for one in order].index("backward")
                overwritten = count - warm_up  # the backward behind the last forward
                is_there = warm_up > 1 and warm_up - 2 in returned
                held += messages.activation_bytes if is_there and overwritten not in returned else 0
            held -= left_behind(stage) if now == "backward" else 0
            if now == "forward":
                held += whole.peak_bytes
            elif now == "backward" and splits:
                held += halves.peak_bytes
            elif closes:
                held += halves.closing_peak_bytes if splits else whole.closing_peak_bytes
            elif now and ended:
                held += halves.later_peak_bytes if splits else whole.later_peak_bytes
            elif now:
                held += halves.first_peak_bytes if splits else whole.first_peak_bytes
        peak = max(peak, held)
    return peak


def test_the_peak_is_what_is_alive_at_some_action() -> None:
    for ranks, chunks, micro_batches in SHAPES:
        costs = [
            StageCost(
                forward_us=(1.0,) * micro_batches,
                backward_us=(2.0,) * micro_batches,
                resting_bytes=10**6 + stage,
                gradients=Gradients(
                    grad_bytes=100 * (stage + 3), own_bytes=50 * (stage % 2), waiting_bytes=400 * (stage % 2)
                ),
                memory=MicroBatchMemory(
                    kept_bytes=700 * (stage + 1),
                    closing_kept_bytes=500 * (stage + 1),
                    saved_bytes=500 + 31 * stage,
                    peak_bytes=900 + 40 * stage,
                    first_peak_bytes=1900 - 7 * stage,
                    later_peak_bytes=1500 - 7 * stage,
                    closing_peak_bytes=25_000 * (stage % 3),
                ),
                messages=Messages(activation_bytes=stage, gradient_bytes=2 * stage, received_bytes=11 * stage),
                split=SplitCost(
                    inputs_us=(1.0,) * micro_batches,
                    weights_us=(1.0,) * micro_batches,
                    memory=MicroBatchMemory(
                        saved_bytes=300 + 7 * stage,
                        closing_kept_bytes=200 * (stage + 1),
                        peak_bytes=1000 * (stage % 2 + 1),
                        first_peak_bytes=1800,
                        later_peak_bytes=1300,
                        closing_peak_bytes=20_000 * (stage % 3),
                    ),
                ),
            )
            for stage in range(ranks * chunks)
        ]
        for schedule in schedules_for(ranks, ranks * chunks, micro_batches):
            order = order_of(schedule, ranks, ranks * chunks, micro_batches)
            places = ranks_of(schedule, ranks, ranks * chunks)
            run = simulate_pipeline(schedule, ranks, costs)
            assert list(run.peak_bytes) == [
                judge(actions, costs, places, schedule != "1F1B", schedule in SPLITTING) for actions in order
            ], run


def test_1f1b_holds_as_many_micro_batches_as_stages_follow() -> None:
    cost = StageCost(forward_us=(1.0,) * 9, backward_us=(2.0,) * 9)
    assert simulate_pipeline("1F1B", 4, [cost] * 4).in_flight == (4, 3, 2, 1)
    assert simulate_pipeline("GPipe", 4, [cost] * 4).in_flight == (9, 9, 9, 9)


# --- gathered parameters that a budget has room for -----------------------------------------------------------------


def sizes_for(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.choice([1, 2, 5, 16, 17]) for _ in range(chance.randrange(9))]


@pytest.mark.parametrize("sizes", [[], [7], [5, 3, 3], [16, 1, 16, 1], *map(sizes_for, range(20))], ids=str)
def test_more_room_keeps_more(sizes: list[int]) -> None:
    found = [kept_bytes(sizes, room) for room in range(sum(sizes) + 2)]
    assert found == sorted(found) and found[-1] == sum(sizes)
    for room, kept in enumerate(found):
        assert first_fit(sizes, kept) == first_fit(sizes, room)  # what is kept is all the room that it needs
        following = next((more for more in range(room, len(found)) if found[more] > kept), None)
        assert next_room(sizes, room) == following


@pytest.mark.parametrize("number", range(20))
def test_the_most_that_fits_is_found(number: int) -> None:
    """Beside every choice; where bytes that are kept take as many, fewer, or more."""
    sizes, chance = sizes_for(number), random.Random(-number)
    taken = list(itertools.accumulate((chance.choice([0, 1, 1, 1, 3]) for _ in range(sum(sizes))), initial=100))
    choices = sorted({kept_bytes(sizes, room) for room in range(sum(sizes) + 1)})
    for budget in range(100, taken[-1] + 2):
        asked: list[int] = []

        def left_with(kept: int, asked: list[int] = asked, budget: int = budget) -> int:
            asked.append(kept)
            return budget - taken[kept]

        found = most_kept(sizes, left_with)
        assert found == max(kept for kept in choices if taken[kept] <= budget)
        assert set(asked) <= set(choices) and len(set(asked)) == len(asked)
        following = next_room(sizes, found)
        assert following is None or kept_bytes(sizes, following) in asked


def keeping(stage: int, kept: int, micro_batches: int) -> StageCost:
    """A stage that keeps so many bytes until its last backward."""
    halves = SplitCost(
        inputs_us=(1.0,) * micro_batches,
        weights_us=(1.0,) * micro_batches,
        memory=MicroBatchMemory(saved_bytes=9, closing_kept_bytes=kept, closing_peak_bytes=kept),
    )
    return StageCost(
        forward_us=(1.0,) * micro_batches,
        backward_us=(2.0,) * micro_batches,
        resting_bytes=1000 * (stage + 1),
        memory=MicroBatchMemory(
            kept_bytes=kept,
            closing_kept_bytes=kept,
            saved_bytes=50 + stage,
            peak_bytes=70,
            closing_peak_bytes=60 + kept,
        ),
        split=halves,
    )


def test_ranks_fill_their_budget_stage_by_stage() -> None:
    """No rank holds more, none of its stages could keep more, and the first ones keep what they can alone."""
    sizes = [30, 8, 30, 8]
    for ranks, chunks, micro_batches in SHAPES:
        count = ranks * chunks
        for schedule in schedules_for(ranks, count, micro_batches):
            places = ranks_of(schedule, ranks, count)
            none = [keeping(stage, 0, micro_batches) for stage in range(count)]
            budget = 100 + max(beside_rest(schedule, rank, ranks, none) for rank in range(ranks))

            def cost_of(stage: int, kept: int, micro_batches: int = micro_batches) -> StageCost | None:
                return keeping(stage, kept, micro_batches) if kept != 46 else None  # its graphs do not fit alone

            found = keep_within(budget, schedule, ranks, [sizes] * count, cost_of)
            costs = [keeping(stage, kept, micro_batches) for stage, kept in enumerate(found)]
            assert 46 not in found
            for stage, rank in enumerate(places):
                assert beside_rest(schedule, rank, ranks, costs) <= budget
                more = next_room(sizes, found[stage])
                if more is None:
                    continue
                larger = kept_bytes(sizes, more)
                tried = [*costs[:stage], keeping(stage, larger, micro_batches), *costs[stage + 1 :]]
                assert larger == 46 or beside_rest(schedule, rank, ranks, tried) > budget
            assert found[0] > 0
            if chunks == 1:
                assert found[0] == keep_within(budget, schedule, ranks, [sizes, *[[]] * (count - 1)], cost_of)[0]


def test_bytes_freed_by_a_stage_serve_the_others() -> None:
    """The second stage holds less where it keeps something; the first had no room before."""

    def cost_of(stage: int, kept: int) -> StageCost:
        held = kept if stage == 0 else {0: 100, 5: 20}[kept]
        return StageCost(forward_us=(1.0, 1.0), backward_us=(1.0, 1.0), messages=Messages(received_bytes=held))

    assert keep_within(30, "Interleaved1F1B", 1, [[10], [5]], cost_of) == [10, 5]
    assert keep_within(29, "Interleaved1F1B", 1, [[10], [5]], cost_of) == [0, 5]


def test_a_little_that_is_kept_may_be_what_fits() -> None:
    """The first choice holds less than nothing kept, and whatever holds more than that is not looked at."""
    held = {0: 100, 4: 90, 8: 80, 12: 95, 16: 120}
    sizes, asked = [4] * 4, list[int]()

    def left_with(budget: int, kept: int) -> int:
        asked.append(kept)
        return budget - held[kept]

    for budget, wanted in ((99, 12), (95, 12), (94, 8), (80, 8), (79, 8)):
        assert most_kept(sizes, partial(left_with, budget)) == wanted
    assert 16 in asked  # with room for 12, the next one was tried, too
    assert left_with(79, 8) < 0  # nothing was found that fits


@pytest.mark.parametrize(
    ("schedule", "numbers", "message"),
    [
        (
            "1F1b",
            (2, 2, 4),
            "a plan knows the schedules GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble; did you "
            "mean '1F1B'",
        ),
        ("ScheduleGPipe", (2, 2, 4), "did you mean 'GPipe'"),
        ("ZBVZeroBubble", (2, 2, 4), "it needs two stages on each rank, and there are 2 on 2"),
        ("LoopedBFS", (2, 4, 4), "a plan knows the schedules GPipe, 1F1B, Interleaved1F1B"),
        ("GPipe", (2, 4, 4), "it needs one stage on each rank, and there are 4 on 2;"),
        ("1F1B", (4, 4, 3), "it needs at least as many micro-batches as there are ranks, 4"),
        ("Interleaved1F1B", (4, 8, 9), "it needs a multiple of 2 micro-batches"),
    ],
)
def test_unsupported_schedule_has_a_reason(schedule: str, numbers: tuple[int, int, int], message: str) -> None:
    assert message in why_not(schedule, *numbers)
