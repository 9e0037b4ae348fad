"""What is made of measured calls: medians, what a profile slowed down, bytes by thread and label."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from zgraph.runtime.profiler import Allocations, Call, GraphProfiler, Measured, StepProfiler


def profiler_of(*calls: Call) -> GraphProfiler:
    profiler = StepProfiler(watch_allocations=False).of("0/0", "forward", ())
    profiler.calls.extend(calls)
    return profiler


def call(us: float, *waits: tuple[str, float], profiled: bool = False, label: str = "", given: int = 0) -> Call:
    """Begins at 100 us; waits one after the other."""
    found: list[tuple[str, float, float]] = []
    for name, blocked in waits:
        begin = found[-1][2] if found else 100.0
        found.append((name, begin, begin + blocked))
    return Call(label, None, profiled, given, 100.0, 100.0 + us, found)


def test_medians_leave_out_what_the_profile_slowed_down() -> None:
    calls = [
        call(900, ("a", 90), ("b", 80), profiled=True, label="first", given=7),
        *(call(us, ("a", us / 10), ("b", 1), ("b", 2)) for us in (50, 30, 40)),
    ]
    assert profiler_of(*calls).found({"first": 100, "other": 5}) == Measured(
        calls=3, us=40, blocked_us={"a": 4, "b": 3}, waited_at_us={"a": 0, "b": 4}, peak_bytes=107
    )


def test_a_single_step_is_all_there_is() -> None:
    found = profiler_of(call(900, ("a", 90), profiled=True, label="first"))
    assert found.found({}) == Measured(calls=1, us=900, blocked_us={"a": 90}, waited_at_us={"a": 0}, peak_bytes=None)


def rise_of(sizes: Sequence[int]) -> dict[str, int]:
    """The peaks of two labelled stretches: allocate all, let the first go, allocate it again; then nothing."""
    allocations = Allocations()
    with torch.profiler.record_function("zgraph::first"):
        kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        del kept[0]
        kept.append(torch.empty(sizes[0], dtype=torch.uint8))
    with torch.profiler.record_function("zgraph::second"):
        kept.clear()
    allocations.stop()
    allocations.stop()  # once is enough
    return allocations.peaks()


def test_memory_rises_by_what_is_alive_at_once() -> None:
    assert rise_of([5000, 3000]) == {"zgraph::first": 8000, "zgraph::second": 0}


def test_buffers_are_let_go_when_nobody_else_holds_them() -> None:
    """A view keeps them, as the copies out of a bucket do, and so does a thread of gloo."""
    allocations = Allocations()
    with torch.profiler.record_function("zgraph::call"):
        buffer = torch.empty(4000, dtype=torch.uint8)
        view = buffer[:10]
        allocations.hold([buffer, [torch.empty(500, dtype=torch.uint8)]])
        allocations.let_go()  # the second
        del buffer
        allocations.let_go()  # nothing
        torch.empty(300, dtype=torch.uint8)
        del view
        allocations.let_go()
        torch.empty(4100, dtype=torch.uint8)
    allocations.stop()
    assert allocations.peaks() == {"zgraph::call": 4500}


def test_memory_freed_by_another_thread_is_seen() -> None:
    """As gloo's do: the last reference to a buffer goes away in a thread that is not profiled."""
    allocations = Allocations()
    with torch.profiler.record_function("zgraph::call"):
        for _ in range(3):
            work = [torch.empty(4000, dtype=torch.uint8)]
            allocations.hold(work)
            thread = threading.Thread(target=work.clear)
            thread.start()
            thread.join()
            allocations.let_go()
    allocations.stop()
    assert allocations.peaks() == {"zgraph::call": 4000}


def test_a_profile_ends_with_the_first_step() -> None:
    """forward, backward | forward: at the second forward; a graph called twice before is not the next step."""
    profiler = StepProfiler(watch_allocations=True)
    allocations = profiler.allocations
    assert allocations is not None
    watching: list[bool] = []
    for direction in ("forward", "forward", "backward", "backward", "forward"):
        profiler.of("0/0", direction, ())
        watching.append(allocations.is_watching)
    assert watching == [True, True, True, True, False]


def test_profiles_do_not_nest() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert StepProfiler(watch_allocations=True).allocations is None
