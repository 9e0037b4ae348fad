"""Collectives as messages: the same bits as the backend's own, whatever the sizes, and nothing is kept."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.graphs import Drawing, fake_world
from tests.support.ranks import Ranks, every_world, worlds
from tests.support.whole_tensors import whole
from zgraph.analysis.hardware import Hardware
from zgraph.compiler.agreement import Signature
from zgraph.graph.collective_dispatch import order_of_waits
from zgraph.graph.traffic import transfers
from zgraph.passes import presets
from zgraph.runtime.exchanges.collectives import (
    all_gather,
    all_to_all,
    finish_group,
    is_hierarchical,
    start_all_gather,
    start_all_to_all,
    start_grouped_gather,
    start_hierarchical_gather,
    uses_point_to_point,
)
from zgraph.torch_compat.collectives import all_gather_into, all_to_all_op, wait

WORLD = "0"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


def of_rank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (100 * torch.randn(shape, generator=generator)).to(dtype)


def by_the_backend(own: Tensor) -> Tensor:
    world = dist.get_world_size()
    return wait(all_gather_into(own.new_empty((world * own.shape[0], *own.shape[1:])), own, WORLD))


def gathers() -> None:
    world = dist.get_world_size()
    for shape in ((5,), (3, 2), (0, 4), (4, 0), (1,), (70_001,)):
        for dtype in DTYPES:
            own = of_rank(*shape, dtype=dtype)
            found = wait(start_all_gather(own, world, WORLD))
            assert found.dtype == dtype and torch.equal(found, by_the_backend(own))
            assert torch.equal(all_gather(own, world, WORLD), found)
    strided = of_rank(6, 4).t()
    for found in (wait(start_all_gather(strided, world, WORLD)), all_gather(strided, world, WORLD)):
        assert torch.equal(found, by_the_backend(strided.contiguous()))
    before = _get_work_registry_size()
    together = start_grouped_gather([of_rank(2), of_rank(0), of_rank(3, 3)], world, WORLD)
    found = finish_group(together, WORLD)
    for one, shape in zip(found, [(2,), (0,), (3, 3)], strict=True):
        assert torch.equal(one, by_the_backend(of_rank(*shape)))
    assert _get_work_registry_size() == before


def exchanges() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for rows in (0, 1, 4):
        for uneven in (False, True):
            # Rank r sends r * p rows to rank p, or as many to each.
            sends = [rows * (rank * peer if uneven else 1) for peer in range(world)]
            receives = [rows * (peer * rank if uneven else 1) for peer in range(world)]
            for dtype in DTYPES:
                pieces = of_rank(sum(sends), 3, dtype=dtype)
                found = wait(start_all_to_all(pieces, receives, sends, WORLD))
                assert torch.equal(found, wait(all_to_all_op()(pieces, receives, sends, WORLD)))
                if not uneven:
                    assert torch.equal(all_to_all(pieces, sends, WORLD), found)
    strided = of_rank(3, 2 * world).t()
    assert torch.equal(all_to_all(strided, [2] * world, WORLD), all_to_all(strided.contiguous(), [2] * world, WORLD))


def many_at_once() -> None:
    """More than gloo has threads, waited for from the last to the first, between two of the backend's own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    before = _get_work_registry_size()
    ones = torch.ones(3)
    other = dist.all_reduce(ones, async_op=True)
    started = []
    for number in range(12):
        own = torch.full((1000 + number,), float(100 * number + rank))
        splits = [1000 + number] * world
        started.append(start_all_gather(own, world, WORLD))
        started.append(start_all_to_all(own.repeat(world), splits, splits, WORLD))
    dist.barrier()
    assert other is not None
    other.wait()
    assert _get_work_registry_size() - before == 2 * 12 * 2 * (world - 1)
    for number, result in reversed([*enumerate(started)]):
        expected = torch.arange(world, dtype=torch.float32) + 100 * (number // 2)
        assert torch.equal(wait(result), expected.repeat_interleave(1000 + number // 2))
    assert _get_work_registry_size() == before
    assert torch.equal(ones, torch.full((3,), float(world)))


def inputs_that_die_early() -> None:
    """What is sent may be dropped, and its memory taken, before it has left."""
    world = dist.get_world_size()
    started = []
    for number in range(4):
        started.append(start_all_gather(torch.full((2_000_000,), float(number)), world, WORLD))
        torch.full((2_000_000,), -1.0)
    for number, result in enumerate(started):
        assert wait(result).eq(number).all()


def order_of_messages() -> list[str]:
    """Of a gather and an exchange: a rank that sends first keeps its peer from sending meanwhile."""
    world, calls = dist.get_world_size(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("send", "recv"):
            patch.setattr(dist.ProcessGroup, name, noted(getattr(dist.ProcessGroup, name), name, calls))
        wait(start_all_gather(torch.ones(2), world, WORLD))
        wait(start_all_to_all(torch.ones(world), [1] * world, [1] * world, WORLD))
    return calls


def noted(call: Any, name: str, calls: list[str]) -> Any:
    def run(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        calls.append(name)
        return call(group, tensors, peer, tag)

    return run


def policies_of_threads_that_read() -> set[int]:
    """After `zgraph.shard`, which makes a second group."""
    zgraph.shard(torch.nn.Linear(4, 4), zero_stage=3)
    tasks = [task for task in Path("/proc/self/task").glob("*") if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    assert len(tasks) >= 2
    return {os.sched_getscheduler(int(task.name)) for task in tasks}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has threads that do not preempt others")
def test_arrivals_do_not_preempt_senders(ranks: Ranks) -> None:
    """Otherwise gloo's thread would ask for a lock that the preempted sender holds, until its time slice ends."""
    assert ranks.run(policies_of_threads_that_read) == [{os.SCHED_BATCH}] * 2


@every_world
def test_receives_are_announced_before_anything_is_sent(ranks: Ranks) -> None:
    others = ranks.world - 1
    assert ranks.run(order_of_messages) == [2 * (others * ["recv"] + others * ["send"])] * ranks.world


@pytest.mark.parametrize("check", [gathers, exchanges, many_at_once, inputs_that_die_early])
@every_world
def test_messages_bring_what_the_backend_brings(ranks: Ranks, check: object) -> None:
    ranks.run(check)  # pyright: ignore[reportArgumentType]


def test_only_gloo_sends_messages_and_only_from_the_host() -> None:
    with fake_world(2):
        group = dist.group.WORLD
        assert group is not None
        assert not uses_point_to_point(group, torch.device("cpu"))


def on_gloo(backend: str | None) -> list[bool]:
    """None: as `init_device_mesh` makes it where nobody has initialised torch.distributed."""
    group = dist.group.WORLD if backend is None else dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return [uses_point_to_point(group, torch.device(kind)) for kind in ("cpu", "cuda")]


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_gloo_does(ranks: Ranks, backend: str | None) -> None:
    """Whatever the group is called: `dist.get_backend` says "undefined" of some."""
    assert ranks.run(on_gloo, backend) == [[True, False]] * 2


def gathers_by_host() -> None:
    """Several in flight, waited for in another order than started, beside gathers and exchanges of the same ranks."""
    world = dist.get_world_size()
    for ranks_per_host in (1, 2, 4):
        owns = [of_rank(rows, 3, dtype=dtype) for rows in (0, 1, 20_000) for dtype in DTYPES]
        by_host = [start_hierarchical_gather(own, world, WORLD, n, ranks_per_host) for n, own in enumerate(owns)]
        plain = [start_all_gather(own, world, WORLD) for own in owns]
        splits = [5] * world
        exchanged = start_all_to_all(torch.arange(5.0 * world), splits, splits, WORLD)
        for found, direct in reversed([*zip(by_host, plain, strict=True)]):
            assert torch.equal(wait(found), wait(direct))
        assert torch.equal(wait(exchanged), torch.arange(5.0).add(5 * dist.get_rank()).repeat(world))


@worlds(4)
def test_a_gather_by_host_brings_the_same(ranks: Ranks) -> None:
    ranks.run(gathers_by_host)


def waits_in_orders_of_their_own() -> None:
    """Of equal sizes, so that only their numbers tell them apart; a wait of one ends behind others' of the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, second = (
        start_hierarchical_gather(torch.tensor([float(n * 100 + rank)]), world, WORLD, n, 2) for n in range(2)
    )
    waiting = [threading.Thread(target=wait, args=(one,)) for one in (first, second)]
    for thread in waiting if rank % 2 else waiting[::-1]:
        thread.start()
    for thread in waiting:
        thread.join()
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [100, 101, 102, 103]


@worlds(4)
def test_numbers_tell_gathers_by_host_apart(ranks: Ranks) -> None:
    ranks.run(waits_in_orders_of_their_own)


def trained_by_host() -> int:
    """Two steps of a compiled model, two ranks a host, against the eager markers; how many gathers went by host."""
    hardware = replace(Hardware.preset("cpu"), ranks_per_host=2)
    x, found, by_host = of_rank(4, 6), list[list[Tensor]](), list[int]()

    def counted(*args: Any) -> Tensor:
        by_host.append(args[-1])
        return start_hierarchical_gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zgraph.runtime.exchanges.collectives.start_hierarchical_gather", counted)
        for is_compiled in (False, True):
            torch.manual_seed(0)
            model: Any = zgraph.shard(models.Uneven(), zero_stage=3)
            pipeline = zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=hardware))
            called = with_fx(model, passes=pipeline) if is_compiled else model
            for _ in range(2):
                called(x).square().mean().backward()
            found.append([whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) > 5
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)
    assert set(by_host) == {2}
    return len(by_host)


@worlds(4)
def test_compiled_step_gathers_by_host_if_hardware_says_so(ranks: Ranks) -> None:
    counts = ranks.run(trained_by_host)
    assert counts == counts[:1] * 4 and counts[0] >= 4  # forward and backward, twice


def test_ranks_agree_on_where_gathers_by_host_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """gather a, gather b, wait a, exchange, wait b: anybody who waited otherwise would wait forever."""
    monkeypatch.setattr("zgraph.runtime.exchanges.collectives.uses_point_to_point", lambda group, device: True)
    with fake_world(4):
        drawing = Drawing()
        starts = [drawing.start_gather(drawing.input(name, 4), name) for name in "ab"]
        first = drawing.wait(starts[0])
        exchange = drawing.wait(drawing.start_exchange(drawing.input("c", 8), "c"))
        graph = drawing.done(first, exchange, drawing.wait(starts[1])).graph
        assert order_of_waits(graph, 1) == order_of_waits(graph, 4) == []
        waits = order_of_waits(graph, 2)
        assert waits == [
            "gather 0 by hosts of 2 ranks is waited for after 2 starts",
            "gather 1 by hosts of 2 ranks is waited for after 3 starts",
        ]
        agreed = Signature.of("forward", [*transfers(graph)], waits)
        assert agreed.entries[-2:] == tuple(waits) and len(agreed.names) == len(agreed.entries)
        assert agreed.digest != Signature.of("forward", [*transfers(graph)], waits[::-1]).digest


@pytest.mark.parametrize(
    ("world", "ranks_per_host", "expected"),
    [(4, 1, False), (4, 4, False), (4, 8, False), (4, 2, True), (6, 2, True), (6, 4, False), (3, 2, False)],
)
def test_where_gathers_go_by_host(world: int, ranks_per_host: int, expected: bool) -> None:
    with fake_world(world):
        group = dist.group.WORLD
        assert group is not None
        assert is_hierarchical(group, ranks_per_host) == expected
