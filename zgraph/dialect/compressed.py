"""Operators of compressed reductions and gathers; their kernels are in `zgraph.codegen.compressed_kernels`.

    payload, draw = quantize_grads([grad, ...], [handle, ...], ...)     a row of bytes for each rank of the group
    received = wait(all_to_all(payload))                                a row of bytes from each rank
    shard, ... = dequantize_sum(received, draw, ...)                    this rank's part of each summed gradient

`quantize_grads` reads and updates the error-feedback state of the parameters, which is attached to their handles.
`draw` is the number of earlier reductions, on the host; all ranks have the same number, and seed the random signs with
it.

    payload = quantize_shards([shard, ...], ...)                        one row, for all ranks
    received = wait(all_gather(payload))
    unsharded = dequantize_shards(received, ...)                        for each parameter, when it is needed

Products and lookups may read the payloads themselves, so that the unsharded weight never exists:

    product = multiply_codes(x, received, ...)                          x @ weight.T, or x @ weight
    found = lookup_codes(received, ids, ...)                            weight[ids]

The results of `quantize_shards` and `dequantize_shards` depend only on their arguments: a parameter that is gathered
twice has the same values both times.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.compression.method_text import from_text
from zgraph.compression.payload import BucketLayout

torch.library.define(
    "zgraph::quantize_grads",
    "(Tensor[] grads, Tensor[] handles, Tensor[] errors, str method, str slot, int[] numels, int world, int stretches, "
    "int rank, int salt, str window) -> (Tensor, Tensor)",
)
torch.library.define(
    "zgraph::load_errors",
    "(Tensor[] handles, str method, str slot, int[] numels, int chunks, Device device) -> Tensor[]",
)
torch.library.define(
    "zgraph::dequantize_sum",
    "(Tensor received, Tensor draw, str method, int[] numels, int world, int stretches, int salt, int divisor, "
    "ScalarType dtype) -> Tensor[]",
)
torch.library.define(
    "zgraph::dequantize_each",
    "(Tensor received, Tensor draw, str method, int[] numels, int world, int salt, ScalarType dtype) -> Tensor[]",
)
torch.library.define("zgraph::quantize_shards", "(Tensor[] shards, str method, int[] numels, int rank) -> Tensor")
torch.library.define(
    "zgraph::dequantize_shards",
    "(Tensor received, str method, int numel, int offset, int world, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "zgraph::multiply_codes",
    "(Tensor x, Tensor received, str method, int numel, int offset, int world, int rows, int columns, "
    "bool transpose) -> Tensor",
)
torch.library.define(
    "zgraph::lookup_codes",
    "(Tensor received, Tensor ids, str method, int numel, int offset, int world, int rows, int columns, "
    "ScalarType dtype) -> Tensor",
)


@functools.cache
def layout_of(method: str, numels: tuple[int, ...], world: int, stretches: int) -> BucketLayout:
    """Return the payload layout for these arguments of an operator; `method` is the compression method as text."""
    return BucketLayout(from_text(method), numels, world, stretches)


@torch.library.register_fake("zgraph::quantize_grads")
def _(
    grads: Sequence[Tensor],
    handles: Sequence[Tensor],
    errors: Sequence[Tensor],
    method: str,
    slot: str,
    numels: Sequence[int],
    world: int,
    stretches: int,
    rank: int,
    salt: int,
    window: str,
) -> tuple[Tensor, Tensor]:
    """Quantize gradients for all ranks of a group (`zgraph::quantize_grads`).

    The quantization error is kept as error-feedback state for the next reduction.

    Args:
        grads: contiguous, any shape and floating-point dtype; a gradient with fewer than `stretches * world * numel`
            elements is padded with zeros.
        handles: handles of the gradients' parameters.
        errors: results of `load_errors` if error-feedback state is kept on the host, else empty. They are updated, then
            copied to the host.
        method: compression method, as `zgraph.compression.method_text.to_text` writes it.
        slot: name of the reduction, unique among a parameter's reductions.
        numels, world, stretches: see `BucketLayout`.
        rank, salt: see `zgraph.compression.methods.RngKey`.
        window: window position of the backward, see `zgraph.runtime.window_state`.

    Returns:
        Payload [world * payload_bytes] uint8; and `draw` [1] int64 on the host, the number of earlier reductions.
    """
    payload = layout_of(method, tuple(numels), world, stretches).payload_bytes
    return grads[0].new_empty((world * payload,), dtype=torch.uint8), torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.register_fake("zgraph::load_errors")
def _(
    handles: Sequence[Tensor], method: str, slot: str, numels: Sequence[int], chunks: int, device: torch.device
) -> list[Tensor]:
    """Copy error-feedback state from the host to the device, for the next reduction (`zgraph::load_errors`).

    Args:
        handles: handles of the parameters.
        method, slot, numels: as in `quantize_grads`.
        chunks: number of chunks of a gradient, that is `stretches * world`, see `BucketLayout`.
        device: device of the copies.

    Returns:
        Tensors of each parameter's state, one parameter after the other.
    """
    specs = [from_text(method).state(numel, chunks) for numel in numels]
    return [torch.empty(shape, dtype=dtype, device=device) for spec in specs for shape, dtype in spec.values()]


@torch.library.register_fake("zgraph::dequantize_sum")
def _(
    received: Tensor,
    draw: Tensor,
    method: str,
    numels: Sequence[int],
    world: int,
    stretches: int,
    salt: int,
    divisor: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Decode all ranks' payloads, sum the gradients in fp32 and in rank order, and divide (`zgraph::dequantize_sum`).

    Args:
        received: [world * payload_bytes] uint8, by rank.
        draw: second result of `quantize_grads`.
        method, numels, world, stretches, salt: as in `quantize_grads`.
        divisor: divisor of the sums.
        dtype: dtype of the results.

    Returns:
        [stretches * numel] for each gradient.
    """
    return [received.new_empty((stretches * numel,), dtype=dtype) for numel in numels]


@torch.library.register_fake("zgraph::dequantize_each")
def _(
    received: Tensor,
    draw: Tensor,
    method: str,
    numels: Sequence[int],
    world: int,
    salt: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Decode all ranks' payloads after a compressed all_gather (`zgraph::dequantize_each`).

    Args:
        received: [world * payload_bytes] uint8, by rank; each rank's payload comes from `quantize_grads` with world=1.
        draw, method, numels, world, salt: as in `dequantize_sum`.
        dtype: dtype of the results.

    Returns:
        [world * numel] for each tensor, in rank order.
    """
    return [received.new_empty((world * numel,), dtype=dtype) for numel in numels]


def shard_bytes(method: str, numel: int) -> int:
    """Return the bytes of a quantized shard of `numel` elements in the payload of a gather, including padding."""
    return layout_of(method, (numel,), 1, 1).payload_bytes


@torch.library.register_fake("zgraph::quantize_shards")
def _(shards: Sequence[Tensor], method: str, numels: Sequence[int], rank: int) -> Tensor:
    """Quantize this rank's shards into one payload, which is sent to all ranks of a group (`zgraph::quantize_shards`).

    Args:
        shards: shard of each parameter, any shape and floating-point dtype; padded with zeros to its `numels`.
        method: compression method without state, as `zgraph.compression.method_text.to_text` writes it.
        numels: for each parameter, the elements of its longest shard on any rank.
        rank: this rank's index in the group, which seeds the signs of rotations; all calls use the same signs.

    Returns:
        [sum of `shard_bytes`] uint8, parameter by parameter, so that each parameter can be decoded separately.
    """
    return shards[0].new_empty((sum(shard_bytes(method, numel) for numel in numels),), dtype=torch.uint8)


@torch.library.register_fake("zgraph::dequantize_shards")
def _(received: Tensor, method: str, numel: int, offset: int, world: int, dtype: torch.dtype) -> Tensor:
    """Decode one parameter from the payloads of all ranks (`zgraph::dequantize_shards`).

    Args:
        received: [world * payload bytes] uint8, by rank.
        method, numel: as in `quantize_shards`.
        offset: byte offset of this parameter in a rank's payload.
        world: number of ranks.
        dtype: dtype of the result.

    Returns:
        [world * numel], including padding.
    """
    return received.new_empty((world * numel,), dtype=dtype)


@torch.library.register_fake("zgraph::multiply_codes")
def _(
    x: Tensor,
    received: Tensor,
    method: str,
    numel: int,
    offset: int,
    world: int,
    rows: int,
    columns: int,
    transpose: bool,
) -> Tensor:
    """Multiply with a weight, given as the payloads of all ranks (`zgraph::multiply_codes`).

    Args:
        x: [n, columns] float32, bfloat16 or float16; [n, rows] without a transpose.
        received, numel, offset, world: as in `dequantize_shards`; `numel` is a multiple of `columns`.
        method: `BlockMethod` without rotation, as text.
        rows: number of rows of the weight, without padding.
        columns: number of columns of the weight, a multiple of the method's group.
        transpose: whether the product is `x @ weight.T`; otherwise it is `x @ weight`.

    Returns:
        [n, rows] in the dtype of `x`; [n, columns] without a transpose. For few rows of `x`, weights are not rounded to
        that dtype, products and sums are fp32, and the sum is rounded once.
    """
    return x.new_empty((x.shape[0], rows if transpose else columns))


@torch.library.register_fake("zgraph::lookup_codes")
def _(
    received: Tensor,
    ids: Tensor,
    method: str,
    numel: int,
    offset: int,
    world: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Decode some rows of a weight, given as the payloads of all ranks (`zgraph::lookup_codes`).

    Args:
        ids: integers, any shape: numbers of rows.
        received, method, numel, offset, world, dtype: as in `dequantize_shards`.
        rows: number of rows of the weight, without padding.
        columns: number of columns of the weight, a multiple of the method's group; `numel` is a multiple of it.

    Returns:
        [*ids.shape, columns], with the bits of `dequantize_shards`.

    Raises:
        IndexError: an id is negative, or too large.
    """
    return received.new_empty((*ids.shape, columns), dtype=dtype)
