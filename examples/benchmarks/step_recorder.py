"""Records one step of a pipeline on one rank: forwards, backwards, update, and what its sockets send meanwhile."""

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

SAMPLE_S = 0.004
# struct tcp_info of the kernel (uapi/linux/tcp.h): tcpi_bytes_acked is the 64 bits behind the two pacing rates.
_BYTES_ACKED = 120

T = TypeVar("T")


@dataclass
class Recording:
    """One rank's step; times are of the monotonic clock, which all ranks of a machine share.

    Attributes:
        spans: name, begin and end in seconds, and CPU seconds of all threads in between.
        sent: time in seconds, and bytes that had reached the other host by then.
    """

    spans: list[tuple[str, float, float, float]] = field(default_factory=list[tuple[str, float, float, float]])
    sent: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.spans.append((name, begin, time.perf_counter(), time.process_time() - cpu))

    def timed(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """The function, recorded under its name and its first argument, a micro-batch."""

        def run(*arguments: Any, **options: Any) -> T:
            with self.span(f"{name}{arguments[0]}" if arguments else name):
                return function(*arguments, **options)

        return run

    @contextmanager
    def watching_sockets(self, own_address: str) -> Generator[None]:
        """Sample what the sockets of this process have sent to other hosts."""
        sockets = _sockets_to_others(own_address)
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(SAMPLE_S):
                self.sent.append((time.perf_counter(), sum(map(_bytes_acked, sockets))))

        thread = threading.Thread(target=sample)
        self.sent.append((time.perf_counter(), sum(map(_bytes_acked, sockets))))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            for one in sockets:
                one.close()


def _sockets_to_others(own_address: str) -> list[socket.socket]:
    found: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        if not stat.S_ISSOCK(_mode(int(name))):
            continue
        one = socket.socket(fileno=os.dup(int(name)))
        if one.type == socket.SOCK_STREAM and _is_elsewhere(one, own_address):
            found.append(one)
        else:
            one.close()
    return found


def _mode(descriptor: int) -> int:
    with suppress(OSError):  # that of the folder itself, which is closed again
        return os.fstat(descriptor).st_mode
    return 0


def _is_elsewhere(one: socket.socket, own_address: str) -> bool:
    with suppress(OSError):
        peer = one.getpeername()
        address = peer[0].removeprefix("::ffff:") if isinstance(peer, tuple) else ""
        return bool(address) and address not in (own_address, "127.0.0.1", "::1")
    return False


def _bytes_acked(one: socket.socket) -> int:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("Q", info, _BYTES_ACKED)[0]
