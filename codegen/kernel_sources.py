"""The source of the kernels that a graph's compressed collectives run, for its dump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from zgraph.codegen.kernels.cpu import source as cpu_source
from zgraph.codegen.kernels.reference import RUN
from zgraph.codegen.kernels.triton import dequantize_blocks, quantize_blocks
from zgraph.codegen.kernels.triton.dequantize_blocks import Task
from zgraph.codegen.kernels.triton.tables import are_aligned
from zgraph.compression.methods import BlockMethod
from zgraph.compression.payload import BucketLayout
from zgraph.dialect.compressed import layout_of
from zgraph.graph import meta, nodes
from zgraph.torch_compat.operators import arguments_by_name


def sources_of(graph: fx.Graph) -> dict[str, str]:
    """By file name, one file for each node of `zgraph.dialect.compressed`; none for the methods of users."""
    found: dict[str, str] = {}
    for node in nodes.call_functions(graph, _has_kernel):
        launches = [launch for launch in _launches(node) if isinstance(launch.layout.method, BlockMethod)]
        if not launches:
            continue
        on_cpu = launches[0].device.type == "cpu"
        emitted = dict.fromkeys(launch.cpp(node.name) if on_cpu else launch.triton(node.name) for launch in launches)
        found[f"{node.name}.{'cpp' if on_cpu else 'triton.py'}"] = "\n".join(emitted)
    return found


@dataclass(frozen=True)
class Quantize:
    """One launch: gradients, or shards, become a payload."""

    layout: BucketLayout
    read: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.read[0].device

    def cpp(self, name: str) -> str:
        method = cast(BlockMethod, self.layout.method)
        kinds = dict.fromkeys(tensor.dtype for tensor in self.read)
        return _described("//", name, self.layout) + "".join(cpu_source.emit_quantize(method, dtype) for dtype in kinds)

    def triton(self, name: str) -> str:
        """For gradients that begin at multiples of 16 bytes, as allocators make them."""
        method = cast(BlockMethod, self.layout.method)
        sizes: dict[torch.dtype, list[int]] = {}
        for tensor, length in zip(self.read, self.layout.numels, strict=True):
            sizes.setdefault(tensor.dtype, []).extend((tensor.numel(), length))
        return _described("#", name, self.layout) + "\n".join(
            quantize_blocks.emit_quantize(method, dtype, aligned=are_aligned([], found, RUN))
            for dtype, found in sizes.items()
        )


@dataclass(frozen=True)
class Dequantize:
    """One launch: the payloads of some ranks become sums, or each rank's its values."""

    layout: BucketLayout
    dtype: torch.dtype
    device: torch.device
    task: Task

    def cpp(self, name: str) -> str:
        method = cast(BlockMethod, self.layout.method)
        return _described("//", name, self.layout) + cpu_source.emit_dequantize(method, self.dtype)

    def triton(self, name: str) -> str:
        method = cast(BlockMethod, self.layout.method)
        aligned = are_aligned([], self.layout.numels, RUN)
        source = dequantize_blocks.emit_dequantize(method, self.dtype, self.task, aligned=aligned)
        return _described("#", name, self.layout) + source


def _has_kernel(node: fx.Node) -> bool:
    return nodes.is_quantize(node) or node.target in (
        torch.ops.zgraph.dequantize_sum.default,
        torch.ops.zgraph.dequantize_each.default,
        torch.ops.zgraph.quantize_shards.default,
        torch.ops.zgraph.dequantize_shards.default,
    )


def _launches(node: fx.Node) -> list[Quantize] | list[Dequantize]:
    """What the node's kernel in `zgraph.codegen.compressed_kernels` launches; equal launches once."""
    named = arguments_by_name(node)
    method, world = named["method"], named.get("world", 1)
    if node.target is torch.ops.zgraph.quantize_shards.default:
        shards = zip(named["shards"], named["numels"], strict=True)
        return [Quantize(layout_of(method, (numel,), 1, 1), (meta.tensor_value(shard),)) for shard, numel in shards]
    if nodes.is_quantize(node):
        layout = layout_of(method, tuple(named["numels"]), world, named["stretches"])
        return [Quantize(layout, tuple(map(meta.tensor_value, named["grads"])))]
    if nodes.is_dequantize_sum(node):
        layout, task = (
            layout_of(method, tuple(named["numels"]), world, named["stretches"]),
            Task(divisor=named["divisor"]),
        )
    else:
        numels = named["numels"] if "numels" in named else [named["numel"]]
        layout, task = layout_of(method, tuple(numels), 1, 1), Task(each=True)
    return [Dequantize(layout, named["dtype"], meta.tensor_value(named["received"]).device, task)]


def _described(mark: str, name: str, layout: BucketLayout) -> str:
    chunks, numels = layout.stretches * layout.world, ", ".join(map(str, layout.numels))
    return (
        f"{mark} {name}: {len(layout.numels)} tensors, each in {chunks} chunks of so many elements: {numels}.\n"
        f"{mark} Payload: {layout.payload_bytes} bytes for each of {layout.world} ranks.\n"
    )
