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
    """How the gradients of a bucket share one payload [world, payload_bytes], with a row for each receiving rank.

    Every gradient is cut into `stretches * world` equal chunks, padded at the end; chunk `s * world + d` goes to rank
    d. A row holds the first section (codes) of all its chunks, gradient by gradient and stretch by stretch, then the
    second section (scales) of all chunks, and is padded to a multiple of 16 bytes.

    Attributes:
        method: method that defines the sections.
        numels: elements of a chunk, for each gradient.
        world: number of ranks to which a payload goes.
        stretches: chunks of a gradient for each rank; more than 1 if another group will split the received part again.
    """

    method: CompressionMethod
    numels: tuple[int, ...]
    world: int
    stretches: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of one row."""
        used = self.stretches * sum(sum(self.method.sections(numel)) for numel in self.numels)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def offsets(self) -> list[tuple[int, ...]]:
        """For each gradient, the byte offset of each of its sections in a row; its stretches follow one another."""
        sections = [self.method.sections(numel) for numel in self.numels]
        found: list[list[int]] = [[] for _ in self.numels]
        offset = 0
        for place in range(len(sections[0])):
            for member, sizes in enumerate(sections):
                found[member].append(offset)
                offset += self.stretches * sizes[place]
        return [tuple(offsets) for offsets in found]

    def views(self, payload: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each gradient, its sections in a payload [ranks, payload_bytes]: [ranks, stretches, bytes] each."""
        for numel, offsets in zip(self.numels, self.offsets(), strict=True):
            sizes: Sequence[int] = self.method.sections(numel)
            yield tuple(
                payload[:, offset : offset + self.stretches * size].unflatten(1, (self.stretches, size))
                for offset, size in zip(offsets, sizes, strict=True)
            )


def chunk_unit(method: CompressionMethod, chunk: Chunk, stretches: int) -> list[Chunk]:
    """The chunks that a collective carries, for `meta.set_chunks`; [] if only the method knows.

    Each stretch is sent as a chunk of its own.
    """
    if not isinstance(method, BlockMethod):
        return []
    return [replace(chunk, unit=(method.group, sum(method.sections(method.group))))] * stretches
