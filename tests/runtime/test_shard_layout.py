"""ShardLayout against torch's own `chunk`, and against the DTensors that `shard` makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.graphs import fake_world, traced
from zgraph.graph import nodes
from zgraph.graph.operator_arguments import ReduceArgs, layout_of
from zgraph.runtime.shard_layout import ShardLayout
from zgraph.runtime.window_state import ALONE, CLOSING, OPEN
from zgraph.sharding.scope import sharded_parameters


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 12])
def test_rows_are_those_of_torch_chunk(world: int, rows: int) -> None:
    """For each rank, those with fewer rows or none included; chunks are padded to the longest."""
    expected = [len(part) for part in torch.arange(rows).chunk(world)]
    expected += [0] * (world - len(expected))
    starts = [sum(expected[:rank]) for rank in range(world)]
    for rank in range(world):
        with fake_world(world, rank):
            layout = ShardLayout((rows, 3), 3, "", "0")
            assert [layout.rows_of(each) for each in range(world)] == expected
            assert (layout.local_rows, layout.first_row) == (expected[rank], starts[rank])
            assert layout.local_shape == (expected[rank], 3)
            assert (layout.chunk_rows, layout.padded_rows) == (expected[0], world * expected[0])
            assert layout.param_chunk.numel() == layout.grad_chunk.numel() == 3 * expected[0]
            assert layout.param_chunk.is_even == (len(set(expected)) == 1)
            assert (layout.is_gathered, layout.is_reduced, layout.gathers_mean) == (world > 1, world > 1, False)


def test_a_replicated_gradient_is_shared_out_by_elements() -> None:
    with fake_world(4, 3):
        layout = ShardLayout((5, 3), 0, "", "0")
        assert not layout.is_sharded and not layout.is_gathered and layout.gathers_mean
        assert (layout.local_shape, layout.first_row, layout.padded_rows) == ((5, 3), 0, 5)
        assert layout.grad_chunk.numel() == 4  # of 15 elements, rounded up
        assert (layout.divisor("mean"), layout.divisor("sum"), layout.divisor("6")) == (4, 1, 6)
        scalar = ShardLayout((), 0, "", "0")
        assert (scalar.local_shape, scalar.numel, scalar.grad_chunk.numel()) == ((), 1, 1)


@pytest.mark.parametrize(
    ("zero_stage", "keeps", "waits"), [(0, False, True), (1, True, True), (2, True, False), (3, False, False)]
)
def test_stages_differ_in_what_a_window_keeps(zero_stage: int, keeps: bool, waits: bool) -> None:
    layout = ShardLayout((4,), zero_stage, "", "")
    assert [layout.keeps_gathered(window) for window in (ALONE, OPEN, CLOSING)] == [False, keeps, keeps]
    assert [layout.gradients_wait(window) for window in (ALONE, OPEN, CLOSING)] == [False, waits, waits]


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("rank", range(6))
def test_shard_places_parameters_as_their_layout_says(zero_stage: int, rank: int) -> None:
    """Two replicas of three shards each: ranks 0 to 2 and 3 to 5."""
    with fake_world(6, rank):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
        model = zgraph.shard(nn.Linear(4, 7), mesh, zero_stage=zero_stage)
        for param in sharded_parameters(model).values():
            layout = param.spec.layout
            assert layout.placements(mesh.ndim) == param.sharded.placements
            assert layout.local_shape == tuple(param.sharded.to_local().shape)
            assert (layout.replica, layout.rank) == divmod(rank, 3)
            assert (layout.world, layout.num_replicas, layout.divisor("mean")) == (3, 2, 6)
            assert layout.gathers_mean
            assert layout.replica_chunk.group_names == (layout.reduce_group, layout.replica_group)
            assert layout.replica_chunk.numel() == -(-layout.grad_chunk.numel() // 2)


def test_ignored_parameters_are_not_sharded() -> None:
    with fake_world(2):
        model = nn.Linear(4, 4)
        zgraph.shard(model, ignored=[model.bias])
        layouts = {name: param.spec.layout for name, param in sharded_parameters(model).items()}
        assert (layouts["weight"].zero_stage, layouts["bias"].zero_stage) == (3, 0)
        assert isinstance(model.bias, DTensor) and model.bias.placements == layouts["bias"].placements(1)


def test_markers_carry_the_layout_as_plain_arguments() -> None:
    """Both markers of a parameter have one layout, and packing arguments inverts unpacking them."""
    with fake_world(2):
        graph = traced(lambda: nn.Linear(5, 7, bias=False), zero_stage=1).captured.graph
        (gather,) = nodes.call_functions(graph, nodes.is_unshard)
        (reduction,) = nodes.call_functions(graph, nodes.is_reduce_grad)
        layout = ShardLayout((7, 5), 1, "", "0")
        assert layout_of(gather) == layout_of(reduction) == layout
        assert ReduceArgs.of(reduction).flat() == reduction.args
