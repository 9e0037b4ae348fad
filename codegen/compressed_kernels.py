"""The kernels of `zgraph::quantize_grads` and related operators, selected by compression method and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import cast

import torch
from torch import Tensor

from zgraph.codegen.kernels.cpu import blocks as cpu_blocks
from zgraph.codegen.kernels.cpu.multiply import multiply
from zgraph.codegen.kernels.triton import dequantize_blocks, quantize_blocks
from zgraph.compression.method_text import from_text, to_text
from zgraph.compression.methods import BlockMethod, CompressionMethod, RngKey, TensorMethod
from zgraph.compression.payload import BucketLayout
from zgraph.dialect.compressed import layout_of, shard_bytes
from zgraph.dialect.sum_ranks import divisor_like
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.handle import name_of
from zgraph.runtime.host_copies import copies_of
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import closes_window

_DEVICES = ("cpu", "cuda")
_MOST_ROWS = MappingProxyType({torch.float32: 64})  # of inputs of a fused product; a library is faster for more
_MOST_ROWS_OF_HALF = 8
_TILE_NUMEL = 2**18  # weights decoded at a time: 1 MiB, which caches hold
_ALWAYS = RngKey(0)  # constant, so that a parameter gathered twice has the same values


@torch.library.impl("zgraph::quantize_grads", _DEVICES)
def quantize_grads(
    grads: Sequence[Tensor],
    handles: Sequence[Tensor],
    errors: Sequence[Tensor],
    method: str,
    slot: str,
    numels: Sequence[int],
    world: int,
    stretches: int,
    rank: int,
    salt: int,
    window: str,
) -> tuple[Tensor, Tensor]:
    layout = layout_of(method, tuple(numels), world, stretches)
    kept = _feedbacks(handles, slot, method, numels, stretches * world, grads[0].device)
    if not errors:
        _begin(handles, kept)
    copies = copies_of(grads[0].device)
    loaded = iter(errors)
    states = [{name: next(loaded) for name in one.kept} if errors else one.kept for one in kept]
    for feedback in kept if errors else ():
        copies.wait(feedback.fetched)
    step = kept[0].reductions
    payload = grads[0].new_zeros((world, layout.payload_bytes), dtype=torch.uint8)
    _quantize(grads, states, layout, RngKey(step, salt), rank, payload)
    for handle, feedback, state in zip(handles, kept, states, strict=True):
        if errors:
            feedback.store(copies, state)
        feedback.end(closing=closes_window(handle, window))
    return payload.view(-1), torch.tensor([step])


@torch.library.impl("zgraph::load_errors", _DEVICES)
def load_errors(
    handles: Sequence[Tensor], method: str, slot: str, numels: Sequence[int], chunks: int, device: torch.device
) -> list[Tensor]:
    kept = _feedbacks(handles, slot, method, numels, chunks, device)
    _begin(handles, kept)
    return [fetched for feedback in kept for fetched in feedback.fetch(copies_of(device))]


@torch.library.impl("zgraph::dequantize_sum", _DEVICES)
def dequantize_sum(
    received: Tensor,
    draw: Tensor,
    method: str,
    numels: Sequence[int],
    world: int,
    stretches: int,
    salt: int,
    divisor: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    layout = layout_of(method, tuple(numels), world, stretches)
    outputs = [received.new_empty((stretches * numel,), dtype=dtype) for numel in numels]
    _dequantize_sum(received.view(world, -1), layout, RngKey(int(draw.item()), salt), 0, divisor, outputs)
    return outputs


@torch.library.impl("zgraph::dequantize_each", _DEVICES)
def dequantize_each(
    received: Tensor,
    draw: Tensor,
    method: str,
    numels: Sequence[int],
    world: int,
    salt: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    layout = layout_of(method, tuple(numels), 1, 1)
    outputs = [received.new_empty((world, numel), dtype=dtype) for numel in numels]
    _dequantize_each(received.view(world, -1), layout, RngKey(int(draw.item()), salt), outputs)
    return [output.view(-1) for output in outputs]


@torch.library.impl("zgraph::quantize_shards", _DEVICES)
def quantize_shards(shards: Sequence[Tensor], method: str, numels: Sequence[int], rank: int) -> Tensor:
    sizes = [shard_bytes(method, numel) for numel in numels]
    payload = shards[0].new_zeros(sum(sizes), dtype=torch.uint8)
    for shard, numel, part in zip(shards, numels, payload.split(sizes), strict=True):
        layout = layout_of(method, (numel,), 1, 1)
        _quantize([shard.contiguous()], [{}], layout, _ALWAYS, rank, part.view(1, -1))
    return payload


@torch.library.impl("zgraph::dequantize_shards", _DEVICES)
def dequantize_shards(received: Tensor, method: str, numel: int, offset: int, world: int, dtype: torch.dtype) -> Tensor:
    layout = layout_of(method, (numel,), 1, 1)
    rows = received.view(world, -1)[:, offset : offset + layout.payload_bytes]
    whole = received.new_empty((world, numel), dtype=dtype)
    _dequantize_each(rows, layout, _ALWAYS, [whole])
    return whole.view(-1)


@torch.library.impl("zgraph::multiply_codes", _DEVICES)
def multiply_codes(
    x: Tensor,
    received: Tensor,
    method: str,
    numel: int,
    offset: int,
    world: int,
    rows: int,
    columns: int,
    transpose: bool,
) -> Tensor:
    if x.is_cpu and x.shape[0] <= _MOST_ROWS.get(x.dtype, _MOST_ROWS_OF_HALF):
        inputs = x.float().contiguous()
        found = multiply(inputs, received, method, numel, offset, world, rows, columns, transpose=transpose)
        if found is not None:
            return found.to(x.dtype)
    layout = layout_of(method, (numel,), 1, 1)
    payloads = received.view(world, -1)[:, offset : offset + layout.payload_bytes]
    coded, ids = _Rows.of(payloads, layout, columns), torch.arange(rows, device=x.device)
    products = x.new_empty((len(x), rows if transpose else columns))
    if transpose:
        for some in ids.split(max(1, _TILE_NUMEL // columns)):
            products[:, some[0] : some[0] + len(some)] = x @ coded.decoded(some, x.dtype).t()
        return products
    group = cast(BlockMethod, layout.method).group
    width = group * max(1, _TILE_NUMEL // (group * max(1, rows)))
    for first in range(0, columns, width):
        last = min(first + width, columns)
        products[:, first:last] = x @ coded.between(first, last).decoded(ids, x.dtype)
    return products


@torch.library.impl("zgraph::lookup_codes", _DEVICES)
def lookup_codes(
    received: Tensor,
    ids: Tensor,
    method: str,
    numel: int,
    offset: int,
    world: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    layout = layout_of(method, (numel,), 1, 1)
    payloads = received.view(world, -1)[:, offset : offset + layout.payload_bytes]
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
        raise IndexError(f"zgraph::lookup_codes: ids from {int(ids.min())} to {int(ids.max())} in a table of {rows}")
    return _Rows.of(payloads, layout, columns).decoded(ids.flatten(), dtype).view(*ids.shape, columns)


@dataclass(frozen=True)
class _Rows:
    """Rows of a weight, as codes.

    Attributes:
        method: compression method, as text.
        columns: number of columns.
        sections: [ranks, rows of a rank, bytes] for each section of the payload.
    """

    method: str
    columns: int
    sections: tuple[Tensor, ...]

    @classmethod
    def of(cls, payloads: Tensor, layout: BucketLayout, columns: int) -> _Rows:
        rows = layout.numels[0] // columns
        views = (view[:, 0] for view in next(layout.views(payloads)))
        return cls(to_text(layout.method), columns, tuple(view.unflatten(1, (rows, -1)) for view in views))

    def between(self, first: int, last: int) -> _Rows:
        """Return the columns from `first` to `last`, which are multiples of the method's group."""

        def narrowed(section: Tensor) -> Tensor:
            row_bytes = section.shape[2]
            return section[:, :, first * row_bytes // self.columns : last * row_bytes // self.columns]

        return _Rows(self.method, last - first, tuple(map(narrowed, self.sections)))

    def decoded(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode rows: [n] int64 -> [n, columns]."""
        layout = layout_of(self.method, (len(ids) * self.columns,), 1, 1)
        payload = self.sections[0].new_zeros((1, layout.payload_bytes))
        rank_rows = self.sections[0].shape[1]
        for view, section in zip(next(layout.views(payload)), self.sections, strict=True):
            view[0, 0] = section[ids // rank_rows, ids % rank_rows].flatten()
        decoded = torch.empty((1, layout.numels[0]), dtype=dtype, device=payload.device)
        _dequantize_each(payload, layout, _ALWAYS, [decoded])
        return decoded.view(len(ids), self.columns)


def encode(
    flat: Tensor, errors: Sequence[Tensor], method: CompressionMethod, numel: int, world: int, step: int, rank: int
) -> Tensor:
    """Encode a flat tensor for the ranks of a group, outside of graphs.

    Args:
        flat: at most `world * numel` elements, which are padded with zeros.
        errors: the method's state for `world` chunks of `numel` elements, updated in place.
        method: compression method.
        numel: number of elements for each rank.
        world: number of ranks.
        step, rank: key of the random numbers, see `RngKey`.

    Returns:
        [world, payload_bytes] uint8.
    """
    layout = BucketLayout(method, (numel,), world)
    state = dict(zip(method.state(numel, world), errors, strict=True))
    payload = flat.new_zeros((world, layout.payload_bytes), dtype=torch.uint8)
    _quantize([flat.contiguous()], [state], layout, RngKey(step), rank, payload)
    return payload


def decode(received: Tensor, method: CompressionMethod, numel: int, step: int) -> Tensor:
    """Decode what each rank has encoded with `encode`: [ranks, payload_bytes] uint8 -> [ranks, numel] fp32."""
    decoded = torch.empty((received.shape[0], numel), device=received.device)
    _dequantize_each(received, BucketLayout(method, (numel,), 1), RngKey(step), [decoded])
    return decoded


def _feedbacks(
    handles: Sequence[Tensor], slot: str, method: str, numels: Sequence[int], chunks: int, device: torch.device
) -> list[Feedback]:
    found = from_text(method)
    if isinstance(found, BlockMethod) and found.error_device is not None:
        device = torch.device(found.error_device)
    return [
        state_behind(handle).feedbacks.of(
            slot, method, numel, chunks, found.state(numel, chunks), device, name_of(handle)
        )
        for handle, numel in zip(handles, numels, strict=True)
    ]


def _begin(handles: Sequence[Tensor], kept: Sequence[Feedback]) -> None:
    for handle, feedback in zip(handles, kept, strict=True):
        scaled = state_behind(handle).feedbacks.loss_scale is not None
        feedback.begin(reset_interval=from_text(feedback.method).reset_interval, keep_before=scaled)


@dataclass(frozen=True)
class Kernels:
    """Modules that implement the functions of `zgraph.codegen.kernels.reference` for one type of device."""

    quantize: ModuleType
    dequantize: ModuleType


def _kernels(device: torch.device) -> Kernels:
    if device.type == "cpu":
        return Kernels(cpu_blocks, cpu_blocks)
    return Kernels(quantize_blocks, dequantize_blocks)


def _quantize(
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    layout: BucketLayout,
    draw: RngKey,
    rank: int,
    payload: Tensor,
) -> None:
    if isinstance(layout.method, BlockMethod):
        _kernels(payload.device).quantize.quantize_bucket(grads, states, layout, draw, rank, payload)
        return
    method, chunks = _tensor_method(layout), layout.stretches * layout.world
    for grad, numel, state, views in zip(grads, layout.numels, states, layout.views(payload), strict=True):
        flat = torch.nn.functional.pad(grad.reshape(-1), (0, chunks * numel - grad.numel()))
        sections = method.quantize(flat.view(chunks, numel), state, draw, rank)
        for view, section in zip(views, sections, strict=True):
            view.copy_(section.view(layout.stretches, layout.world, -1).transpose(0, 1))


def _dequantize_sum(
    received: Tensor, layout: BucketLayout, draw: RngKey, first_rank: int, divisor: int, outputs: Sequence[Tensor]
) -> None:
    if isinstance(layout.method, BlockMethod):
        _kernels(received.device).dequantize.dequantize_sum_bucket(received, layout, draw, first_rank, divisor, outputs)
        return
    method = _tensor_method(layout)
    for numel, views, output in zip(layout.numels, layout.views(received), outputs, strict=True):
        for stretch in range(layout.stretches):
            sections = [view[:, stretch] for view in views]
            total = method.dequantize_sum(sections, numel, draw)
            output.view(layout.stretches, numel)[stretch].copy_(total / divisor_like(total, divisor))


def _dequantize_each(received: Tensor, layout: BucketLayout, draw: RngKey, outputs: Sequence[Tensor]) -> None:
    """Decode each rank's row of `received` into that rank's row of the outputs; a single launch on a GPU."""
    if isinstance(layout.method, BlockMethod):
        _kernels(received.device).dequantize.dequantize_each_bucket(received, layout, draw, outputs)
        return
    for rank in range(received.shape[0]):
        parts = [output[rank] for output in outputs]
        _dequantize_sum(received[rank : rank + 1], layout, draw, rank, 1, parts)


def _tensor_method(layout: BucketLayout) -> TensorMethod:
    assert isinstance(layout.method, TensorMethod), layout.method
    return layout.method
