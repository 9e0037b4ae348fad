"""Finds the network interface through which gloo connects ranks."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from typing import Literal

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True, kw_only=True)
class Interface:
    """The network interface that gloo would use.

    Attributes:
        text: description of the interface.
        status: "ok"; "note": gloo can connect only ranks on this host; "missing": gloo cannot connect ranks.
        advice: what to change; "" if the status is "ok".
    """

    text: str
    status: Literal["ok", "note", "missing"] = "ok"
    advice: str = ""


def gloo_interface() -> Interface:
    """Return the interface that gloo would use.

    It is the interface in GLOO_SOCKET_IFNAME; without that variable, the interface with the host name's address; and if
    the host name has no address, the loopback interface.
    """
    addresses = _addresses()
    others = [name for name, address in addresses.items() if not _is_loopback(address)]
    choose = f"set GLOO_SOCKET_IFNAME to {' or '.join(others) or 'an interface that other hosts can reach'}"
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given:
        return _given(given, addresses, choose)
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        text = f"loopback, because the host name {host} has no address"
        return Interface(text=text, status="note", advice=f"{choose}, if ranks run on several hosts")
    name = next((name for name, own in addresses.items() if own == address), "")
    text = f"{name + ', ' if name else ''}{address}, by the host name {host}"
    if _is_loopback(address):
        return Interface(text=text, status="note", advice=f"{choose}, if ranks run on several hosts")
    return Interface(text=text)


def _given(names: str, addresses: dict[str, str], choose: str) -> Interface:
    present = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in names.split(",") if name not in present]
    if unknown:
        text = f"GLOO_SOCKET_IFNAME={names}, but there is only {', '.join(present)}"
        return Interface(text=text, status="missing", advice=choose)
    found = ", ".join(f"{name} {addresses.get(name, 'without an IPv4 address')}" for name in names.split(","))
    return Interface(text=f"{found}, by GLOO_SOCKET_IFNAME")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface by name; empty if the system cannot list them."""
    try:
        import fcntl
    except ImportError:
        return {}
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
