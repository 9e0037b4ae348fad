"""Tensors on disk: bits, order, pages, space and copies. Errors: test_disk_errors.py; kills: test_disk_kills.py."""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.slow_disk import slow_down
from tests.support.torchrun import ROOT
from zgraph.tiers.disk import folder, transfer
from zgraph.tiers.disk.buffers import KEPT_BYTES, Buffers
from zgraph.tiers.disk.folder import DiskFolder
from zgraph.tiers.disk.place import filesystem_of
from zgraph.tiers.disk.system_calls import address_of

KIB, MIB, GIB = 2**10, 2**20, 2**30
DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((), (0, 3), (7,), (1000, 33), (1024, 4), (4097,))
# The folder of pytest may be in memory.
pytestmark = pytest.mark.filterwarnings("ignore:.*is in memory:zgraph.ZgraphWarning")


@pytest.fixture
def disk(tmp_path: Path) -> DiskFolder:
    return DiskFolder(str(tmp_path), 0)


@pytest.fixture(params=["direct", "buffered", "small"])
def either(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DiskFolder:
    """A folder with direct transfers, one on a filesystem without them, and one that leaves small tensors in memory."""
    if request.param == "buffered":
        refuse_opening(monkeypatch, os.O_DIRECT)
    if request.param != "small":
        monkeypatch.setattr(transfer, "SMALL_BYTES", 0)
    folder = DiskFolder(str(tmp_path), 0)
    assert (folder._access.direct is None) == (request.param == "buffered")
    return folder


def refuse_opening(monkeypatch: pytest.MonkeyPatch, flag: int) -> None:
    """Refuse what is opened with this flag, as a filesystem does that does not know it."""
    real = os.open

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & flag == flag:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def raw(tensor: Tensor) -> bytes:
    """Bits of a tensor."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits, of which some are NaN; a bool has but two."""
    numel = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (numel,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype).reshape(shape)


def filled(disk: DiskFolder, source: Tensor, name: str = "weight") -> Tensor:
    tensor = disk.empty(source.shape, source.dtype, name)
    disk.start_write(source, tensor).wait()
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_survive(either: DiskFolder, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        source = values(shape, dtype)
        tensor = filled(either, source)
        found = either.start_read(tensor).wait()
        assert (tensor.shape, tensor.dtype) == (found.shape, found.dtype) == (source.shape, dtype)
        assert raw(found) == raw(tensor) == raw(source), shape
        # From the memory that a read returns nothing is copied on the way back.
        either.start_write(found, tensor).wait()
        assert raw(tensor) == raw(source), shape


def test_neighbours_are_left_alone(either: DiskFolder) -> None:
    sources = [values((numel,), torch.uint8, numel) for numel in (1, 4095, 4096, 4097, 3 * MIB + 5)]
    tensors = [filled(either, source) for source in sources]
    for tensor, source in zip(tensors, sources, strict=True):
        either.start_write(source.flip(0).contiguous(), tensor).wait()
    assert [raw(tensor) for tensor in tensors] == [raw(source.flip(0)) for source in sources]


def test_views_are_parts_of_a_tensor(either: DiskFolder) -> None:
    source = values((64, 1000), torch.float32)
    tensor = filled(either, source)
    for rows in (slice(0, 64), slice(3, 9), slice(0, 1), slice(60, 64), slice(5, 5)):
        assert raw(either.start_read(tensor[rows]).wait()) == raw(source[rows])
        source[rows] = values((64, 1000), torch.float32, 1)[rows]
        either.start_write(source[rows].clone(), tensor[rows]).wait()
        assert raw(tensor) == raw(source)


def test_the_mapping_and_transfers_see_each_other(either: DiskFolder) -> None:
    tensor = either.empty((512, 512), torch.float32, "weight")
    for value in range(5):
        tensor.fill_(value)  # dirty pages
        tensor[7] = -1.0
        found = either.start_read(tensor).wait()
        assert found[7].eq(-1).all() and found.sum() == value * 511 * 512 - 512
        _ = tensor.sum()  # clean pages, now in memory
        either.start_write(found + 1, tensor).wait()
        assert raw(tensor) == raw(found + 1)
        tensor[9] = 3.0  # dirty again, just before a write that covers it
        either.start_write(found, tensor).wait()
        assert raw(tensor) == raw(found)


def resident_pages(tensor: Tensor) -> int:
    """Pages of a mapped tensor that are in memory."""
    pages = -(-tensor.nbytes // 4096)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(pages * 4096), found) == 0
    return sum(page & 1 for page in found)


def test_pages_are_dropped(either: DiskFolder) -> None:
    if filesystem_of(either._space.fd) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("the folder of pytest keeps its files in memory, or in another filesystem's pages")
    tensor = either.empty((MIB,), torch.uint8, "weight")
    uses: tuple[Callable[[], object], ...] = (
        lambda: either.start_read(tensor).wait(),
        lambda: either.start_write(torch.ones(MIB, dtype=torch.uint8), tensor).wait(),
    )
    for use in uses:
        tensor.fill_(1)
        assert resident_pages(tensor) == 256
        use()
        assert resident_pages(tensor) == 0
        assert tensor.eq(1).all()


def test_pages_of_small_tensors_stay(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of its own for each would wait for the large ones before it."""
    direct: list[int] = []

    def logged(real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            direct.append(fd)
            return real(fd, buffers, offset)

        return call

    small, large = (disk.empty((nbytes,), torch.uint8, "bias") for nbytes in (256 * KIB, 256 * KIB + 1))
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, logged(getattr(os, name)))
    for tensor in (small, large):
        direct.clear()
        source = values(tuple(tensor.shape), torch.uint8)
        disk.start_write(source, tensor).wait()
        assert disk.start_read(tensor).wait().equal(source)
        if disk._access.direct is not None:
            assert (disk._access.direct in direct) == (tensor is large)
    if filesystem_of(disk._space.fd) not in ("tmpfs", "ramfs", "overlay"):
        assert (resident_pages(small), resident_pages(large)) == (64, 0)


def test_memory_of_large_reads_is_used_again(disk: DiskFolder) -> None:
    if disk._access.direct is None:
        pytest.skip("only direct reads need memory of their own kind")
    source = values((5 * MIB,), torch.uint8)
    tensor, smaller, tiny = (filled(disk, source[:numel].clone()) for numel in (5 * MIB, 4 * MIB, 2 * MIB))
    read = disk.start_read(tensor).wait()
    address, part = read.data_ptr(), read[7:9]
    other = disk.start_read(tensor).wait()
    assert other.data_ptr() != address and read.equal(source)
    del read
    assert disk._access.buffers.free_bytes == 0  # a view keeps all of it
    del part
    assert disk._access.buffers.free_bytes == 5 * MIB
    assert disk.start_read(tiny).wait().data_ptr() != address  # more than half of it would lie idle
    read = disk.start_read(smaller).wait()
    assert read.data_ptr() == address and read.equal(source[: 4 * MIB])
    assert other.equal(source)


def test_free_memory_of_reads_is_bounded() -> None:
    buffers = Buffers()
    taken = [buffers.take(nbytes) for nbytes in (40 * MIB, 60 * MIB, 80 * MIB, 130 * MIB)]
    addresses = [one.data_ptr() for one in taken]
    while taken:
        del taken[0]
        assert buffers.free_bytes <= KEPT_BYTES
    assert buffers.free_bytes == 0  # the last has pushed all others out, and is too large itself
    again = [buffers.take(KEPT_BYTES // 4) for _ in range(5)]
    again.clear()
    assert buffers.free_bytes == KEPT_BYTES
    assert len(set(addresses)) == 4


def test_large_reads_come_in_halves(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    source = values((9 * MIB + 5,), torch.uint8)  # no multiple of a page of any size
    tensor = filled(disk, source)
    requests: list[tuple[int, int]] = []
    real = os.preadv

    def logged(fd: int, buffers: list[memoryview], offset: int) -> int:
        requests.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", logged)
    read = disk.start_read(tensor).wait()
    assert read.equal(source)
    if disk._access.direct is not None:
        (first, half), (second, _), *_ = sorted(requests)
        assert half == 4 * MIB == second - first


def test_large_reads_come_into_huge_pages(disk: DiskFolder) -> None:
    if disk._access.direct is None or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("only direct reads ask for huge pages, of a kernel that has them")
    source = values((5 * MIB,), torch.uint8)
    read = disk.start_read(filled(disk, source)).wait()
    assert read.equal(source) and read.data_ptr() % (2 * MIB) == 0
    assert "hg" in flags_of_mapping(read.data_ptr()) and "hg" in flags_of_mapping(read.data_ptr() + 4 * MIB - 1)
    # Not beyond: a page that the tensor fills in part would take more than the tensor does.
    assert "hg" not in flags_of_mapping(read.data_ptr() + 4 * MIB)
    small = disk.start_read(filled(disk, source[: 2 * MIB - 1].clone())).wait()
    assert small.equal(source[: 2 * MIB - 1])


def flags_of_mapping(address: int) -> list[str]:
    """Flags that the kernel has for the memory mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head:
            start, end = (int(one, 16) for one in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return rest.split()
    raise AssertionError(f"{address:#x} is not mapped")


def test_plain_code_uses_it(disk: DiskFolder, tmp_path: Path) -> None:
    """An optimizer, `state_dict`, torch.save and `load_state_dict` over mapped files do what they do in memory."""
    plain, mapped = nn.Linear(33, 17), nn.Linear(33, 17)
    mapped.load_state_dict(plain.state_dict())
    for name, parameter in list(mapped.named_parameters()):
        setattr(mapped, name, nn.Parameter(filled(disk, parameter.detach(), name)))
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1, fused=True) for module in (plain, mapped)]
    for step, (module, optimizer) in itertools.product(range(3), zip((plain, mapped), optimizers, strict=True)):
        module(torch.ones(4, 33) * step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, state in enumerate(optimizer.state.values()):
            if module is mapped and step == 0:
                state |= {key: filled(disk, value, f"{name}.{key}") for key, value in state.items() if value.dim() > 0}
    assert [disk.is_on_disk(value) for value in mapped.state_dict().values()] == [True, True]
    assert [disk.is_on_disk(state["exp_avg"]) for state in optimizers[1].state.values()] == [True, True]
    assert disk.is_on_disk(mapped.weight[3:]) and not disk.is_on_disk(mapped.weight.detach().clone())
    states = [(plain.state_dict(), optimizers[0].state_dict()), (mapped.state_dict(), optimizers[1].state_dict())]
    files = [io.BytesIO(), io.BytesIO()]
    for file, state in zip(files, states, strict=True):
        torch.save(state, file)
    loaded = [torch.load(io.BytesIO(file.getvalue())) for file in files]
    for key, value in loaded[0][0].items():
        assert raw(value) == raw(loaded[1][0][key])
    for number, state in loaded[0][1]["state"].items():
        assert {key: raw(value) for key, value in state.items()} == {
            key: raw(value) for key, value in loaded[1][1]["state"][number].items()
        }
    # A tensor is saved with its own bytes, not with those of the whole file.
    assert abs(len(files[0].getvalue()) - len(files[1].getvalue())) < 200
    mapped.load_state_dict({key: torch.zeros_like(value) for key, value in plain.state_dict().items()})
    assert disk.is_on_disk(mapped.weight) and disk.start_read(mapped.weight).wait().eq(0).all()


class Gate:
    """Holds every direct and buffered write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        real = os.pwritev

        def held(*args: object) -> int:
            self.reached.set()
            assert self.opened.wait(60)
            return real(*args)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(os, "pwritev", held)


def test_transfers_of_one_tensor_keep_their_order(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (filled(disk, torch.zeros(5000), name) for name in ("one", "other"))
    gate = Gate(monkeypatch)
    before = disk.start_read(one)
    writes = [disk.start_write(torch.full((5000,), float(value)), one) for value in (1, 2)]
    assert gate.reached.wait(60)
    assert before.wait().eq(0).all()  # it was started before the writes
    elsewhere = disk.start_read(other)
    assert elsewhere.wait().eq(0).all()  # another tensor does not wait for them
    after = disk.start_read(one)
    rows = disk.start_read(one[1000:2000])
    last = disk.start_write(torch.full((5000,), 3.0), one)
    assert not any(transfer._future.done() for transfer in (*writes, after, rows, last))
    gate.opened.set()
    assert after.wait().eq(2).all() and rows.wait().eq(2).all()
    last.wait()
    assert one.eq(3).all()


def test_small_tensors_are_read_at_once(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [filled(disk, torch.full((5000,), float(place))) for place in range(2 * folder.READERS)]
    all_there, real = threading.Barrier(folder.READERS), os.preadv

    def held(*args: object) -> int:
        all_there.wait(60)
        return real(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "preadv", held)
    for place, read in enumerate([disk.start_read(one) for one in tensors]):
        assert read.wait().eq(place).all()


def test_large_tensors_are_read_one_by_one(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in halves: two requests at a time, never three."""
    monkeypatch.setattr(transfer, "HALVED_BYTES", 4 * MIB)
    tensors = [filled(disk, torch.full((MIB,), float(place))) for place in range(3)]
    under_way, most, counting, real = [0], [0], threading.Lock(), os.preadv

    def counted(*args: object) -> int:
        with counting:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        try:
            return real(*args)  # pyright: ignore[reportArgumentType]
        finally:
            with counting:
                under_way[0] -= 1

    monkeypatch.setattr(os, "preadv", counted)
    for place, read in enumerate([disk.start_read(one) for one in tensors]):
        assert read.wait().eq(place).all()
    assert most[0] <= 2 or disk._access.direct is None


def test_a_pending_write_keeps_its_tensors(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, kept = filled(disk, torch.zeros(5000)), filled(disk, torch.ones(5000))
    gate = Gate(monkeypatch)
    write = disk.start_write(torch.full((5000,), 2.0), tensor)
    del tensor
    gc.collect()
    assert disk._space.used_bytes == 2 * 20480
    gate.opened.set()
    write.wait()
    disk.finish()  # the worker has let go of what it wrote
    assert disk._space.used_bytes == 20480 and kept.eq(1).all()


def test_staging_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 64 * KIB)
    disk = DiskFolder(str(tmp_path), 0)
    movers = (disk._reads, disk._writes)
    assert [mover.staging_bytes for mover in movers] == [0, 0]
    memory = torch.arange(MIB + 2, dtype=torch.uint8)
    source = memory[1:-1]  # at an odd address: nothing can be transferred in place
    tensor = filled(disk, source)
    into = torch.empty_like(memory)[1:-1]
    disk.start_read_in_pieces(tensor, (one for one in (into,))).wait()
    assert raw(into) == raw(source)
    assert [mover.staging_bytes for mover in movers] == [64 * KIB if disk._access.direct is not None else 0] * 2


def test_memory_that_no_disk_reaches_is_staged(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory of some drivers: the kernel refuses direct transfers from and to it, and copies of it work."""
    source, back = (aligned(3 * KIB * KIB + 7) for _ in range(2))
    refused: list[str] = []

    def of_pinned(name: str) -> Any:
        call = getattr(os, name)

        def refusing(fd: int, buffers: Any, offset: int) -> int:
            begins = [tensor.data_ptr() for tensor in (source, back)]
            if fd == disk._access.direct and any(0 <= address_of(buffers[0]) - at < back.nbytes for at in begins):
                refused.append(name)
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            return call(fd, buffers, offset)

        return refusing

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, of_pinned(name))
    source.random_()
    kept = disk.empty(source.shape, source.dtype, "weight")
    for _ in range(2):
        disk.start_write(source, kept).wait()
        back.zero_()
        disk.start_read_in_pieces(kept, (one for one in (back,))).wait()
        assert torch.equal(back, source)
    if disk._access.direct is not None:
        assert refused == ["pwritev", "preadv"], "once each way, and then it is known"


def aligned(nbytes: int) -> Tensor:
    """Memory that direct transfers take in place, with room up to the next block."""
    memory = torch.empty(nbytes + 2 * 4096, dtype=torch.uint8)
    first = -memory.data_ptr() % 4096
    return memory[first : first + nbytes]


def test_space_is_counted_and_used_again(disk: DiskFolder) -> None:
    assert disk._space.used_bytes == 0
    before = size_of(disk)
    for _ in range(50):
        tensors = [disk.empty((numel,), torch.float32, f"state {numel}") for numel in (1, 1024, 1025, 300_000)]
        assert disk._space.used_bytes == 4096 + 4096 + 8192 + 1_200_128
        for tensor in tensors:
            tensor.fill_(1)
        del tensor
        tensors.clear()
        assert disk._space.used_bytes == 0
    assert size_of(disk) - before <= 4096 + 4096 + 8192 + 1_200_128
    assert os.fstat(disk._space.fd).st_blocks * 512 < 64 * KIB  # its blocks are the filesystem's again


def size_of(disk: DiskFolder) -> int:
    return os.fstat(disk._space.fd).st_size


def test_views_and_storages_keep_a_tensor_alive(disk: DiskFolder) -> None:
    storage = disk.empty((5000,), torch.float32, "weight").fill_(4)[3:].untyped_storage()
    gc.collect()
    assert disk._space.used_bytes == 20480
    assert torch.empty(0).set_(storage).eq(4).all()  # pyright: ignore[reportCallIssue, reportArgumentType]
    del storage
    gc.collect()
    assert disk._space.used_bytes == 0


def test_offsets_beyond_2_gib(disk: DiskFolder) -> None:
    if os.fstatvfs(disk._space.fd).f_bavail * 4096 < 8 * GIB or filesystem_of(disk._space.fd) in ("tmpfs", "ramfs"):
        pytest.skip("needs 3 GiB of disk in the folder of pytest")
    large = disk.empty((2 * GIB + 8192,), torch.uint8, "large")  # reserved, not written
    after = filled(disk, values((5000,), torch.float32), "after")
    end = values((10_000,), torch.uint8)
    disk.start_write(end, large[-10_000:]).wait()
    assert raw(disk.start_read(large[-10_000:]).wait()) == raw(large[-10_000:]) == raw(end)
    assert raw(disk.start_read(after).wait()) == raw(values((5000,), torch.float32))
    disk.start_write(end[:4096].clone(), large[2 * GIB : 2 * GIB + 4096]).wait()
    assert raw(large[2 * GIB : 2 * GIB + 4096]) == raw(end[:4096])


def test_a_thousand_tensors_take_few_descriptors(disk: DiskFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensors = [disk.empty((3,), torch.float32, str(number)) for number in range(1500)]
    assert len(os.listdir("/proc/self/fd")) == before
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(disk.start_read(tensors[number]).wait().eq(number).all() for number in (0, 700, 1499))


def test_ranks_share_a_folder_but_no_file(tmp_path: Path) -> None:
    one, other = DiskFolder(str(tmp_path), 0), DiskFolder(str(tmp_path), 1)
    assert os.fstat(one._space.fd).st_ino != os.fstat(other._space.fd).st_ino
    tensors = [filled(folder, torch.full((100,), float(rank))) for rank, folder in enumerate((one, other))]
    assert [tensor[0].item() for tensor in tensors] == [0, 1]
    assert not one.is_on_disk(tensors[1])
    assert os.listdir(tmp_path) == []


def test_files_are_closed_with_the_folder_and_its_last_tensor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    disk = DiskFolder(str(tmp_path), 0)
    tensor = disk.empty((300_000,), torch.float32, "weight")
    disk.start_write(torch.ones(300_000), tensor)
    disk.finish()
    del disk
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the file of the mapping
    assert tensor.eq(1).all() and os.listdir(tmp_path) == []
    del tensor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_process_leaves_tensors_alone(disk: DiskFolder) -> None:
    tensor = filled(disk, torch.ones(5000))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert tensor.eq(1).all()
            with pytest.raises(zgraph.DiskError, match="forked from the folder's process"):
                disk.start_read(tensor)
            del tensor
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(1).all() and disk.start_read(tensor).wait().eq(1).all()


def test_a_process_ends(tmp_path: Path) -> None:
    """It waits for what it has started, and then ends. A process of its own: it loads torch, which takes seconds."""
    script = f"""
import torch
from tests.support.slow_disk import slow_down
from zgraph.tiers.disk.folder import DiskFolder
disk = DiskFolder({str(tmp_path)!r}, 0)
slow_down(disk, 1e7)
tensor = disk.empty((1000000,), torch.uint8, "weight")
disk.start_write(torch.ones(1000000, dtype=torch.uint8), tensor)
print("started")
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
    assert os.listdir(tmp_path) == []


def test_finish_waits_for_all_that_was_started(tmp_path: Path) -> None:
    disk = DiskFolder(str(tmp_path), 0)
    slow_down(disk, 4e6)
    tensor, other = (disk.empty((MIB,), torch.uint8, "weight") for _ in range(2))
    transfers = [disk.start_write(torch.ones(MIB, dtype=torch.uint8), tensor), disk.start_read(other)]
    disk.finish()
    assert all(one._future.done() for one in transfers)
