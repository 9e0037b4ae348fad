"""What the suite gathers itself is what torch gathers."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole


def compared() -> int:
    world = dist.get_world_size()
    found = 0
    for axes in [(world,), (2, world // 2)] if world == 4 else [(world,)]:
        mesh = init_device_mesh("cpu", axes)
        for shape in [(5, 3), (7, 2), (1, 4), (0, 2), (8, 9)]:
            tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
            for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(axes)):
                sharded = distribute_tensor(tensor, mesh, placements)
                assert isinstance(sharded, DTensor)
                assert torch.equal(whole(sharded), tensor), (axes, shape, placements)
                found += 1
    return found


@worlds(2, 3, 4)
def test_a_tensor_is_whole_again(ranks: Ranks) -> None:
    assert set(ranks.run(compared)) == {15 if ranks.world < 4 else 60}
