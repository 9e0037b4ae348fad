"""Pieces that emitted Triton kernels share, and how a kernel's source becomes one that runs.

Checked with Triton 3.6.0, 3.7.1 (which torch 2.13 brings) and 3.9.0:

- `enable_fp_fusion=False`, given at launch, keeps a multiplication and an addition apart: LLVM writes mul.rn and
  add.rn, which ptxas does not contract, and ptxas gets --fmad=false. Both keep denormals.
- `/` compiles to div.full, which is off by up to two units in the last place; `tl.div_rn` is IEEE's division.
- The interpreter rounds to bfloat16 wrongly, so bfloat16 is read and written as integers here, to nearest even. A NaN
  becomes 0x7FC0 here, where cvt.rn.bf16 gives 0x7FFF.
- `tl.sum` adds in an order of its own, so it only ever adds two numbers here.
- `tl.full` makes 0.0 of -0.0.
- No kernel of the tests spills registers, except that with 3.6.0 one without rotation spills 80 bytes at most on sm_80.

How a group lies in a program. A group of g elements is 32 stripes of g / 32 (if g < 32: g stripes of one element). In
*stripe order*, [stripes, groups, places of a stripe] flattened, the elements that a rotation mixes, and those that the
first additions of a sum meet, are of one place in all stripes. With as many places as a program has threads, Triton's
default layout gives each thread one place, so that both happen in registers, without a shuffle. Memory is read and
written in the order of the group; one conversion each way lies between.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph.compression import HADAMARD, BlockMethod, Draw
from zgraph.wire_format import BucketLayout

IMPORTS = """\
import torch
import triton
import triton.language as tl
"""

# Adding and subtracting 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum. Conversion
# instructions run at a quarter to an eighth of the rate of additions.
ROUNDING = """\
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to an integer


@triton.jit
def round_down(x):  # floor, for magnitudes up to 2^22; a conversion instruction would take several times as long
    nearest = (x + ROUNDER) - ROUNDER
    return tl.where(nearest > x, nearest - 1.0, nearest)


@triton.jit
def to_float(x):  # of a small integer
    return (x.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - ROUNDER


@triton.jit
def low_bits(x):  # of an integral fp32: its low bits as a two's complement, above them others
    return (x + ROUNDER).to(tl.int32, bitcast=True)
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
def in_stripes(x, STRIPES: tl.constexpr):  # [GROUPS, STRIPES * PLACES] -> [STRIPES * GROUPS * PLACES]
    x = tl.reshape(x, [x.shape[0], STRIPES, x.shape[1] // STRIPES])
    return tl.reshape(tl.permute(x, (1, 0, 2)), [x.shape[0] * x.shape[1] * x.shape[2]])


@triton.jit
def in_groups(x, GROUPS: tl.constexpr, STRIPES: tl.constexpr):  # what `in_stripes` has taken apart
    x = tl.reshape(x, [STRIPES, GROUPS, x.shape[0] // (STRIPES * GROUPS)])
    return tl.reshape(tl.permute(x, (1, 0, 2)), [GROUPS, x.shape[0] * x.shape[2]])


@triton.jit
def to_all(x):  # [GROUPS] -> [STRIPES * GROUPS * PLACES]
    x = tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], PLACES]), [x.shape[0] * PLACES])
    return tl.reshape(tl.broadcast_to(x[None, :], [STRIPES, x.shape[0]]), [STRIPES * x.shape[0]])
"""

FOLD = """\
@triton.jit
def fold(x, GROUPS: tl.constexpr):
    # [STRIPES * GROUPS * PLACES] -> [GROUPS]: of each group the second half added to the first, again and again
    for _ in tl.static_range(STRIPE_HALVINGS):
        first, second = halves(x, 1, x.shape[0] // 2)
        x = first + second
    for halving in tl.static_range(PLACE_HALVINGS):
        x = tl.sum(tl.reshape(x, [GROUPS, 2, PLACES >> (halving + 1)]), axis=1)
    return tl.reshape(x, [GROUPS])
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
def draw_signs(group, key):
    # group: [GROUPS] -> [STRIPES * GROUPS * PLACES] int32, a sign bit alone. Bit i // 32 of a hash of
    # (32 group + i % 32) is the sign of element i, so each hash serves stripes that lie 32 / PLACES apart.
    place = tl.reshape(32 * group[:, None] + tl.arange(0, PLACES)[None, :], [group.shape[0] * PLACES])
    place = place[None, :] + PLACES * tl.arange(0, 32 // PLACES)[:, None]
    words = hash_32(place.to(tl.uint32) ^ key)
    bits = words[None, :, :] >> tl.arange(0, PLACES).to(tl.uint32)[:, None, None]
    return tl.reshape((bits << 31).to(tl.int32, bitcast=True), [STRIPES * group.shape[0] * PLACES])


@triton.jit
def flip(x, signs):  # x times the signs
    return (x.to(tl.int32, bitcast=True) ^ signs).to(tl.float32, bitcast=True)


@triton.jit
def butterflies(x, stage: tl.constexpr):
    first, second = halves(x, 1 << stage, x.shape[0] >> (stage + 1))
    return unite(first + second, first - second, 1 << stage, x.shape[0] >> (stage + 1))


@triton.jit
def hadamard(x):  # over the 32 stripes
    for stage in tl.static_range(5):
        x = butterflies(x, stage)
    return x


@triton.jit
def flip_hadamard(x, signs):
    # Signs are applied behind the first split: before it, Triton would draw them in the layout of memory, one hash for
    # each element.
    first, second = halves(x, 1, x.shape[0] // 2)
    of_first, of_second = halves(signs, 1, x.shape[0] // 2)
    first, second = flip(first, of_first), flip(second, of_second)
    x = unite(first + second, first - second, 1, x.shape[0] // 2)
    for stage in tl.static_range(1, 5):
        x = butterflies(x, stage)
    return x
"""


@dataclass(frozen=True)
class Member:
    """What a kernel has to know of one gradient of a bucket: numbers in its source, or names of its arguments.

    Attributes:
        numel: elements of the gradient.
        length: elements of a chunk.
        chunks: how many, known in any case.
        codes_at, scales_at: where its sections begin in a row of the payload, in bytes.
    """

    numel: int | str
    length: int | str
    chunks: int
    codes_at: int | str
    scales_at: int | str

    @property
    def numbers(self) -> tuple[int | str, ...]:
        """Those that are arguments where the source has no sizes."""
        return (self.numel, self.length, self.codes_at, self.scales_at)

    def named(self, place: int) -> Member:
        """The same with the names of arguments."""
        names = (f"{name}_{place}" for name in NUMBER_NAMES)
        numel, length, codes_at, scales_at = names
        return Member(numel, length, self.chunks, codes_at, scales_at)

    def rows(self, group: int) -> int | str:
        """Groups of all chunks, or the expression for them."""
        if isinstance(self.length, int):
            return self.chunks * -(-self.length // group)
        return f"{self.chunks} * tl.cdiv({self.length}, {group})"


NUMBER_NAMES = ("numel", "length", "codes_at", "scales_at")


def members_of(layout: BucketLayout, numels: Sequence[int], chunks: int) -> list[Member]:
    """Of each gradient, given how many elements it has and into how many chunks it is cut here."""
    return [
        Member(numel, length, chunks, codes_at, scales_at)
        for numel, length, (codes_at, scales_at) in zip(numels, layout.numels, layout.offsets(), strict=True)
    ]


def choose_member(members: Sequence[Member], group: int, own: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a kernel that say for which gradient a program works.

    Args:
        members: of the bucket.
        group: elements of a group.
        own: for each member, further assignments.
    """
    dynamic = isinstance(members[0].length, str)
    largest = max((number for member in members for number in member.numbers if isinstance(number, int)), default=0)
    wide = dynamic or largest >= 2**31
    lines: list[str] = []
    for place, member in enumerate(members):
        before = f"end_{place - 1} + " if place else ""
        if dynamic:
            lines.append(f"end_{place} = {before}tl.cdiv({member.rows(group)}, GROUPS)")
        else:
            lines.append(f"end_{place}: tl.constexpr = {before}({member.rows(group)} + GROUPS - 1) // GROUPS")
    for place, member in enumerate(members):
        condition = "if" if place == 0 else "elif"
        indent = "    " if len(members) > 1 else ""
        if len(members) > 1:
            lines.append("else:" if place == len(members) - 1 else f"{condition} program < end_{place}:")
        values = {"first": f"end_{place - 1}" if place else 0, "rows": member.rows(group)}
        values |= dict(zip(NUMBER_NAMES, member.numbers, strict=True))
        for name, value in values.items():
            lines.append(f"{indent}{name} = tl.cast({value}, tl.int64)" if wide else f"{indent}{name} = {value}")
        lines += [indent + line for line in own[place]]
    return lines


def sizes(members: Sequence[Member], payload_bytes: int) -> list[int]:
    """What a kernel without sizes in its source takes as arguments."""
    return [*(int(number) for member in members for number in member.numbers), payload_bytes]


def comment(lines: Iterable[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def kernel(name: str, arguments: Sequence[str], unspecialized: Sequence[str], body: str) -> str:
    """A kernel that is not compiled anew for other values of some of its arguments."""
    listed = ", ".join(f'"{argument}"' for argument in unspecialized)
    return f"@triton.jit(do_not_specialize=[{listed}])\ndef {name}({', '.join(arguments)}):\n{body}"


def launcher(name: str, arguments: Sequence[str], rows: Sequence[int | str], ranks: int | None = None) -> str:
    """A function that starts a kernel with a program for every GROUPS groups of each gradient, and of each rank."""
    grid = "(programs,)" if ranks is None else f"(programs, {ranks})"
    programs = " + ".join(f"triton.cdiv({str(count).replace('tl.', 'triton.')}, GROUPS)" for count in rows)
    return f"""

def launch({", ".join(arguments)}, GROUPS, **options):
    programs = {programs}
    if programs:
        # Contracting a multiplication with an addition would change bits.
        {name}[{grid}]({", ".join(arguments)}, GROUPS=GROUPS, enable_fp_fusion=False, **options)
"""


def indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in lines)


def constants(method: BlockMethod, more: Mapping[str, int]) -> str:
    """Numbers that all functions of a source may read."""
    stripes = stripes_of(method)
    places = method.group // stripes
    values = {
        "GROUP": method.group,
        "STRIPES": stripes,
        "PLACES": places,  # of a stripe
        "STRIPE_HALVINGS": stripes.bit_length() - 1,
        "PLACE_HALVINGS": places.bit_length() - 1,
    }
    return "".join(f"{name} = tl.constexpr({value})\n" for name, value in (values | {**more}).items())


def block_method(layout: BucketLayout) -> BlockMethod:
    assert isinstance(layout.method, BlockMethod), "kernels know zgraph's own methods"
    return layout.method


def sign_base(draw: Draw) -> int:
    """What step and salt add to the key of signs, as a signed number of 32 bits, which Triton takes as int32."""
    mixed = (draw.step * 0x9E3779B1 + draw.salt * 0xC2B2AE3D + 1) & 0xFFFFFFFF
    return mixed - 2**32 if mixed >= 2**31 else mixed


def require_contiguous(who: str, tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError for a tensor whose elements do not follow one another."""
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(
                f"zgraph.codegen.{who}: tensor {place} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
                "the kernel reads it as one run of elements: pass tensor.contiguous()."
            )


def require_device(who: str, what: str, tensor: Tensor) -> None:
    """Raise a ValueError for a tensor that no compiled kernel reaches."""
    if tensor.device.type == "cpu":
        raise ValueError(
            f"zgraph.codegen.{who}: the {what} lies on the CPU, and Triton compiles for GPUs alone; move the bucket to "
            "a GPU, or call zgraph.codegen.reference."
        )


def joined(*blocks: str) -> str:
    """Top-level definitions with two empty lines between them."""
    return "\n\n".join(block.rstrip("\n") + "\n" for block in blocks)


def stripes_of(method: BlockMethod) -> int:
    """Into how many stripes a program cuts a group."""
    return min(HADAMARD, method.group)


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
