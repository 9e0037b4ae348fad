"""Layout of each gradient's bytes in the payload of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from zgraph.compression.methods import BlockMethod, CompressionMethod
from zgraph.runtime.chunks import Chunk

ALIGNMENT = 16  # bytes; vector units and GPUs prefer each rank's payload to begin at such a multiple


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket's gradients in one payload, a row for each receiving rank: [world, payload_bytes].

    Every gradient is cut into `stretches * world` equal chunks, padded at the end; chunk `s * world + d` of stretch s
    goes to rank d. A row holds the first section (codes) of all chunks for its rank, gradient by gradient and stretch
    by stretch, then the second section (scales) of these chunks. It is padded to a multiple of 16 bytes.

    Attributes:
        method: compression method, which defines the sections.
        numels: number of elements of a chunk, for each gradient.
        world: number of ranks to which the payload is sent.
        stretches: number of chunks that each rank receives of a gradient; more than 1 if another process group will
            split the received chunks again.
    """

    method: CompressionMethod
    numels: tuple[int, ...]
    world: int
    stretches: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of one row of the payload, padding included."""
        used = self.stretches * sum(sum(self.method.sections(numel)) for numel in self.numels)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def offsets(self) -> list[tuple[int, ...]]:
        """For each gradient, the byte offset of each section in a row; a section's stretches follow one another."""
        sections = [self.method.sections(numel) for numel in self.numels]
        found: list[list[int]] = [[] for _ in self.numels]
        offset = 0
        for place in range(len(sections[0])):
            for member, sizes in enumerate(sections):
                found[member].append(offset)
                offset += self.stretches * sizes[place]
        return [tuple(offsets) for offsets in found]

    def views(self, payload: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield for each gradient the views of its sections: [ranks, payload_bytes] -> [ranks, stretches, bytes]."""
        for numel, offsets in zip(self.numels, self.offsets(), strict=True):
            sizes: Sequence[int] = self.method.sections(numel)
            yield tuple(
                payload[:, offset : offset + self.stretches * size].unflatten(1, (self.stretches, size))
                for offset, size in zip(offsets, sizes, strict=True)
            )


def chunk_unit(method: CompressionMethod, chunk: Chunk, stretches: int) -> list[Chunk]:
    """The encoded chunks, one for each stretch, that a collective sends for a gradient's chunk, for `meta.set_chunks`.

    Returns [] unless the method is a `BlockMethod`: the sizes of other methods follow no fixed unit.
    """
    if not isinstance(method, BlockMethod):
        return []
    return [replace(chunk, unit=(method.group, sum(method.sections(method.group))))] * stretches
