"""Layout of the encoded gradients of a bucket in its payload, the bytes that a collective sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from zgraph.compression.methods import BlockMethod, CompressionMethod
from zgraph.runtime.chunks import Chunk

ALIGNMENT = 16  # bytes; vector units and GPUs prefer each rank's payload to begin at such a multiple


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket's encoded gradients in its payload [world, payload_bytes], a row for each receiving rank.

    Every gradient is padded and cut into `stretches * world` equal chunks; chunk `s * world + d` goes to rank d. A
    row has one section after another, each gradient by gradient: for example the codes of all chunks for rank d, then
    the scales of all these chunks. A row is padded to a multiple of 16 bytes.

    Attributes:
        method: compression method, which defines the sections.
        numels: number of elements of a chunk, for each gradient.
        world: number of ranks to which the payload is sent.
        stretches: number of chunks of a gradient that each rank receives; more than 1 if another process group will
            split the received chunks again.
    """

    method: CompressionMethod
    numels: tuple[int, ...]
    world: int
    stretches: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of one row of the payload, including padding."""
        used = self.stretches * sum(sum(self.method.sections(numel)) for numel in self.numels)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def offsets(self) -> list[tuple[int, ...]]:
        """Return the byte offsets of each gradient's sections within a row of the payload."""
        sections = [self.method.sections(numel) for numel in self.numels]
        found: list[list[int]] = [[] for _ in self.numels]
        offset = 0
        for place in range(len(sections[0])):
            for member, sizes in enumerate(sections):
                found[member].append(offset)
                offset += self.stretches * sizes[place]
        return [tuple(offsets) for offsets in found]

    def views(self, payload: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield for each gradient a view of each section: [ranks, payload_bytes] -> [ranks, stretches, bytes]."""
        for numel, offsets in zip(self.numels, self.offsets(), strict=True):
            sizes: Sequence[int] = self.method.sections(numel)
            yield tuple(
                payload[:, offset : offset + self.stretches * size].unflatten(1, (self.stretches, size))
                for offset, size in zip(offsets, sizes, strict=True)
            )


def chunk_unit(method: CompressionMethod, chunk: Chunk, stretches: int) -> list[Chunk]:
    """Describe, for `meta.set_chunks`, the encoded chunks of one gradient that each rank receives.

    Returns [] unless the method is a `BlockMethod`, because other encodings have no fixed size per group.
    """
    if not isinstance(method, BlockMethod):
        return []
    return [replace(chunk, unit=(method.group, sum(method.sections(method.group))))] * stretches
