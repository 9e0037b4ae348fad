"""Memory of a step's micro-batches (bytes saved, peaks of both halves), computed from the curve of one micro-batch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import fx

from zgraph.analysis.liveness import MemoryCurve
from zgraph.analysis.workspace import remaining_bytes
from zgraph.graph import meta, nodes


@dataclass(frozen=True, kw_only=True)
class MicroBatchMemory:
    """Memory of micro-batches in two halves: forward and backward, or the two halves of a backward.

    Parameters that a window keeps gathered, and gradient sums that wait for the last micro-batch, count only where an
    attribute names them.

    Attributes:
        saved_bytes: bytes that a micro-batch keeps from its first half to its second.
        peak_bytes: most bytes alive while a first half runs.
        first_peak_bytes: most bytes alive while the first micro-batch's second half runs, including the sums that it
            creates.
        later_peak_bytes: most bytes alive while a later second half runs and adds to these sums.
        closing_peak_bytes: most bytes alive while the last (or only) second half runs, including the kept parameters
            and the sums that it frees.
        kept_bytes: bytes of gathered parameters that the window keeps.
        closing_kept_bytes: the part of `kept_bytes` that is still kept when the last second half starts.
    """

    saved_bytes: int = 0
    peak_bytes: int = 0
    first_peak_bytes: int = 0
    later_peak_bytes: int = 0
    closing_peak_bytes: int = 0
    kept_bytes: int = 0
    closing_kept_bytes: int = 0

    @classmethod
    def of(cls, curve: MemoryCurve, begin: int, cut: int) -> MicroBatchMemory:
        """Memory of micro-batches with this curve; the first half is from `begin` to `cut`, the rest the second."""
        kept = _kept_by_window(curve)
        during = list(map(operator.sub, curve.bytes_during, kept))
        made, found = _sums_that_wait(curve.nodes)
        return cls(
            saved_bytes=curve.bytes_after[cut - 1] - kept[cut - 1],
            peak_bytes=max(during[begin:cut]),
            first_peak_bytes=max(during[cut:], default=0),
            later_peak_bytes=max(map(operator.sub, during[cut:], made[cut:]), default=0),
            closing_peak_bytes=max(map(operator.add, curve.bytes_during[cut:], found[cut:]), default=0),
            kept_bytes=max(kept, default=0),
            closing_kept_bytes=kept[cut - 1],
        )

    @classmethod
    def in_turn(
        cls, frames: Sequence[MicroBatchMemory], closing: Sequence[MicroBatchMemory], created_bytes: int
    ) -> MicroBatchMemory:
        """Memory of micro-batches that pass several frames one after the other.

        Args:
            frames: memory of each frame.
            closing: memory of each frame, as compiled for the last micro-batch.
            created_bytes: bytes that the first backward creates in addition to the sums.
        """
        saved = [frame.saved_bytes for frame in frames]
        closing_saved = [frame.saved_bytes for frame in closing]
        return cls(
            saved_bytes=sum(saved),
            peak_bytes=max(
                _peak_of((frame.peak_bytes for frame in frames), saved),
                _peak_of((frame.peak_bytes for frame in closing), closing_saved),
            ),
            first_peak_bytes=_peak_of((frame.first_peak_bytes for frame in frames), saved) + created_bytes,
            later_peak_bytes=_peak_of((frame.later_peak_bytes for frame in frames), saved),
            closing_peak_bytes=_peak_of(
                (frame.closing_peak_bytes for frame in closing),
                (frame.saved_bytes + frame.kept_bytes for frame in closing),
            ),
            kept_bytes=sum(frame.kept_bytes for frame in frames),
            closing_kept_bytes=sum(frame.closing_kept_bytes for frame in closing),
        )

    def without(self, nbytes: int) -> MicroBatchMemory:
        """This memory less `nbytes` bytes, which are alive from the first half to the end of the second half."""
        return replace(
            self,
            saved_bytes=self.saved_bytes - nbytes,
            first_peak_bytes=self.first_peak_bytes - nbytes,
            later_peak_bytes=self.later_peak_bytes - nbytes,
            closing_peak_bytes=self.closing_peak_bytes - nbytes,
        )


def _peak_of(peaks: Iterable[int], left: Iterable[int]) -> int:
    """Most bytes alive while frames run one after the other, given the peak of each, and the bytes that each leaves."""
    return max(map(operator.add, peaks, accumulate(left, initial=0)), default=0)


def _kept_by_window(curve: MemoryCurve) -> list[int]:
    """Bytes of the gathered parameters that a window keeps, at each position of a frame."""
    kept = [0] * len(curve.nodes)
    for entry in curve.ranges:
        if nodes.is_kept_gather(entry.node) and not entry.held:
            for place in range(entry.first, entry.last + 1):
                kept[place] += entry.bytes
    return kept


def _sums_that_wait(order: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """Bytes of the waiting unsharded gradient sums, at each position of a frame.

    Returns:
        Two lists: bytes of sums that the graph has created so far; bytes of earlier sums that are not read yet.
    """
    made, found = [0] * len(order), [0] * len(order)
    for place, node in enumerate(order):
        bytes_made = remaining_bytes(node)
        for later in range(place, len(order) if bytes_made else 0):
            made[later] += bytes_made
        if node.target is torch.ops.zgraph.add_accumulated.default:
            for earlier in range(place):
                found[earlier] += meta.tensor_value(node).nbytes
    return made, found
