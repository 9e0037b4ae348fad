"""Between a disk and a GPU: pinned memory that is bounded, order of every access, errors; on streams that stand in."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zgraph
from tests.support.judges.vector_clocks import ClockedLanes
from tests.support.lazy_streams import LazyLanes
from tests.support.slow_disk import slow_down
from zgraph.tiers.disk.folder import DiskFolder
from zgraph.tiers.disk.system_calls import BLOCK
from zgraph.tiers.staging import BUFFERS, PIECE_BYTES, buffer_bytes, staging_bytes
from zgraph.tiers.stores import OnDisk

pytestmark = pytest.mark.filterwarnings("ignore:.*is in memory:zgraph.ZgraphWarning")

# Nothing, one element, a piece, a piece and an element, pieces with an odd end.
SIZES = (0, 1, BLOCK // 4, BLOCK // 4 + 1, 5 * BLOCK // 4 + 3)


@pytest.fixture
def slow(tmp_path: Path) -> DiskFolder:
    """A disk that takes a millisecond for each block."""
    folder = DiskFolder(str(tmp_path), 0)
    slow_down(folder, 4e6)
    return folder


def known(lanes: Any, disk: DiskFolder) -> None:
    lanes.stores.by_key["here"] = lanes.on_disk = OnDisk(disk)  # which lanes do not keep alive


@pytest.mark.parametrize("numel", SIZES)
def test_bits_survive_the_way_to_a_disk_and_back(slow: DiskFolder, numel: int) -> None:
    lanes = LazyLanes(piece_bytes=BLOCK)
    known(lanes, slow)
    values = torch.arange(numel, dtype=torch.float32)
    kept = lanes.spill(values, "here").wait()
    assert slow.is_on_disk(kept) and torch.equal(kept, values)
    back = lanes.reload(kept).wait()
    assert torch.equal(back, values)
    store = lanes.store(back.flip(0), kept)
    again = lanes.reload(kept)  # reads what the store has written, though nobody has waited for that
    assert torch.equal(again.wait(), values.flip(0))
    assert torch.equal(store.wait(), values.flip(0))
    assert lanes.lazy.freed == [] and lanes.writes == {}


def double(lanes: ClockedLanes, kept: list[Tensor], drawn: random.Random) -> None:
    """Update tensors at rest on the device, and let go of one more that comes, before it is waited for."""
    reloads = [lanes.reload(one) for one in kept]
    dropped = [lanes.reload(drawn.choice(kept))]
    stores: list[tuple[Any, Tensor]] = []
    while reloads:
        here = reloads.pop(0).wait()
        lanes.compute(reads=[here], writes=[here])
        stores.append((lanes.store(here.mul_(2), kept[len(stores)]), here))
    dropped.clear()
    for store, source in stores:
        lanes.stored(store)
        lanes.compute(writes=[source])
        source.fill_(torch.nan)


@pytest.mark.parametrize("seed", range(3))
def test_no_two_accesses_race(slow: DiskFolder, seed: int) -> None:
    """Reloads and stores in flight together, and some that nobody waits for."""
    lanes = ClockedLanes(piece_bytes=BLOCK)
    known(lanes, slow)
    drawn = random.Random(seed)
    kept = [lanes.stored(lanes.spill(lanes.made(torch.full((numel,), 1.0)), "here")) for numel in SIZES]
    expected = [1.0] * len(SIZES)
    for _ in range(12):
        chosen = drawn.sample(range(len(SIZES)), 3)
        double(lanes, [kept[place] for place in chosen], drawn)
        for place in chosen:
            expected[place] *= 2
    lanes.finish()
    assert lanes.clocks.races == [] and lanes.clocks.looked > 200
    for value, tensor in zip(expected, kept, strict=True):
        assert tensor.eq(value).all()


def test_judge_detects_a_source_overwritten_during_its_copy(slow: DiskFolder) -> None:
    """The stand-in itself."""
    lanes = ClockedLanes(piece_bytes=BLOCK)
    known(lanes, slow)
    source = lanes.made(torch.ones(5 * BLOCK))
    copy = lanes.spill(source, "here")
    lanes.compute(writes=[source])
    lanes.stored(copy)
    assert any(
        "out reads what compute writes" in race or "writes what out reads" in race for race in lanes.clocks.races
    )


def test_pinned_memory_is_bounded_and_used_again(slow: DiskFolder) -> None:
    lanes = LazyLanes(piece_bytes=2 * BLOCK)
    known(lanes, slow)
    for numel in (1, 20 * BLOCK // 4):
        values = torch.randn(numel)
        kept = lanes.spill(values, "here").wait()
        assert torch.equal(lanes.reload(kept).wait(), values)
        for _ in range(3):
            lanes.store(lanes.reload(kept).wait(), kept).wait()
        size = BLOCK if numel == 1 else 2 * BLOCK
        buffers = [one for staging in lanes.staging(slow) for one in staging._buffers if one is not None]
        assert [one.nbytes for one in buffers] == [size] * 2 * BUFFERS
        assert {one.data_ptr() for one in buffers} == lanes.memory._held, "larger ones take the place of smaller ones"
        assert sum(one.nbytes for one in buffers) == staging_bytes([numel * 4], [numel * 4], 2 * BLOCK)


def test_planned_pinned_memory_covers_staging_buffers() -> None:
    assert staging_bytes([], []) == 0
    assert staging_bytes([1], []) == BUFFERS * BLOCK
    assert staging_bytes([3 * BLOCK, 5], [2**40]) == BUFFERS * (4 * BLOCK + PIECE_BYTES)
    assert buffer_bytes(PIECE_BYTES) == buffer_bytes(2**40) == PIECE_BYTES


def failing(*_: Any) -> int:
    raise OSError(5, "Input/output error")


def test_read_error_is_raised_at_its_wait(slow: DiskFolder, monkeypatch: Any) -> None:
    """Also one that fails between two pieces, of which one is on its way to the device."""
    lanes = LazyLanes(piece_bytes=BLOCK)
    known(lanes, slow)
    kept = lanes.spill(torch.ones(3 * BLOCK), "here").wait()
    real, calls = os.preadv, list[int]()

    def second_fails(*args: Any) -> int:
        calls.append(1)
        return failing() if len(calls) == 2 else real(*args)

    monkeypatch.setattr(os, "preadv", second_fails)
    copy = lanes.reload(kept)
    with pytest.raises(zgraph.DiskError, match=r"reading new state .* Input/output error"):
        copy.wait()
    assert lanes.back.begun == lanes.back.done == 1, "compute is behind what was copied"
    monkeypatch.undo()
    assert torch.equal(lanes.reload(kept).wait(), torch.ones(3 * BLOCK))


def test_unawaited_reload_keeps_its_memory_reserved(slow: DiskFolder) -> None:
    lanes = LazyLanes(piece_bytes=BLOCK)
    known(lanes, slow)
    kept = lanes.spill(torch.ones(3 * BLOCK), "here").wait()
    lanes.reload(kept)
    assert lanes.back.begun == lanes.back.done == 12 and lanes.lazy.freed == []


def test_write_error_is_raised_at_its_wait_or_end(slow: DiskFolder, monkeypatch: Any) -> None:
    lanes = LazyLanes(piece_bytes=BLOCK)
    known(lanes, slow)
    kept: list[Tensor] = [lanes.spill(torch.ones(BLOCK), "here").wait() for _ in range(2)]
    monkeypatch.setattr(os, "pwritev", failing)
    waited, left = (lanes.store(torch.zeros(BLOCK), one) for one in kept)
    with pytest.raises(zgraph.DiskError, match=r"writing new state .* Input/output error"):
        waited.wait()
    del left
    with pytest.raises(zgraph.DiskError, match=r"writing new state .* Input/output error"):
        lanes.finish()
    monkeypatch.undo()
    lanes.finish()
    with pytest.raises(zgraph.DiskError, match="its last write failed"):
        lanes.reload(kept[1]).wait()
    lanes.store(torch.zeros(BLOCK), kept[1]).wait()
    assert torch.equal(lanes.reload(kept[1]).wait(), torch.zeros(BLOCK))


def test_pinned_memory_that_cannot_be_had_fails_the_transfer(slow: DiskFolder, monkeypatch: Any) -> None:
    lanes = LazyLanes(piece_bytes=BLOCK)
    known(lanes, slow)

    def none(tensor: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(lanes, "pinned_like", none)
    copy = lanes.spill(torch.ones(BLOCK), "here")
    with pytest.raises(RuntimeError, match="out of memory"):
        copy.wait()
    monkeypatch.undo()
    with pytest.raises(zgraph.DiskError, match=r"was given up: CUDA error: out of memory"):
        lanes.reload(copy.copied).wait()  # pyright: ignore[reportAttributeAccessIssue]
