"""The compression kernels in plain PyTorch; the C++ and Triton kernels give bitwise equal results.

Each group of elements x is sent as integer codes c and one bf16 scale s. The receiver decodes s (c + b):

    y = H (signs * x)            H: Hadamard transform of 32 elements, not normalised; signs of this rank and step
    u = round(K y / max|y|)      integers up to K = 511; with 8 bits, K = 32767
    c = clamp(floor(k u))        k = levels / 2 / (K + 1) / clip, for the clip with the largest <u, c + b>^2 / |c + b|^2
    s = max|y| / K <u, u> / <u, c + b> / 32

Here levels is 2^bits, clip is a clipping level as a share of the largest magnitude, and <x, y> is the inner product.

With rotation by H, values look Gaussian: codes represent the middles of their intervals (b = 1/2), and all levels are
used. Without rotation, y = x and s has no factor 1/32; codes are rounded to nearest, and zero has a code of its own
(b = 0, one level fewer).

The scale s makes the result unbiased along y: <y, s (c + b)> = <y, y>. A least-squares scale would shrink each gradient
by the loss due to clipping (as in Suresh et al. 2017, arXiv 1611.00429, rotation before quantization; Vargaftik et al.
2021, DRIVE, arXiv 2105.08339, section 4, unbiased scale). Error feedback without rotation does use the least-squares
scale, s = max|y| / K <u, c + b> / |c + b|^2: the error is then never longer than the input, and the shrinkage is part
of the error, which is sent later. With the unbiased scale, classic error feedback can diverge, as it does with 2 bits
on heavy-tailed inputs.

Values are fp32 until they are stored. Every operation rounds separately, except three fused multiply-adds: rounding a
product to an integer, `clip_share`, and a step of `reciprocal`. Sums over up to 128 integers u are exact in any order
(for |u|^2 only the last addition rounds); other sums are in the order of `fold`. Decoding is exact: a sum of at most 32
codes needs 13 bits, and a scale needs 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from zgraph.compression.exact_arithmetic import fp32, reciprocal, round_product
from zgraph.compression.methods import HADAMARD, SCALE_DTYPE, BlockMethod, RngKey
from zgraph.compression.payload import BucketLayout
from zgraph.compression.residual_codec import TINY, decode_error, encode_error

RUN = 8  # neighbours that belong to the same block
_MASK = 0xFFFFFFFF
# A group with a value of at least 2^100 (given as bits) counts as not finite: decoded values or its error may overflow.
HUGE_BITS = 0x71800000
NO_NUMBER = 0x7FC0  # a bf16 NaN: torch's own bits differ from kernel to kernel


@dataclass(frozen=True)
class CodeBook:
    """Parameters of the mapping from the integers u of a group to codes c, as defined in this module's docstring.

    Attributes:
        clips: clipping levels to try, as shares of the largest magnitude.
        top: K, the largest u.
        after: b, added to a code when it is decoded.
        low, high: smallest and largest code.
    """

    clips: tuple[float, ...]
    top: int
    after: float
    low: int
    high: int

    @classmethod
    def of(cls, method: BlockMethod) -> CodeBook:
        half, top = method.levels // 2, 511 if method.bits <= 4 else 32767
        if method.rotate:
            return cls(method.clips, top, 0.5, -half, half - 1)
        return cls(method.clips, top, 0.0, 1 - half, half - 1)

    @property
    def rotated(self) -> bool:
        return self.after != 0

    @property
    def step(self) -> int:
        """Number of integers u that share a code, for rotated values without clipping."""
        return 2 * (self.top + 1) // (self.high - self.low + 1)

    def slope(self, clip: float) -> float:
        """Return the factor that turns u into a code or, with rotation, into a position between the two clips."""
        return fp32(0.5 / (self.top + 1) / clip if self.rotated else self.high / self.top / clip)

    @property
    def unit(self) -> float:
        """Scale of a group whose largest magnitude is 1, before the correction by the group's codes."""
        return fp32(1 / self.top / (HADAMARD if self.rotated else 1))


def sums_are_exact(method: BlockMethod) -> bool:
    """Return whether sums over a group's integers have the same bits in any order of additions."""
    return method.bits <= 4 and method.group <= 128


Words = TypeVar("Words", int, Tensor)


# --- quantize -------------------------------------------------------------------------------------------------------


def quantize(
    grad: Tensor, state: dict[str, Tensor], method: BlockMethod, draw: RngKey, rank: int
) -> tuple[Tensor, Tensor]:
    """Quantize a gradient plus the error left by the previous gradient, and update the error.

    Args:
        grad: [chunks, numel] in any floating-point dtype.
        state: "error" [chunks, groups, group] and, for an int8 error, "error_scale" [chunks, groups]; updated in place,
            except for groups with a gradient that is not finite. Empty if the method keeps no error.
        method: compression method.
        draw, rank: key of the random signs, and this rank; the signs depend on both.

    Returns:
        codes [chunks, groups * group * bits / 8] uint8; scales [chunks, groups] bf16, NaN if a group is not finite.
    """
    chunks, numel = grad.shape
    groups, group = method.groups(numel), method.group
    given = grad.to(torch.float32)
    if groups * group != numel:
        given = torch.nn.functional.pad(given, (0, groups * group - numel))
    given = given.view(chunks, groups, group)
    old = read_error(state)
    compensated = given if old is None else given + old
    book = CodeBook.of(method)
    signs = draw_signs(groups, group, draw, rank, grad.device) if method.rotate else None
    rotated = compensated if signs is None else hadamard(compensated * signs)

    largest = rotated.abs().amax(-1, keepdim=True)
    finite = largest.view(torch.int32) < HUGE_BITS
    used = finite & (largest >= TINY)
    inverse = torch.where(used, reciprocal(largest) * book.top, 0.0)
    integers = torch.where(finite, round_product(rotated, inverse), 0.0)

    levels = best_levels(integers, book)
    along = fold(integers * levels)
    over, under = (fold(integers * integers), along) if is_unbiased(method) else (along, fold(levels * levels))
    ratio = torch.where(used, over * reciprocal(under), 0.0)
    scale = (ratio * torch.where(used, largest * book.unit, 0.0)).to(SCALE_DTYPE)
    scale.view(torch.int16).masked_fill_(~finite, NO_NUMBER)

    if old is not None and method.residual_decay is not None:
        keep_error(state, compensated, decode(levels, scale.squeeze(-1), signs), method.residual_decay, finite)
    codes = (levels - book.after).to(torch.int8)
    return pack(codes, method).view(chunks, -1), scale.view(chunks, groups)


def is_unbiased(method: BlockMethod) -> bool:
    """Return whether a method uses the unbiased scale rather than the least-squares scale."""
    return method.rotate or method.residual_decay is None


def best_levels(integers: Tensor, book: CodeBook) -> Tensor:
    """Return levels c + b for integers u [..., group], at the clipping level whose levels align best with u."""
    best, *others = (levels_of(integers, clip, book) for clip in book.clips)
    if not others:
        return best
    along, square = fold(integers * best), fold(best * best)
    for levels in others:
        this_along, this_square = fold(integers * levels), fold(levels * levels)
        better = this_along * this_along * square > along * along * this_square
        best = torch.where(better, levels, best)
        along, square = torch.where(better, this_along, along), torch.where(better, this_square, square)
    return best


def levels_of(integers: Tensor, clip: float, book: CodeBook) -> Tensor:
    """Return levels c + b for integers u [...], at one clipping level."""
    if not book.rotated:
        return round_product(integers, book.slope(clip)).clamp(book.low, book.high)
    if clip != 1:
        share = clip_share(integers, book.slope(clip))
        integers = round_product(share, 2 * book.top + 1) - (book.top + 1)
    return torch.floor(integers / book.step) + book.after


def clip_share(integers: Tensor, slope: float) -> Tensor:
    """Return the position of u between the lower and upper clip, from 0 to 1: u * slope + 1/2, rounded once."""
    return (integers.double() * slope + 0.5).to(torch.float32).clamp(0, 1)


def read_error(state: dict[str, Tensor]) -> Tensor | None:
    """Return the error-feedback state in fp32 [chunks, groups, group]; None if the method keeps none."""
    if "error" not in state:
        return None
    return decode_error(state["error"], state["error_scale"]) if "error_scale" in state else state["error"]


def keep_error(
    state: dict[str, Tensor], compensated: Tensor, sent: Tensor, residual_decay: float, finite: Tensor
) -> None:
    """Store the new error, residual_decay * old error + (1 - residual_decay) * (compensated - sent), in `state`.

    Groups that are not `finite` [chunks, groups, 1] keep their old error.
    """
    if "error_scale" not in state:
        new = fp32(residual_decay) * state["error"] + fp32(1 - residual_decay) * (compensated - sent)
        state["error"].copy_(torch.where(finite, new, state["error"]))
        return
    # Everything is divided by 1 - residual_decay, so that the factor only enters the scale. The old error is added
    # first, so that a kernel no longer needs it once it knows the values that are sent.
    wide = state["error_scale"].unsqueeze(-1).to(torch.float32) * fp32(residual_decay / (1 - residual_decay))
    new = compensated + state["error"].to(torch.float32) * wide - sent
    codes, scale = encode_error(new, residual_decay)
    state["error"].copy_(torch.where(finite, codes, state["error"]))
    state["error_scale"].copy_(torch.where(finite.squeeze(-1), scale, state["error_scale"]))


# --- dequantize -----------------------------------------------------------------------------------------------------


def dequantize_sum(
    codes: Tensor, scales: Tensor, numel: int, method: BlockMethod, draw: RngKey, first_rank: int = 0
) -> Tensor:
    """Return the sum of the decoded values of all ranks, in rank order.

    Args:
        codes: [ranks, groups * group * bits / 8] uint8.
        scales: [ranks, groups] bf16.
        numel: number of elements of the chunk; the padding of its last group is dropped.
        method: compression method.
        draw: key of random signs that the senders used.
        first_rank: rank, in the process group, that sent the first row.

    Returns:
        [numel] fp32.
    """
    groups, group = scales.shape[1], method.group
    book = CodeBook.of(method)
    total = torch.zeros(groups, group, device=codes.device)
    for rank, (packed, scale) in enumerate(zip(codes, scales, strict=True), first_rank):
        signs = draw_signs(groups, group, draw, rank, codes.device) if method.rotate else None
        sent = decode(unpack(packed.view(groups, -1), method) + book.after, scale, signs)
        total = sent if rank == first_rank else total + sent
    return total.view(-1)[:numel]


def decode(levels: Tensor, scale: Tensor, signs: Tensor | None) -> Tensor:
    """Decode `levels` [..., groups, group] with `scale` [..., groups] and, if rotated, the random signs."""
    wide = scale.unsqueeze(-1).to(torch.float32)
    return levels * wide if signs is None else hadamard(levels) * (wide * signs)


# --- pieces ---------------------------------------------------------------------------------------------------------


def to_blocks(values: Tensor) -> Tensor:
    """Cut groups into blocks of 32 elements: [..., group] -> [..., blocks, 32], or [..., 1, group] for smaller groups.

    A block has runs of 8 neighbouring elements, group / 4 elements apart: element 8 * blocks * a + 8 * b + c of a group
    is at place 8 * a + c of block b. A GPU thread keeps one block in its registers. It therefore reads 8 elements at
    once, neighbouring threads read neighbouring runs, and a byte of codes only has elements of one block.
    """
    places = min(values.shape[-1], HADAMARD)
    return values.unflatten(-1, (places // RUN, -1, RUN)).transpose(-3, -2).flatten(-2)


def from_blocks(values: Tensor) -> Tensor:
    """Undo `to_blocks`."""
    return values.unflatten(-1, (-1, RUN)).transpose(-3, -2).flatten(-3)


def hadamard(values: Tensor) -> Tensor:
    """Hadamard-transform each block of 32 elements in groups [..., group], not normalised, widest butterflies first."""
    values = to_blocks(values)
    distance = HADAMARD // 2
    while distance:
        pairs = values.unflatten(-1, (HADAMARD // (2 * distance), 2, distance))
        first, second = pairs.unbind(-2)
        values = torch.stack([first + second, first - second], -2).flatten(-3)
        distance //= 2
    return from_blocks(values)


def fold(values: Tensor) -> Tensor:
    """Sum over the last dim (a group), with keepdim: first within blocks of 32, then over blocks.

    Each of the two sums repeatedly adds the second half of the numbers to the first half.
    """
    return _halve(_halve(to_blocks(values)).squeeze(-1))


def _halve(values: Tensor) -> Tensor:
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first + second
    return values


def draw_signs(groups: int, group: int, draw: RngKey, rank: int, device: torch.device | None = None) -> Tensor:
    """Return random signs, 1 or -1, as [groups, group] on `device` (default: CPU).

    They depend on step, rank and position: the sign at place p of a block is bit 31 - p of a hash of the block's number
    in the chunk.
    """
    key, blocks = sign_key(draw, rank), group // HADAMARD
    words = hash_32(torch.arange(groups * blocks, dtype=torch.int64, device=device).bitwise_and(_MASK).bitwise_xor(key))
    bits = words.view(groups, blocks, 1) >> torch.arange(HADAMARD - 1, -1, -1, device=device)
    return from_blocks((1.0 - 2.0 * (bits & 1)).to(torch.float32))


def sign_key(draw: RngKey, rank: int) -> int:
    """Return 32 bits that differ between ranks and between steps."""
    mixed = draw.step * 0x9E3779B1 + rank * 0x85EBCA77 + draw.salt * 0xC2B2AE3D + 1
    return hash_32(mixed & _MASK)


def hash_32(words: Words) -> Words:
    """Hash 32-bit words, given as int64 or int, by Wellons' "lowbias32", whose bits are nearly independent."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & _MASK
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & _MASK
    return words ^ (words >> 16)


def pack(codes: Tensor, method: BlockMethod) -> Tensor:
    """Pack int8 codes into bytes: [..., group] -> [..., group * bits / 8].

    A group is cut into 8 / bits equal parts. Byte i holds code i of every part, beginning with the first part in the
    lowest bits.
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
    """Unpack bytes into int8 codes: [..., group * bits / 8] -> [..., group]."""
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
    draw: RngKey,
    rank: int,
    payload: Tensor,
) -> None:
    """Quantize the gradients of a bucket into its payload.

    Args:
        grads: contiguous gradients of any shape, treated as padded to `stretches * world * numel` elements by zeros.
        states: error-feedback state of each gradient, see `quantize`; updated in place.
        layout: layout of the bucket; its method is a BlockMethod.
        draw, rank: key of the random signs, and this rank; the signs depend on both.
        payload: [world, payload_bytes] uint8, zeros; overwritten.
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
    draw: RngKey,
    first_rank: int,
    divisor: int,
    outputs: Sequence[Tensor],
    *,
    accumulate: bool = False,
) -> None:
    """Sum the decoded values of all ranks, divide once, and store the result.

    Args:
        received: [ranks, payload_bytes] uint8, from ranks first_rank, first_rank + 1, ... of the group.
        layout, draw: the senders' layout and key of random signs.
        first_rank: rank that sent the first row.
        divisor: divisor of the sum; 1 leaves it unchanged.
        outputs: [stretches * numel] in any floating-point dtype for each gradient; overwritten.
        accumulate: add the result to the outputs, in fp32 (fp64 for fp64 outputs), then round to their dtype.
    """
    method = _block_method(layout)
    for numel, views, output in zip(layout.numels, layout.views(received), outputs, strict=True):
        for stretch in range(layout.stretches):
            codes, scales = views[0][:, stretch], views[1][:, stretch].contiguous().view(SCALE_DTYPE)
            total = dequantize_sum(codes, scales, numel, method, draw, first_rank)
            result = total / divisor if divisor > 1 else total
            place = output.view(layout.stretches, numel)[stretch]
            place.copy_(place + result if accumulate else result)


def dequantize_each_bucket(received: Tensor, layout: BucketLayout, draw: RngKey, outputs: Sequence[Tensor]) -> None:
    """Decode the rows of all ranks into separate rows of the outputs, after a gather.

    Args:
        received: [ranks, payload_bytes] uint8, from ranks 0, 1, ... of the group; rows need not be adjacent.
        layout: the senders' layout, in which world and stretches are 1.
        draw: the senders' key of random signs.
        outputs: [ranks, numel] in any floating-point dtype for each tensor; overwritten.
    """
    for rank in range(received.shape[0]):
        parts = [output[rank] for output in outputs]
        dequantize_sum_bucket(received[rank : rank + 1], layout, draw, rank, 1, parts)


def _block_method(layout: BucketLayout) -> BlockMethod:
    assert isinstance(layout.method, BlockMethod), "kernels know zgraph's own methods"
    return layout.method
