"""Nobody has to name the machine: ranks agree on the preset that their GPUs are, and on NCCL buckets suit its links."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.graphs import apply, deep, fake_world, traced
from tests.support.ranks import Ranks
from zgraph import Hardware
from zgraph.graph import nodes
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions
from zgraph.sharding.meshes.same_machine import agreed_machine, gathered, machine_of, preset_of

LOWERED = (LowerGathers(), LowerReductions())


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_name_stands_for_a_preset(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


def test_ranks_must_be_alike_and_lie_together() -> None:
    four = machine_of([(1, 7)] * 4 + [(1, 9)] * 4)
    assert four is not None and (four.name, four.ranks_per_host) == ("h100", 4)
    assert machine_of([(2, 5)]) is not None
    assert machine_of([(1, 7), (2, 7)]) is None
    assert machine_of([(1, 7), (-1, 7)]) is None
    assert machine_of([(1, 7), (1, 7), (1, 9)]) is None  # a host less full than another
    assert machine_of([(1, 7), (1, 9), (1, 7), (1, 9)]) is None  # as if four hosts


def rows_of_all() -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    assert agreed_machine(mesh) is None  # and nothing was asked
    return gathered(torch.tensor([dist.get_rank(), 5]), mesh.get_all_groups()).tolist()


def test_every_rank_hears_of_all(ranks: Ranks) -> None:
    assert ranks.run(rows_of_all) == [[[0, 5], [1, 5]]] * 2


def members(backend: str, machine: Hardware | None, size: int = 256) -> list[int]:
    """How many of six weights share each gather, weights of so many bytes."""
    with fake_world(2):
        found = traced(deep, LOWERED)
        found.know(planned_backend=backend, machine=machine)
        gm = found.graphs["forward"]
        apply(BucketCollectives(bucket_bytes="auto"), found, "forward")
        return [len(nodes.sent_by(start)) for start in nodes.call_functions(gm.graph, nodes.is_gather)]


def test_buckets_suit_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six weights of 256 bytes: to NVLink they are all latency, and only the first is not to wait for the others."""
    h100 = Hardware.preset("h100")
    assert members("nccl", h100) == [1, 5]
    module = "zgraph.passes.bucket_collectives"
    monkeypatch.setattr(f"{module}.NCCL_BYTES", 3 * 256)
    assert members("nccl", None) == [3, 3]
    monkeypatch.setattr(f"{module}.ETHERNET_BYTES", 256)
    assert members("gloo", h100) == [1] * 6


def test_a_machine_that_is_only_known_changes_no_other_pass() -> None:
    with fake_world(2):
        found = traced(deep, LOWERED)
        found.know(planned_backend="nccl", machine=Hardware.preset("h100"))
        apply(BucketCollectives(bucket_bytes="auto"), found, "forward")
    assert found.ctx.hardware is None and found.ctx.cost_of is None
    assert [text for name, _, text in found.ctx.notes if name == "bucket_collectives"][-1] == "gathers: 1 coalesced"


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bucket_bytes='all' holds nothing"):
        BucketCollectives(bucket_bytes="all")  # pyright: ignore[reportArgumentType]
