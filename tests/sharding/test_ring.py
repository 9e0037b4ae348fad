"""Attention whose keys pass by the ranks of a context axis, against attention to whole sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support import context as cp
from tests.support.ranks import Ranks, worlds
from zgraph.sharding.context import attention as ways
from zgraph.sharding.context.attention import attention
from zgraph.sharding.context.positions import own_tokens

HEADS = [(1, 1), (3, 1), (6, 2), (8, 1)]  # of queries and keys: each but the last has keys sent again on four ranks
LENGTH, FEATURES = 24, 8
# Relative to the largest entry. Results of blocks are rounded, so bf16 has the error of a few roundings.
ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _inputs(heads: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, of whole sequences."""
    generator = torch.Generator().manual_seed(heads)
    shapes = [(2, count, LENGTH, FEATURES) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def _apart(heads: int, key_heads: int, dtype: torch.dtype, is_causal: bool, scale: float | None) -> float:
    mesh, size, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size(), dist.get_rank()
    *wholes, grad = _inputs(heads, key_heads, dtype)
    query, key, value = own = [own_tokens(one, 2, rank, size).requires_grad_() for one in wholes]
    assert ways._way(query, key, value, None, 0.0, True, size, True) == "ring"  # pyright: ignore[reportPrivateUsage]
    group_name = mesh.get_group().group_name
    found = attention(query, key, value, None, 0.0, is_causal, scale, True, group_name, size, True)
    found.backward(own_tokens(grad, 2, rank, size))
    query, key, value = (one.requires_grad_() for one in wholes)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)
    expected.backward(grad)
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(own, wholes, strict=True))]
    parts = [(one, own_tokens(other, 2, rank, size)) for one, other in pairs if one is not None and other is not None]
    assert len(parts) == 4
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in parts)


@worlds(2, 3, 4)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_keys_that_pass_by_are_keys_at_hand(ranks: Ranks, dtype: torch.dtype) -> None:
    for (heads, key_heads), is_causal in itertools.product(HEADS, (True, False)):
        if heads % ranks.world or key_heads == 1:
            scale = None if is_causal else 0.3
            assert max(ranks.run(_apart, heads, key_heads, dtype, is_causal, scale)) <= ROUNDING[dtype]


def _under_autocast() -> tuple[bool, bool]:
    """Whether the result of fp32 tensors is that of bf16 ones, bit by bit, and has their dtype."""
    mesh, size, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size(), dist.get_rank()
    tensors = [own_tokens(one, 2, rank, size) for one in _inputs(1, 1, torch.float32)[:3]]
    options = (None, 0.0, True, None, False, mesh.get_group().group_name, size, True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(tensors[0], tensors[1], tensors[2], *options)
    query, key, value = (one.bfloat16() for one in tensors)
    expected = attention(query, key, value, *options)
    return torch.equal(found, expected), found.dtype == torch.bfloat16


@worlds(2)
def test_autocast_casts_before_tensors_are_sent(ranks: Ranks) -> None:
    assert ranks.run(_under_autocast) == [(True, True)] * 2


def _sent(heads: int, key_heads: int, autocast: torch.dtype | None) -> list[tuple[torch.dtype, int]]:
    """Dtype and bytes that attention sends in forward, and in backward."""
    world = dist.get_world_size()
    mesh = cp.mesh_of(world, world)
    case = cp.Case(heads=heads, key_heads=key_heads, dtype=torch.float32)
    model = cp.started(case)
    zgraph.shard(model, mesh, context="cp")
    run = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    batch = zgraph.context_batch(model, cp.batches(case, 0, 0)[0])
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = run(**batch)
    loss.backward()
    found: list[tuple[torch.dtype, int]] = []
    for graph in zgraph.summary(model).graphs:
        sent = [one for one in graph.transfers if not one.parameters and one.dtype.is_floating_point]
        assert len({one.dtype for one in sent}) == 1
        found.append((sent[0].dtype, sum(one.sent_bytes for one in sent)))
    return found


@worlds(4)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "times"), [(2, 2, 2), (8, 1, 1)], ids=["sent_again", "kept"])
def test_bytes_are_those_of_the_formula(
    ranks: Ranks, heads: int, key_heads: int, times: int, autocast: torch.dtype | None
) -> None:
    elements = 2 * cp.BATCH * cp.LENGTH * key_heads * (cp.WIDTH // heads) * 3 // 4
    dtype = autocast or torch.float32
    forward, backward = ranks.run(_sent, heads, key_heads, autocast)[0]
    assert forward == (dtype, elements * dtype.itemsize)
    assert backward == (dtype, times * elements * dtype.itemsize)


def _differentiated_twice() -> None:
    mesh, size, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size(), dist.get_rank()
    wholes = _inputs(1, 1, torch.float32)[:3]
    query, key, value = (own_tokens(one, 2, rank, size).requires_grad_() for one in wholes)
    found = attention(query, key, value, None, 0.0, True, None, False, mesh.get_group().group_name, size, True)
    (grad,) = torch.autograd.grad(found.sum(), query, create_graph=True)
    grad.sum().backward()


@worlds(2)
def test_second_derivatives_are_refused(ranks: Ranks) -> None:
    for good, text in ranks.outcomes(_differentiated_twice):
        assert not good and "derivative for" in text and "is not implemented" in text


UNLIKE: dict[str, Any] = {
    "a mask": {"mask": True},
    "dropout": {"dropout_p": 0.5},
    "other features of values": {"value": 4},
    "one sequence of keys": {"batch": 1},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_other_attention_gathers_keys(name: str) -> None:
    given = UNLIKE[name]
    query, key = torch.empty(2, 3, 8, 8), torch.empty(given.get("batch", 2), 3, 8, 8)
    value = torch.empty(*key.shape[:3], given.get("value", 8))
    mask = torch.ones(1, 1, 8, 16, dtype=torch.bool) if "mask" in given else None
    way = ways._way(query, key, value, mask, given.get("dropout_p", 0.0), False, 2, True)  # pyright: ignore[reportPrivateUsage]
    assert way == "keys"


def _planned_bytes(hardware: str) -> list[int]:
    """Bytes that attention sends in a plan, in forward and backward."""

    def batch() -> tuple[Tensor, Tensor]:
        return torch.zeros(cp.BATCH, cp.LENGTH // 2, dtype=torch.int64), torch.zeros(cp.BATCH, cp.LENGTH // 2).long()

    plan = zgraph.plan(lambda: cp.Language(4, 1), world={"dp": 1, "cp": 2}, batch=batch, hardware=hardware)
    return [
        sum(one.sent_bytes for one in graph.transfers if not one.parameters and one.dtype.is_floating_point)
        for graph in plan.compiled.graphs
    ]


def test_plans_for_gpus_have_no_ring() -> None:
    """A model with one head of keys goes by a ring on CPUs, and by heads on GPUs: 2 k and 2 (h + k) / N, k = N."""
    unit = cp.BATCH * cp.LENGTH * (cp.WIDTH // 4) * 4 // 2
    assert _planned_bytes("cpu") == [2 * unit] * 2
    assert _planned_bytes("h100") == [2 * (4 + 2) * unit // 2] * 2


def test_a_plan_over_an_axis_cp_shares_sequences() -> None:
    """By default; a function that shards over the axis without sharing would plan something else."""
    with pytest.raises(ValueError, match=r'over the axis cp of .*; write zgraph.shard\(model, mesh, context="cp"\)'):
        zgraph.plan(
            lambda: cp.Language(4, 1),
            world={"dp": 1, "cp": 2},
            batch=lambda: (torch.zeros(2, 8).long(), torch.zeros(2, 8).long()),
            shard_fn=lambda model, mesh: zgraph.shard(model, mesh),
            hardware="cpu",
        )
