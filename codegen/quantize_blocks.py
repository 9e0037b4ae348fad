"""Triton source for one bucket: compensate, rotate, quantize, pack, and keep the new error, in one launch.

The kernel reads every gradient where it lies and writes codes and scales to their places in the payload. A program
takes a few groups of one gradient; which one follows from its id and from constants in the source. Nothing as large as
the bucket is ever in device memory beside the gradients, their errors and the payload.

`zgraph.codegen.reference` says what is computed; results are equal bit for bit, whatever the launch options.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from zgraph.codegen import triton_source as pieces
from zgraph.codegen.launch_options import LaunchOptions, drawn, fastest, is_compiled, on_device
from zgraph.codegen.reference import HUGE_BITS, NO_NUMBER, TINY, CodeBook, is_unbiased
from zgraph.codegen.triton_source import Member
from zgraph.compression import HADAMARD, BlockMethod, Draw
from zgraph.wire_format import BucketLayout


def quantize_bucket(
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    layout: BucketLayout,
    draw: Draw,
    rank: int,
    payload: Tensor,
    *,
    dynamic: bool = True,
    options: LaunchOptions | None = None,
) -> None:
    """Fill the payload of a bucket, as `zgraph.codegen.reference.quantize_bucket` does.

    Args:
        grads: contiguous, any shape; what a gradient lacks to `stretches * world * numel` counts as zeros.
        states: of each, contiguous, beside the gradients; updated in place.
        layout: of the bucket; its method is a BlockMethod.
        draw, rank: which signs. New ones compile nothing.
        payload: [world, payload_bytes] uint8, contiguous; bytes behind the last section are left alone.
        dynamic: sizes are arguments of the kernel, so that buckets of as many gradients share one; otherwise constants.
        options: how to launch. None: the fastest of a few, found once for each method, dtype and device.

    Raises:
        ValueError: a tensor is not contiguous, or on the CPU where kernels are compiled.
    """
    kept = [state[name] for name in _state_names(pieces.block_method(layout)) for state in states]
    pieces.require_contiguous("quantize_blocks", [*grads, *kept, payload])
    dtypes, numels = tuple(grad.dtype for grad in grads), tuple(grad.numel() for grad in grads)
    names = pieces.load(emit_quantize(layout, dtypes, numels, dynamic=dynamic))
    if is_compiled(names["quantize"]):
        pieces.require_device("quantize_blocks", "payload", payload)
        options = options or _fastest(pieces.block_method(layout), dtypes[0], payload.device)
    sizes = pieces.sizes(_members(layout, numels), layout.payload_bytes) if dynamic else ()
    with on_device(payload.device):
        names["launch"](
            *grads,
            *kept,
            payload,
            payload.view(torch.int16),
            *sizes,
            pieces.sign_base(draw),
            rank,
            **(options or LaunchOptions()).arguments(pieces.block_method(layout)),
        )


@functools.cache
def _fastest(method: BlockMethod, dtype: torch.dtype, device: torch.device) -> LaunchOptions:
    """Tried on a bucket of its own: trying them on the caller's would change its errors."""
    numel = 2**24
    layout = BucketLayout(method, (numel,), world=1)
    state = {
        name: torch.zeros(shape, dtype=kept, device=device) for name, (shape, kept) in method.state(numel, 1).items()
    }
    grad = drawn(numel, dtype, device)
    payload = torch.zeros(1, layout.payload_bytes, dtype=torch.uint8, device=device)
    return fastest(
        lambda options: quantize_bucket([grad], [state], layout, Draw(0), 0, payload, options=options), device
    )


@functools.lru_cache(maxsize=1024)
def emit_quantize(
    layout: BucketLayout, dtypes: tuple[torch.dtype, ...], numels: tuple[int, ...], *, dynamic: bool = False
) -> str:
    """The source of a kernel `quantize`, and of a function `launch` that starts it.

    Args:
        layout: of the bucket.
        dtypes, numels: of each gradient.
        dynamic: write no sizes into the source, but take them as arguments. Of the sizes it then only says whether all
            are multiples of 16, so that 16 bytes can be read at once.
    """
    method = pieces.block_method(layout)
    members = _members(layout, numels)
    aligned = all(number % 16 == 0 for member in members for number in (member.numel, member.length))
    whole = not dynamic and all(
        member.length % method.group == 0 and member.numel == member.length * member.chunks for member in members
    )
    written = [member.named(place) for place, member in enumerate(members)] if dynamic else members
    sizes = {"WORLD": layout.world, "CODE_BYTES": method.group * method.bits // 8}
    return pieces.joined(
        _header(layout, dtypes, members, dynamic),
        pieces.IMPORTS,
        pieces.constants(method, sizes if dynamic else sizes | {"PAYLOAD_BYTES": layout.payload_bytes}),
        pieces.ROUNDING,
        pieces.BF16,
        pieces.HALVES,
        pieces.FOLD,
        *([pieces.SIGNS] if method.rotate else []),
        _codes(method),
        _kernel(layout, dtypes, written, aligned, whole),
    )


def _members(layout: BucketLayout, numels: Sequence[int]) -> list[Member]:
    return pieces.members_of(layout, numels, layout.stretches * layout.world)


def _state_names(method: BlockMethod) -> list[str]:
    return list(method.state(1, 1))


def _header(layout: BucketLayout, dtypes: Sequence[torch.dtype], members: Sequence[Member], dynamic: bool) -> str:
    """What the kernel works on, and the bytes it moves."""
    method = pieces.block_method(layout)
    kept = sum(
        torch.Size(shape).numel() * dtype.itemsize for shape, dtype in method.state(method.group, 1).values()
    )  # of a group
    sent = sum(method.sections(method.group))
    lines = [f"Quantize {len(members)} gradients into one payload for {layout.world} ranks.", "", f"{method}"]
    if dynamic:
        lines += [
            f"grad_{place}: {pieces.dtype_name(dtype)} [numel_{place}] in {member.chunks} chunks of length_{place}"
            for place, (dtype, member) in enumerate(zip(dtypes, members, strict=True))
        ]
        lines.append(f"bytes of a group of {method.group}: its gradient + {kept} read, {kept} + {sent} written")
        return pieces.comment(lines)
    elements = sum(int(member.numel) for member in members)
    rows = sum(int(member.rows(method.group)) for member in members)
    lines += [
        f"grad_{place}: {pieces.dtype_name(dtype)} [{member.numel}] in {member.chunks} chunks of {member.length}, "
        f"{member.rows(method.group)} groups"
        for place, (dtype, member) in enumerate(zip(dtypes, members, strict=True))
    ]
    read = sum(int(member.numel) * dtype.itemsize for member, dtype in zip(members, dtypes, strict=True)) + rows * kept
    written = rows * (kept + sent)
    each = (read + written) / max(elements, 1)
    lines.append(
        f"{read} bytes read + {written} written = {read + written}: {each:.3f} for each of {elements} elements"
    )
    return pieces.comment(lines)


def _codes(method: BlockMethod) -> str:
    """Functions from rotated elements to codes and scales."""
    book = CodeBook.of(method)
    before = f" + {book.before}" if book.before else ""
    after = f" + {book.after}" if book.after else ""
    best = f"slope = {pieces.literal(book.slopes[0])}\n    along, score = try_clip(unit, slope, GROUPS)\n"
    for other in map(pieces.literal, book.slopes[1:]):
        best += f"    other_along, other_score = try_clip(unit, {other}, GROUPS)\n"
        best += "    better = other_score > score\n"
        best += f"    slope = tl.where(better, {other}, slope)\n"
        best += "    along, score = tl.where(better, other_along, along), tl.where(better, other_score, score)\n"
    slope = "to_all(slope)" if len(book.slopes) > 1 else "slope"
    unbiased, least_squares = "fold(unit * unit, GROUPS), along", "along, fold(levels * levels, GROUPS)"
    shares = unbiased if is_unbiased(method) else least_squares
    rescale = f" * {pieces.literal(1 / HADAMARD)}" if method.rotate else ""
    low, high = pieces.literal(book.low), pieces.literal(book.high)
    return f"""\
@triton.jit
def round_codes(unit, slope):
    return tl.minimum(tl.maximum(round_down(unit * slope{before}), {low}), {high})


@triton.jit
def try_clip(unit, slope, GROUPS: tl.constexpr):  # only sums are kept: holding all codes takes too many registers
    levels = round_codes(unit, slope){after}
    along, square = fold(unit * levels, GROUPS), fold(levels * levels, GROUPS)
    return along, tl.where(square > 0, tl.div_rn(along * along, tl.where(square > 0, square, 1.0)), 0.0)


@triton.jit
def quantize_groups(rotated, GROUPS: tl.constexpr):
    # -> codes, levels [STRIPES * GROUPS * PLACES] fp32; scale as bf16 bits, finite [GROUPS]
    bits = tl.reshape(rotated.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [STRIPES, GROUPS * PLACES])
    bits = tl.max(tl.reshape(tl.max(bits, axis=0), [GROUPS, PLACES]), axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    finite = bits < {HUGE_BITS:#010x}
    used = finite & (largest >= {TINY!r})
    inverse = to_all(tl.where(used, tl.div_rn(1.0, largest), 0.0))
    unit = tl.where(inverse > 0, rotated * inverse, 0.0)
    {best}\
    codes = round_codes(unit, {slope})
    levels = codes{after}
    over, under = {shares}
    ratio = tl.where(used, tl.div_rn(over, tl.where(used, under, 1.0)), 0.0){rescale}
    scale = tl.where(finite, to_bf16(ratio * tl.where(used, largest, 0.0)), {NO_NUMBER:#06x}).to(tl.int16)
    return codes, levels, scale, finite
"""


_READ = MappingProxyType(
    {
        torch.bfloat16: "from_bf16(tl.load({at}, mask=inside, other=0.0).to(tl.int16, bitcast=True))",
        torch.float32: "tl.load({at}, mask=inside, other=0.0)",
    }
)
_PACK = MappingProxyType(
    {
        2: """\
first, second = halves(bits, 1, bits.shape[0] // 2)
first, second = halves(first | (second << 4), 1, first.shape[0] // 2)
packed = first | (second << 2)""",
        4: """\
first, second = halves(bits, 1, bits.shape[0] // 2)
packed = first | (second << 4)""",
        8: "packed = bits",
    }
)


def _kernel(
    layout: BucketLayout, dtypes: Sequence[torch.dtype], members: Sequence[Member], aligned: bool, whole: bool
) -> str:
    method = pieces.block_method(layout)
    names = _state_names(method)
    kinds = list(dict.fromkeys(dtypes))
    own: list[list[str]] = []
    for place, dtype in enumerate(dtypes):
        own.append([f"grad_{pieces.dtype_name(dtype)} = grad_{place}", *(f"{name} = {name}_{place}" for name in names)])
        if len(kinds) > 1:
            own[-1].append(f"kind = {kinds.index(dtype)}")
    dynamic = isinstance(members[0].length, str)
    numbers = [str(number) for member in members for number in member.numbers] if dynamic else []
    numbers += ["payload_bytes"] if dynamic else []
    payload_bytes = "payload_bytes" if dynamic else "PAYLOAD_BYTES"
    pointers = [f"grad_{place}" for place in range(len(members))]
    pointers += [f"{name}_{place}" for name in names for place in range(len(members))]

    body = ["program = tl.program_id(0)"]
    if len(kinds) > 1:
        body += [f"grad_{pieces.dtype_name(dtype)} = grad_{dtypes.index(dtype)}" for dtype in kinds]
    body += pieces.choose_member(members, method.group, own)
    body += [
        "",
        "row = ((program - first) * GROUPS + tl.arange(0, GROUPS)).to(tl.int32)  # groups of one chunk after another",
        "real = row < rows",
        "groups = tl.cdiv(length, GROUP).to(tl.int32)  # of a chunk" if dynamic else "groups = tl.cdiv(length, GROUP)",
        "chunk, group = row // groups, row % groups",
        "start = chunk.to(tl.int64) * length + group * GROUP",
    ]
    if aligned:
        body.append("start = tl.multiple_of(start, 16)")
    if whole:
        body.append("inside = tl.broadcast_to(real[:, None], [GROUPS, GROUP])")
    else:
        body += [
            "# Zeros fill up the last group of a chunk, and what the gradient lacks to its last chunks.",
            "left = tl.minimum(length - group * GROUP, numel - start)",
            "left = tl.where(real, tl.minimum(tl.maximum(left, 0), GROUP), 0).to(tl.int32)",
            *(["left = tl.multiple_of(left, 16)"] if aligned else []),
            "inside = tl.arange(0, GROUP)[None, :] < left[:, None]",
        ]
    body.append("at = start[:, None] + tl.arange(0, GROUP)[None, :]")
    for number, dtype in enumerate(kinds):
        read = _READ.get(dtype, "tl.load({at}, mask=inside, other=0.0).to(tl.float32)")
        line = "whole = " + read.format(at=f"grad_{pieces.dtype_name(dtype)} + at")
        if len(kinds) == 1:
            body.append(line)
        else:
            body += [f"if kind == {number}:" if number < len(kinds) - 1 else "else:", "    " + line]
            if 0 < number < len(kinds) - 1:
                body[-2] = "el" + body[-2]
    if names:
        body += [
            "",
            "error += row.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]",
            "old = tl.load(error, mask=tl.broadcast_to(real[:, None], [GROUPS, GROUP]), other=0)",
        ]
        if "error_scale" in names:
            body += [
                "old_scale = tl.load(error_scale + row, mask=real, other=0.0).to(tl.int16, bitcast=True)",
                "old = to_float(old) * from_bf16(old_scale)[:, None]",
            ]
        body.append("whole += old")
    body.append("")
    if method.rotate:
        body += [
            "signs = draw_signs(group, sign_key(base, rank))",
            "rotated = flip_hadamard(in_stripes(whole, STRIPES), signs)",
        ]
    else:
        body.append("rotated = in_stripes(whole, STRIPES)")
    body += [
        "codes, levels, scale, finite = quantize_groups(rotated, GROUPS)",
        "",
        f"bits = low_bits(codes) & {method.levels - 1}",
        *_PACK[method.bits].splitlines(),
        f"packed = in_groups(packed.to(tl.uint8), GROUPS, STRIPES * {method.bits} // 8)",
        "stretch, to = chunk // WORLD, chunk % WORLD",
        f"to_row = to.to(tl.int64) * {payload_bytes}",
        "place = stretch.to(tl.int64) * groups + group",
        "code_at = to_row + codes_at + place * CODE_BYTES",
        f"code_at = tl.multiple_of(code_at, {min(16, method.group * method.bits // 8)})",
        "code_at = code_at[:, None] + tl.arange(0, CODE_BYTES)[None, :]",
        "tl.store(payload + code_at, packed, mask=tl.broadcast_to(real[:, None], [GROUPS, CODE_BYTES]))",
        "tl.store(scales + (to_row + scales_at) // 2 + place, scale, mask=real)",
    ]
    if names:
        assert method.old_share is not None
        old_share, rest = (
            pieces.literal(torch.tensor(share, dtype=torch.float32).item())
            for share in (method.old_share, 1 - method.old_share)
        )
        body += ["", "sent = levels * to_all(from_bf16(scale))"]
        if method.rotate:
            body.append("sent = flip(hadamard(sent), signs)")
        body += [
            "lost = whole - in_groups(sent, GROUPS, STRIPES)",
            f"new = {old_share} * old + {rest} * lost",
            "keep = real & finite  # a group that is not finite keeps its error",
        ]
        if "error_scale" in names:
            body += [
                "largest = tl.max(new.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)",
                f"new_scale = tl.where(largest >= {TINY!r}, largest * {pieces.literal(_INT8)}, 0.0)",
                "new_scale = to_bf16(new_scale)",
                "wide = from_bf16(new_scale)",
                "inverse = tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)",
                "new = tl.minimum(tl.maximum(round_down(new * inverse[:, None] + 0.5), -127.0), 127.0)",
                "new = low_bits(new).to(tl.int8)",
                "tl.debug_barrier()  # other warps of the program may still have to read the old scales",
                "tl.store(error_scale + row, new_scale.to(tl.bfloat16, bitcast=True), mask=keep)",
            ]
        body.append("tl.store(error, new, mask=tl.broadcast_to(keep[:, None], [GROUPS, GROUP]))")

    arguments = [*pointers, "payload", "scales"]
    scalars = ["base", "rank"]
    typed = [*arguments, *(f"{number}: tl.int64" for number in numbers), *scalars, "GROUPS: tl.constexpr"]
    return pieces.kernel("quantize", typed, [*numbers, *scalars], pieces.indented(body)) + pieces.launcher(
        "quantize", [*arguments, *numbers, *scalars], [member.rows(method.group) for member in members]
    )


_INT8 = torch.tensor(1 / 127, dtype=torch.float32).item()
