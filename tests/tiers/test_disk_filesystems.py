"""Tensors on other filesystems than a plain disk's: an overlay, as containers have, and two that are in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, under
from tests.support.whole_steps import Case, compare
from zgraph.tiers.disk.folder import DiskFolder

pytestmark = pytest.mark.filterwarnings("ignore:.*is in memory:zgraph.ZgraphWarning")


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A filesystem of the kind that the test names."""
    kind: str = request.param
    path, *layers = (tmp_path / name for name in ("mounted", "lowerdir", "upperdir", "workdir"))
    for folder in (path, *layers):
        folder.mkdir()
    options = {"overlay": ",".join(f"{layer.name}={layer}" for layer in layers), "tmpfs": "size=64m"}
    command = ["mount", "-t", kind, "-o", options.get(kind, "rw"), kind, str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("another filesystem needs the right to mount one")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("mounted", ["overlay", "tmpfs", "ramfs"], indirect=True)
def test_bits_survive_on_other_filesystems(mounted: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    disk = DiskFolder(str(mounted / "new"), 0)
    if request.node.callspec.params["mounted"] == "ramfs":
        assert disk._access.direct is None  # which it does not have
    for numel in (3, 1024, 5000):
        values = torch.randn(numel)
        tensor = disk.empty((numel,), torch.float32, "weight")
        disk.start_write(values, tensor).wait()
        assert torch.equal(disk.start_read(tensor).wait(), values)
        tensor.mul_(2)
        assert torch.equal(disk.start_read(tensor).wait(), 2 * values)
    assert [*(mounted / "new").iterdir()] == []


@worlds(2)
@pytest.mark.parametrize("mounted", ["overlay", "ramfs"], indirect=True)  # the table above has what is special
def test_a_step_on_other_filesystems_equals_the_plain_loop(ranks: Ranks, mounted: Path) -> None:
    ranks.run(compare, Case(at_rest=under(mounted, DISK), clip="torch"))
