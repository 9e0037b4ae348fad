"""Quantizes a bucket on a GPU, with one kernel launch for the gradients of each dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import RUN, sign_key
from zgraph.codegen.kernels.triton import checks, launch_options
from zgraph.codegen.kernels.triton.constants import quantize_constants, signed
from zgraph.codegen.kernels.triton.launch_options import LaunchOptions, drawn, fastest, is_compiled, on_device, start
from zgraph.codegen.kernels.triton.tables import are_aligned, entries_of, programs_of
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
    """Quantize the gradients of a bucket into its payload, like `zgraph.codegen.kernels.reference.quantize_bucket`.

    Args:
        grads: contiguous gradients of any shape, treated as padded to `stretches * world * numel` elements by zeros.
        states: error-feedback state of each gradient, contiguous, on the gradients' device; updated in place.
        layout: layout of the bucket; its method is a BlockMethod.
        draw, rank: key of the random signs, and this rank; the signs depend on both.
        payload: [world, payload_bytes] uint8, contiguous; bytes after the last section are not written.
        options: launch options. None: the fastest of a few, found once for each method, dtype and device.

    Raises:
        ValueError: a tensor is not contiguous, or is on the CPU although kernels are compiled; the payload or a stored
            error does not begin at a multiple of 16 bytes.
    """
    method = checks.block_method(layout)
    kept = [[state[name] for name in _state_names(method)] for state in states]
    checks.require_contiguous("quantize_blocks", [*grads, *(tensor for state in kept for tensor in state), payload])
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
    """Launch the kernel for the gradients of one dtype, whose indices in the bucket are `members`."""
    method, dtype = checks.block_method(layout), grads[0].dtype
    lengths = [layout.numels[member] for member in members]
    numels, addresses = [grad.numel() for grad in grads], [checks.address_of(grad) for grad in grads]
    kernel = launch_options.load("quantize")
    if is_compiled(kernel):
        checks.require_device("quantize_blocks", payload)
        checks.require_aligned("quantize_blocks", [payload, *(kept[member][0] for member in members if kept[member])])
        options = options or _fastest(method, dtype, payload.device)
    options, offsets = options or LaunchOptions(), layout.offsets()
    programs = programs_of(
        tuple(method.groups(length) for length in lengths), options.groups_at_once(method), payload.device
    )
    if not len(programs):
        return
    rows = [
        [address, *_addresses(kept[member]), numel, length, method.groups(length), *offsets[member]]
        for address, member, numel, length in zip(addresses, members, numels, lengths, strict=True)
    ]
    case = quantize_constants(method, dtype, aligned=are_aligned(addresses, [*numels, *lengths], RUN))
    with on_device(payload.device):
        start(
            kernel,
            (len(programs), layout.world, layout.stretches),
            options,
            case,
            entries_of(rows, payload.device),
            programs,
            payload,
            layout.payload_bytes,
            signed(key),
            -(2**31),
            contracts=case.contracts,
        )


@functools.cache
def _fastest(method: BlockMethod, dtype: torch.dtype, device: torch.device) -> LaunchOptions:
    """Find the fastest launch options on temporary tensors, so that error-feedback state does not change.

    The tensors are small, because they are allocated during the first backward, but large enough for all SMs.
    """
    numel = 2**21
    layout = BucketLayout(method, (numel,), world=1)
    state = {
        name: torch.zeros(shape, dtype=kept, device=device) for name, (shape, kept) in method.state(numel, 1).items()
    }
    grad = drawn(numel, dtype, device)
    payload = torch.zeros(1, layout.payload_bytes, dtype=torch.uint8, device=device)
    return fastest(
        lambda options: quantize_bucket([grad], [state], layout, RngKey(0), 0, payload, options=options), device
    )


def _addresses(kept: Sequence[Tensor]) -> list[int]:
    """Return the addresses of a gradient's error and of the error's scales; 0 for a tensor that does not exist."""
    found = [checks.address_of(tensor) for tensor in kept]
    return found + [0] * (2 - len(found))


def _state_names(method: BlockMethod) -> list[str]:
    return list(method.state(1, 1))
