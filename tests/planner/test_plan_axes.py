"""Plans of clusters with several axes: what is sent along each, beside what real ranks send, and refusals."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zgraph
from tests.support import experts
from tests.support import tensor_parallel as tp
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, worlds
from zgraph.analysis.hardware import Link
from zgraph.planner.planned_step import Plan

CPU = zgraph.Hardware.preset("cpu")
SPLITS: dict[str, Any] = {"llama": tp.split_llama, "sequence": tp.split_sequence}


def shard_llama(model: nn.Module, mesh: DeviceMesh, *, split: str, zero_stage: int = 3) -> None:
    SPLITS[split](model, mesh["tp"])
    zgraph.shard(model, mesh["dp"], zero_stage=zero_stage)


def tokens() -> tuple[Tensor]:
    return (torch.zeros(2, 8, dtype=torch.long),)


def planned(split: str = "llama", world: dict[str, int] | None = None, **options: Any) -> Plan:
    defaults: dict[str, Any] = {"hardware": "cpu", "shard_fn": functools.partial(shard_llama, split=split)}
    return zgraph.plan(tp.Llama, world=world or {"dp": 2, "tp": 2}, batch=tokens, **(defaults | options))


@functools.cache
def usual() -> Plan:
    """Planned once, as a plan takes seconds."""
    return planned()


# --- beside real ranks ----------------------------------------------------------------------------------------------


def sent_for_real(split: str, zero_stage: int) -> dict[str, int]:
    """What this rank sends in a step, by axis.

    Gathers, and all that zgraph starts, are sends on gloo. DTensor's other collectives over tp are found in the
    profile, with the shapes that they ran on; a ring sends (T-1)/T of all that is reduced.
    """
    mesh = tp.mesh_of()
    model = tp.Llama()
    shard_llama(model, mesh, split=split, zero_stage=zero_stage)
    called = with_fx(model)
    called(*tokens()).sum().backward()
    found, of_tp = Counter[str](), dist.get_process_group_ranks(mesh.get_group("tp"))
    send = dist.ProcessGroup.send

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        found["tp" if dist.get_process_group_ranks(group) == of_tp else "dp"] += sum(
            tensor.nbytes for tensor in tensors
        )
        return send(group, tensors, dst, tag)

    with pytest.MonkeyPatch.context() as patch, profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        patch.setattr(dist.ProcessGroup, "send", counted)
        called(*tokens()).sum().backward()
    size = mesh["tp"].size()
    share = {"all_reduce": 2 * (size - 1) / size, "reduce_scatter_tensor": (size - 1) / size}
    for event in run.events() or ():
        kind = str(event.name).removeprefix("_c10d_functional::")
        if kind in share and kind != event.name:
            payload = 4 * math.prod(event.input_shapes[0])
            found["tp"] += int(payload * share[kind])
    return dict(found)


@worlds(4)
@pytest.mark.parametrize(("split", "zero_stage"), [("llama", 3), ("sequence", 2)])
def test_real_ranks_send_what_was_planned(ranks: Ranks, split: str, zero_stage: int) -> None:
    found = planned(split, shard_fn=functools.partial(shard_llama, split=split, zero_stage=zero_stage))
    wanted = {axis: sent.sent_bytes for axis, sent in found.traffic.items()}
    assert wanted.keys() == {"dp", "tp"}
    assert ranks.run(sent_for_real, split, zero_stage) == [wanted] * 4


class ScoredExperts(experts.Mixture):
    """Returns its loss."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return experts.loss_of(super().forward(x))


def shard_experts(model: experts.Mixture, mesh: DeviceMesh, *, zero_stage: int) -> None:
    model.experts.split(mesh["ep"])
    zgraph.shard(model.experts, mesh["dp"], zero_stage=zero_stage, reduction=mesh.size())
    zgraph.shard(model, mesh, zero_stage=zero_stage)


def experts_sent_for_real(zero_stage: int) -> dict[str, int]:
    """What this rank sends in a step, by axis; dispatch and combine are sends, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = ScoredExperts()
    shard_experts(model, mesh, zero_stage=zero_stage)
    called = with_fx(model)
    x = experts.tokens_of(dist.get_rank(), 0)
    called(x).backward()
    found, of_dp = Counter[str](), dist.get_process_group_ranks(mesh.get_group("dp"))
    send = dist.ProcessGroup.send

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        axis = "dp" if dist.get_process_group_ranks(group) == of_dp else "ep"
        assert len(dist.get_process_group_ranks(group)) == 2
        found[axis] += sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, dst, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "send", counted)
        called(x).backward()
    return dict(found)


@worlds(4)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_real_ranks_with_experts_send_what_was_planned(ranks: Ranks, zero_stage: int) -> None:
    found = zgraph.plan(
        ScoredExperts,
        world={"dp": 2, "ep": 2},
        batch=lambda: (torch.zeros(experts.TOKENS, experts.WIDTH),),
        hardware="cpu",
        shard_fn=functools.partial(shard_experts, zero_stage=zero_stage),
    )
    wanted = {axis: sent.sent_bytes for axis, sent in found.traffic.items()}
    assert wanted.keys() == {"dp", "ep"}  # what is not an expert is sharded over ep, with replicas over dp
    assert ranks.run(experts_sent_for_real, zero_stage) == [wanted] * 4


# --- the plan's own sums --------------------------------------------------------------------------------------------


def test_traffic_by_axis_adds_up_to_that_of_the_graphs() -> None:
    """Also with an axis of replicas, and with one rank on an axis."""
    hybrid = zgraph.plan(
        tp.Mlp, world={"replicate": 2, "dp": 2, "pp": 1}, hardware="cpu", batch=lambda: (torch.zeros(4, 6),)
    )
    for found, axes in ((usual(), {"dp", "tp"}), (hybrid, {"dp", "replicate"})):
        assert found.traffic.keys() == axes
        assert sum(sent.sent_bytes for sent in found.traffic.values()) == found.sent_bytes
        exposed_us = sum(graph.exposed_us for graph in found.graphs)
        assert sum(sent.exposed_us for sent in found.traffic.values()) == pytest.approx(exposed_us)


def test_each_axis_is_costed_on_its_own_link() -> None:
    """Neighbours on tp are next to each other, those on dp two ranks apart."""
    slow = Link(latency_us=5000.0, bytes_per_us=1.0)
    plain = usual().traffic
    slow_tp, slow_dp = (planned(hardware=replace(CPU, links=links)).traffic for links in ({1: slow}, {2: slow}))
    assert slow_tp["tp"].exposed_us > 10 * plain["tp"].exposed_us
    assert slow_dp["dp"].exposed_us > 10 * plain["dp"].exposed_us
    assert slow_tp["dp"].exposed_us <= plain["dp"].exposed_us + 1  # hidden behind the other, if anything
    assert slow_tp["tp"].sent_bytes == slow_dp["tp"].sent_bytes == plain["tp"].sent_bytes


def test_a_rank_holds_its_part_of_both_axes() -> None:
    """Attention and MLP are split by both; norms, embedding and head by dp alone."""
    model = tp.Llama()
    of_blocks = sum(one.numel() for one in model.blocks.parameters() if one.ndim == 2)
    others = sum(one.numel() for one in model.parameters()) - of_blocks
    assert usual().parameter_bytes == 4 * (of_blocks // 4 + others // 2)


def test_one_axis_is_what_a_number_of_ranks_is() -> None:
    def of(**world: Any) -> Plan:
        return zgraph.plan(tp.Mlp, hardware="cpu", batch=lambda: (torch.zeros(4, 6),), **world)

    counted = of(world_size=2)
    for found in (of(world={"dp": 2}), of(world={"dp": 2}, shard_fn=lambda model: zgraph.shard(model))):
        assert (found.sent_bytes, found.peak_bytes, found.step_us) == (
            counted.sent_bytes,
            counted.peak_bytes,
            counted.step_us,
        )
    assert counted.traffic == {} and counted.axes is None


def test_the_text_and_json_of_a_plan_name_the_axes() -> None:
    found = usual()
    assert str(found).startswith("zgraph.plan for 4 ranks (dp 2 x tp 2) of cpu")
    assert "along tp: 7.00 KiB sent, " in str(found)
    as_json = found.as_json()
    assert as_json["axes"] == {"dp": 2, "tp": 2}
    assert as_json["traffic"]["tp"]["sent_bytes"] == found.traffic["tp"].sent_bytes
    (by_axis,) = [table for table in found.tables() if table.title == "traffic of the step by axis"]
    assert [row[0] for row in by_axis.rows] == list(found.traffic)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ({}, r"world=\{\}; write the size of each axis"),
        (8, r"world=8; write the size of each axis"),
        ({"dp": 2, "tpp": 2}, "world has an axis 'tpp', and a plan knows .*; did you mean 'tp'"),
        ({"dp": 0}, "world has 0 ranks on its axis 'dp'; write a number from 1 on"),
        ({"dp": True}, "world has True ranks on its axis 'dp'"),
        ({"dp": 2.0}, "world has 2.0 ranks on its axis 'dp'"),
    ],
)
def test_axes_that_are_none_are_refused(world: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"zgraph.plan: {message}"):
        zgraph.plan(tp.Mlp, world=world, batch=tokens)


def test_a_world_is_said_once() -> None:
    with pytest.raises(ValueError, match=r"world_size=2 and world=.*; write one of them"):
        zgraph.plan(tp.Mlp, world_size=2, world={"dp": 2}, batch=tokens)
    with pytest.raises(ValueError, match="world_size=None; write the number of ranks of the cluster, or its axes"):
        zgraph.plan(tp.Mlp, batch=tokens)


@pytest.mark.parametrize(
    ("shard_fn", "message"),
    [
        (zgraph.shard, r"shard_fn shards embed\.weight over the tensor-parallel axis tp as well"),
        (lambda model: zgraph.shard(model), "shard_fn accepts only the model, and a cluster of dp 2 x tp 2 has"),
        (lambda model, mesh: zgraph.shard(model, mesh["dp"]), "nothing travels over the axis tp of dp 2 x tp 2"),
    ],
)
def test_tensor_parallel_axis_needs_a_model_split_over_it(shard_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"zgraph\.plan: {message}.*parallelize_module\(model, mesh\["):
        planned(shard_fn=shard_fn)
