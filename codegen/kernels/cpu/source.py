"""Generates the C++ of the compression kernels for CPUs, which `zgraph.codegen.kernels.cpu.blocks` compiles and calls.

Method and dtype are compile-time constants; sizes, ranks, the step and pointers are arguments.
"""

from __future__ import annotations

import math
from importlib import resources
from types import MappingProxyType

import torch

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.reference import CodeBook
from zgraph.compression import exact_arithmetic as exact
from zgraph.compression.methods import HADAMARD, SCALE_DTYPE, BlockMethod

C_TYPES = MappingProxyType({torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "Half"})


def emit_quantize(method: BlockMethod, grad_dtype: torch.dtype) -> str:
    """Return the C++ source of `extern "C" void quantize(...)` for gradients of `grad_dtype`.

    Raises:
        KeyError: the dtype is not in C_TYPES.
    """
    wire, error = _wire_bytes(method), _error_bytes(method)
    coded = "H (signs * compensated), H being a Hadamard transform of 32 elements" if method.rotate else "compensated"
    what = f"""\
Quantizes gradients plus the error of earlier ones, and updates the error.

    compensated = grad + error
    codes, scale = quantized {coded}
    error = RESIDUAL_DECAY * error + RESIDUAL_GAIN * (compensated - decoded codes)

grad      [present] {C_TYPES[grad_dtype]}: [stretches * world, numel]; missing elements count as zeros
error     {_error_shape(method)}
payload   [world, row_bytes] uint8: {_sections(method)}

Bytes per element: {grad_dtype.itemsize} of gradient, {error:.3f} of error, read and written, {wire:.3f} of codes and
scale; {grad_dtype.itemsize + error + wire:.3f} in all."""
    return _comment(what) + _constants(method, "Grad", grad_dtype) + _template("common") + _template("quantize")


def emit_dequantize(method: BlockMethod, output_dtype: torch.dtype) -> str:
    """Return the C++ source of `extern "C" void dequantize_sum(...)` for outputs of `output_dtype`.

    Raises:
        KeyError: the dtype is not in C_TYPES.
    """
    what = f"""\
The sum of the decoded values of all ranks, {"each rotated back, " if method.rotate else ""}divided once.

received  [ranks, row_bytes] uint8: {_sections(method)}
output    [stretches, numel] {C_TYPES[output_dtype]}, overwritten or added to

Bytes per element of the output: {_wire_bytes(method):.3f} for each rank, and {output_dtype.itemsize} to store it."""
    return _comment(what) + _constants(method, "Output", output_dtype) + _template("common") + _template("dequantize")


def emit_multiply(method: BlockMethod) -> str:
    """Return the C++ source of `extern "C" void multiply(...)` and `multiply_rows(...)`."""
    what = f"""\
Products of inputs and a weight that is stored as codes; each code is decoded in a register. For inputs @ weight.T
`multiply` adds up along a row of the weight, for inputs @ weight `multiply_rows` adds up rows.

received  [ranks, row_bytes] uint8: {_sections(method)}, of rank_rows rows of the weight
multiply
    inputs    [input_rows, numel] float
    outputs   [input_rows, weight_rows] float
multiply_rows
    inputs    [input_rows, weight_rows] float
    outputs   [input_rows, columns] float

Bytes per weight: {_wire_bytes(method):.3f}."""
    parts = map(_template, ("common", "dequantize", "multiply", "multiply_rows"))
    return _comment(what) + _constants(method, "Output", torch.float32) + "".join(parts)


def _template(name: str) -> str:
    """Return the text of a C++ file, which uses the constants emitted before it."""
    return resources.files("zgraph.codegen.kernels.cpu").joinpath(f"{name}.cpp").read_text()


def _comment(text: str) -> str:
    return "".join(f"// {line}".rstrip() + "\n" for line in text.splitlines())


def _sections(method: BlockMethod) -> str:
    codes = method.group * method.bits // 8
    return f"for each gradient codes [stretches, groups, {codes}], scales [stretches, groups] bf16"


def _error_shape(method: BlockMethod) -> str:
    if method.residual_decay is None:
        return "none is kept"
    if method.error_dtype.is_floating_point:
        return f"[stretches * world, groups, {method.group}] float"
    return f"[stretches * world, groups, {method.group}] int8, error_scale [stretches * world, groups] bf16"


def _error_bytes(method: BlockMethod) -> float:
    """Return the bytes of error-feedback state read and written per element."""
    if method.residual_decay is None:
        return 0.0
    scale = 0.0 if method.error_dtype.is_floating_point else SCALE_DTYPE.itemsize / method.group
    return 2 * (method.error_dtype.itemsize + scale)


def _wire_bytes(method: BlockMethod) -> float:
    """Return the bytes sent per element: codes, and a share of the group's scale."""
    return method.bits / 8 + SCALE_DTYPE.itemsize / method.group


def _constants(method: BlockMethod, name: str, dtype: torch.dtype) -> str:
    book = CodeBook.of(method)
    slopes = ", ".join(_literal(book.slope(clip)) for clip in book.clips)
    clipped = ", ".join(str(clip != 1).lower() for clip in book.clips)
    nan_bits = torch.full((1,), math.nan).to(SCALE_DTYPE).view(torch.uint16).item()
    feedback = method.residual_decay is not None
    share = method.residual_decay or 0.0
    return f"""
#include <stdint.h>
#include <string.h>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

struct Bf16 {{ uint16_t bits; }};
struct Half {{ uint16_t bits; }};

using {name} = {C_TYPES[dtype]};

constexpr int GROUP = {method.group};  // elements that share a scale
constexpr int BITS = {method.bits};
constexpr bool ROTATE = {str(method.rotate).lower()};
constexpr int CLIPS = {len(book.clips)};
constexpr bool CLIPPED[CLIPS] = {{{clipped}}};  // whether a clipping level is below the largest magnitude
constexpr float SLOPES[CLIPS] = {{{slopes}}};
constexpr int TOP = {book.top};  // the largest of the integers that values become
constexpr int STEP = {book.step};  // integers that share a code
constexpr float AFTER = {_literal(book.after)};  // added to a code when it is read
constexpr float LOW = {_literal(book.low)}, HIGH = {_literal(book.high)};
constexpr float UNIT = {_literal(book.unit)};
constexpr bool EXACT_SUMS = {str(reference.sums_are_exact(method)).lower()};
constexpr bool FEEDBACK = {str(feedback).lower()};
constexpr bool ERROR_INT8 = {str(method.error_dtype == torch.int8).lower()};
using Error = {"int8_t" if method.error_dtype == torch.int8 else "float"};
constexpr float RESIDUAL_DECAY = {_literal(share)}, RESIDUAL_GAIN = {_literal(1 - share)};
constexpr float OLD_OVER_LOST = {_literal(share / (1 - share))};
constexpr float TINY = {_literal(reference.TINY)};
constexpr float LOST_SHARE_127TH = {_literal((1 - share) / 127)};
constexpr int32_t RECIPROCAL = {exact.RECIPROCAL:#010x};
constexpr int NEWTON_STEPS = {exact.NEWTON_STEPS};
constexpr int32_t HUGE_BITS = {reference.HUGE_BITS:#010x};  // of magnitudes that count as not finite
constexpr bool UNBIASED = {str(reference.is_unbiased(method)).lower()};
constexpr uint16_t NO_NUMBER = {reference.NO_NUMBER:#06x};  // the scale of a group that is not finite
constexpr uint16_t BF16_NAN = {nan_bits:#06x};  // as torch makes it here

constexpr int HADAMARD = {HADAMARD};"""


def _literal(value: float) -> str:
    """Return a number as a C++ fp32 literal that is exact after rounding to fp32."""
    return f"{torch.tensor(value, dtype=torch.float32).item()!r}f"
