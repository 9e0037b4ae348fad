"""Groups that zgraph makes on NCCL are bound and connected while sharding: told by a recording fake, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from zgraph.runtime import groups
from zgraph.runtime.groups import make_host_groups, reduction_group, separate_reductions
from zgraph.sharding.scope import sharded_parameters
from zgraph.sharding.shard import _separate_reductions  # pyright: ignore[reportPrivateUsage]
from zgraph.torch_compat.groups import fake_world, make_sibling_group, resolve_group

CUDA = torch.device("cuda", 0)


@dataclass
class Recorded:
    """What happened, in order: ("made", name) and ("connected", name, device); and how groups were made."""

    events: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    options: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Options:
    """Stands for ProcessGroupNCCL.Options, which CPU builds lack."""

    is_high_priority_stream = False
    _timeout: Any = None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    helper = c10d._new_process_group_helper  # pyright: ignore[reportPrivateUsage]

    def record(*args: Any, backend_options: Any, device_id: Any, **kwargs: Any) -> Any:
        found.events.append(("made", args[5]))
        found.options.append({"backend": args[3], "options": backend_options, "device_id": device_id, **kwargs})
        return helper(*args[:3], "fake", *args[4:], **kwargs)

    monkeypatch.setattr(c10d, "_new_process_group_helper", record)
    nccl = type("ProcessGroupNCCL", (), {"Options": Options})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(groups, "backend_of", lambda group, device: "nccl")
    monkeypatch.setattr(
        groups, "connect", lambda group, device: found.events.append(("connected", group.group_name, device))
    )
    return found


def claim_nccl(group: Any) -> None:
    """Let a group of a fake world look as init_process_group("nccl", device_id=...) leaves it."""
    _, store = c10d._world.pg_map[group]  # pyright: ignore[reportPrivateUsage]
    c10d._world.pg_map[group] = ("nccl", store)  # pyright: ignore[reportPrivateUsage]
    group.bound_device_id = CUDA


def test_gathers_get_a_bound_and_connected_group_of_high_priority(recorded: Recorded) -> None:
    with fake_world(2):
        group: Any = resolve_group("0")
        recorded.events.clear()
        claim_nccl(group)
        for _ in range(2):  # models share it
            assert separate_reductions(group, CUDA) == "0.gathers"
        assert recorded.events == [
            ("made", "0.gathers"),
            ("connected", "0", CUDA),
            ("connected", "0.gathers", CUDA),
        ]
        made = recorded.options[-1]
        assert made["device_id"] == CUDA and made["options"].is_high_priority_stream
        assert made["options"]._timeout == made["timeout"]
        assert reduction_group("0.gathers") == "0"
        assert dist.get_process_group_ranks(resolve_group("0.gathers")) == [0, 1]


def test_groups_of_nodes_are_connected_too(recorded: Recorded) -> None:
    with fake_world(4):
        group: Any = resolve_group("0")
        claim_nccl(group)
        recorded.events.clear()
        intra_host, inter_host = make_host_groups("0", 2)
        assert recorded.events == [
            ("made", intra_host),
            ("connected", intra_host, CUDA),
            ("made", inter_host),
            ("connected", inter_host, CUDA),
        ]
        assert not any(made["options"] for made in recorded.options[-2:])


def test_an_unbound_world_binds_nothing(recorded: Recorded) -> None:
    with fake_world(2):
        made = make_sibling_group(resolve_group("0"), "0.more", high_priority=True)
    assert made.group_name == "0.more"
    assert recorded.options[-1]["device_id"] is None and recorded.options[-1]["options"] is None  # it is not NCCL's


def test_model_gathers_on_new_group_and_reduces_on_meshs(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zgraph.sharding.shard.backend_of", lambda group, device: "nccl")
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        assert _separate_reductions(mesh) == mesh.get_group().group_name + ".gathers"
        model = zgraph.shard(nn.Linear(4, 4), mesh)
        (name,) = {read.spec.layout.gather_group for read in sharded_parameters(model).values()}
        assert reduction_group(name) == mesh.get_group().group_name
        before = len(recorded.events)
        zgraph.shard(nn.Linear(4, 4), mesh, zero_stage=0)  # nothing is gathered, and nothing is made
        assert len(recorded.events) == before


def test_partial_mesh_makes_no_group_split_by_all_ranks(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zgraph.sharding.shard.backend_of", lambda group, device: "nccl")
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "dp"))["dp"]
        before = len(recorded.events)
        assert _separate_reductions(mesh) == mesh.get_group().group_name
        assert len(recorded.events) == before
