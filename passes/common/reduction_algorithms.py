"""Chooses the collective that reduces gradients fastest on given hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from zgraph.analysis.hardware import Hardware
from zgraph.dialect.wire_dtypes import accumulate_dtype
from zgraph.tiers.devices import kind_of_backend

Algorithm = Literal["auto", "all_to_all", "reduce_scatter", "narrow_reduce_scatter", "all_reduce"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """All gradients of a graph that are reduced over one group in the same dtypes, and so can share collectives.

    Attributes:
        numel: total number of elements of the unsharded gradients.
        wire: dtype in which gradients are sent to the ranks that sum them.
        mean: dtype in which the averaged parts are gathered; None: they are not gathered.
        result: dtype of the result.
    """

    numel: int
    wire: torch.dtype
    mean: torch.dtype | None
    result: torch.dtype


def choose_algorithm(
    reduction: Reduction, *, backend: str, world: int, stride: int, hardware: Hardware | None
) -> Algorithm:
    """Return the fastest algorithm that keeps sums in fp32.

    On gloo, this is always all_to_all: gloo's own reductions send twice as much, and sum in another order. On NCCL, an
    all_to_all sends narrow dtypes, which a reduce_scatter must widen to fp32. However, every rank sends to other hosts
    in an all_to_all, but only one rank of each host in a reduce_scatter, which is a ring. If averages are gathered
    afterwards, an all_reduce inside a host saves a launch, but every rank divides the whole tensor. At equal cost,
    prefers reduce_scatter, then all_to_all, then all_reduce.

    Args:
        reduction: gradients to reduce.
        backend: backend of the group.
        world: number of ranks of the group.
        stride: distance between neighbours of the group in global ranks.
        hardware: hardware of each rank, equal on all ranks; None: unknown, and NCCL uses a reduce_scatter.
    """
    if not kind_of_backend(backend).is_gpu:
        return "all_to_all"
    if hardware is None:
        return "reduce_scatter"
    costs: dict[Algorithm, float] = {
        "reduce_scatter": _scattered_us(reduction, hardware, world, stride),
        "all_to_all": _exchanged_us(reduction, hardware, world, stride),
    }
    if reduction.mean is not None and world * stride <= hardware.ranks_per_host:
        costs["all_reduce"] = _all_reduced_us(reduction, hardware, world, stride)
    return min(costs, key=costs.__getitem__)


def _exchanged_us(reduction: Reduction, hardware: Hardware, world: int, stride: int) -> float:
    part = math.ceil(reduction.numel / world)
    kept = (reduction.mean or reduction.result).itemsize
    sum_us = hardware.compute_us(0, part * (world * reduction.wire.itemsize + kept), torch.float32)
    sent_bytes = (world - 1) * part * reduction.wire.itemsize
    exchange_us = hardware.launch_us + hardware.collective_us("all_to_all_single", sent_bytes, world, stride)
    return exchange_us + sum_us + _gathered_us(reduction, hardware, world, stride)


def _scattered_us(reduction: Reduction, hardware: Hardware, world: int, stride: int) -> float:
    part = math.ceil(reduction.numel / world)
    wide = accumulate_dtype(reduction.wire).itemsize
    kept = (reduction.mean or reduction.result).itemsize
    divide_us = hardware.compute_us(0, part * (wide + kept), torch.float32)
    sent_bytes = (world - 1) * part * wide
    scatter_us = hardware.launch_us + hardware.collective_us("reduce_scatter_tensor", sent_bytes, world, stride)
    return _widened_us(reduction, hardware) + scatter_us + divide_us + _gathered_us(reduction, hardware, world, stride)


def _all_reduced_us(reduction: Reduction, hardware: Hardware, world: int, stride: int) -> float:
    wide = accumulate_dtype(reduction.wire).itemsize
    divide_us = hardware.compute_us(0, reduction.numel * (wide + reduction.result.itemsize), torch.float32)
    sent_bytes = 2 * (world - 1) * math.ceil(reduction.numel / world) * wide
    reduce_us = hardware.launch_us + hardware.collective_us("all_reduce", sent_bytes, world, stride)
    return _widened_us(reduction, hardware) + reduce_us + divide_us


def _widened_us(reduction: Reduction, hardware: Hardware) -> float:
    wide = accumulate_dtype(reduction.wire)
    if reduction.wire == wide:
        return 0.0
    return hardware.compute_us(0, reduction.numel * (reduction.wire.itemsize + wide.itemsize), torch.float32)


def _gathered_us(reduction: Reduction, hardware: Hardware, world: int, stride: int) -> float:
    if reduction.mean is None:
        return 0.0
    sent_bytes = (world - 1) * math.ceil(reduction.numel / world) * reduction.mean.itemsize
    gather_us = hardware.launch_us + hardware.collective_us("all_gather_into_tensor", sent_bytes, world, stride)
    if reduction.mean != reduction.result:
        moved = reduction.numel * (reduction.mean.itemsize + reduction.result.itemsize)
        gather_us += hardware.compute_us(0, moved, torch.float32)
    return gather_us
