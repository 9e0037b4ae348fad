"""Operators that users define themselves act on sharded tensors as torch's operators do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import zgraph
from tests.support.ranks import Ranks


def read_after_own_operator() -> tuple[float, float]:
    zgraph.shard(nn.Linear(3, 5))  # a model from before the operator is defined

    @torch.library.custom_op("tests::doubled", mutates_args=())
    def doubled(tensor: Tensor) -> Tensor:
        return tensor * 2

    @doubled.register_fake
    def _(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    @register_sharding(torch.ops.tests.doubled.default)
    def _(tensor: Tensor) -> list[tuple[list[object], list[object]]]:
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]

    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    expected = 2 * plain.weight.norm().item()
    weight = zgraph.shard(plain).weight.detach()
    return doubled(weight).norm().item(), expected


def test_results_are_read_as_whole_tensors(ranks: Ranks) -> None:
    """On torch 2.11 each operator needs a rule, which `zgraph.shard` registers."""
    for found, expected in ranks.run(read_after_own_operator):
        torch.testing.assert_close(found, expected)
