"""Pipelines that work: plain lists, to be edited."""

from __future__ import annotations

from zgraph.graph_pass import GraphPass
from zgraph.passes.bucket_collectives import BucketCollectives
from zgraph.passes.choose_lifetimes import ChooseLifetimes
from zgraph.passes.dedupe_gathers import DedupeGathers
from zgraph.passes.hoist_starts import HoistStarts
from zgraph.passes.lower_gathers import LowerGathers
from zgraph.passes.lower_reductions import LowerReductions
from zgraph.passes.sink_waits import SinkWaits

MIB = 2**20


def default(*, bucket_bytes: int = 4 * MIB) -> list[GraphPass]:
    """Gathers and reductions, bucketed and overlapped; the ZeRO stage comes from each parameter.

    Args:
        bucket_bytes: the most that one collective carries, counted on what a rank hands in.
    """
    return [
        DedupeGathers(),
        ChooseLifetimes(),
        LowerGathers(),
        LowerReductions(),
        BucketCollectives(bucket_bytes=bucket_bytes),
        SinkWaits(),
        HoistStarts(),
    ]
