"""Source code of the compression kernels that a graph runs, for dumps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib import resources
from typing import cast

import torch
from torch import Tensor, fx

from zgraph.codegen.kernels.cpu import source as cpu_source
from zgraph.codegen.kernels.reference import RUN
from zgraph.codegen.kernels.triton.constants import BlockConstants, dtype_name, quantize_constants
from zgraph.codegen.kernels.triton.dequantize_blocks import Task
from zgraph.codegen.kernels.triton.tables import are_aligned
from zgraph.compression.methods import BlockMethod
from zgraph.compression.payload import BucketLayout
from zgraph.dialect.compressed import layout_of
from zgraph.graph import meta, nodes
from zgraph.torch_compat.operators import arguments_by_name


def sources_of(graph: fx.Graph) -> dict[str, str]:
    """Return the kernel source of each compression or decompression node, by file name.

    User-defined methods have no kernels and are left out.
    """
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
    """One launch of the kernel that quantizes gradients, or shards of parameters, into a payload."""

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
        """Return the Triton source for gradients aligned to 16 bytes, as torch's allocators place them."""
        method = cast(BlockMethod, self.layout.method)
        sizes: dict[torch.dtype, list[int]] = {}
        for tensor, length in zip(self.read, self.layout.numels, strict=True):
            sizes.setdefault(tensor.dtype, []).extend((tensor.numel(), length))
        cases = "\n".join(
            _quantize_case(method, dtype, aligned=are_aligned([], found, RUN)) for dtype, found in sizes.items()
        )
        return _described("#", name, self.layout) + cases + _triton_source("quantize")


@dataclass(frozen=True)
class Dequantize:
    """One launch of the kernel that decodes the payloads of all ranks, and stores their sum or each rank's values."""

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
        case = _dequantize_case(method, self.dtype, self.task, aligned=aligned)
        return _described("#", name, self.layout) + case + _triton_source("dequantize")


@dataclass(frozen=True)
class Multiply(Dequantize):
    """One launch of the kernel that multiplies with a weight whose codes it decodes in registers.

    GPUs have no such kernel: there, the weight is decoded.
    """

    def cpp(self, name: str) -> str:
        return _described("//", name, self.layout) + cpu_source.emit_multiply(cast(BlockMethod, self.layout.method))


def _has_kernel(node: fx.Node) -> bool:
    return (
        nodes.is_quantize(node)
        or nodes.reads_codes(node)
        or node.target
        in (
            torch.ops.zgraph.dequantize_sum.default,
            torch.ops.zgraph.dequantize_each.default,
            torch.ops.zgraph.quantize_shards.default,
            torch.ops.zgraph.dequantize_shards.default,
        )
    )


def _launches(node: fx.Node) -> list[Quantize] | list[Dequantize]:
    """Return the distinct kernel launches of a node, as `zgraph.codegen.compressed_kernels` makes them."""
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
    device = meta.tensor_value(named["received"]).device
    if node.target is torch.ops.zgraph.multiply_codes.default:
        return [Multiply(layout, meta.tensor_value(node).dtype, device, task)]
    return [Dequantize(layout, named["dtype"], device, task)]


def _described(mark: str, name: str, layout: BucketLayout) -> str:
    chunks, numels = layout.stretches * layout.world, ", ".join(map(str, layout.numels))
    return (
        f"{mark} {name}: {len(layout.numels)} tensors, each in {chunks} chunks. Elements of their chunks: {numels}.\n"
        f"{mark} Payload: {layout.payload_bytes} bytes for each of {layout.world} ranks.\n"
    )


def _quantize_case(method: BlockMethod, dtype: torch.dtype, *, aligned: bool) -> str:
    """Describe in a comment the constants that the quantizing kernel is compiled for, and the bytes it moves."""
    state = method.state(method.group, 1).values()
    kept = sum(torch.Size(shape).numel() * kept.itemsize for shape, kept in state)
    read, written = method.group * dtype.itemsize + kept, kept + sum(method.sections(method.group))
    lines = [
        f"Quantize {dtype_name(dtype)} gradients, each in chunks for all ranks, into one payload.",
        "",
        f"{method}",
        f"{'16 bytes' if aligned else 'one element'} of the gradient at once",
        f"bytes of a group of {method.group}: {read} read + {written} written = {read + written}, "
        f"{(read + written) / method.group:.3f} for each element",
    ]
    return _comment(lines, quantize_constants(method, dtype, aligned=aligned))


def _dequantize_case(method: BlockMethod, dtype: torch.dtype, task: Task, *, aligned: bool) -> str:
    """Describe in a comment the constants that the decoding kernel is compiled for, and the bytes it moves."""
    verb, what = "Add" if task.accumulate else "Write", "the values" if task.each else "sums of the values"
    sent, stored = sum(method.sections(method.group)), method.group * dtype.itemsize * (1 + task.accumulate)
    lines = [
        f"{verb} {what} of all ranks, as {dtype_name(dtype)}.",
        "",
        f"{method}",
        f"{'16 bytes' if aligned else 'one element'} of the output at once",
        f"bytes of a group of {method.group}: {sent} read {'' if task.each else 'of each rank '}+ {stored} of its "
        f"output, {sent / method.group:.3f} + {stored / method.group:.3f} for each element",
    ]
    return _comment(lines, task.constants(method, dtype, aligned=aligned))


def _comment(lines: Iterable[str], case: BlockConstants) -> str:
    constants = [f"CASE.{field.name} = {getattr(case, field.name)!r}" for field in fields(case)]
    return "".join(f"# {line}".rstrip() + "\n" for line in ["", *lines, "", *constants])


def _triton_source(kernel: str) -> str:
    """Return the source of a kernel's module, followed by the module of functions that kernels share."""
    folder = resources.files("zgraph.codegen.kernels.triton")
    texts = (folder.joinpath(f"{name}.py").read_text() for name in (f"{kernel}_kernel", "blocks"))
    return "".join(f"\n\n{text}" for text in texts)
