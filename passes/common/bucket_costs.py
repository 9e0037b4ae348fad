"""Predicted cost of buckets: how large a bucket should be, and which collectives it should wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def link_bytes(
    *, total_bytes: int, latency_us: float, transfer_us: float, compute_us: float, latency_share: float
) -> int:
    """Return the bucket size in bytes that suits a link: the smaller of two sizes.

    - The size at which latency is `latency_share` of the transfer.
    - The size that exposes the least time. With n buckets, n latencies are exposed, and 1 / n of the transfer (or of
      the compute, if that is shorter). The sum is least at n = sqrt(min(transfer, compute) / latency).

    Args:
        total_bytes: bytes of all collectives together.
        latency_us: latency of one collective.
        transfer_us: time to transfer all bytes, without latencies.
        compute_us: time of the compute that can hide the transfers.
        latency_share: share of latency in the transfer, such as 0.1.
    """
    sizes = [1.0]
    if transfer_us:
        sizes.append(latency_us / (latency_share * transfer_us))
    if min(compute_us, transfer_us):
        sizes.append(math.sqrt(latency_us / min(compute_us, transfer_us)))
    return max(1, math.ceil(total_bytes * min(sizes)))


@dataclass(frozen=True, slots=True)
class Member:
    """A collective that may join a bucket.

    Attributes:
        at_us: compute time until the result is read (for a gather), or until the input is ready (for a reduction).
        transfer_us: time on the link, without latency.
    """

    at_us: float
    transfer_us: float


class GatherQueue:
    """Model of a graph's gathers on a link, to decide whether each gather joins the previous bucket.

    The link starts with the graph and is never idle. A gather that joins a bucket delays the first reader of the
    bucket; a gather that stays out arrives one latency later. A gather joins unless the graph would then end later. The
    gathers after it are assumed to have no latency.

        joined   link [lat a b      ]      compute ...........[a][b]
        apart    link [lat a][lat b ]      compute .......[a]....[b]
    """

    def __init__(self, members: Sequence[Member], latency_us: float, compute_us: float) -> None:
        self.members = members
        self.latency_us = latency_us
        self.compute_us = compute_us
        self._next = 0
        self._read_at_us = 0.0  # when the first member of the open bucket is read
        self._done_us = 0.0  # when the open bucket has arrived
        self._late_us = 0.0  # delay of compute caused by closed buckets
        # Minimum time from the end of each member's transfer to the end of the graph, due to the later transfers.
        self._rest_us = [-math.inf] * len(members)
        for place in range(len(members) - 1, 0, -1):
            after = max(compute_us - members[place].at_us, self._rest_us[place])
            self._rest_us[place - 1] = members[place].transfer_us + after

    def should_join(self) -> bool:
        """Return whether the next gather should join the open bucket."""
        member = self.members[self._next]
        joined_us = self._done_us + member.transfer_us
        apart_us = joined_us + self.latency_us
        joined_late_us = max(self._late_us, joined_us - self._read_at_us)
        apart_late_us = max(self._late_us, self._done_us - self._read_at_us, apart_us - member.at_us)
        return not _is_later(self._end_us(joined_us, joined_late_us), self._end_us(apart_us, apart_late_us))

    def _end_us(self, done_us: float, late_us: float) -> float:
        return max(self.compute_us + late_us, done_us + self._rest_us[self._next])

    def add(self, *, joins: bool) -> None:
        """Add the next gather: to the open bucket if `joins`, else to a new bucket."""
        member = self.members[self._next]
        if not joins:
            if self._next:
                self._late_us = max(self._late_us, self._done_us - self._read_at_us)
            self._read_at_us = member.at_us
            self._done_us += self.latency_us
        self._done_us += member.transfer_us
        self._next += 1


class ReductionQueue:
    """Model of a graph's reductions on a link, to decide whether each reduction joins the previous bucket.

    A bucket starts when the input of its last member is ready. A reduction joins unless the last reduction of the graph
    would then end later. The reductions after it are assumed to have no latency.
    """

    def __init__(self, members: Sequence[Member], latency_us: float, compute_us: float) -> None:
        self.members = members
        self.latency_us = latency_us
        self.compute_us = compute_us
        self._next = 0
        self._carried_us = 0.0  # transfer time of the open bucket
        self._begin_us = 0.0  # earliest start of the open bucket
        self._free_us = 0.0  # when the link has finished all closed buckets
        # After each member: transfer time of the remaining members, and their earliest end.
        self._rest_us = [0.0] * len(members)
        self._earliest_us = [0.0] * len(members)
        for place in range(len(members) - 1, 0, -1):
            member = members[place]
            self._rest_us[place - 1] = self._rest_us[place] + member.transfer_us
            self._earliest_us[place - 1] = max(self._earliest_us[place], member.at_us + self._rest_us[place - 1])

    def should_join(self) -> bool:
        """Return whether the next reduction should join the open bucket."""
        member = self.members[self._next]
        joined_us = max(self._free_us, member.at_us) + self.latency_us + self._carried_us + member.transfer_us
        apart_us = max(self._closed_us(), member.at_us) + self.latency_us + member.transfer_us
        return not _is_later(self._end_us(joined_us), self._end_us(apart_us))

    def _closed_us(self) -> float:
        return self._begin_us + self.latency_us + self._carried_us if self._next else 0.0

    def _end_us(self, done_us: float) -> float:
        return max(self.compute_us, done_us + self._rest_us[self._next], self._earliest_us[self._next])

    def add(self, *, joins: bool) -> None:
        """Add the next reduction: to the open bucket if `joins`, else to a new bucket."""
        member = self.members[self._next]
        if not joins:
            self._free_us, self._carried_us = self._closed_us(), 0.0
        self._begin_us = max(self._free_us, member.at_us)
        self._carried_us += member.transfer_us
        self._next += 1


def _is_later(one_us: float, other_us: float) -> bool:
    return one_us > other_us and not math.isclose(one_us, other_us, rel_tol=1e-9)
