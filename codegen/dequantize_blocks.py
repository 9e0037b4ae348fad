"""Triton source for one bucket: unpack, scale, rotate back, sum over the ranks, divide and store, in one launch.

A program takes a few groups of one gradient and goes through the ranks in their order, with the sums in registers.

`zgraph.codegen.reference` says what is computed; results are equal bit for bit, whatever the launch options.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from zgraph.codegen import triton_source as pieces
from zgraph.codegen.launch_options import LaunchOptions, fastest, is_compiled, on_device
from zgraph.codegen.reference import CodeBook
from zgraph.codegen.triton_source import Member
from zgraph.compression import BlockMethod, Draw
from zgraph.wire_format import ALIGNMENT, BucketLayout


def dequantize_sum_bucket(
    received: Tensor,
    layout: BucketLayout,
    draw: Draw,
    first_rank: int,
    divisor: int,
    outputs: Sequence[Tensor],
    *,
    accumulate: bool = False,
    dynamic: bool = True,
    options: LaunchOptions | None = None,
) -> None:
    """Sum what the ranks have sent, as `zgraph.codegen.reference.dequantize_sum_bucket` does.

    Args:
        received: [ranks, payload_bytes] uint8, contiguous, from ranks first_rank, first_rank + 1, ... of the group.
        layout, draw: those of the senders.
        first_rank: whose signs the first row has.
        divisor: of the sum.
        outputs: [stretches * numel], contiguous, in any floating-point dtype for each gradient.
        accumulate: add to the outputs instead of overwriting them.
        dynamic: sizes are arguments of the kernel, so that buckets of as many gradients share one; otherwise constants.
        options: how to launch. None: the fastest of a few, found once for each method, dtype, ranks and device.

    Raises:
        ValueError: a tensor is not contiguous, or on the CPU where kernels are compiled.
    """
    pieces.require_contiguous("dequantize_blocks", [received, *outputs])
    source = emit_dequantize(
        layout, tuple(output.dtype for output in outputs), received.shape[0], accumulate=accumulate, dynamic=dynamic
    )
    numbers = pieces.sizes(_members(layout), layout.payload_bytes) if dynamic else []
    _launch(source, received, outputs, layout, received.shape[0], [*numbers, pieces.sign_base(draw), first_rank],
            float(divisor), options)  # fmt: skip


def dequantize_each_bucket(
    received: Tensor,
    layout: BucketLayout,
    draw: Draw,
    outputs: Sequence[Tensor],
    *,
    options: LaunchOptions | None = None,
) -> None:
    """Store what each rank has sent, as `zgraph.codegen.reference.dequantize_each_bucket` does, in one launch.

    Args:
        received: [ranks, payload_bytes] uint8; rows may lie apart, by a multiple of 16 bytes.
        layout, draw: those of the senders; the layout is that of a world of one, with one stretch.
        outputs: [ranks, numel], contiguous, in any floating-point dtype for each tensor.
        options: how to launch. None: the fastest of a few, found once for each method, dtype and device.

    Raises:
        ValueError: a tensor is not contiguous, or on the CPU where kernels are compiled.
    """
    pieces.require_contiguous("dequantize_blocks", outputs)
    ranks, row_bytes = received.shape[0], received.stride(0) if received.shape[0] > 1 else layout.payload_bytes
    assert layout.stretches == 1 and received.stride(1) == 1 and row_bytes % ALIGNMENT == 0, (layout, received.stride())
    source = emit_dequantize(layout, tuple(output.dtype for output in outputs), ranks, dynamic=True, each=True)
    numbers = [*pieces.sizes(_members(layout), row_bytes), pieces.sign_base(draw), 0]
    _launch(source, received, outputs, layout, 1, numbers, 1.0, options)


def _launch(
    source: str,
    received: Tensor,
    outputs: Sequence[Tensor],
    layout: BucketLayout,
    summed: int,
    numbers: Sequence[int],
    divisor: float,
    options: LaunchOptions | None,
) -> None:
    """Start a kernel whose programs each sum the payloads of `summed` ranks."""
    method, names = pieces.block_method(layout), pieces.load(source)
    if is_compiled(names["dequantize"]):
        pieces.require_device("dequantize_blocks", "payload", received)
        options = options or _fastest(method, outputs[0].dtype, summed, received.device)
    with on_device(received.device):
        names["launch"](
            *outputs,
            received,
            received.view(torch.int16),
            *numbers,
            divisor,
            **(options or LaunchOptions()).arguments(method),
        )


@functools.cache
def _fastest(method: BlockMethod, dtype: torch.dtype, ranks: int, device: torch.device) -> LaunchOptions:
    """Tried on a bucket of its own, which the caller's sums do not meet."""
    numel = 2**22
    layout = BucketLayout(method, (numel,), world=ranks)
    received = torch.zeros(ranks, layout.payload_bytes, dtype=torch.uint8, device=device)
    output = torch.empty(numel, dtype=dtype, device=device)
    return fastest(
        lambda options: dequantize_sum_bucket(received, layout, Draw(0), 0, ranks, [output], options=options), device
    )


@functools.lru_cache(maxsize=1024)
def emit_dequantize(
    layout: BucketLayout,
    dtypes: tuple[torch.dtype, ...],
    ranks: int,
    *,
    accumulate: bool = False,
    dynamic: bool = False,
    each: bool = False,
) -> str:
    """The source of a kernel `dequantize`, and of a function `launch` that starts it.

    Args:
        layout: of the bucket.
        dtypes: of each output.
        ranks: that have sent something.
        accumulate: add to the outputs.
        dynamic: write no sizes into the source, but take them as arguments. Of the sizes it then only says whether all
            are multiples of 16, so that 16 bytes can be written at once.
        each: sum nothing, but write the values of every rank to a row of the outputs.
    """
    method = pieces.block_method(layout)
    assert dynamic or not each, "rows may lie apart, by an argument"
    members = _members(layout)
    written = [member.named(place) for place, member in enumerate(members)] if dynamic else members
    sizes = {"CODE_BYTES": method.group * method.bits // 8}
    return pieces.joined(
        _header(layout, dtypes, ranks, accumulate, dynamic, each),
        pieces.IMPORTS,
        pieces.constants(method, sizes if dynamic else sizes | {"PAYLOAD_BYTES": layout.payload_bytes}),
        pieces.BF16,
        pieces.HALVES,
        *([pieces.SIGNS] if method.rotate else []),
        _kernel(layout, dtypes, written, ranks, accumulate, all(length % 16 == 0 for length in layout.numels), each),
    )


def _members(layout: BucketLayout) -> list[Member]:
    """Of the outputs, whose chunks are stretches."""
    return pieces.members_of(layout, [layout.stretches * length for length in layout.numels], layout.stretches)


def _header(
    layout: BucketLayout, dtypes: Sequence[torch.dtype], ranks: int, accumulate: bool, dynamic: bool, each: bool
) -> str:
    """What the kernel works on, and the bytes it moves."""
    method = pieces.block_method(layout)
    verb = "Add" if accumulate else "Write"
    what = f"{len(dtypes)} tensors of each of" if each else f"the sums of {len(dtypes)} gradients from the payloads of"
    lines = [f"{verb} {what} {ranks} ranks.", "", f"{method}"]
    if dynamic:
        lines += [
            f"output_{place}: {pieces.dtype_name(dtype)} [{ranks if each else layout.stretches}, length_{place}]"
            for place, dtype in enumerate(dtypes)
        ]
        sent = sum(method.sections(method.group))
        lines.append(f"bytes of a group of {method.group}: {sent if each else ranks * sent} read, its output written")
        return pieces.comment(lines)
    lines += [
        f"output_{place}: {pieces.dtype_name(dtype)} [{layout.stretches}, {length}], "
        f"{method.groups(length)} groups a stretch"
        for place, (dtype, length) in enumerate(zip(dtypes, layout.numels, strict=True))
    ]
    elements = layout.stretches * sum(layout.numels)
    written = layout.stretches * sum(
        length * dtype.itemsize for length, dtype in zip(layout.numels, dtypes, strict=True)
    )
    read = ranks * layout.stretches * sum(sum(method.sections(length)) for length in layout.numels)
    read += written if accumulate else 0
    each = (read + written) / max(elements, 1)
    lines.append(
        f"{read} bytes read + {written} written = {read + written}: {each:.3f} for each of {elements} elements"
    )
    return pieces.comment(lines)


# How an fp32 sum is added to an output, and stored in it.
_ADD = MappingProxyType(
    {
        torch.bfloat16: "result += from_bf16(tl.load({at}, mask=inside, other=0.0).to(tl.int16, bitcast=True))",
        torch.float16: "result += tl.load({at}, mask=inside, other=0.0).to(tl.float32)",
    }
)
_CAST = MappingProxyType(
    {
        torch.bfloat16: "to_bf16(result).to(tl.bfloat16, bitcast=True)",
        torch.float16: "result.to(tl.float16)",
        torch.float64: "result.to(tl.float64)",
    }
)
_UNPACK = MappingProxyType(
    {
        2: """\
first, second = packed & 0x33, (packed >> 2) & 0x33
packed = unite(first, second, 1, packed.shape[0])
codes = unite(packed & 3, packed >> 4, 1, packed.shape[0])""",
        4: "codes = unite(packed & 15, packed >> 4, 1, packed.shape[0])",
        8: "codes = packed",
    }
)


def _kernel(
    layout: BucketLayout,
    dtypes: Sequence[torch.dtype],
    members: Sequence[Member],
    ranks: int,
    accumulate: bool,
    aligned: bool,
    each: bool,
) -> str:
    method = pieces.block_method(layout)
    kinds = list(dict.fromkeys(dtypes))
    own: list[list[str]] = []
    for place, dtype in enumerate(dtypes):
        own.append([f"output_{pieces.dtype_name(dtype)} = output_{place}"])
        if len(kinds) > 1:
            own[-1].append(f"kind = {kinds.index(dtype)}")
    dynamic = isinstance(members[0].length, str)
    numbers = [str(number) for member in members for number in member.numbers] if dynamic else []
    numbers += ["payload_bytes"] if dynamic else []
    payload_bytes = "payload_bytes" if dynamic else "PAYLOAD_BYTES"

    body = ["program = tl.program_id(0)"]
    if len(kinds) > 1:
        body += [f"output_{pieces.dtype_name(dtype)} = output_{dtypes.index(dtype)}" for dtype in kinds]
    body += pieces.choose_member(members, method.group, own)
    half = method.levels // 2
    body += [
        "",
        "row = ((program - first) * GROUPS + tl.arange(0, GROUPS)).to(tl.int32)  # groups of one stretch after another",
        "real = row < rows",
        "groups = tl.cdiv(length, GROUP).to(tl.int32)  # of a stretch"
        if dynamic
        else "groups = tl.cdiv(length, GROUP)",
        "stretch, group = row // groups, row % groups",
        "code_at = codes_at + row.to(tl.int64) * CODE_BYTES",
        f"code_at = tl.multiple_of(code_at, {min(16, method.group * method.bits // 8)})",
        "code_at = code_at[:, None] + tl.arange(0, CODE_BYTES)[None, :]",
        "real_codes = tl.broadcast_to(real[:, None], [GROUPS, CODE_BYTES])",
        "",
        "# -0.0, which leaves any x in -0.0 + x as it is; tl.full would make 0.0 of it.",
        "total = tl.full([STRIPES * GROUPS * PLACES], -0x80000000, tl.int32).to(tl.float32, bitcast=True)",
        *(["own = tl.program_id(1)"] if each else []),
        "for sender in range(own, own + 1):" if each else f"for sender in range({ranks}):",
        f"    from_row = tl.cast(sender, tl.int64) * {payload_bytes}",
        f"    from_row = tl.multiple_of(from_row, {ALIGNMENT})",
        "    packed = tl.load(received + from_row + code_at, mask=real_codes, other=0)",
        "    scale = tl.load(scales + (from_row + scales_at) // 2 + row, mask=real, other=0)",
        f"    packed = in_stripes(packed, STRIPES * {method.bits} // 8).to(tl.int32)",
        *("    " + line for line in _UNPACK[method.bits].splitlines()),
        "    # 2^22 + x holds 2 x in its low bits: a number is made of a code without a conversion instruction.",
        f"    levels = (((codes ^ {half}) << 1) | 0x4A800000).to(tl.float32, bitcast=True)",
        f"    levels -= {pieces.literal(2**22 + half - CodeBook.of(method).after)}",
        "    sent = levels * to_all(from_bf16(scale))",
    ]
    if method.rotate:
        body.append("    sent = flip(hadamard(sent), draw_signs(group, sign_key(base, first_rank + sender)))")
    body += [
        "    total += sent",
        "",
        "result = tl.div_rn(in_groups(total, GROUPS, STRIPES), tl.cast(divisor, tl.float32))",
        "left = tl.minimum(length - group * GROUP, GROUP)",
        "left = tl.where(real, left, 0).to(tl.int32)",
        *(["left = tl.multiple_of(left, 16)"] if aligned else []),
        "inside = tl.arange(0, GROUP)[None, :] < left[:, None]",
        "start = stretch.to(tl.int64) * length + group * GROUP",
        *(["start += own.to(tl.int64) * length  # a row for each rank"] if each else []),
        *(["start = tl.multiple_of(start, 16)"] if aligned else []),
        "at = start[:, None] + tl.arange(0, GROUP)[None, :]",
    ]
    for number, dtype in enumerate(kinds):
        place = f"output_{pieces.dtype_name(dtype)} + at"
        lines: list[str] = []
        if accumulate:
            lines.append(_ADD.get(dtype, "result += tl.load({at}, mask=inside, other=0.0)").format(at=place))
        lines.append(f"tl.store({place}, {_CAST.get(dtype, 'result')}, mask=inside)")
        if len(kinds) > 1:
            lines = [f"if kind == {number}:", *("    " + line for line in lines)]
        body += lines

    arguments = [*(f"output_{place}" for place in range(len(members))), "received", "scales"]
    scalars = ["base", "first_rank", "divisor"]
    typed = [*arguments, *(f"{number}: tl.int64" for number in numbers), *scalars, "GROUPS: tl.constexpr"]
    return pieces.kernel("dequantize", typed, [*numbers, *scalars], pieces.indented(body)) + pieces.launcher(
        "dequantize",
        [*arguments, *numbers, *scalars],
        [member.rows(method.group) for member in members],
        ranks if each else None,
    )
