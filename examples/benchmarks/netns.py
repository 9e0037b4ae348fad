"""A small shaped network: one namespace per host, joined by a bridge, with every link limited in both directions.

A loopback collective runs at memory speed and says nothing about a cluster. Here each host has its own network
namespace and one Ethernet link with a known rate, so that what a training step sends has to fit through it::

    with ShapedNetwork(hosts=2, rate="1gbit") as network:
        rank = network.popen(host=1, command=["python", "rank.py"], environment={})

The bridge stands in a namespace of its own, so the machine's own network never sees any of this. On exit, whatever the
reason short of SIGKILL, the processes started here are ended, with all that they started, and the namespaces removed;
links, bridge and shapers go with them. After a SIGKILL, `ip netns list` still has zgraph<pid>-* for `ip netns delete`.
Needs Linux, root, iproute2.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

# One name serves in every namespace: each host sees only its own link.
INTERFACE = "link0"

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetworkError(RuntimeError):
    """The network cannot be built here; the message says what is missing."""


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate such as "200mbit"; None for "none", the unshaped link.

    Raises:
        ValueError: not a rate, or outside 1mbit to 100gbit.
    """
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None:
        raise ValueError(f"rate {text!r}: write a number and a unit, such as 200mbit or 1gbit, or none")
    bits_per_second = round(float(match[1]) * _UNITS[match[2]])
    if not 10**6 <= bits_per_second <= 10**11:
        raise ValueError(f"rate {text!r} is outside 1mbit to 100gbit")
    return bits_per_second


def require_network_tools() -> None:
    """Refuse early, and by name, what would otherwise fail halfway through building the network.

    Raises:
        NetworkError: not Linux, not root, or ip or tc is missing.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NetworkError("network namespaces and core pinning need Linux")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root; run this with sudo -E or in a privileged container")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found; install iproute2")


def transmitted_bytes() -> int:
    """Bytes this namespace's link has sent since it came up, as the kernel's interface counter has them.

    The counter sees whole packets: payload, TCP acknowledgements and one Ethernet, IP and TCP header per packet handed
    to the link. Segmentation happens below it, so a 64 KiB packet counts one header where a wire would carry 45.
    """
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


class ShapedNetwork:
    """Hosts 10.78.0.1, 10.78.0.2, ... behind one switch; see the module's docstring."""

    def __init__(self, hosts: int, rate: str) -> None:
        self._bits_per_second = parse_rate(rate)
        # The pid keeps two runs apart and makes everything that is removed at the end recognisably ours.
        prefix = f"zgraph{os.getpid()}"
        self._switch = f"{prefix}-switch"
        self._hosts = [f"{prefix}-host{index}" for index in range(hosts)]
        self._created: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        return f"10.78.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """Name of a host's network namespace, for `ip -n`."""
        return self._hosts[host]

    def popen(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command inside a host; the network ends it on exit if it is still running.

        Its standard input is a pipe held by this process: a command that reads it learns from the end of file that its
        parent has died, even by SIGKILL. It has its own session, so that Ctrl-C reaches only the parent, which then
        ends it in order.
        """
        # A host name of its own as well, by which zgraph.calibrate knows who shares a host.
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"']
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._hosts[host], *named, self._hosts[host], *command],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def __enter__(self) -> Self:
        require_network_tools()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started and remove what was created, deaf to a second Ctrl-C until that is done."""
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
                process.kill()
                process.communicate()
            self._processes.clear()
            while self._created:
                namespace = self._created.pop()
                _kill_inside(namespace)
                subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _build(self) -> None:
        self._create_namespace(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for index, host in enumerate(self._hosts):
            port = f"port{index}"
            self._create_namespace(host)
            # Both ends are born inside their namespaces; nothing appears on the machine's own list of links.
            _run("ip", "link", "add", INTERFACE, "netns", host, "type", "veth", "peer", port, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(index)}/24", "dev", INTERFACE)
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", INTERFACE, "up")
            # The same on every machine, allowed in every namespace, and steady: BBR, often the machine's default, all
            # but stops for a moment every ten seconds.
            congestion_control = "/proc/sys/net/ipv4/tcp_congestion_control"
            _run("ip", "netns", "exec", host, "sh", "-c", f"echo reno > {congestion_control}")
            # A shaper acts on what leaves: the host's end limits sending, the switch's end limits receiving.
            self._shape(host, INTERFACE)
            self._shape(self._switch, port)

    def _create_namespace(self, name: str) -> None:
        self._created.append(name)  # first, so that a Ctrl-C in between still removes it
        _run("ip", "netns", "add", name)

    def _shape(self, namespace: str, interface: str) -> None:
        if self._bits_per_second is None:
            return
        # The bucket must hold at least one 64 KiB packet, and two milliseconds so that a timer that wakes late loses
        # nothing. A message smaller than the bucket passes unshaped after a pause, as it would in a switch's buffer.
        burst_bytes = max(128 * 1024, self._bits_per_second // 8 // 500)
        _run(
            *("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf"),
            *("rate", f"{self._bits_per_second}bit", "burst", str(burst_bytes), "latency", "50ms"),
        )


def _kill_inside(namespace: str) -> None:
    """End what is left in a namespace, such as the ranks of a launcher that was killed before it could end them."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    for process in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise NetworkError(f"{' '.join(command)} failed: {result.stderr.strip() or result.stdout.strip()}")
