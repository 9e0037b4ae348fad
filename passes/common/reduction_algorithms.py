"""Chooses the collective that reduces gradients fastest on given hardware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
from torch import fx

from zgraph.analysis.hardware import Hardware
from zgraph.compiler.graph_pass import PassContext
from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of, wire_dtype_of
from zgraph.graph import meta, traits
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.graph.sizes import size_hint
from zgraph.runtime.groups import group_stride
from zgraph.runtime.window_state import OPEN
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


def plan_algorithms(
    markers: Sequence[fx.Node], ctx: PassContext, algorithm: Algorithm
) -> dict[fx.Node, dict[str, Algorithm]]:
    """Choose the algorithm of each reduce_grad node (marker) for each of its process groups.

    Gradients with different algorithms cannot be merged. Those that may share a collective therefore get the same
    algorithm, chosen as if one collective carried them all.

    Returns:
        Algorithms by marker and group name.
    """
    hops = {marker: _hops_of(marker) for marker in markers}
    compatible: dict[tuple[object, ...], list[Reduction]] = {}
    for marker, found in hops.items():
        for group_name, reduction in found.items():
            compatible.setdefault(_kind(marker, group_name, reduction), []).append(reduction)
    chosen: dict[tuple[object, ...], Algorithm] = {}
    for key, members in compatible.items():
        group_name, device, *_ = cast("tuple[str, torch.device]", key)
        combined = replace(members[0], numel=sum(member.numel for member in members))
        chosen[key] = (
            choose_algorithm(
                combined,
                backend=ctx.group_backend(group_name, device),
                world=ctx.group_size(group_name),
                stride=group_stride(group_name),
                hardware=ctx.hardware or ctx.machine,
            )
            if algorithm == "auto"
            else algorithm
        )
    return {
        marker: {name: chosen[_kind(marker, name, reduction)] for name, reduction in found.items()}
        for marker, found in hops.items()
    }


def _kind(marker: fx.Node, group_name: str, reduction: Reduction) -> tuple[object, ...]:
    return group_name, meta.tensor_value(ReduceArgs.of(marker).grad).device, replace(reduction, numel=0)


def _hops_of(marker: fx.Node) -> dict[str, Reduction]:
    """Describe the reduction of a reduce_grad node over each of its groups, by group name; empty if nothing is sent."""
    args = ReduceArgs.of(marker)
    layout, world = args.layout, args.layout.world
    waits = layout.gradients_wait(args.window)
    if not layout.is_reduced or (waits and args.window == OPEN):
        return {}
    grad = meta.tensor_value(args.grad)
    dtype = args.dtype if waits else grad.dtype
    wire = wire_dtype_of(dtype, args.wire_dtype) if waits else travelling(args.grad, args.wire_dtype)[1]
    wide, mean = accumulate_dtype(wire), mean_dtype_of(dtype, args.dtype, args.wire_dtype, args.mean_dtype)
    numel = size_hint(grad.numel())
    hops: dict[str, Reduction] = {}
    if world > 1:
        ends = layout.num_replicas == 1
        gathered = mean if ends and not layout.is_sharded else None
        hops[layout.reduce_group] = Reduction(
            numel=numel, wire=wire, mean=gathered, result=args.dtype if ends else wide
        )
    if layout.num_replicas > 1:
        wire = wire_dtype_of(wide, args.wire_dtype)
        hops[layout.replica_group] = Reduction(numel=-(-numel // world), wire=wire, mean=mean, result=args.dtype)
    return hops


def travelling(grad: fx.Node, asked: torch.dtype | None) -> tuple[fx.Node, torch.dtype]:
    """Return the node to send for `grad`, and the dtype in which to send it.

    The node is `grad` itself or, if `grad` only widens a bf16 or fp16 gradient to fp32, that narrow gradient.
    """
    dtype = meta.tensor_value(grad).dtype
    if traits.cast_dtype(grad) == torch.float32 and wire_dtype_of(dtype, asked) == dtype:
        source = grad.all_input_nodes[0]
        narrow = meta.tensor_value(source).dtype
        if narrow in (torch.bfloat16, torch.float16):
            return source, narrow
    return grad, wire_dtype_of(dtype, asked)


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
