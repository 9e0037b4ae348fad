"""How fast tensors move between memory and disk, by size of requests, and beside a computing thread by library.

    python examples/benchmarks/disk_io.py --path /nvme/scratch                      # three minutes, 2 GB of disk
    python examples/benchmarks/disk_io.py --path /nvme/scratch --json results.json

Bandwidth: preadv and pwritev with O_DIRECT on one reserved file, at several sizes of requests, one and two in flight
(two threads, a half of the file each), a reader beside a writer, a file for each tensor, and dd as the raw rate.

Overlap: 24 tensors of 16 MiB are read, computed with, changed and written back, in order: the next read and the last
write are under way meanwhile. Every way has the same memory and the same computing, which takes about as long as a
transfer. At the end all is synced, in the time. "cache" is what the page cache of this process's memory control group
has gained until then. Libraries that are not there, or do not work here, are left out with the reason:

    pip install safetensors numpy caio tensorstore liburing
    pip install --no-deps deepspeed hjson ninja py-cpuinfo msgpack einops     # and libaio-dev of the system, a compiler

All of them take turns, since disks of virtual machines are noisy; printed are medians, least and most over the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from disk_ways import WAYS, Way
from provenance import commit, processor
from torch import Tensor

from zgraph.runtime.disk.place import filesystem_of
from zgraph.runtime.disk.system_calls import address_of, view

KIB, MIB = 2**10, 2**20
REQUESTS = (64 * KIB, MIB, 8 * MIB, 64 * MIB)
FILE_BYTES = 256 * MIB
TENSORS, TENSOR_BYTES = 24, 16 * MIB


@dataclass(frozen=True)
class Result:
    """Figures of one row, one for each turn.

    Attributes:
        mb_s: megabytes per second; in the overlap, of reads and writes together.
        seconds: of a turn, and in the overlap of its computing alone.
        cache_mib: gained by the page cache.
    """

    what: str
    mb_s: list[float]
    seconds: list[float]
    cache_mib: list[float]


def pages(nbytes: int) -> mmap.mmap:
    """Memory at a multiple of 4 KiB, written once so that it is there."""
    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(found, dtype=torch.uint8).fill_(1)
    return found


def page_cache_bytes() -> int:
    """Page cache of this process's memory control group, which others may be in."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        first, key = ("memory", "total_cache") if controllers == "memory" else ("", "file")
        stat = Path("/sys/fs/cgroup") / first / path.lstrip("/") / "memory.stat"
        if controllers in ("memory", "") and stat.exists():
            return int(dict(row.split() for row in stat.read_text().splitlines())[key])
    raise RuntimeError("the memory control group of this process is not to be seen in /sys/fs/cgroup")


@contextlib.contextmanager
def open_direct(path: Path, nbytes: int) -> Generator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def transfer(call: Callable[..., int], fd: int, start: int, nbytes: int, request: int, address: int) -> None:
    memory = view(address, request)
    for offset in range(start, start + nbytes, request):
        assert call(fd, [memory], offset) == request


def bandwidth(folder: Path) -> dict[str, tuple[int, Callable[[], object]]]:
    """Bytes and function of each row; the last removes the files of all."""
    stack = contextlib.ExitStack()
    fd = stack.enter_context(open_direct(folder / "bandwidth", FILE_BYTES))
    many = [
        stack.enter_context(open_direct(folder / f"many{number}", 8 * MIB)) for number in range(FILE_BYTES // (8 * MIB))
    ]
    memories = [pages(64 * MIB) for _ in range(2)]
    stack.callback(memories.clear)
    first, second = map(address_of, memories)
    threads = stack.enter_context(ThreadPoolExecutor(2))
    for one in (fd, *many):
        transfer(os.pwritev, one, 0, os.fstat(one).st_size, 8 * MIB, first)  # reserved blocks are slower at first

    def halves(one: Callable[..., int], other: Callable[..., int], request: int, nbytes: int) -> None:
        half = nbytes // 2
        jobs = [
            threads.submit(transfer, one, fd, 0, half, request, first),
            threads.submit(transfer, other, fd, half, half, request, second),
        ]
        for job in jobs:
            job.result()

    rows: dict[str, tuple[int, Callable[[], object]]] = {}
    for name, call in (("write", os.pwritev), ("read", os.preadv)):
        for request in REQUESTS:
            nbytes = min(FILE_BYTES, 1024 * request)
            label = f"{name}, {request // KIB} KiB requests"
            rows[f"{label}, 1 in flight"] = (
                nbytes,
                lambda call=call, nbytes=nbytes, request=request: transfer(call, fd, 0, nbytes, request, first),
            )
            rows[f"{label}, 2 in flight"] = (
                nbytes,
                lambda call=call, nbytes=nbytes, request=request: halves(call, call, request, nbytes),
            )
        rows[f"{name}, 8192 KiB requests, a file each"] = (
            FILE_BYTES,
            lambda call=call: [transfer(call, one, 0, 8 * MIB, 8 * MIB, first) for one in many],
        )
    rows["read beside write, 65536 KiB requests"] = (
        FILE_BYTES,
        lambda: halves(os.preadv, os.pwritev, 64 * MIB, FILE_BYTES),
    )
    target = folder / "bandwidth"
    rows["dd, write"] = (FILE_BYTES, lambda: dd("if=/dev/zero", f"of={target}", "oflag=direct", "conv=notrunc"))
    rows["dd, read"] = (FILE_BYTES, lambda: dd(f"if={target}", "of=/dev/null", "iflag=direct"))
    rows["close"] = (0, stack.close)
    return rows


def dd(*arguments: str) -> None:
    command = ["dd", *arguments, "bs=64M", f"count={FILE_BYTES // (64 * MIB)}"]
    subprocess.run(command, check=True, capture_output=True)


def measure_bandwidth(folder: Path, turns: int) -> list[Result]:
    rows = bandwidth(folder)
    _, close = rows.pop("close")
    results = {what: Result(what, [], [], []) for what in rows}
    for _ in range(turns):
        for what, (nbytes, run) in rows.items():
            before, start = page_cache_bytes(), time.perf_counter()
            run()
            results[what].seconds.append(time.perf_counter() - start)
            results[what].mb_s.append(nbytes / 1e6 / results[what].seconds[-1])
            results[what].cache_mib.append((page_cache_bytes() - before) / MIB)
    close()
    return list(results.values())


class Computing:
    """Products of matrices in the calling thread, which take about as long as a given time, the same for each way."""

    def __init__(self, seconds: float) -> None:
        self.matrix, self.times = torch.randn(512, 512), 1
        self.run()
        start = time.perf_counter()
        for _ in range(10):
            self.run()
        self.times = max(1, round(seconds / ((time.perf_counter() - start) / 10)))

    def run(self) -> None:
        for _ in range(self.times):
            _ = self.matrix @ self.matrix

    def alone(self) -> float:
        """Seconds of the computing of one turn."""
        start = time.perf_counter()
        for _ in range(TENSORS):
            self.run()
        return time.perf_counter() - start


def turn(way: Way, computing: Computing, memories: Sequence[Tensor]) -> None:
    """Read, compute with, change and write back each tensor, one read ahead and one write behind."""
    reading = way.read(0, memories[0])
    writing: Callable[[], object] = int
    for number in range(TENSORS):
        reading()
        if number + 1 < TENSORS:
            reading = way.read(number + 1, memories[(number + 1) % 3])
        computing.run()
        memories[number % 3][::4096] += 1
        writing()
        writing = way.write(number, memories[number % 3])
    writing()


def measure_overlap(folder: Path, turns: int, names: Sequence[str]) -> list[Result]:
    computing = Computing(TENSOR_BYTES / 1e9)
    memory = torch.frombuffer(pages(3 * TENSOR_BYTES), dtype=torch.uint8).split(TENSOR_BYTES)
    results = [Result("computing alone", [], [], [])]
    ways: dict[str, Way] = {}
    for name, kind in WAYS:
        if name in names:
            place = folder / name.replace(" ", "-")
            place.mkdir()
            try:
                ways[name] = kind(place, TENSORS, TENSOR_BYTES)
                turn(ways[name], computing, memory)
                results.append(Result(name, [], [], []))
            except Exception as error:
                ways.pop(name, None)
                reason = str(error).strip().splitlines()[:1]
                print(f"left out: {name}: {type(error).__name__} {reason}", file=sys.stderr)
    for _ in range(turns):
        results[0].seconds.append(computing.alone())
        for result in results[1:]:
            ways[result.what].drop()  # what is read then comes from the disk
            before, start = page_cache_bytes(), time.perf_counter()
            turn(ways[result.what], computing, memory)
            result.cache_mib.append((page_cache_bytes() - before) / MIB)
            os.sync()
            result.seconds.append(time.perf_counter() - start)
            result.mb_s.append(2 * TENSORS * TENSOR_BYTES / 1e6 / result.seconds[-1])
    for way in ways.values():
        way.close()
    return results


def show(results: Sequence[Result]) -> None:
    def spread(values: Sequence[float], digits: int) -> str:
        if not values:
            return ""
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"

    print(f"{'':42} {'MB/s':>22} {'s':>22} {'cache, MiB':>22}")
    for one in results:
        print(f"{one.what:42} {spread(one.mb_s, 0):>22} {spread(one.seconds, 2):>22} {spread(one.cache_mib, 0):>22}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ways", nargs="*", default=[name for name, _ in WAYS], help="only these of the overlap")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.path))
    try:
        raw = measure_bandwidth(folder, options.turns)
        show(raw)
        overlap = measure_overlap(folder, options.turns, options.ways)
        show(overlap)
        fd = os.open(folder, os.O_RDONLY)
        about = {"filesystem": filesystem_of(fd), "kernel": os.uname().release, "processor": processor()}
        os.close(fd)
    finally:
        shutil.rmtree(folder)
    if options.json is not None:
        found = {"bandwidth": [asdict(one) for one in raw], "overlap": [asdict(one) for one in overlap]}
        options.json.write_text(
            json.dumps({**about, "commit": commit(), "torch": torch.__version__, **found}, indent=1)
        )


if __name__ == "__main__":
    main()
