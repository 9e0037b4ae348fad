"""Triton source for one bucket: compensate, rotate, quantize, pack, and keep the new error, in one launch for a dtype.

The kernel reads every gradient where it lies and writes codes and scales to their places in the payload. A program
takes a few groups of one gradient; which, and where that lies, it reads in two tables. Nothing as large as the bucket
is ever in device memory beside the gradients, their errors and the payload.

`zgraph.codegen.kernels.reference` says what is computed; results are equal bit for bit, whatever the launch options.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import (
    HUGE_BITS,
    NO_NUMBER,
    RUN,
    TINY,
    CodeBook,
    is_unbiased,
    sign_key,
    sums_are_exact,
)
from zgraph.codegen.kernels.triton import source as pieces
from zgraph.codegen.kernels.triton.launch_options import LaunchOptions, drawn, fastest, is_compiled, on_device, start
from zgraph.codegen.kernels.triton.tables import are_aligned, entries_of, programs_of
from zgraph.compression.exact_arithmetic import fp32
from zgraph.compression.methods import BlockMethod, RngKey
from zgraph.compression.payload import BucketLayout


def quantize_bucket(
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    layout: BucketLayout,
    draw: RngKey,
    rank: int,
    payload: Tensor,
    *,
    options: LaunchOptions | None = None,
) -> None:
    """Fill the payload of a bucket, as `zgraph.codegen.kernels.reference.quantize_bucket` does.

    Args:
        grads: contiguous, any shape; what a gradient lacks to `stretches * world * numel` counts as zeros.
        states: of each, contiguous, beside the gradients; updated in place.
        layout: of the bucket; its method is a BlockMethod.
        draw, rank: which signs.
        payload: [world, payload_bytes] uint8, contiguous; bytes behind the last section are left alone.
        options: how to launch. None: the fastest of a few, found once for each method, dtype and device.

    Raises:
        ValueError: a tensor is not contiguous, or on the CPU where kernels are compiled; an error or the payload does
            not begin at a multiple of 16 bytes.
    """
    method = pieces.block_method(layout)
    kept = [[state[name] for name in _state_names(method)] for state in states]
    pieces.require_contiguous("quantize_blocks", [*grads, *(tensor for state in kept for tensor in state), payload])
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        members = [place for place, grad in enumerate(grads) if grad.dtype == dtype]
        _launch([grads[place] for place in members], kept, members, layout, sign_key(draw, rank), payload, options)


def _launch(
    grads: Sequence[Tensor],
    kept: Sequence[Sequence[Tensor]],
    members: Sequence[int],
    layout: BucketLayout,
    key: int,
    payload: Tensor,
    options: LaunchOptions | None,
) -> None:
    """For the gradients of one dtype, which are these members of the bucket."""
    method, dtype = pieces.block_method(layout), grads[0].dtype
    lengths = [layout.numels[member] for member in members]
    numels, addresses = [grad.numel() for grad in grads], [pieces.address_of(grad) for grad in grads]
    names = pieces.load(emit_quantize(method, dtype, aligned=are_aligned(addresses, [*numels, *lengths], RUN)))
    if is_compiled(names["quantize"]):
        pieces.require_device("quantize_blocks", "payload", payload)
        pieces.require_aligned("quantize_blocks", [payload, *(kept[member][0] for member in members if kept[member])])
        options = options or _fastest(method, dtype, payload.device)
    options, offsets = options or LaunchOptions(), layout.offsets()
    programs = programs_of(
        tuple(method.groups(length) for length in lengths), options.groups_at_once(method), payload.device
    )
    if not len(programs):
        return
    rows = [
        [address, *map(pieces.address_of, kept[member]), numel, length, method.groups(length), *offsets[member]]
        for address, member, numel, length in zip(addresses, members, numels, lengths, strict=True)
    ]
    with on_device(payload.device):
        start(
            names["quantize"],
            (len(programs), layout.world, layout.stretches),
            options,
            entries_of(rows, payload.device),
            programs,
            payload,
            layout.payload_bytes,
            pieces.signed(key),
            -(2**31),
            contracts=may_contract(method),
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
        lambda options: quantize_bucket([grad], [state], layout, RngKey(0), 0, payload, options=options), device
    )


def may_contract(method: BlockMethod) -> bool:
    """Whether a multiplication may be contracted with an addition: where every product that is added is exact.

    Those of 8-bit errors are where the scale's 8 bits, the factor's and the code's 7 fit into 24.
    """
    share = method.residual_decay
    if share is not None and method.error_dtype.is_floating_point:
        return False
    factor = torch.tensor(0.0 if share is None else fp32(share / (1 - share))).view(torch.int32).item()
    return sums_are_exact(method) and factor % 2 ** (23 - 8) == 0


@functools.lru_cache(maxsize=1024)
def emit_quantize(method: BlockMethod, dtype: torch.dtype, *, aligned: bool) -> str:
    """The source of a kernel `quantize` for gradients of one dtype.

    Args:
        method: what to do.
        dtype: of the gradients.
        aligned: each gradient and each of its chunks begins at a multiple of 16 bytes and ends with a whole run, so
            that 16 bytes are read at once.
    """
    return pieces.joined(
        _header(method, dtype, aligned),
        pieces.IMPORTS,
        pieces.constants(method),
        pieces.ROUNDING,
        pieces.BF16,
        pieces.HALVES,
        pieces.GROUP_LARGEST,
        pieces.EXACT_SUM if sums_are_exact(method) else pieces.ORDERED_SUM,
        *([pieces.SIGNS] if method.rotate else []),
        _levels(method),
        _kernel(method, dtype, aligned),
    )


def _state_names(method: BlockMethod) -> list[str]:
    return list(method.state(1, 1))


def _header(method: BlockMethod, dtype: torch.dtype, aligned: bool) -> str:
    """What the kernel works on, and the bytes it moves."""
    kept = sum(torch.Size(shape).numel() * kept.itemsize for shape, kept in method.state(method.group, 1).values())
    read, written = method.group * dtype.itemsize + kept, kept + sum(method.sections(method.group))
    name = pieces.dtype_name(dtype)
    return pieces.comment(
        [
            f"Quantize {name} gradients, each in chunks for all ranks, into one payload.",
            "",
            f"{method}",
            f"{'16 bytes' if aligned else 'one element'} of the gradient at once",
            f"bytes of a group of {method.group}: {read} read + {written} written = {read + written}, "
            f"{(read + written) / method.group:.3f} for each element",
        ]
    )


def _levels(method: BlockMethod) -> str:
    """A function for each clipping level: from integers u to levels c + b."""
    book = CodeBook.of(method)
    blocks: list[str] = []
    for place, clip in enumerate(book.clips):
        slope = pieces.literal(book.slope(clip))
        if not book.rotated:
            low, high = pieces.literal(book.low), pieces.literal(book.high)
            lines = [f"return tl.clamp(tl.fma(unit, {slope}, ROUNDER) - ROUNDER, {low}, {high})"]
        else:
            lines: list[str] = []
            if clip != 1:
                lines = [
                    f"share = tl.clamp(tl.fma(unit, {slope}, 0.5), 0.0, 1.0)  # of the interval from clip to clip",
                    f"grid = tl.fma(share, {pieces.literal(2 * book.top + 1)}, ROUNDER)",
                ]
            begin = 3 * 2**22 if clip == 1 else 3 * 2**22 + book.top + 1
            lines += [
                f"floors = (grid.to(tl.int32, bitcast=True) & -{book.step}).to(tl.float32, bitcast=True)",
                f"return tl.fma(floors, {1 / book.step}, {0.5 - begin / book.step})",
            ]
        blocks.append(
            f"@triton.jit\ndef levels_{place}(unit, grid):  # grid: unit + ROUNDER\n" + pieces.indented(lines)
        )
    return pieces.joined(*blocks)


_READ = MappingProxyType(
    {
        torch.bfloat16: ("tl.bfloat16", "from_bf16({}.to(tl.int16, bitcast=True))"),
        torch.float16: ("tl.float16", "{}.to(tl.float32)"),
        torch.float32: ("tl.float32", "{}"),
        torch.float64: ("tl.float64", "{}.to(tl.float32)"),
    }
)


def _best(method: BlockMethod) -> list[str]:
    """Lines that make levels, and `over` and `under` of their scale."""
    book, unbiased = CodeBook.of(method), is_unbiased(method)
    lines = ["levels = levels_0(unit, grid)", "along = group_sum(unit * levels)"]
    if len(book.clips) > 1 or not unbiased:
        lines.append("square = group_sum(levels * levels)")
    for place in range(1, len(book.clips)):
        lines += [
            f"other = levels_{place}(unit, grid)",
            "other_along, other_square = group_sum(unit * other), group_sum(other * other)",
            "better = other_along * other_along * square > along * along * other_square",
            "levels = tl.where(to_all(better.to(tl.int1)), other, levels)",
            "along, square = tl.where(better, other_along, along), tl.where(better, other_square, square)",
        ]
    return [*lines, "over, under = " + ("group_sum(unit * unit), along" if unbiased else "along, square")]


# Levels [STRIPES * THREADS] -> words of four bytes [CODE_RUNS * CODE_RUN / 4 * THREADS].
_PACK_4 = f"""\
# Fused multiplications make 16 bits of four codes, each plus 8, as twice a number beside 2^22. Of both halves of a
# word the lower one is shifted right with the exponent that stands above it, which the upper one makes up for.
low, high = halves(levels, 1, 16 * THREADS)
bytes = tl.fma(high, 16.0, low)
low, high = halves(bytes, 8, THREADS)
shorts = tl.fma(high, 256.0, low)
low, high = halves(shorts, 4, THREADS)
low = (low + 4227071.5).to(tl.int32, bitcast=True)
high = (high + {4227071.5 + 65536 - 0x2540}).to(tl.int32, bitcast=True)
packed = ((high << 15) + (low >> 1)) ^ -0x77777778"""
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


def _pack(method: BlockMethod) -> list[str]:
    """Lines that store codes."""
    book = CodeBook.of(method)
    if method.bits == 4 and method.rotate:
        return [
            *_PACK_4.splitlines(),
            "packed = tl.where(tl.reshape(tl.broadcast_to(finite[None, :], [4, THREADS]), [4 * THREADS]), packed, 0)",
            "words = tl.multiple_of((payload + code_at).to(tl.pointer_type(tl.int32)), 16)",
            "at_codes = offsets(group, place, CODE_BYTES // 4, 2, 2)",
            "real_words = tl.broadcast_to(real[None, :, None], [2, THREADS, 2])",
            "tl.store(words + at_codes, in_runs(packed, 2, 2), mask=real_words)",
        ]
    shape = "[CODE_RUNS, THREADS, CODE_RUN]"
    return [
        f"bits = low_bits({'levels' if book.after == 0 else f'levels - {book.after}'}) & {method.levels - 1}",
        "bits = tl.where(to_all(finite), bits, 0)",
        *_PACK[method.bits].splitlines(),
        "packed = in_runs(packed.to(tl.uint8), CODE_RUNS, CODE_RUN)",
        f"codes = tl.multiple_of(payload + code_at, {min(16, method.group * method.bits // 8)})",
        "at_codes = offsets(group, place, CODE_BYTES, CODE_RUNS, CODE_RUN)",
        f"tl.store(codes + at_codes, packed, mask=tl.broadcast_to(real[None, :, None], {shape}))",
    ]


def _read_error(method: BlockMethod) -> list[str]:
    """Lines that add the old error to `whole`, and make `kept`, of which the new one is a share."""
    shape, share = "[RUNS, THREADS, RUN]", method.residual_decay
    assert share is not None
    factor = pieces.literal(fp32(share / (1 - share)))
    if method.error_dtype.is_floating_point:
        return [
            f"old = tl.load(error + at, mask=tl.broadcast_to(real[None, :, None], {shape}))",
            "old = in_stripes(old)",
            "whole += old",
        ]
    return [
        f"words = tl.multiple_of(error.to(tl.pointer_type(tl.int32)), {min(16, method.group)})",
        "words += offsets(group, place, GROUP // 4, RUNS, 2)",
        "words = tl.load(words, mask=tl.broadcast_to(real[None, :, None], [RUNS, THREADS, 2]))",
        "byte = (8 * tl.arange(0, 4))[None, None, None, :]",
        "old = (words[:, :, :, None] << (24 - byte)) >> 24  # with its sign",
        f"old = in_stripes(tl.reshape(old, {shape})).to(tl.float32)",
        "error_scale += first",
        "old_scale = from_bf16(tl.load(error_scale + group, mask=real, other=0))",
        f"whole = {_sum_of_product(method, 'old', 'to_all(old_scale)', 'whole')}",
        f"kept = {_sum_of_product(method, 'old', f'to_all(old_scale * {factor})', 'whole')}",
    ]


def _sum_of_product(method: BlockMethod, one: str, other: str, more: str) -> str:
    """Written as one operation where that changes no bits: compilers make fewer instructions of it."""
    return f"tl.fma({one}, {other}, {more})" if may_contract(method) else f"{more} + {one} * {other}"


def _keep_error(method: BlockMethod) -> list[str]:
    """Lines that store the new error, given what is `sent`."""
    share = method.residual_decay
    assert share is not None
    mask = "mask=tl.broadcast_to(keep[None, :, None], [RUNS, THREADS, RUN])"
    lines = ["keep = real & finite  # a group that is not finite keeps its error"]
    if method.error_dtype.is_floating_point:
        kept, rest = pieces.literal(fp32(share)), pieces.literal(fp32(1 - share))
        return [
            *lines,
            f"new = {kept} * old + {rest} * (whole - sent)",
            f"tl.store(error + at, in_runs(new, RUNS, RUN), {mask})",
        ]
    rest = pieces.literal(fp32(1 - share))
    return [
        *lines,
        f"new = kept - sent  # of which {rest} is kept",
        "largest = group_largest(new)",
        f"new_scale = tl.where(largest >= {TINY!r}, largest * {pieces.literal(fp32((1 - share) / 127))}, 0.0)",
        "new_scale = number_to_bf16(new_scale)",
        "wide = from_bf16(new_scale)",
        f"inverse = tl.where(wide > 0, reciprocal(wide) * {rest}, 0.0)",
        "new = tl.fma(new, to_all(inverse), ROUNDER).to(tl.int32, bitcast=True)",
        "tl.store(error_scale + group, new_scale, mask=keep & (place == 0))",
        f"tl.store(error + at, in_runs(new, RUNS, RUN).to(tl.int8), {mask})",
    ]


def _kernel(method: BlockMethod, dtype: torch.dtype, aligned: bool) -> str:
    book, names = CodeBook.of(method), _state_names(method)
    kind, read = _READ[dtype]
    pointers = [("grad", kind)]
    if names:
        pointers.append(("error", pieces.TRITON_TYPES[method.error_dtype]))
    if "error_scale" in names:
        pointers.append(("error_scale", "tl.int16"))
    body = [
        *pieces.choose_member(pointers, ["numel", "length", "groups", "codes_at", "scales_at"]),
        "to, stretch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)",
        "chunk = stretch * tl.num_programs(1) + to",
        "first = chunk * groups + before  # of the groups of all chunks",
        "",
        "# Zeros fill up the last group of a chunk, and what the gradient lacks to its last chunks.",
        "start = chunk * length + before * GROUP",
        "present = tl.minimum(tl.maximum(numel - start, 0), THREADS * STRIPES).to(tl.int32)",
        "left = tl.minimum(left, present)",
        "at = offsets(group, place, GROUP, RUNS, RUN)",
    ]
    if aligned:
        body += [
            "begins = run_begins(group, place, GROUP, RUNS, RUN)",
            "inside = tl.broadcast_to((begins < left)[:, :, None], [RUNS, THREADS, RUN])",
            "grad = tl.multiple_of(grad + start, 16)",
        ]
    else:
        body += ["inside = at < left", "grad += start"]
    body.append("given = in_stripes(tl.load(grad + at, mask=inside, other=0.0))")
    body.append("whole = " + read.format("given"))
    if names:
        body += ["", f"error = tl.multiple_of(error + first * GROUP, {min(16, method.group)})"]
        body += _read_error(method)
    if method.rotate:
        body += [
            "",
            "signs = draw_signs(before * PLACES + thread, key.to(tl.uint32))",
            "rotated = hadamard(flip(whole, signs, -0x80000000))",
        ]
    else:
        body += ["", "rotated = whole"]
    rescale = pieces.literal(book.unit)
    body += [
        "largest = group_largest(rotated)",
        f"finite = largest.to(tl.int32, bitcast=True) < {HUGE_BITS:#010x}",
        f"used = finite & (largest >= {TINY!r})",
        f"inverse = tl.where(used, reciprocal(largest) * {pieces.literal(book.top)}, 0.0)",
        "grid = tl.fma(rotated, to_all(inverse), ROUNDER)",
        "unit = grid - ROUNDER",
        *_best(method),
        f"scale = tl.where(used, over * reciprocal(under) * (largest * {rescale}), 0.0)",
        f"scale = tl.where(finite, number_to_bf16(scale), {NO_NUMBER:#06x}).to(tl.int16)",
        "",
        "code_at = to * payload_bytes + codes_at + (stretch * groups + before) * CODE_BYTES",
        *_pack(method),
        "scales = (payload + (to * payload_bytes + scales_at)).to(tl.pointer_type(tl.int16))",
        "scales += stretch * groups + before",
        "tl.store(scales + group, scale, mask=real & (place == 0))",
    ]
    if names:
        body += [""]
        if method.rotate:
            body += [
                "# By an argument, lest the compiler keep all signs in registers from the first time on.",
                "signed = flip(to_all(from_bf16(scale)), signs, sign_bit)",
                "sent = hadamard(levels) * signed",
            ]
        else:
            body.append("sent = levels * to_all(from_bf16(scale))")
        body += _keep_error(method)
    arguments = ["table", "programs", "payload", "payload_bytes: tl.int64", "key", "sign_bit", "THREADS: tl.constexpr"]
    return pieces.kernel("quantize", arguments, ["payload_bytes", "key", "sign_bit"], pieces.indented(body))
