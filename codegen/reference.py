"""What the compression kernels compute, in plain PyTorch: the specification that every kernel equals bit for bit.

Each group of elements x is sent as integer codes c and one bf16 scale s, so that the receiver reads s (c + b):

    y = H (signs * x)            H: Hadamard over 32 elements, not normalised; signs of this rank and step
    t = y / max|y|
    c = clamp(floor(k t + a))    k = levels / 2 / clip, for the clip with the largest <t, c + b>^2 / <c + b, c + b>
    s = max|y| <t, t> / <t, c + b> / 32

Rotated values look Gaussian: codes stand for the middles of their intervals (a = 0, b = 1/2), and all levels are used.
Without rotation y = x, s lacks the 1/32, and zero has a code of its own (a = 1/2, b = 0, levels less one). The scale is
that which makes the result unbiased along y: <y, s (c + b)> = <y, y>; the scale of least squares would shrink each
gradient by what clipping has lost (as in Suresh et al. 2017, arXiv 1611.00429, rotation before quantization; Vargaftik
et al. 2021, DRIVE, arXiv 2105.08339, section 4, unbiased scale).

Where an error is kept and nothing is rotated, s is that of least squares, max|y| <t, c + b> / <c + b, c + b>: what is
lost is then never longer than what was to be sent, without which the errors of classic feedback grow without end (as
they do with 2 bits on heavy tails, where the unbiased scale is many times the largest value). What it shrinks by comes
with the error.

Sums over a group halve it again and again, adding its second half to its first. No multiplication is contracted with an
addition. Every value is fp32, until it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zgraph.compression import HADAMARD, SCALE_DTYPE, BlockMethod, Draw
from zgraph.error_codes import TINY, decode_error, encode_error
from zgraph.wire_format import BucketLayout

STAGES = 5  # of a Hadamard transform over 32 elements
_MASK = 0xFFFFFFFF
# From here on a group counts as not finite: what its codes stand for, or its error, might overflow. 2^100, as bits.
HUGE_BITS = 0x71800000
NO_NUMBER = 0x7FC0  # a bf16 NaN: torch's own bits differ from kernel to kernel


@dataclass(frozen=True)
class CodeBook:
    """How numbers in [-1, 1] become codes.

    Attributes:
        slopes: k, for each clipping level to try.
        before: a, added before rounding down.
        after: b, added to the code when it is read.
        low, high: the codes.
    """

    slopes: tuple[float, ...]
    before: float
    after: float
    low: int
    high: int

    @classmethod
    def of(cls, method: BlockMethod) -> CodeBook:
        half = method.levels // 2
        if method.rotate:
            return cls(tuple(_fp32(half / clip) for clip in method.clips), 0.0, 0.5, -half, half - 1)
        return cls(tuple(_fp32((half - 1) / clip) for clip in method.clips), 0.5, 0.0, 1 - half, half - 1)


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


# --- quantize -------------------------------------------------------------------------------------------------------


def quantize(
    grad: Tensor, state: dict[str, Tensor], method: BlockMethod, draw: Draw, rank: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a gradient to which the error of the last one is added; the error becomes the new one.

    Args:
        grad: [chunks, numel] in any floating-point dtype.
        state: "error" [chunks, groups, group], and "error_scale" [chunks, groups] where that is int8; empty where the
            method keeps none. Updated in place. A group that is not finite keeps its error.
        method: what to do.
        draw, rank: which signs.

    Returns:
        codes [chunks, groups * group * bits / 8] uint8; scales [chunks, groups] bf16, NaN where a group is not finite.
    """
    chunks, numel = grad.shape
    groups, group = method.groups(numel), method.group
    given = grad.to(torch.float32)
    if groups * group != numel:
        given = torch.nn.functional.pad(given, (0, groups * group - numel))
    given = given.view(chunks, groups, group)
    old = read_error(state)
    whole = given if old is None else given + old
    book = CodeBook.of(method)
    signs = draw_signs(groups, group, draw, rank, grad.device) if method.rotate else None
    rotated = whole if signs is None else hadamard(whole * signs)

    largest_bits = (rotated.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    finite = largest_bits < HUGE_BITS
    largest = largest_bits.view(torch.float32)
    used = finite & (largest >= TINY)
    unit = torch.where(used, rotated * torch.where(used, 1.0 / largest, 0.0), 0.0)

    best = best_codes(unit, book)
    levels = best + book.after
    along = fold(unit * levels)
    over, under = (fold(unit * unit), along) if is_unbiased(method) else (along, fold(levels * levels))
    ratio = torch.where(used, over / torch.where(used, under, 1.0), 0.0)
    if method.rotate:
        ratio = ratio * (1.0 / HADAMARD)
    scale = (ratio * torch.where(used, largest, 0.0)).to(SCALE_DTYPE)
    scale.view(torch.int16).masked_fill_(~finite, NO_NUMBER)

    if old is not None and method.old_share is not None:
        sent = decode(best, scale.squeeze(-1), book, signs)
        lost = whole - sent
        new = _fp32(method.old_share) * old + _fp32(1 - method.old_share) * lost
        write_error(state, new, finite)
    return pack(best.to(torch.int8), method).view(chunks, -1), scale.view(chunks, groups)


def is_unbiased(method: BlockMethod) -> bool:
    """Whether the scale is the unbiased one, and not that of least squares."""
    return method.rotate or method.old_share is None


def best_codes(unit: Tensor, book: CodeBook) -> Tensor:
    """The codes [..., group], as fp32, of the clipping level whose codes point closest along `unit`."""
    best, best_score = torch.zeros_like(unit), torch.full_like(unit[..., :1], -1.0)
    for slope in book.slopes:
        codes = torch.floor(unit * slope + book.before).clamp(book.low, book.high)
        levels = codes + book.after
        along, square = fold(unit * levels), fold(levels * levels)
        score = torch.where(square > 0, along * along / torch.where(square > 0, square, 1.0), 0.0)
        better = score > best_score
        best, best_score = torch.where(better, codes, best), torch.where(better, score, best_score)
    return best


def read_error(state: dict[str, Tensor]) -> Tensor | None:
    """The kept error [chunks, groups, group] in fp32; None where none is kept."""
    if "error" not in state:
        return None
    return decode_error(state["error"], state["error_scale"]) if "error_scale" in state else state["error"]


def write_error(state: dict[str, Tensor], error: Tensor, finite: Tensor) -> None:
    """Keep a new error, but not where `finite` [chunks, groups, 1] says that it is none."""
    if "error_scale" not in state:
        state["error"].copy_(torch.where(finite, error, state["error"]))
        return
    codes, scale = encode_error(error)
    state["error"].copy_(torch.where(finite, codes, state["error"]))
    state["error_scale"].copy_(torch.where(finite.squeeze(-1), scale, state["error_scale"]))


# --- dequantize -----------------------------------------------------------------------------------------------------


def dequantize_sum(
    codes: Tensor, scales: Tensor, numel: int, method: BlockMethod, draw: Draw, first_rank: int = 0
) -> Tensor:
    """The sum of what the ranks have sent, in rank order.

    Args:
        codes: [ranks, groups * group * bits / 8] uint8.
        scales: [ranks, groups] bf16.
        numel: elements of the chunk; what fills its last group up is dropped.
        draw: that of the senders.
        first_rank: which of the group has sent the first row.

    Returns:
        [numel] fp32.
    """
    groups, group = scales.shape[1], method.group
    book = CodeBook.of(method)
    total = torch.zeros(groups, group, device=codes.device)
    for rank, (packed, scale) in enumerate(zip(codes, scales, strict=True), first_rank):
        signs = draw_signs(groups, group, draw, rank, codes.device) if method.rotate else None
        sent = decode(unpack(packed.view(groups, -1), method).to(torch.float32), scale, book, signs)
        total = sent if rank == first_rank else total + sent
    return total.view(-1)[:numel]


def decode(codes: Tensor, scale: Tensor, book: CodeBook, signs: Tensor | None) -> Tensor:
    """What codes [..., groups, group] with scales [..., groups] stand for."""
    values = (codes + book.after) * scale.unsqueeze(-1).to(torch.float32)
    return values if signs is None else hadamard(values) * signs


# --- pieces ---------------------------------------------------------------------------------------------------------


def hadamard(values: Tensor) -> Tensor:
    """The Hadamard transform, not normalised, of blocks of 32 in groups [..., group].

    A block is every (group / 32)-th element: butterflies between elements that are far apart are those that vector
    units like.
    """
    group = values.shape[-1]
    distance = group // 2
    for _ in range(STAGES):
        pairs = values.unflatten(-1, (group // (2 * distance), 2, distance))
        first, second = pairs.unbind(-2)
        values = torch.stack([first + second, first - second], -2).flatten(-3)
        distance //= 2
    return values


def fold(values: Tensor) -> Tensor:
    """The sum over the last dim, a power of two, kept: its second half added to its first, again and again."""
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first + second
    return values


def draw_signs(groups: int, group: int, draw: Draw, rank: int, device: torch.device | None = None) -> Tensor:
    """[groups, group] of 1 and -1 on a device, by default the CPU, by step, rank and place in the chunk.

    Bit i // 32 of a hash of (32 g + i % 32) is the sign of element i of group g.
    """
    key = sign_key(draw, rank)
    words = hash_32(torch.arange(groups * HADAMARD, dtype=torch.int64, device=device).bitwise_xor(key))
    bits = words.view(groups, 1, HADAMARD) >> torch.arange(group // HADAMARD, device=device).view(1, -1, 1)
    return (1.0 - 2.0 * (bits & 1)).to(torch.float32).view(groups, group)


def sign_key(draw: Draw, rank: int) -> int:
    """32 bits that differ from rank to rank and from step to step."""
    mixed = draw.step * 0x9E3779B1 + rank * 0x85EBCA77 + draw.salt * 0xC2B2AE3D + 1
    return int(hash_32(torch.tensor(mixed & _MASK, dtype=torch.int64)).item())


def hash_32(words: Tensor) -> Tensor:
    """A hash of 32-bit words, kept in int64: Wellons' "lowbias32", whose bits hardly depend on one another."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & _MASK
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & _MASK
    return words ^ (words >> 16)


def pack(codes: Tensor, method: BlockMethod) -> Tensor:
    """int8 codes [..., group] as bytes [..., group * bits / 8].

    A group is cut into 8 / bits stretches of equal length; a byte holds the codes of equal place in each, that of the
    first stretch in its lowest bits.
    """
    if method.bits == 8:
        return codes.view(torch.uint8)
    stretches = codes.view(torch.uint8).chunk(8 // method.bits, -1)
    mask = method.levels - 1
    packed = stretches[0] & mask
    for place, stretch in enumerate(stretches[1:], 1):
        packed = packed | ((stretch & mask) << (place * method.bits))
    return packed


def unpack(packed: Tensor, method: BlockMethod) -> Tensor:
    """int8 codes [..., group] of bytes [..., group * bits / 8]."""
    if method.bits == 8:
        return packed.view(torch.int8)
    half, mask = method.levels // 2, method.levels - 1
    stretches: Sequence[Tensor] = [
        (((packed >> (place * method.bits)) & mask).to(torch.int8) ^ half) - half for place in range(8 // method.bits)
    ]
    return torch.cat(tuple(stretches), -1)


# --- buckets --------------------------------------------------------------------------------------------------------


def quantize_bucket(
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    layout: BucketLayout,
    draw: Draw,
    rank: int,
    payload: Tensor,
) -> None:
    """Fill the payload of a bucket.

    Args:
        grads: contiguous, any shape; what a gradient lacks to `stretches * world * numel` counts as zeros.
        states: of each, see `quantize`; updated in place.
        layout: of the bucket; its method is a BlockMethod.
        draw, rank: which signs.
        payload: [world, payload_bytes] uint8, zeros.
    """
    method = _block_method(layout)
    chunks = layout.stretches * layout.world
    for grad, numel, state, views in zip(grads, layout.numels, states, layout.views(payload), strict=True):
        flat = torch.nn.functional.pad(grad.reshape(-1), (0, chunks * numel - grad.numel()))
        codes, scales = quantize(flat.view(chunks, numel), state, method, draw, rank)
        for view, section in zip(views, (codes, scales.view(torch.uint8)), strict=True):
            view.copy_(section.view(layout.stretches, layout.world, -1).transpose(0, 1))


def dequantize_sum_bucket(
    received: Tensor,
    layout: BucketLayout,
    draw: Draw,
    first_rank: int,
    divisor: int,
    outputs: Sequence[Tensor],
    *,
    accumulate: bool = False,
) -> None:
    """Sum what the ranks have sent, divide once, and store.

    Args:
        received: [ranks, payload_bytes] uint8, from ranks first_rank, first_rank + 1, ... of the group.
        layout, draw: those of the senders.
        first_rank: whose signs the first row has.
        divisor: of the sum; 1 leaves it as it is.
        outputs: [stretches * numel] in any floating-point dtype for each gradient; overwritten.
        accumulate: add to the outputs instead, in fp32 (fp64 where an output is) before it is rounded to its dtype.
    """
    method = _block_method(layout)
    for numel, views, output in zip(layout.numels, layout.views(received), outputs, strict=True):
        for stretch in range(layout.stretches):
            codes, scales = views[0][:, stretch], views[1][:, stretch].contiguous().view(SCALE_DTYPE)
            total = dequantize_sum(codes, scales, numel, method, draw, first_rank)
            result = total / divisor if divisor > 1 else total
            place = output.view(layout.stretches, numel)[stretch]
            place.copy_(place + result if accumulate else result)


def dequantize_each_bucket(received: Tensor, layout: BucketLayout, draw: Draw, outputs: Sequence[Tensor]) -> None:
    """Store what each rank has sent, rank after rank: the other end of a gather.

    Args:
        received: [ranks, payload_bytes] uint8, from ranks 0, 1, ... of the group; rows may lie apart.
        layout, draw: those of the senders; the layout is that of a world of one, with one stretch.
        outputs: [ranks, numel] in any floating-point dtype for each tensor; overwritten.
    """
    for rank in range(received.shape[0]):
        parts = [output[rank] for output in outputs]
        dequantize_sum_bucket(received[rank : rank + 1], layout, draw, rank, 1, parts)


def _block_method(layout: BucketLayout) -> BlockMethod:
    assert isinstance(layout.method, BlockMethod), "kernels know zgraph's own methods"
    return layout.method
