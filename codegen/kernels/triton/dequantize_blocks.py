"""Triton source for one bucket: unpack, scale, rotate back, sum over the ranks, divide and store, in one launch.

A program takes a few groups of one gradient and goes through the ranks in their order, with the sums in registers.
Which gradient, and where it lies, it reads in two tables. Outputs of each dtype have a launch of their own.

`zgraph.codegen.kernels.reference` says what is computed; results are equal bit for bit, whatever the launch options.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import RUN, CodeBook
from zgraph.codegen.kernels.triton import source as pieces
from zgraph.codegen.kernels.triton.launch_options import LaunchOptions, fastest, is_compiled, on_device, start
from zgraph.codegen.kernels.triton.tables import are_aligned, entries_of, programs_of
from zgraph.compression.methods import BlockMethod, RngKey
from zgraph.compression.payload import ALIGNMENT, BucketLayout


def dequantize_sum_bucket(
    received: Tensor,
    layout: BucketLayout,
    draw: RngKey,
    first_rank: int,
    divisor: int,
    outputs: Sequence[Tensor],
    *,
    accumulate: bool = False,
    options: LaunchOptions | None = None,
) -> None:
    """Sum what the ranks have sent, as `zgraph.codegen.kernels.reference.dequantize_sum_bucket` does.

    Args:
        received: [ranks, payload_bytes] uint8, contiguous, from ranks first_rank, first_rank + 1, ... of the group.
        layout, draw: those of the senders.
        first_rank: whose signs the first row has.
        divisor: of the sum.
        outputs: [stretches * numel], contiguous, in any floating-point dtype for each gradient.
        accumulate: add to the outputs instead of overwriting them.
        options: how to launch. None: the fastest of a few, found once for each method, dtype, ranks and device.

    Raises:
        ValueError: a tensor is not contiguous, or on the CPU where kernels are compiled; the payloads do not begin at a
            multiple of 16 bytes.
    """
    pieces.require_contiguous("dequantize_blocks", [received, *outputs])
    task = Task(divisor=divisor, accumulate=accumulate)
    _launch(received, layout.payload_bytes, outputs, layout, draw, first_rank, task, options)


def dequantize_each_bucket(
    received: Tensor,
    layout: BucketLayout,
    draw: RngKey,
    outputs: Sequence[Tensor],
    *,
    options: LaunchOptions | None = None,
) -> None:
    """Store what each rank has sent, as `reference.dequantize_each_bucket` does, all in one launch.

    Args:
        received: [ranks, payload_bytes] uint8; rows may lie apart, by a multiple of 16 bytes.
        layout, draw: those of the senders; the layout is that of a world of one, with one stretch.
        outputs: [ranks, numel], contiguous, in any floating-point dtype for each tensor.
        options: how to launch. None: the fastest of a few, found once for each method, dtype and device.

    Raises:
        ValueError: a tensor is not contiguous, or on the CPU where kernels are compiled; the payloads do not begin at a
            multiple of 16 bytes.
    """
    pieces.require_contiguous("dequantize_blocks", outputs)
    row_bytes = received.stride(0) if received.shape[0] > 1 else layout.payload_bytes
    assert layout.stretches == 1 and received.stride(1) == 1 and row_bytes % ALIGNMENT == 0, (layout, received.stride())
    _launch(received, row_bytes, outputs, layout, draw, 0, Task(each=True), options)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What becomes of what the ranks have sent.

    Attributes:
        divisor: of the sum.
        accumulate: it is added to the outputs.
        each: nothing is summed; the values of every rank become a row of the outputs.
    """

    divisor: int = 1
    accumulate: bool = False
    each: bool = False

    @property
    def divides(self) -> bool:
        """Whether a multiplication by the reciprocal would give other bits."""
        return self.divisor & (self.divisor - 1) != 0

    @property
    def factor(self) -> float:
        """The divisor where the sum is divided, else what it is multiplied by."""
        return float(self.divisor) if self.divides else 1.0 / self.divisor


def _launch(
    received: Tensor,
    row_bytes: int,
    outputs: Sequence[Tensor],
    layout: BucketLayout,
    draw: RngKey,
    first_rank: int,
    task: Task,
    options: LaunchOptions | None,
) -> None:
    for dtype in dict.fromkeys(output.dtype for output in outputs):
        members = [place for place, output in enumerate(outputs) if output.dtype == dtype]
        _launch_dtype(received, row_bytes, outputs, members, layout, draw, first_rank, task, options)


def _launch_dtype(
    received: Tensor,
    row_bytes: int,
    outputs: Sequence[Tensor],
    members: Sequence[int],
    layout: BucketLayout,
    draw: RngKey,
    first_rank: int,
    task: Task,
    options: LaunchOptions | None,
) -> None:
    """For the outputs of one dtype, which are these members of the bucket."""
    method, dtype, ranks = pieces.block_method(layout), outputs[members[0]].dtype, received.shape[0]
    lengths = [layout.numels[member] for member in members]
    addresses = [pieces.address_of(outputs[member]) for member in members]
    names = pieces.load(emit_dequantize(method, dtype, task, aligned=are_aligned(addresses, lengths, RUN)))
    if is_compiled(names["dequantize"]):
        pieces.require_device("dequantize_blocks", "payload", received)
        pieces.require_aligned("dequantize_blocks", [received])
        options = options or _fastest(method, dtype, 1 if task.each else ranks, received.device)
    options, offsets = options or LaunchOptions(), layout.offsets()
    programs = programs_of(
        tuple(method.groups(length) for length in lengths), options.groups_at_once(method), received.device
    )
    if not len(programs):
        return
    rows = [
        [address, length, method.groups(length), *offsets[member]]
        for address, member, length in zip(addresses, members, lengths, strict=True)
    ]
    with on_device(received.device):
        start(
            names["dequantize"],
            (len(programs), ranks if task.each else layout.stretches),
            options,
            entries_of(rows, received.device),
            programs,
            received,
            row_bytes,
            ranks,
            pieces.sign_base(draw),
            first_rank,
            task.factor,
            contracts=True,
        )


@functools.cache
def _fastest(method: BlockMethod, dtype: torch.dtype, ranks: int, device: torch.device) -> LaunchOptions:
    """Tried on a bucket of its own, which the caller's sums do not meet."""
    numel = 2**22
    layout = BucketLayout(method, (numel,), world=ranks)
    received = torch.zeros(ranks, layout.payload_bytes, dtype=torch.uint8, device=device)
    output = torch.empty(numel, dtype=dtype, device=device)
    return fastest(
        lambda options: dequantize_sum_bucket(received, layout, RngKey(0), 0, ranks, [output], options=options), device
    )


@functools.lru_cache(maxsize=1024)
def emit_dequantize(method: BlockMethod, dtype: torch.dtype, task: Task, *, aligned: bool) -> str:
    """The source of a kernel `dequantize` for outputs of one dtype.

    Multiplications may be contracted with additions: all products are exact.

    Args:
        method: of the senders.
        dtype: of the outputs.
        task: what is wanted.
        aligned: each output and each of its chunks begins at a multiple of 16 bytes and ends with a whole run, so that
            16 bytes are written at once.
    """
    return pieces.joined(
        _header(method, dtype, task, aligned),
        pieces.IMPORTS,
        pieces.constants(method),
        pieces.BF16,
        pieces.HALVES,
        *([pieces.SIGNS] if method.rotate else []),
        _kernel(method, dtype, task, aligned),
    )


def _header(method: BlockMethod, dtype: torch.dtype, task: Task, aligned: bool) -> str:
    """What the kernel works on, and the bytes it moves."""
    verb, what = "Add" if task.accumulate else "Write", "the values" if task.each else "sums of the values"
    sent, stored = sum(method.sections(method.group)), method.group * dtype.itemsize * (1 + task.accumulate)
    return pieces.comment(
        [
            f"{verb} {what} of all ranks, as {pieces.dtype_name(dtype)}.",
            "",
            f"{method}",
            f"{'16 bytes' if aligned else 'one element'} of the output at once",
            f"bytes of a group of {method.group}: {sent} read {'' if task.each else 'of each rank '}+ {stored} of its "
            f"output, {sent / method.group:.3f} + {stored / method.group:.3f} for each element",
        ]
    )


# How an fp32 sum is added to an output, and stored in it.
_ADD = MappingProxyType(
    {
        torch.bfloat16: "result += from_bf16(in_stripes(tl.load(output + at, mask=inside, other=0)))",
        torch.float16: "result += in_stripes(tl.load(output + at, mask=inside, other=0)).to(tl.float32)",
    }
)
_CAST = MappingProxyType(
    {
        torch.bfloat16: "to_bf16(result)",
        torch.float16: "result.to(tl.float16)",
        torch.float64: "result.to(tl.float64)",
    }
)


def _levels(method: BlockMethod) -> list[str]:
    """Lines that make levels [STRIPES * THREADS] of bytes in stripes, of which more bits may stand above."""
    half = method.levels // 2
    lines: list[str] = []
    for place in range(8 // method.bits):
        shifted = f"bytes >> {place * method.bits - 1}" if place else "bytes << 1"
        lines.append(f"part_{place} = ({shifted}) & {2 * method.levels - 2}")
    if method.bits == 2:
        lines += [f"part_{place} = unite(part_{place}, part_{place + 1}, 1, part_{place}.shape[0])" for place in (0, 2)]
        lines.append("part_0 = unite(part_0, part_2, 1, part_2.shape[0])")
    if method.bits == 4:
        lines.append("part_0 = unite(part_0, part_1, 1, part_1.shape[0])")
    return [
        *lines,
        "# 2^22 + x holds 2 x in its low bits: a number is made of a code without a conversion instruction.",
        "levels = (part_0 | 0x4A800000).to(tl.float32, bitcast=True)",
        f"levels -= {pieces.literal(2**22 + half - CodeBook.of(method).after)}",
    ]


def _read(method: BlockMethod) -> list[str]:
    """Lines that make bytes in stripes, with the codes' signs turned: the lowest code is 0."""
    sign = sum((method.levels // 2) << place for place in range(0, 8, method.bits))
    if method.group * method.bits // 8 < RUN:
        return [
            "bytes = tl.load(codes + at, mask=tl.broadcast_to(real[None, :, None], at.shape), other=0)",
            f"bytes = in_stripes(bytes.to(tl.int32)) ^ {sign}",
        ]
    word = sign * 0x01010101
    return [
        "words = tl.load(codes + at, mask=tl.broadcast_to(real[None, :, None], [CODE_RUNS, THREADS, 2]), other=0)",
        f"words = words ^ {pieces.signed(word)}",
        "words = words[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]",
        "bytes = in_stripes(tl.reshape(words, [CODE_RUNS, THREADS, CODE_RUN]))",
    ]


def _kernel(method: BlockMethod, dtype: torch.dtype, task: Task, aligned: bool) -> str:
    kind = "tl.int16" if dtype == torch.bfloat16 else pieces.TRITON_TYPES[dtype]
    words = method.group * method.bits // 8 >= RUN
    body = [
        *pieces.choose_member([("output", kind)], ["length", "groups", "codes_at", "scales_at"]),
        f"stretch = {'0' if task.each else 'tl.program_id(1)'}",
        "first = tl.cast(stretch, tl.int64) * groups + before  # of the groups of all stretches",
        "codes_at += first * CODE_BYTES",
        "scales_at += 2 * first",
    ]
    if words:
        body.append("at = offsets(group, place, CODE_BYTES // 4, CODE_RUNS, 2)")
    else:
        body.append("at = offsets(group, place, CODE_BYTES, CODE_RUNS, CODE_RUN)")
    code_alignment = min(16, method.group * method.bits // 8)
    codes = f"tl.multiple_of(received + (from_row + codes_at), {code_alignment})"
    if words:
        codes = f"tl.multiple_of((received + (from_row + codes_at)).to(tl.pointer_type(tl.int32)), {code_alignment})"
    body += [
        "",
        "# -0.0, which leaves any x in -0.0 + x as it is; tl.full would make 0.0 of it.",
        "total = tl.full([STRIPES * THREADS], -0x80000000, tl.int32).to(tl.float32, bitcast=True)",
        *(["own = tl.program_id(1)"] if task.each else []),
        "for sender in range(own, own + 1):" if task.each else "for sender in range(ranks):",
        "    from_row = tl.cast(sender, tl.int64) * row_bytes",
        f"    codes = {codes}",
        *("    " + line for line in _read(method)),
        *("    " + line for line in _levels(method)),
        "    scales = (received + (from_row + scales_at)).to(tl.pointer_type(tl.int16))",
        "    scale = to_all(from_bf16(tl.load(scales + group, mask=real, other=0)))",
    ]
    if method.rotate:
        body += [
            "    signs = draw_signs(before * PLACES + thread, sign_key(base, first_rank + sender))",
            "    total += hadamard(levels) * flip(scale, signs, -0x80000000)",
        ]
    else:
        body.append("    total += levels * scale")
    factor = "tl.cast(divisor, tl.float32)"
    body += [
        "",
        f"result = tl.div_rn(total, {factor})" if task.divides else f"result = total * {factor}",
        f"output += {'own' if task.each else 'stretch'}.to(tl.int64) * length + before * GROUP",
        "at = offsets(group, place, GROUP, RUNS, RUN)",
    ]
    if aligned:
        body += [
            "begins = run_begins(group, place, GROUP, RUNS, RUN)",
            "inside = tl.broadcast_to((begins < left)[:, :, None], [RUNS, THREADS, RUN])",
            "output = tl.multiple_of(output, 16)",
        ]
    else:
        body.append("inside = at < left")
    if task.accumulate:
        body.append(_ADD.get(dtype, "result += in_stripes(tl.load(output + at, mask=inside, other=0))"))
    body.append(f"tl.store(output + at, in_runs({_CAST.get(dtype, 'result')}, RUNS, RUN), mask=inside)")
    scalars = ["row_bytes", "ranks", "base", "first_rank", "divisor"]
    typed = ["row_bytes: tl.int64", *scalars[1:], "THREADS: tl.constexpr"]
    return pieces.kernel("dequantize", ["table", "programs", "received", *typed], scalars, pieces.indented(body))
