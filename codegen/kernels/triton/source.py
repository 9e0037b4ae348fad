"""Pieces that emitted Triton kernels share, and how a kernel's source becomes one that runs.

Checked with Triton 3.7.1 (which torch 2.13 brings):

- `enable_fp_fusion=False`, given at launch, keeps a multiplication and an addition apart: LLVM writes mul.rn and
  add.rn, which ptxas does not contract, and ptxas gets --fmad=false. Both keep denormals. Where all products that are
  added are exact, contracting them changes nothing, and kernels allow it.
- `/` compiles to div.full, which is off by up to two units in the last place; `tl.div_rn` is IEEE's division.
- The interpreter rounds to bfloat16 wrongly, so bfloat16 is read and written as integers here, to nearest even. A NaN
  becomes 0x7FC0 here, where cvt.rn.bf16 gives 0x7FFF.
- `tl.sum` adds in an order of its own, so it only ever adds two numbers here, or some whose sum is exact.
- `tl.full` makes 0.0 of -0.0.
- `tl.clamp` between 0 and 1 costs nothing: ptxas saturates the operation before it.

How a group lies in a program. A thread owns a block, see `reference.to_blocks`: what a rotation mixes, and what the
first additions of a sum meet, stays in its registers. Memory is read and written as [runs, THREADS, RUN], of which
Triton's layout gives each thread one run of 8 elements after another; inside, values are *in stripes*, [places of a
block, THREADS] flattened, of which it has a column. Between both no value leaves its thread.

No kernel knows how many gradients a bucket has, or of what sizes: an entry of a table on the device says where each
lies, and a second table, for which of them a program works (`zgraph.codegen.kernels.triton.tables`).
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import RUN
from zgraph.codegen.kernels.triton.tables import ENTRY
from zgraph.compression.exact_arithmetic import NEWTON_STEPS, RECIPROCAL
from zgraph.compression.methods import HADAMARD, BlockMethod, RngKey
from zgraph.compression.payload import BucketLayout

IMPORTS = """\
import torch
import triton
import triton.language as tl
"""

# Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum. Conversion instructions run at a
# quarter to an eighth of the rate of additions.
ROUNDING = """\
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to an integer


@triton.jit
def low_bits(x):  # of an integral fp32: its low bits as a two's complement, above them others
    return (x + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def reciprocal(x):  # by Newton's method, see zgraph.codegen.kernels.reference
    found = (-x.to(tl.int32, bitcast=True) + RECIPROCAL).to(tl.float32, bitcast=True)
    for _ in tl.static_range(NEWTON_STEPS):
        found = found * tl.fma(-x, found, 2.0)
    return found
"""

BF16 = """\
@triton.jit
def from_bf16(bits):  # int16 -> fp32
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x):  # fp32 -> int16, to nearest even
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def number_to_bf16(x):  # the same for what is no NaN
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
"""

HALVES = """\
@triton.jit
def halves(x, MANY: tl.constexpr, SIZE: tl.constexpr):  # [MANY * 2 * SIZE] -> twice [MANY * SIZE]
    pairs = tl.permute(tl.reshape(x, [MANY, 2, SIZE]), (0, 2, 1))
    return tl.split(tl.reshape(pairs, [MANY * SIZE, 2]))


@triton.jit
def unite(first, second, MANY: tl.constexpr, SIZE: tl.constexpr):  # what `halves` has taken apart
    pairs = tl.reshape(tl.join(first, second), [MANY, SIZE, 2])
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [2 * MANY * SIZE])


@triton.jit
def in_stripes(x):  # [RUNS, THREADS, RUN] -> [RUNS * RUN * THREADS]
    return tl.reshape(tl.permute(x, (0, 2, 1)), [x.shape[0] * x.shape[1] * x.shape[2]])


@triton.jit
def in_runs(x, RUNS: tl.constexpr, RUN: tl.constexpr):  # what `in_stripes` has taken apart
    return tl.permute(tl.reshape(x, [RUNS, RUN, x.shape[0] // (RUNS * RUN)]), (0, 2, 1))


@triton.jit
def run_begins(group, place, SIZE: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr):
    # -> [RUNS, THREADS]: where the runs of each thread's block begin, given what a group and a run take
    return (group * SIZE + place * RUN)[None, :] + (tl.arange(0, RUNS) * (RUN * PLACES))[:, None]


@triton.jit
def offsets(group, place, SIZE: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr):  # -> [RUNS, THREADS, RUN]
    begins = run_begins(group, place, SIZE, RUNS, RUN)
    return begins[:, :, None] + tl.arange(0, RUN)[None, None, :]


@triton.jit
def to_all(x):  # [THREADS] -> [STRIPES * THREADS]
    return tl.reshape(tl.broadcast_to(x[None, :], [STRIPES, x.shape[0]]), [STRIPES * x.shape[0]])
"""

# Each thread of a group gets the same result.
GROUP_LARGEST = """\
@triton.jit
def group_largest(x):  # [STRIPES * THREADS] -> [THREADS] of magnitudes; a NaN is larger than anything
    x = tl.abs(x)
    for _ in tl.static_range(STRIPE_HALVINGS):
        first, second = halves(x, 1, x.shape[0] // 2)
        x = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    if PLACES > 1:
        bits = tl.reshape(x.to(tl.int32, bitcast=True), [x.shape[0] // PLACES, PLACES])
        bits = tl.broadcast_to(tl.max(bits, axis=1, keep_dims=True), [x.shape[0] // PLACES, PLACES])
        x = tl.reshape(bits, [x.shape[0]]).to(tl.float32, bitcast=True)
    return x
"""

EXACT_SUM = """\
@triton.jit
def group_sum(x):  # [STRIPES * THREADS] -> [THREADS]; exact, so in any order
    x = tl.sum(tl.reshape(x, [STRIPES, x.shape[0] // STRIPES]), axis=0)
    if PLACES > 1:
        of_group = tl.sum(tl.reshape(x, [x.shape[0] // PLACES, PLACES]), axis=1, keep_dims=True)
        x = tl.reshape(tl.broadcast_to(of_group, [x.shape[0] // PLACES, PLACES]), [x.shape[0]])
    return x
"""

ORDERED_SUM = """\
@triton.jit
def group_sum(x):  # [STRIPES * THREADS] -> [THREADS]; the second half is added to the first, again and again
    for _ in tl.static_range(STRIPE_HALVINGS):
        first, second = halves(x, 1, x.shape[0] // 2)
        x = first + second
    if PLACES > 1:
        GROUPS: tl.constexpr = x.shape[0] // PLACES
        for halving in tl.static_range(PLACE_HALVINGS):
            x = tl.sum(tl.reshape(x, [GROUPS, 2, PLACES >> (halving + 1)]), axis=1)
        x = tl.broadcast_to(tl.reshape(x, [GROUPS, 1]), [GROUPS, PLACES])
        x = tl.reshape(x, [GROUPS * PLACES])
    return x
"""

SIGNS = """\
@triton.jit
def hash_32(words):  # Wellons' "lowbias32"
    words = words ^ (words >> 16)
    words = words * 0x7FEB352D
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def sign_key(base, rank):  # base: of step and salt
    return hash_32(base.to(tl.uint32) + rank.to(tl.uint32) * 0x85EBCA77)


@triton.jit
def draw_signs(block, key):
    # block: [THREADS] of the chunk -> [STRIPES * THREADS] int32, of which the highest bit is a sign
    words = hash_32(block.to(tl.uint32) ^ key)
    bits = words[None, :] << tl.arange(0, STRIPES).to(tl.uint32)[:, None]
    return tl.reshape(bits.to(tl.int32, bitcast=True), [STRIPES * block.shape[0]])


@triton.jit
def flip(x, signs, sign_bit):  # x times the signs
    return (x.to(tl.int32, bitcast=True) ^ (signs & sign_bit)).to(tl.float32, bitcast=True)


@triton.jit
def butterflies(x, stage: tl.constexpr):
    first, second = halves(x, 1 << stage, x.shape[0] >> (stage + 1))
    return unite(first + second, first - second, 1 << stage, x.shape[0] >> (stage + 1))


@triton.jit
def hadamard(x):  # over the 32 stripes
    for stage in tl.static_range(5):
        x = butterflies(x, stage)
    return x
"""


def comment(lines: Iterable[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def kernel(name: str, arguments: Sequence[str], unspecialized: Sequence[str], body: str) -> str:
    """A kernel that is not compiled anew for other values of some of its arguments."""
    listed = ", ".join(f'"{argument}"' for argument in unspecialized)
    return f"@triton.jit(do_not_specialize=[{listed}])\ndef {name}({', '.join(arguments)}):\n{body}"


def indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in lines)


def constants(method: BlockMethod) -> str:
    """Numbers that all functions of a source may read."""
    stripes = stripes_of(method)
    places = method.group // stripes
    code_bytes = stripes * method.bits // 8  # of a block
    values = {
        "GROUP": method.group,
        "STRIPES": stripes,  # places of a block
        "PLACES": places,  # blocks of a group
        "STRIPE_HALVINGS": stripes.bit_length() - 1,
        "PLACE_HALVINGS": places.bit_length() - 1,
        "ENTRY": ENTRY,
        "RUN": RUN,
        "RUNS": stripes // RUN,  # of a block
        "CODE_BYTES": method.group * method.bits // 8,
        "CODE_RUN": min(RUN, code_bytes),
        "CODE_RUNS": max(1, code_bytes // RUN),
        "RECIPROCAL": RECIPROCAL,
        "NEWTON_STEPS": NEWTON_STEPS,
    }
    return "".join(f"{name} = tl.constexpr({value})\n" for name, value in values.items())


def choose_member(pointers: Sequence[tuple[str, str]], numbers: Sequence[str]) -> list[str]:
    """Lines of a kernel that say for which tensor of the bucket a program works, and from which group of its chunk.

    Args:
        pointers: what an entry of the table begins with: names, and what they point to.
        numbers: what follows.
    """
    lines = [
        "program = programs + 2 * tl.program_id(0).to(tl.int64)",
        "entry = table + ENTRY * tl.load(program).to(tl.int64)",
        "before = tl.load(program + 1).to(tl.int64) * (THREADS // PLACES)",
    ]
    for place, (name, kind) in enumerate(pointers):
        lines.append(f"{name} = tl.load(entry + {place}).to(tl.pointer_type({kind}))")
    lines += [f"{name} = tl.load(entry + {place})" for place, name in enumerate(numbers, len(pointers))]
    assert len(pointers) + len(numbers) <= ENTRY
    return [
        *lines,
        "thread = tl.arange(0, THREADS)",
        "group, place = thread // PLACES, thread % PLACES  # the block of a thread",
        "left = tl.minimum(length - before * GROUP, THREADS * STRIPES).to(tl.int32)  # of the chunk",
        "real = group * GROUP < left",
    ]


def block_method(layout: BucketLayout) -> BlockMethod:
    assert isinstance(layout.method, BlockMethod), "kernels know zgraph's own methods"
    return layout.method


def signed(word: int) -> int:
    """32 bits as a signed number, which Triton takes as int32."""
    return word - 2**32 if word >= 2**31 else word


def sign_base(draw: RngKey) -> int:
    """What step and salt add to the key of signs."""
    return signed((draw.step * 0x9E3779B1 + draw.salt * 0xC2B2AE3D + 1) & 0xFFFFFFFF)


def require_contiguous(who: str, tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError for a tensor whose elements do not follow one another."""
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(
                f"zgraph.codegen.{who}: tensor {place} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
                "the kernel reads it as one run of elements: pass tensor.contiguous()."
            )


def require_aligned(who: str, tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError for a tensor that begins where no 16 bytes can be read at once."""
    for tensor in tensors:
        if address_of(tensor) % 16:
            raise ValueError(
                f"zgraph.codegen.{who}: a {dtype_name(tensor.dtype)} tensor of shape {tuple(tensor.shape)} begins "
                f"{address_of(tensor) % 16} bytes behind a multiple of 16, and the kernel reads 16 bytes at once; pass "
                "a tensor that begins its storage, such as tensor.clone()."
            )


def address_of(tensor: Tensor) -> int:
    return tensor.data_ptr()


def require_device(who: str, what: str, tensor: Tensor) -> None:
    """Raise a ValueError for a tensor that no compiled kernel reaches."""
    if tensor.device.type == "cpu":
        raise ValueError(
            f"zgraph.codegen.{who}: the {what} lies on the CPU, and Triton compiles for GPUs alone; move the bucket to "
            "a GPU, or call zgraph.codegen.kernels.reference."
        )


def joined(*blocks: str) -> str:
    """Top-level definitions with two empty lines between them."""
    return "\n\n".join(block.rstrip("\n") + "\n" for block in blocks)


def stripes_of(method: BlockMethod) -> int:
    """Elements of a block, which a thread owns."""
    return min(HADAMARD, method.group)


TRITON_TYPES = MappingProxyType(
    {torch.float32: "tl.float32", torch.float16: "tl.float16", torch.float64: "tl.float64", torch.int8: "tl.int8"}
)


def literal(value: float) -> str:
    """An fp32 number that Triton reads as just that number."""
    return repr(float(value))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1024)
def load(source: str) -> dict[str, Any]:
    """The names that a kernel's source defines.

    Triton reads the source of a kernel again, as a debugger does; it finds it under a name made from its text.
    """
    name = f"zgraph_kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": name, "__file__": file}
    exec(compile(source, file, "exec"), names)
    return names
