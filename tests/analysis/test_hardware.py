"""Machines: figures that make sense, times on numbers written out by hand, and JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import zgraph
from tests.support.costs import TWO_PER_HOST
from zgraph.analysis.hardware import Hardware, Link


@pytest.mark.parametrize(
    ("flops", "moved", "dtype", "launches", "us"),
    [
        (0, 10, torch.float32, 1, 2.0),  # the launch
        (0, 500, torch.float32, 1, 10.0),  # memory
        (20_000, 500, torch.float32, 1, 20.0),  # arithmetic
        (20_000, 500, torch.bfloat16, 1, 10.0),
        (20_000, 500, torch.int64, 1, 20.0),  # an unlisted dtype
        (0, 10, torch.float32, 4, 8.0),
    ],
)
def test_a_kernel_takes_what_binds_it(flops: int, moved: int, dtype: torch.dtype, launches: int, us: float) -> None:
    assert TWO_PER_HOST.compute_us(flops, moved, dtype, launches) == us


MIB = 2**20
ROUND = dataclasses.replace(  # rates that divide pieces of 16 MiB
    TWO_PER_HOST,
    backend="nccl",
    disk=Link(latency_us=7.0, bytes_per_us=4.0),
    host_to_device=Link(latency_us=3.0, bytes_per_us=16.0),
    device_to_host=Link(latency_us=5.0, bytes_per_us=32.0),
)
FAST_DISK = dataclasses.replace(ROUND, disk=Link(latency_us=7.0, bytes_per_us=64.0))


@pytest.mark.parametrize(
    ("hardware", "moved", "to_device", "us"),
    [
        (ROUND, 512, True, (7 + 128) + (3 + 32)),  # one piece: one way after the other
        (ROUND, 512, False, (7 + 128) + (5 + 16)),
        (ROUND, 16 * MIB, True, (7 + 4 * MIB) + (3 + MIB)),
        # Pieces of 16, 16 and 8 MiB: the disk all the time, and one piece behind it.
        (ROUND, 40 * MIB, True, (7 + 10 * MIB) + (3 + MIB)),
        (ROUND, 40 * MIB, False, (7 + 10 * MIB) + (5 + MIB / 2)),
        # The link all the time, three copies, and one piece of the disk before it.
        (FAST_DISK, 40 * MIB, True, (3 * 3 + 2.5 * MIB) + (7 + MIB / 4)),
        # 32 bytes/us beside 64: three copies of the link again.
        (FAST_DISK, 40 * MIB, False, (3 * 5 + 1.25 * MIB) + (7 + MIB / 4)),
        (dataclasses.replace(ROUND, backend="gloo"), 40 * MIB, True, 7 + 10 * MIB),  # straight into memory
    ],
)
def test_a_copy_from_disk_passes_pinned_memory_piece_by_piece(
    hardware: Hardware, moved: int, to_device: bool, us: float
) -> None:
    assert hardware.disk_copy_us(moved, to_device=to_device) == us


@pytest.mark.parametrize(
    ("kind", "sent", "size", "stride", "us"),
    [
        ("all_gather_into_tensor", 0, 1, 1, 0.0),
        ("all_gather_into_tensor", 600, 2, 1, 1 + 6),
        ("all_reduce", 600, 2, 1, 2 + 6),
        ("all_to_all_single", 600, 2, 1, 1 + 6),
        # Two hosts: three messages, one of them outside; the ring uses both links of a host.
        ("all_gather_into_tensor", 600, 4, 1, 2 * 1 + 1 * 5 + 600 / 20),
        ("reduce_scatter_tensor", 600, 4, 1, 2 * 1 + 1 * 5 + 600 / 20),
        ("all_reduce", 600, 4, 1, 2 * (2 * 1 + 1 * 5) + 600 / 20),
        # One partner inside, two outside, which get two thirds.
        ("all_to_all_single", 600, 4, 1, 1 * 1 + 2 * 5 + 400 / 10),
        # Neighbours two ranks apart: all on other hosts.
        ("all_gather_into_tensor", 600, 4, 2, 3 * 5 + 600 / 10),
        ("all_to_all_single", 600, 4, 2, 3 * 5 + 600 / 10),
    ],
)
def test_collectives_by_hand(kind: str, sent: int, size: int, stride: int, us: float) -> None:
    assert TWO_PER_HOST.collective_us(kind, sent, size, stride) == pytest.approx(us, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "sent", "size", "stride", "us"),
    [
        # Eight hosts of two: three rounds of a tree, and a hop inside; a ring would take 8 * 1 + 7 * 5.
        ("all_gather_into_tensor", 600, 16, 1, 1 + 3 * 5 + 600 / 20),
        ("all_reduce", 600, 16, 1, 2 * (1 + 3 * 5) + 600 / 20),
        ("reduce_scatter_tensor", 600, 8, 2, 3 * 5 + 600 / 10),
        ("all_to_all_single", 600, 8, 2, 7 * 5 + 600 / 10),  # to each of the others
        ("all_gather_into_tensor", 600, 2, 1, 1 + 6),
        ("all_gather_into_tensor", 0, 1, 2, 0.0),
    ],
)
def test_nccl_does_not_pass_messages_through_every_node(
    kind: str, sent: int, size: int, stride: int, us: float
) -> None:
    nccl = dataclasses.replace(TWO_PER_HOST, backend="nccl")
    assert nccl.collective_us(kind, sent, size, stride) == pytest.approx(us, rel=1e-12)


def test_a_thousand_ranks_do_not_ask_for_buckets_of_gigabytes() -> None:
    """A fiftieth of the transfer is latency: 0.1 GB over one port of 400 Gbit/s, and not 5."""
    h100 = Hardware.preset("h100")
    latency_us = h100.collective_us("all_gather_into_tensor", 0, 1024)
    rate = 1e9 / (h100.collective_us("all_gather_into_tensor", 10**9, 1024) - latency_us)
    assert 2e6 < 50 * latency_us * rate < 1e9


def test_an_axis_of_its_own_link() -> None:
    known = dataclasses.replace(TWO_PER_HOST, links={1: Link(latency_us=9.0, bytes_per_us=60.0)})
    assert known.collective_us("all_to_all_single", 600, 4, 1) == 3 * 9 + 10
    # Two ranks on each of two hosts: over gloo a part crosses once, for both of them.
    assert known.collective_us("all_gather_into_tensor", 600, 4, 1) == 3 * 9 + 10 / 2
    assert dataclasses.replace(known, backend="nccl").collective_us("all_gather", 600, 4, 1) == 3 * 9 + 10
    alone = dataclasses.replace(known, ranks_per_host=1)
    assert alone.collective_us("all_gather_into_tensor", 600, 4, 1) == 3 * 9 + 10
    assert known.collective_us("all_gather_into_tensor", 600, 4, 2) == TWO_PER_HOST.collective_us(
        "all_gather", 600, 4, 2
    )


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "cpu"])
def test_presets_survive_json(name: str) -> None:
    found = Hardware.preset(name)
    assert found.name == name
    assert Hardware.from_json(found.to_json()) == found
    assert found.flops_per_us[torch.float32] >= found.flops_per_us[torch.float64]
    assert found.intra_host.bytes_per_us < found.memory_bytes_per_us


def test_presets_have_the_dense_figures_of_the_data_sheets() -> None:
    h100, h200 = Hardware.preset("h100"), zgraph.Hardware.preset("h200")
    assert h100.flops_per_us[torch.bfloat16] == 989.5e6  # 989.5 Tflop/s; 1979 are printed, with sparsity
    assert h100.flops_per_us == h200.flops_per_us
    assert (h100.memory_bytes_per_us, h200.memory_bytes_per_us) == (3.35e6, 4.8e6)
    assert Hardware.preset("a100").flops_per_us[torch.float16] == 312e6


def test_links_survive_json() -> None:
    known = dataclasses.replace(
        TWO_PER_HOST, links={4: Link(latency_us=0.1, bytes_per_us=1 / 3)}, cpu_us_per_wire_byte=1e-4
    )
    assert Hardware.from_json(known.to_json()) == known


def test_files_of_before_the_host_was_measured_are_read() -> None:
    known = Hardware.preset("h100")
    plain = json.loads(known.to_json())
    del plain["host_memory_bytes_per_us"], plain["host_gain_both_ways"]
    found = Hardware.from_json(json.dumps(plain))
    assert found == dataclasses.replace(known, host_memory_bytes_per_us=None)
    assert found.host_update_us(3.35e6) == 1.0 < known.host_update_us(3.35e6)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zgraph.Hardware: unknown preset 'h10'; did you mean 'h100'\?"):
        Hardware.preset("h10")
    with pytest.raises(ValueError, match="unknown preset 'mi300'; the presets are a100, h100, h200, cpu"):
        Hardware.preset("mi300")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes_per_us": 0.0}, "memory_bytes_per_us=0.0; write a positive number"),
        ({"launch_us": -1.0}, "launch_us=-1.0; write zero or a positive number"),
        ({"launch_us": float("nan")}, "launch_us=nan; write zero or a positive number"),
        ({"host_gain_both_ways": 0.9}, "host_gain_both_ways=0.9; write a number from 1 to 2"),
        ({"ranks_per_host": 1.5}, "ranks_per_host=1.5; write a whole number of ranks"),
        ({"flops_per_us": {torch.bfloat16: 1.0}}, "flops_per_us has no torch.float32"),
        ({"flops_per_us": {torch.float32: "fast"}}, r"flops_per_us\[torch.float32\]='fast'; write a positive number"),
        ({"links": {0: TWO_PER_HOST.disk}}, "the distance of neighbours in links=0; write a positive number"),
    ],
)
def test_bad_figures_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"zgraph.Hardware: {message}"):
        dataclasses.replace(TWO_PER_HOST, **change)


def test_bad_links_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zgraph\.Link: bytes_per_us=0; write a positive number"):
        Link(latency_us=0, bytes_per_us=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "zgraph.Hardware: not valid JSON"),
        ("[]", "zgraph.Hardware: found list, but to_json"),
        ('{"name": "x"}', r"zgraph.Hardware: found \['name'\], but to_json"),
        (TWO_PER_HOST.to_json().replace('"float32"', '"float33"'), "float33"),
        (TWO_PER_HOST.to_json().replace('"latency_us"', '"latency"', 1), "pass the text of to_json"),
    ],
)
def test_text_that_is_something_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hardware.from_json(text)


def test_json_is_plain() -> None:
    assert json.loads(TWO_PER_HOST.to_json())["flops_per_us"] == {"float32": 1000.0, "bfloat16": 4000.0}
