"""What `zgraph doctor` looks for on a machine, on machines that are not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zgraph.cli import machine_checks, network_interface


def test_missing_folder_counts_as_writable_if_it_can_be_created(tmp_path: Path) -> None:
    assert machine_checks.is_writable(tmp_path / "a" / "b")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    assert not machine_checks.is_writable(tmp_path / "file" / "inside")


def test_slow_bf16_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(features: dict[str, bool]) -> list[str]:
        monkeypatch.setattr("zgraph.torch_compat.inductor.cpu_features", lambda: features)
        return [f"{check.status} {check.found}" for check in machine_checks._cpu_features()]

    assert note({"avx512_f": True, "avx2": True, "amx_bf16": True}) == ["ok avx512_f, avx2", "ok amx_bf16"]
    assert note({"avx512_f": False, "avx2": True}) == ["ok avx2", "note none"]
    assert note({}) == []  # a torch that does not say


def test_glooss_interface_is_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interface, "_addresses", lambda: {"lo": "127.0.0.1", "eth7": "10.1.2.3"})
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    found = network_interface.gloo_interface()
    assert (found.status, found.text) == ("ok", "eth7 10.1.2.3, by GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    found = network_interface.gloo_interface()
    assert (found.status, found.advice) == ("missing", "set GLOO_SOCKET_IFNAME to eth7")
    assert "only lo, eth7" in found.text


@pytest.mark.parametrize(
    ("address", "status", "text"),
    [
        ("10.1.2.3", "ok", "eth7, 10.1.2.3, by the host name here"),
        ("127.0.1.1", "note", "127.0.1.1, by the host name here"),
        ("fe80::1%eth7", "ok", "fe80::1%eth7, by the host name here"),
        (None, "note", "loopback, because the host name here has no address"),
    ],
)
def test_gloos_interface_is_that_of_the_host_name(
    monkeypatch: pytest.MonkeyPatch, address: str | None, status: str, text: str
) -> None:
    def look_up(*_: Any, **__: Any) -> Any:
        if address is None:
            raise OSError("unknown")
        return [(None, None, 0, "", (address, 0))]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network_interface, "_addresses", lambda: {"lo": "127.0.0.1", "eth7": "10.1.2.3"})
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    found = network_interface.gloo_interface()
    assert (found.status, found.text) == (status, text)
    assert ("GLOO_SOCKET_IFNAME to eth7" in found.advice) == (status == "note")


def test_addresses_are_those_of_this_machine() -> None:
    found = network_interface._addresses()
    assert found.get("lo", "127.0.0.1") == "127.0.0.1"
