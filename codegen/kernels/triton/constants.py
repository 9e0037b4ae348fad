"""Compile-time constants of the compression kernels: everything that differs between methods or dtypes.

A kernel receives them as one constexpr argument. It must read fields only, not properties, because Triton's cache
identifies a kernel by the text of its constants, even across versions of zgraph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from zgraph.codegen.kernels.reference import RUN, CodeBook, is_unbiased, sums_are_exact
from zgraph.compression.exact_arithmetic import fp32
from zgraph.compression.methods import HADAMARD, BlockMethod


@dataclass(frozen=True, kw_only=True)
class BlockConstants:
    """Compile-time constants: layout of groups of elements, and of their codes, in a program (see `blocks`).

    Attributes:
        bits: bits of a code.
        group: number of elements that share a scale.
        rotate: whether blocks are Hadamard-transformed, with random signs.
        stripes: number of elements of a block, which one thread owns.
        places: number of blocks of a group.
        stripe_halvings, place_halvings: base-2 logarithms of stripes and places.
        runs: number of runs of RUN neighbouring elements in a block.
        code_bytes: bytes of a group's codes.
        code_run: bytes of codes in one load or store of a thread.
        code_runs: number of such loads or stores per block.
        code_alignment: alignment of a group's codes, in bytes.
        after: b, added to a code when it is decoded.
        aligned: whether all gradients or outputs, and all their chunks, begin at multiples of 16 bytes and have
            complete runs only, so that 16 bytes can be moved at once.
    """

    bits: int
    group: int
    rotate: bool
    stripes: int
    places: int
    stripe_halvings: int
    place_halvings: int
    runs: int
    code_bytes: int
    code_run: int
    code_runs: int
    code_alignment: int
    after: float
    aligned: bool


@dataclass(frozen=True, kw_only=True)
class QuantizeConstants(BlockConstants):
    """Compile-time constants of the kernel that quantizes gradients; symbols as in the docstring of `reference`.

    Attributes:
        grad: name of the gradients' dtype in torch and Triton.
        error: dtype of the error-feedback state, or "none".
        error_alignment: alignment of a group's error, in bytes.
        old_factor: residual_decay / residual_gain, for int8 errors.
        residual_decay: weight of the old error in the new error-feedback state.
        residual_gain: weight of the new quantization error in the new state.
        error_unit: scale of an int8 error whose largest magnitude is 1.
        contracts: whether all added products are exact, so that multiply-adds may be fused.
        exact_sums: whether sums over a group's integers have the same bits in any order.
        unbiased: whether the scale is the unbiased one rather than the least-squares one.
        slopes: factor of u at each clipping level, see `CodeBook.slope`.
        clipped: whether each clipping level is below the largest magnitude.
        begins: for each clipping level, the offset that turns rounded integers, divided by step, into levels.
        top: K, the largest integer u.
        intervals: number of intervals of the grid of integers u between the two clips.
        step: number of integers u that share a level.
        low, high: smallest and largest code.
        unit: scale of a group whose largest magnitude is 1.
    """

    grad: str
    error: str
    error_alignment: int
    old_factor: float
    residual_decay: float
    residual_gain: float
    error_unit: float
    contracts: bool
    exact_sums: bool
    unbiased: bool
    slopes: tuple[float, ...]
    clipped: tuple[bool, ...]
    begins: tuple[float, ...]
    top: int
    intervals: float
    step: int
    low: float
    high: float
    unit: float


@dataclass(frozen=True, kw_only=True)
class DequantizeConstants(BlockConstants):
    """Compile-time constants of the kernel that decodes payloads.

    Attributes:
        output: name of the outputs' dtype in torch and Triton.
        accumulate: whether values are added to the outputs.
        each: whether each rank's values become a row of the outputs, instead of being summed.
        divides: whether sums are divided, by IEEE division; otherwise they are multiplied by the reciprocal.
        signs: mask that flips the sign bits of all codes in a byte, so that the lowest code becomes 0.
        word_signs: the same mask for a word of four bytes.
        middle: fp32 number that represents level 0 when codes are inserted into its bits.
    """

    output: str
    accumulate: bool
    each: bool
    divides: bool
    signs: int
    word_signs: int
    middle: float


@functools.lru_cache(maxsize=1024)
def quantize_constants(method: BlockMethod, dtype: torch.dtype, *, aligned: bool) -> QuantizeConstants:
    """Return the constants for gradients of one dtype."""
    book, share = CodeBook.of(method), method.residual_decay
    lost = 1.0 if share is None else 1 - share
    clipped = tuple(book.rotated and clip != 1 for clip in book.clips)
    return QuantizeConstants(
        **_shared(method),
        aligned=aligned,
        grad=dtype_name(dtype),
        error="none" if share is None else dtype_name(method.error_dtype),
        error_alignment=min(16, method.group),
        old_factor=fp32((share or 0.0) / lost),
        residual_decay=fp32(share or 0.0),
        residual_gain=fp32(lost),
        error_unit=fp32(lost / 127),
        contracts=may_contract(method),
        exact_sums=sums_are_exact(method),
        unbiased=is_unbiased(method),
        slopes=tuple(book.slope(clip) for clip in book.clips),
        clipped=clipped,
        begins=tuple(0.5 - (3 * 2**22 + (book.top + 1 if below else 0)) / book.step for below in clipped),
        top=book.top,
        intervals=float(2 * book.top + 1),
        step=book.step,
        low=float(book.low),
        high=float(book.high),
        unit=book.unit,
    )


@functools.lru_cache(maxsize=1024)
def dequantize_constants(
    method: BlockMethod, dtype: torch.dtype, *, accumulate: bool, each: bool, divides: bool, aligned: bool
) -> DequantizeConstants:
    """Return the constants for outputs of one dtype."""
    half = method.levels // 2
    signs = sum(half << place for place in range(0, 8, method.bits))
    return DequantizeConstants(
        **_shared(method),
        aligned=aligned,
        output=dtype_name(dtype),
        accumulate=accumulate,
        each=each,
        divides=divides,
        signs=signs,
        word_signs=signed(signs * 0x01010101),
        middle=float(2**22 + half - CodeBook.of(method).after),
    )


def may_contract(method: BlockMethod) -> bool:
    """Return whether multiplications may be fused with additions, because all added products are exact.

    For int8 errors, the bits of scale (8), code (7) and factor must fit into the 24 bits of an fp32 mantissa.
    """
    share = method.residual_decay
    if share is not None and method.error_dtype.is_floating_point:
        return False
    factor = torch.tensor(0.0 if share is None else fp32(share / (1 - share))).view(torch.int32).item()
    return sums_are_exact(method) and factor % 2 ** (23 - 8) == 0


def stripes_of(method: BlockMethod) -> int:
    """Return the number of elements of a block, which one thread owns."""
    return min(HADAMARD, method.group)


def signed(word: int) -> int:
    """Reinterpret an unsigned 32-bit integer as signed, because Triton accepts only int32."""
    return word - 2**32 if word >= 2**31 else word


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shared(method: BlockMethod) -> dict[str, Any]:
    stripes = stripes_of(method)
    places, code_bytes = method.group // stripes, stripes * method.bits // 8  # bytes of a block
    return {
        "bits": method.bits,
        "group": method.group,
        "rotate": method.rotate,
        "stripes": stripes,
        "places": places,
        "stripe_halvings": stripes.bit_length() - 1,
        "place_halvings": places.bit_length() - 1,
        "runs": stripes // RUN,
        "code_bytes": method.group * method.bits // 8,
        "code_run": min(RUN, code_bytes),
        "code_runs": max(1, code_bytes // RUN),
        "code_alignment": min(16, method.group * method.bits // 8),
        "after": CodeBook.of(method).after,
    }
