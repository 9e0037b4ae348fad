"""Weights stored as codes (low-bit integers) for inference: encoding, layout and decoding."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.compression.method_text import to_text
from zgraph.compression.methods import NoFeedback
from zgraph.dialect.compressed import shard_bytes
from zgraph.errors import ZgraphError
from zgraph.runtime.shard_layout import ShardLayout
from zgraph.tiers.offload import Offload
from zgraph.torch_compat.operators import has_kernel

CODED = (torch.bfloat16, torch.float16, torch.float32)
LEAST_NUMEL = 4096  # codes of fewer elements save nothing: disk space is allocated in units of 4 KiB


@dataclass(frozen=True)
class Codes:
    """How one weight is stored as codes (low-bit integers).

    Each rank quantizes its own rows; consecutive elements form groups that share a scale. Between forwards the
    parameter is a DTensor of bytes, with the same number of bytes on each rank.

    Attributes:
        method: compression method, as `zgraph.compression.method_text.to_text` writes it.
        weight: layout of the unencoded weight on the mesh.
        dtype: dtype of the weight.
        world: number of ranks over which the rows are split.
        numel: number of elements in the rows of the rank with the most rows.
    """

    method: str
    weight: ShardLayout
    dtype: torch.dtype
    world: int  # stored as numbers, like numel, since Dynamo does not look up process groups
    numel: int

    @classmethod
    def of(cls, options: Offload | None, name: str, parameter: Tensor, layout: ShardLayout) -> Codes | None:
        """Return how a parameter is encoded; None if it is stored unencoded.

        Small parameters, vectors, and parameters named in `Offload.full_precision` are stored unencoded.

        Raises:
            ZgraphError: `zgraph.codegen`, which has the kernels, is not imported.
        """
        if options is None or options.param_bits is None:
            return None
        is_named = any(fnmatch.fnmatchcase(name, pattern) for pattern in options.full_precision)
        if is_named or parameter.dtype not in CODED or parameter.ndim < 2 or parameter.numel() < LEAST_NUMEL:
            return None
        if not has_kernel("zgraph::quantize_shards", "CPU"):
            raise ZgraphError(
                f"zgraph.shard: {name} must be stored as codes of {options.param_bits} bits, but their kernels are not "
                "loaded; write zgraph.Offload, which loads them, or import zgraph.codegen."
            )
        bits = options.param_bits
        method = NoFeedback(bits=bits, group=64 if bits == 4 else 128, clip_search=True)
        world = layout.world if layout.is_sharded else 1
        return cls(to_text(method), layout, parameter.dtype, world, layout.chunk_rows * math.prod(layout.shape[1:]))

    @property
    def layout(self) -> ShardLayout:
        """Layout of the stored bytes on the mesh."""
        return replace(self.weight, shape=(self.world * shard_bytes(self.method, self.numel),))

    def encode(self, shard: Tensor) -> Tensor:
        """Return the codes of this rank's rows, as uint8 [bytes]."""
        return torch.ops.zgraph.quantize_shards.default([shard], self.method, [self.numel], self.weight.rank)

    def encoded(self, sharded: DTensor) -> DTensor:
        """Return a sharded weight as a DTensor of codes."""
        with torch.no_grad():
            codes = self.encode(sharded.to_local())
        return DTensor.from_local(codes, sharded.device_mesh, sharded.placements, run_check=False)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode gathered codes to the unsharded weight, rounded to the weight's dtype, then cast to `dtype`."""
        first = dtype if self.dtype == torch.float32 else self.dtype  # decoded values are fp32; round only once
        decode = torch.ops.zgraph.dequantize_shards.default
        flat = decode(codes, self.method, self.numel, 0, self.world, first)
        rows, shape = self.world * self.numel // math.prod(self.weight.shape[1:]), self.weight.shape
        whole = flat.view(rows, *shape[1:])
        whole = whole if rows == shape[0] else whole[: shape[0]]
        return whole if first == dtype else whole.to(dtype)
