"""Calibration on two real ranks: the same figures everywhere, kept on disk, and measured again where they are lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.graphs import fake_world
from tests.ranks import Ranks
from zgraph import calibration
from zgraph.calibration import compute_share, fit_link, in_a_stream
from zgraph.hardware import Hardware, Link


def _calibrate(directory: str) -> str:
    return zgraph.calibrate(cache=directory).to_json()


def _calibrate_apart(directory: str) -> str:
    """Each rank has a cache of its own, as on two hosts; a mesh this time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return zgraph.calibrate(mesh, cache=Path(directory) / str(dist.get_rank())).to_json()


def test_ranks_measure_the_same_once(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(_calibrate, str(tmp_path))
    assert first == second
    found = Hardware.from_json(first)
    assert found.ranks_per_node == 2
    assert found.links == {1: found.intra_node}
    assert set(found.flops_per_us) == {torch.float32, torch.bfloat16}
    assert found.cpu_us_per_wire_byte > 0 and found.cpu_us_per_collective > 0
    assert (found.backend, found.collectives_at_once) == ("gloo", 1)
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == first

    # What is kept is used, and nothing is measured; what cannot be read is replaced.
    changed = first.replace(found.name, "kept")
    kept.write_text(changed)
    assert two_ranks.run(_calibrate, str(tmp_path)) == [changed, changed]
    kept.write_text(changed[: len(changed) // 2])
    first, second = two_ranks.run(_calibrate, str(tmp_path))
    assert first == second != changed
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == first


def _shares() -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    ranks = calibration._Ranks.of(group)  # pyright: ignore[reportPrivateUsage]
    return [compute_share(ranks, group, Link(latency_us=us, bytes_per_us=1000.0)) for us in (50.0, 5e5)]


def test_what_collectives_take_from_compute_is_a_part_of_it(two_ranks: Ranks) -> None:
    """Measured on all ranks alike, whatever the link is said to be; on gloo, whose threads share the cores."""
    first, second = two_ranks.run(_shares)
    assert first == second and all(0 <= share < 1 for share in first)


def test_ranks_that_have_kept_different_figures_measure_again(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(_calibrate_apart, str(tmp_path))
    assert first == second
    (kept,) = (tmp_path / "1").iterdir()
    kept.write_text(first.replace("calibrated", "other"))
    again, other = two_ranks.run(_calibrate_apart, str(tmp_path))
    assert again == other
    assert "other" not in again
    assert kept.read_text() == again


def test_a_process_alone_has_no_links(tmp_path: Path) -> None:
    found = zgraph.calibrate(cache=tmp_path / "not" / "there")
    assert (found.links, found.ranks_per_node) == ({}, 1)
    assert zgraph.calibrate(cache=tmp_path / "not" / "there") == found


def test_a_line_is_found_beneath_disturbed_points() -> None:
    sizes = (256, 256, 4096, 4096, 2**18, 2**18, 2**20, 2**20, 2**22, 2**22)
    disturbed = (0, 4, 9)
    points = [(size, (3 if at in disturbed else 1) * (50.0 + size / 125)) for at, size in enumerate(sizes)]
    link = fit_link(points, messages=1)
    assert link.latency_us == pytest.approx(50, rel=0.02)
    assert link.bytes_per_us == pytest.approx(125, rel=0.02)
    assert fit_link(points, messages=3).latency_us == pytest.approx(link.latency_us / 3)


def test_what_cannot_be_measured_is_refused() -> None:
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
