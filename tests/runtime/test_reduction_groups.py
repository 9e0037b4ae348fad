"""Gathers and reductions run on two process groups of the same ranks, made once and gone with all others."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.costs import costs_of
from tests.support.graphs import fake_world, mlp, traced
from tests.support.ranks import fresh_ranks
from zgraph import Hardware
from zgraph.compiler.agreement import Signature
from zgraph.compiler.target import sharing_of
from zgraph.graph import dataflow, nodes
from zgraph.graph.traffic import transfers
from zgraph.passes import LowerGathers, LowerReductions
from zgraph.runtime.groups import reduction_group
from zgraph.scheduling.simulate import simulate
from zgraph.tiers.lanes import Lane
from zgraph.torch_compat.groups import find_group, resolve_group

BESIDE = "0.reductions"


def shard_many_models() -> list[list[int]]:
    """Members of the groups for reductions: of the world, and of one axis of a mesh."""
    rank = dist.get_rank()
    # From torch 2.14 on a mesh that is made on ranks in unequally many groups waits for ever: it comes first.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    if rank < 2:  # ranks need not be in equally many groups
        dist.new_group([0, 1], use_local_synchronization=True)
    zgraph.shard(nn.Linear(4, 4), zero_stage=0)
    assert reduction_group("0") == "0", "nothing is gathered"
    found: list[list[int]] = []
    for group in (dist.group.WORLD, mesh.get_group("local")):
        assert group is not None
        made: dict[str, None] = {}
        for _ in range(3):
            zgraph.shard(nn.Linear(4, 4), None if group is dist.group.WORLD else mesh)
            made[reduction_group(group.group_name)] = None
        (name,) = made
        beside = resolve_group(name)
        assert name != group.group_name and dist.get_rank(beside) == dist.get_rank(group)
        given, made_too = (each._get_backend(torch.device("cpu")).options._timeout for each in (group, beside))
        assert given == made_too  # a mesh's own groups have torch's default
        assert given == timedelta(seconds=55) or group is not dist.group.WORLD
        found.append(dist.get_process_group_ranks(beside))
    assert reduction_group(mesh.get_group("node").group_name) == mesh.get_group("node").group_name
    _gather_past_a_reduction(BESIDE)
    return found


def _gather_past_a_reduction(group_name: str) -> None:
    """Rank 0 has started a reduction that no other rank has, and all finish a gather meanwhile."""
    rank, beside = dist.get_rank(), resolve_group(group_name)
    received, sent = torch.zeros(4), torch.arange(4.0)
    early = dist.all_to_all_single(received, sent, group=beside, async_op=True) if rank == 0 else None
    gathered = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    assert torch.cat(gathered).tolist() == [0, 1, 2, 3]
    work = early or dist.all_to_all_single(received, sent, group=beside, async_op=True)
    assert work is not None
    work.wait()
    assert received.tolist() == [float(rank)] * 4


def test_group_gets_one_reduction_group_for_all_models() -> None:
    with fresh_ranks(4, timeout_s=55) as ranks:
        found = ranks.run(shard_many_models)
    everybody = [0, 1, 2, 3]
    assert found == [[everybody, [0, 1]], [everybody, [0, 1]], [everybody, [2, 3]], [everybody, [2, 3]]]


def test_reduction_group_dies_with_its_process_group() -> None:
    with fake_world(2):
        zgraph.shard(nn.Linear(4, 4))
        assert reduction_group("0") == BESIDE
    with fake_world(1):
        assert find_group(BESIDE) is None
        zgraph.shard(nn.Linear(4, 4))
        assert reduction_group("0") == "0"


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_reductions_are_lowered_onto_their_own_group(zero_stage: int) -> None:
    """Those of replicated parameters with the gathers of their means."""
    with fake_world(2):
        found = traced(mlp, [LowerGathers(), LowerReductions()], zero_stage=zero_stage)
        graph = found.graphs["backward"].graph
        groups = {True: dict[str, None](), False: dict[str, None]()}
        for start in nodes.call_functions(graph, nodes.is_start):
            groups[dataflow.copy_in(start) is not None][nodes.group_of(start)] = None
    assert [*groups[False]] == [BESIDE]
    assert [*groups[True]] == (["0"] if zero_stage else [])


def test_markers_and_collectives_cost_on_two_lanes_of_one_link() -> None:
    hardware = Hardware.preset("cpu")
    with fake_world(2):
        sharing = sharing_of(traced(mlp).graphs["backward"].graph, hardware)
        lanes = [Lane.of_group("0"), Lane.of_group(BESIDE)]
        assert [*sharing.links] == lanes and len(dict.fromkeys(sharing.links.values())) == 1
        for passes in ([], [LowerGathers(), LowerReductions()]):
            graph = traced(mlp, passes).graphs["backward"].graph
            timeline = simulate(list(graph.nodes), costs_of(graph, hardware), sharing)
            assert [lane for lane in lanes if lane in timeline.busy_us] == lanes


def test_agreement_distinguishes_both_groups_but_requires_one_order() -> None:
    """Ranks that wait for two collectives crosswise would wait forever, whatever the order on each group."""
    with fake_world(2):
        found = list(transfers(traced(mlp, [LowerGathers(), LowerReductions()]).graphs["backward"].graph))
        first = next(place for place, one in enumerate(found) if one.group_name == "0")
        second = next(place for place, one in enumerate(found) if one.group_name == BESIDE)
        assert Signature.of("backward", found).entries[second].endswith("over ranks r + [0, 1], reductions")
        swapped = list(found)
        swapped[first], swapped[second] = found[second], found[first]
        for group_name in ("0", BESIDE):
            assert [one for one in found if one.group_name == group_name] == [
                one for one in swapped if one.group_name == group_name
            ]
        assert Signature.of("backward", swapped).digest != Signature.of("backward", found).digest
