"""What tensors on disk say when a folder, the space or a transfer fails, and what they leave behind then."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import platform
import re
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zgraph
from zgraph.tiers.disk import transfer
from zgraph.tiers.disk.folder import DiskFolder

MIB = 2**20
pytestmark = pytest.mark.filterwarnings("ignore:.*is in memory:zgraph.ZgraphWarning")


@pytest.fixture(params=["small", "large"])
def disk(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DiskFolder:
    """Tensors of these tests are small, and stay in the page cache; or are taken for large ones."""
    if request.param == "large":
        monkeypatch.setattr(transfer, "SMALL_BYTES", 0)
    return DiskFolder(str(tmp_path), 3)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small filesystem needs the right to mount one")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def filled(disk: DiskFolder, value: float = 1.0) -> Tensor:
    tensor = disk.empty((5000,), torch.float32, "layers.0.weight")
    disk.start_write(torch.full((5000,), value), tensor).wait()
    return tensor


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_a_folder_is_made_in_one_that_exists(tmp_path: Path) -> None:
    for _ in range(2):  # as of two ranks
        DiskFolder(str(tmp_path / "new"), 0)
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
    with pytest.raises(
        zgraph.DiskError, match=rf"rank 1: .*/none/new cannot be made: there is no folder {tmp_path}/none; make that"
    ):
        DiskFolder(str(tmp_path / "none" / "new"), 1)


def test_a_path_must_be_a_folder_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(zgraph.DiskError, match=r"/file is not a directory; give a folder"):
        DiskFolder(str(tmp_path / "file"), 0)
    with pytest.raises(zgraph.DiskError, match=r"/file/new cannot be used: Not a directory; give a folder, or the"):
        DiskFolder(str(tmp_path / "file" / "new"), 0)
    refused = r"/proc/new cannot be used: (No such file or directory|Permission denied); give a folder"
    with pytest.raises(zgraph.DiskError, match=refused):  # the first of them to root
        DiskFolder("/proc/new", 0)  # in a folder that exists, and makes none
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(zgraph.DiskError, match=rf"/link cannot be made: there is no folder {tmp_path}/gone;"):
        DiskFolder(str(tmp_path / "link"), 0)

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # root may write to every folder
    with pytest.raises(
        zgraph.DiskError, match=r"cannot create a file in .*: Permission denied; give a folder on a disk"
    ):
        DiskFolder(str(tmp_path), 0)


@pytest.mark.filterwarnings("default::zgraph.ZgraphWarning")
def test_a_folder_in_memory_is_pointed_out(small: Path) -> None:
    with pytest.warns(zgraph.ZgraphWarning, match=r"is in memory \(tmpfs\), so that nothing is saved; give a folder"):
        DiskFolder(str(small), 0)


def test_a_full_disk_refuses_a_tensor_and_keeps_nothing(small: Path) -> None:
    disk = DiskFolder(str(small), 2)
    kept = disk.empty((65536,), torch.float32, "layers.0.weight").fill_(7)
    free = free_bytes(small)
    text = r"rank 2: no space for layers.1.weight in .*: it needs 1200128 bytes in addition to the 262144 of the "
    text += rf"tensors stored there, {free} are free, {1200128 - free} are lacking \(No space left on device\)"
    with pytest.raises(zgraph.DiskError, match=text):
        disk.empty((300_000,), torch.float32, "layers.1.weight")
    assert (free_bytes(small), disk._space.used_bytes) == (free, 262144)
    assert disk.empty((65536,), torch.float32, "layers.1.weight").fill_(8).eq(8).all()
    assert kept.eq(7).all()


def test_a_full_disk_refuses_a_folder(small: Path) -> None:
    with contextlib.suppress(OSError), (small / "ballast").open("wb") as file:
        file.write(bytes(2 * MIB))
    with pytest.raises(zgraph.DiskError, match=r"no space for a trial of two blocks .* 0 are free, 8192 are lacking"):
        DiskFolder(str(small), 0)


def test_a_disk_that_fills_up_during_a_write(small: Path) -> None:
    """A filesystem that breaks its word, as copy-on-write ones may: reserved blocks are no longer there."""
    disk = DiskFolder(str(small), 0)
    tensor = disk.empty((100_000,), torch.float32, "layers.0.weight")
    os.truncate(f"/proc/self/fd/{disk._space.fd}", 0)
    os.truncate(f"/proc/self/fd/{disk._space.fd}", 8192 + 401408)
    with contextlib.suppress(OSError), (small / "ballast").open("wb") as file:
        file.write(bytes(2 * MIB))
    failing = disk.start_write(torch.ones(100_000), tensor)
    with pytest.raises(
        zgraph.DiskError, match=r"writing layers.0.weight \(400000 bytes .* No space left on device; free"
    ):
        failing.wait()
    (small / "ballast").unlink()
    with pytest.raises(zgraph.DiskError, match=r"start_read of layers.0.weight: its last write failed"):
        disk.start_read(tensor).wait()
    disk.start_write(torch.ones(100_000), tensor).wait()
    assert disk.start_read(tensor).wait().eq(1).all()


def test_a_limit_on_files_refuses_a_tensor(disk: DiskFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensor = filled(disk)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(zgraph.DiskError, match=r"a file size limit or a quota prevents it \(File too large\)"):
            disk.empty((MIB,), torch.float32, "layers.1.weight")
        assert disk._space.used_bytes == 20480 and disk.start_read(tensor).wait().eq(1).all()
        assert disk.empty((1000,), torch.float32, "layers.1.weight").fill_(1).eq(1).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(error: int, after: int = 0) -> Callable[..., int]:
    """A transfer that fails after a number of bytes have been moved."""
    real = os.pwritev
    moved = 0

    def call(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal moved
        if moved >= after:
            raise OSError(error, os.strerror(error))
        moved += real(fd, [memoryview(buffers[0])[: after - moved]], offset)
        return moved

    return call


def test_an_error_of_the_disk_names_the_tensor(
    disk: DiskFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, other = filled(disk), filled(disk)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing(errno.EIO, after=4096))  # torn
        text = rf"rank 3: writing layers.0.weight \(20000 bytes at \d+ of the file in {re.escape(str(tmp_path))}"
        with pytest.raises(zgraph.DiskError, match=text + r"\) failed: Input/output error; the disk may be failing"):
            disk.start_write(torch.zeros(5000), tensor).wait()
    with pytest.raises(zgraph.DiskError, match="its last write failed"):
        disk.start_read(tensor[:10]).wait()
    disk.start_write(torch.zeros(10), tensor[:10]).wait()  # a part is not enough
    with pytest.raises(zgraph.DiskError, match="its last write failed"):
        disk.start_read(tensor).wait()
    assert disk.start_read(other).wait().eq(1).all()
    disk.start_write(torch.full((5000,), 2.0), tensor).wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(zgraph.DiskError, match=r"reading layers.0.weight .* Input/output error"):
            disk.start_read(tensor).wait()
    assert disk.start_read(tensor).wait().eq(2).all()  # a failed read spoils nothing


def test_late_write_failure_of_the_kernel_fails_next_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page may be gone, and the disk has the values before."""
    disk = DiskFolder(str(tmp_path), 3)
    tensor = filled(disk)
    asked: list[tuple[int, int]] = []

    def failed(fd: int, offset: int, nbytes: int) -> None:
        asked.append((fd, nbytes))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "check_written", failed)
        with pytest.raises(zgraph.DiskError, match=r"rank 3: reading layers.0.weight .* Input/output error"):
            disk.start_read(tensor).wait()
    assert asked == [(disk._space.fd, 20_000)]
    for other in (tensor, filled(disk)):  # the kernel says it once, and not of which
        with pytest.raises(zgraph.DiskError, match="Input/output error"):
            disk.start_read(other).wait()


@pytest.mark.parametrize("failing_half", [0, 1])
def test_failing_half_fails_the_read_after_both_end(
    disk: DiskFolder, monkeypatch: pytest.MonkeyPatch, failing_half: int
) -> None:
    source = torch.arange(9 * MIB, dtype=torch.uint8)
    tensor = disk.empty(source.shape, source.dtype, "layers.0.weight")
    disk.start_write(source, tensor).wait()
    if disk._access.direct is None:
        pytest.skip("only direct reads come in halves")
    real, failed, opened = os.preadv, threading.Event(), threading.Event()
    slot = disk._space.slot_at(tensor.data_ptr())
    assert slot is not None
    middle = slot.offset + 4 * MIB

    def torn(fd: int, buffers: list[memoryview], offset: int) -> int:
        if (offset >= middle) == bool(failing_half):
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert opened.wait(60)
        return real(fd, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", torn)
        read = disk.start_read(tensor)
        assert failed.wait(60)
        done, _ = concurrent.futures.wait([read._future], timeout=0.1)
        assert not done  # the other half still reads into memory that would be freed
        opened.set()
        with pytest.raises(zgraph.DiskError, match=r"reading layers.0.weight .* Input/output error"):
            read.wait()
    assert disk.start_read(tensor).wait().equal(source)
    del tensor, read, slot
    disk.finish()
    assert disk._space.used_bytes == 0  # nothing keeps the tensor


def test_short_transfers_are_continued(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(real: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, buffers, offset: real(fd, [memoryview(buffers[0])[:4096]], offset)

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    source = torch.arange(5000, dtype=torch.float32)
    tensor = disk.empty((5000,), torch.float32, "weight")
    disk.start_write(source, tensor).wait()
    assert tensor.equal(source) and disk.start_read(tensor).wait().equal(source)


def test_a_write_that_nobody_waits_for_fails_the_next_read(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled(disk)
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    disk.start_write(torch.zeros(5000), tensor)
    with pytest.raises(zgraph.DiskError, match=r"its last write failed.*Input/output error"):
        disk.start_read(tensor).wait()


def test_failed_transfers_free_their_tensors(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled(disk)
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    write = disk.start_write(torch.zeros(5000), tensor)
    with pytest.raises(zgraph.DiskError, match="Input/output error"):
        write.wait()
    read = disk.start_read(tensor)
    with pytest.raises(zgraph.DiskError, match="its last write failed"):
        read.wait()
    del tensor
    disk.finish()
    assert disk._space.used_bytes == 0


def test_a_truncated_file_is_an_error_not_a_signal(disk: DiskFolder, tmp_path: Path) -> None:
    _before, last = filled(disk), filled(disk)
    os.truncate(f"/proc/self/fd/{disk._space.fd}", 8192 + 20480 + 4096)
    text = "file of layers.0.weight in .* was truncated to 32768 bytes, .* is at 28672 to 49152; it is lost: resume"
    for use in (
        lambda: disk.start_read(last).wait(),
        lambda: disk.start_write(torch.ones(5000), last).wait(),
    ):
        with pytest.raises(zgraph.DiskError, match=text):
            use()
    assert os.listdir(tmp_path) == []


def test_a_file_that_ends_while_it_is_read(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled(disk)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(zgraph.DiskError, match=r"reading .* it ended after 0 of \d+ bytes; the file was truncated"):
        disk.start_read(tensor).wait()


def test_tensors_and_sources_must_fit(disk: DiskFolder) -> None:
    tensor = filled(disk)
    with pytest.raises(ValueError, match=r"start_read: a tensor of shape \[3\] on cpu is not stored in .*not a copy"):
        disk.start_read(torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \[2500\] and strides \(2,\) is not contiguous"):
        disk.start_read(tensor[::2])
    for wrong in (torch.ones(4999), torch.ones(5000, dtype=torch.float64), torch.ones(5000, 2)[:, 0]):
        with pytest.raises(
            ValueError, match=r"source must be a contiguous CPU tensor of shape \[5000\] and torch.float32"
        ):
            disk.start_write(wrong, tensor)
    assert not disk.is_on_disk(torch.empty(3, device="meta"))


def test_names_left_by_a_killed_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a filesystem without nameless files a kill between two system calls leaves an empty file."""
    leftover, foreign = (
        tmp_path / f".zgraph-disk-{host}-0123456789abcdef" for host in (platform.node(), "another-host")
    )
    leftover.touch()
    foreign.touch()
    real = os.open

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    one, other = DiskFolder(str(tmp_path), 0), DiskFolder(str(tmp_path), 0)
    assert os.listdir(tmp_path) == [foreign.name]
    tensors = [filled(folder, float(value)) for value, folder in enumerate((one, other))]
    assert [folder.start_read(tensor).wait()[0] for folder, tensor in zip((one, other), tensors, strict=True)] == [
        0,
        1,
    ]
