"""Calibration on two real ranks: the same figures everywhere, kept on disk, and measured again where they are lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks
from zgraph.analysis import measured_links
from zgraph.analysis.hardware import Hardware, Link
from zgraph.analysis.measured_links import compute_share, fit_link, in_a_stream
from zgraph.runtime.exchanges.collectives import start_all_gather, start_all_to_all
from zgraph.torch_compat.collectives import wait


def _calibrate(directory: str) -> str:
    return zgraph.calibrate(cache=directory).to_json()


def _calibrate_apart(directory: str) -> str:
    """Each rank has a cache of its own, as on two hosts; a mesh this time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return zgraph.calibrate(mesh, cache=Path(directory) / str(dist.get_rank())).to_json()


def test_ranks_measure_the_same_once(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_calibrate, str(tmp_path))
    assert first == second
    found = Hardware.from_json(first)
    assert found.ranks_per_host == 2
    assert found.links == {1: found.intra_host}
    assert set(found.flops_per_us) == {torch.float32, torch.bfloat16}
    assert found.cpu_us_per_wire_byte > 0 and found.cpu_us_per_collective > 0
    assert (found.backend, found.collectives_at_once) == ("gloo", 1)
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == first

    # What is kept is used, and nothing is measured; what cannot be read is replaced.
    changed = first.replace(found.name, "kept")
    kept.write_text(changed)
    assert ranks.run(_calibrate, str(tmp_path)) == [changed, changed]
    kept.write_text(changed[: len(changed) // 2])
    first, second = ranks.run(_calibrate, str(tmp_path))
    assert first == second != changed
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == first


def _shares() -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    ranks = measured_links.MeasuringRanks.of(group)
    return [compute_share(ranks, group, Link(latency_us=us, bytes_per_us=1000.0)) for us in (50.0, 5e5)]


def test_collectives_take_a_share_of_compute(ranks: Ranks) -> None:
    """Measured on all ranks alike, whatever the link is said to be; on gloo, whose threads share the cores."""
    first, second = ranks.run(_shares)
    assert first == second and all(0 <= share < 1 for share in first)


def test_ranks_that_have_kept_different_figures_measure_again(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_calibrate_apart, str(tmp_path))
    assert first == second
    (kept,) = (tmp_path / "1").iterdir()
    kept.write_text(first.replace("calibrated", "other"))
    again, other = ranks.run(_calibrate_apart, str(tmp_path))
    assert again == other
    assert "other" not in again
    assert kept.read_text() == again


@dataclass
class Wire:
    """Stands for a link: real collectives, and a clock that goes on by what each takes, however many are in flight.

    Attributes:
        now_us: of the clock.
        in_flight: results that nobody has waited for, with what one rank sends for them.
        most: the most that were in flight at once, by what one rank sends for each.
    """

    latency_us: float
    bytes_per_us: float
    now_us: float = 0.0
    in_flight: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])
    most: dict[int, int] = field(default_factory=dict[int, int])

    def started(self, result: Tensor, sent_bytes: int) -> Tensor:
        self.now_us += self.latency_us + sent_bytes / self.bytes_per_us
        self.in_flight.append((result, sent_bytes))
        alike = sum(1 for _, size in self.in_flight if size == sent_bytes)
        self.most[sent_bytes] = max(self.most.get(sent_bytes, 0), alike)
        return result

    def gather(self, shard: Tensor, world: int, group_name: str) -> Tensor:
        return self.started(start_all_gather(shard, world, group_name), shard.nbytes * (world - 1))

    def exchange(self, pieces: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
        return self.started(
            start_all_to_all(pieces, received, sent, group_name), pieces.nbytes - pieces.nbytes // len(sent)
        )

    def wait(self, result: Tensor) -> Tensor:
        self.in_flight = [each for each in self.in_flight if each[0] is not result]
        return wait(result)

    def timed(self, ranks: object, run: Callable[[], object]) -> tuple[float, float]:
        before = self.now_us
        run()
        return self.now_us - before, 0.5 * (self.now_us - before)


def _link_on_a_wire() -> tuple[Link, float, float, dict[int, int]]:
    """What is measured of a link that takes 100 us and 50 bytes in each microsecond, and how many were in flight."""
    group = dist.group.WORLD
    assert group is not None
    wire = Wire(latency_us=100.0, bytes_per_us=50.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, stand_in in (
            ("start_all_gather", wire.gather),
            ("start_all_to_all", wire.exchange),
            ("wait", wire.wait),
            ("timed", wire.timed),
        ):
            monkeypatch.setattr(measured_links, name, stand_in)
        ranks = measured_links.MeasuringRanks.of(group)  # pyright: ignore[reportPrivateUsage]
        axis = measured_links.link_of(ranks, group, 1)  # pyright: ignore[reportPrivateUsage]
    assert axis is not None and not wire.in_flight
    return axis.link, axis.cpu_us_per_collective, axis.cpu_us_per_byte, wire.most


def test_small_collectives_are_timed_with_others_in_flight(ranks: Ranks) -> None:
    """One alone is, on gloo, the time that its thread polls for a lock; the time is that of each, not of all."""
    first, second = ranks.run(_link_on_a_wire)
    assert first == second
    link, cpu_us_per_collective, cpu_us_per_byte, most = first
    assert (link.latency_us, link.bytes_per_us) == pytest.approx((100.0, 50.0), rel=0.01)
    assert (cpu_us_per_collective, cpu_us_per_byte) == pytest.approx((50.0, 0.01), rel=0.01)
    # 64 and 1024 numbers and one more; then large ones alone, and those of a stream.
    assert most == {260: 8, 4100: 8, 262_148: 1, 1_048_580: 1, 4_194_308: 1, 524_292: 3}


def test_a_process_alone_has_no_links(tmp_path: Path) -> None:
    found = zgraph.calibrate(cache=tmp_path / "not" / "there")
    assert (found.links, found.ranks_per_host) == ({}, 1)
    assert zgraph.calibrate(cache=tmp_path / "not" / "there") == found


def test_products_are_timed_on_values_like_a_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones are multiplied faster. Nobody's generator moves."""
    spreads: list[tuple[float, float]] = []
    multiply = torch.mm

    def seen(a: Tensor, b: Tensor, **options: Tensor) -> Tensor:
        spreads.append((a.float().std().item(), b.float().std().item()))
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "mm", seen)
    before = torch.get_rng_state()
    zgraph.calibrate(cache=tmp_path, refresh=True)
    assert spreads and all(0.9 < one < 1.1 for pair in spreads for one in pair)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_line_is_found_beneath_disturbed_points() -> None:
    sizes = (256, 256, 4096, 4096, 2**18, 2**18, 2**20, 2**20, 2**22, 2**22)
    disturbed = (0, 4, 9)
    points = [(size, (3 if at in disturbed else 1) * (50.0 + size / 125)) for at, size in enumerate(sizes)]
    link = fit_link(points, messages=1)
    assert link.latency_us == pytest.approx(50, rel=0.02)
    assert link.bytes_per_us == pytest.approx(125, rel=0.02)
    assert fit_link(points, messages=3).latency_us == pytest.approx(link.latency_us / 3)


def test_unmeasurable_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("zgraph.calibrate: 'dp' is a str; pass a DeviceMesh")):
        zgraph.calibrate("dp")  # pyright: ignore[reportArgumentType]
    with fake_world(2), pytest.raises(ValueError, match="collectives of the backend fake move nothing"):
        zgraph.calibrate()


@pytest.mark.parametrize(
    ("stream_us", "without_gap", "rate", "gain"),
    [
        (1 / 60, True, 60.0, 1.0),  # a burst made one message look fast
        (1 / 60, False, 60.0, 1.0),
        (1 / 150, True, 150.0, 1.0),  # one message leaves gaps that the next one fills
        (1 / 150, False, 100.0, 1.5),
        (1e-9, True, 200.0, 1.0),  # a disturbed measurement
    ],
)
def test_a_stream_decides_the_rate_of_a_link(stream_us: float, without_gap: bool, rate: float, gain: float) -> None:
    alone = Link(latency_us=5.0, bytes_per_us=100.0)
    found = in_a_stream(alone, stream_us, without_gap=without_gap)
    assert (found.latency_us, found.bytes_per_us, found.gain_at_once) == pytest.approx((5.0, rate, gain))
