"""Decodes the payloads of a bucket on a GPU, with one kernel launch for the outputs of each dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import RUN
from zgraph.codegen.kernels.triton import checks, launch_options
from zgraph.codegen.kernels.triton.constants import DequantizeConstants, dequantize_constants, signed
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
    """Sum the decoded values of all ranks, like `zgraph.codegen.kernels.reference.dequantize_sum_bucket`.

    Args:
        received: [ranks, payload_bytes] uint8, contiguous, from ranks first_rank, first_rank + 1, ... of the group.
        layout, draw: the senders' layout and key of random signs.
        first_rank: rank that sent the first row.
        divisor: divisor of the sum.
        outputs: [stretches * numel], contiguous, in any floating-point dtype for each gradient.
        accumulate: add to the outputs instead of overwriting them.
        options: launch options. None: the fastest of a few, found once for each method, dtype, ranks and device.

    Raises:
        ValueError: a tensor is not contiguous, or is on the CPU although kernels are compiled; the payloads do not
            begin at a multiple of 16 bytes.
    """
    checks.require_contiguous("dequantize_blocks", [received, *outputs])
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
    """Decode each rank's values into a row of the outputs, like `reference.dequantize_each_bucket`, with one launch.

    Args:
        received: [ranks, payload_bytes] uint8; the stride between rows may be any multiple of 16 bytes.
        layout: the senders' layout, in which world and stretches are 1.
        draw: the senders' key of random signs.
        outputs: [ranks, numel], contiguous, in any floating-point dtype for each tensor.
        options: launch options. None: the fastest of a few, found once for each method, dtype and device.

    Raises:
        ValueError: a tensor is not contiguous, or is on the CPU although kernels are compiled; the payloads do not
            begin at a multiple of 16 bytes.
    """
    checks.require_contiguous("dequantize_blocks", outputs)
    row_bytes = received.stride(0) if received.shape[0] > 1 else layout.payload_bytes
    assert layout.stretches == 1 and received.stride(1) == 1 and row_bytes % ALIGNMENT == 0, (layout, received.stride())
    _launch(received, row_bytes, outputs, layout, draw, 0, Task(each=True), options)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Processing of decoded values in the kernel.

    Attributes:
        divisor: divisor of the sum over ranks.
        accumulate: whether the result is added to the outputs.
        each: whether each rank's values become a row of the outputs, instead of being summed.
    """

    divisor: int = 1
    accumulate: bool = False
    each: bool = False

    @property
    def divides(self) -> bool:
        """Whether sums are divided, rather than multiplied by a reciprocal, which is exact for powers of two."""
        return self.divisor & (self.divisor - 1) != 0

    @property
    def factor(self) -> float:
        """The divisor if sums are divided, else its reciprocal."""
        return float(self.divisor) if self.divides else 1.0 / self.divisor

    def constants(self, method: BlockMethod, dtype: torch.dtype, *, aligned: bool) -> DequantizeConstants:
        """Return the kernel's compile-time constants for outputs of one dtype."""
        return dequantize_constants(
            method, dtype, accumulate=self.accumulate, each=self.each, divides=self.divides, aligned=aligned
        )


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
    """Launch the kernel for the outputs of one dtype, whose indices in the bucket are `members`."""
    method, dtype, ranks = checks.block_method(layout), outputs[members[0]].dtype, received.shape[0]
    lengths = [layout.numels[member] for member in members]
    addresses = [checks.address_of(outputs[member]) for member in members]
    kernel = launch_options.load("dequantize")
    if is_compiled(kernel):
        checks.require_device("dequantize_blocks", received)
        checks.require_aligned("dequantize_blocks", [received])
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
            kernel,
            (len(programs), ranks if task.each else layout.stretches),
            options,
            task.constants(method, dtype, aligned=are_aligned(addresses, lengths, RUN)),
            entries_of(rows, received.device),
            programs,
            received,
            row_bytes,
            ranks,
            _sign_base(draw),
            first_rank,
            task.factor,
            contracts=True,
        )


def _sign_base(draw: RngKey) -> int:
    """Return the part of the random signs' key that depends on step and salt."""
    return signed((draw.step * 0x9E3779B1 + draw.salt * 0xC2B2AE3D + 1) & 0xFFFFFFFF)


@functools.cache
def _fastest(method: BlockMethod, dtype: torch.dtype, ranks: int, device: torch.device) -> LaunchOptions:
    """Find the fastest launch options on temporary tensors."""
    numel = 2**21
    layout = BucketLayout(method, (numel,), world=ranks)
    received = torch.zeros(ranks, layout.payload_bytes, dtype=torch.uint8, device=device)
    output = torch.empty(numel, dtype=dtype, device=device)
    return fastest(
        lambda options: dequantize_sum_bucket(received, layout, RngKey(0), 0, ranks, [output], options=options), device
    )
