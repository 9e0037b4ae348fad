"""Pipelines that work: plain lists, to be edited."""

from __future__ import annotations

from zgraph.graph_pass import GraphPass
from zgraph.ops import MIB
from zgraph.passes.bucket_collectives import BucketCollectives
from zgraph.passes.choose_lifetimes import ChooseLifetimes
from zgraph.passes.dedupe_gathers import DedupeGathers
from zgraph.passes.hoist_starts import HoistStarts
from zgraph.passes.lower_gathers import LowerGathers
from zgraph.passes.lower_reductions import LowerReductions
from zgraph.passes.sink_waits import SinkWaits


def default(*, bucket_bytes: int = 2 * MIB) -> list[GraphPass]:
    """Gathers and reductions, bucketed and overlapped; the ZeRO stage comes from each parameter.

    Args:
        bucket_bytes: the most that one collective carries, counted on whole parameters and gradients.
            The default suits Ethernet, where it keeps both directions of a link busy; faster links want larger buckets.
    """
    return [
        DedupeGathers(),
        ChooseLifetimes(),
        LowerGathers(),
        LowerReductions(),
        BucketCollectives(bucket_bytes=bucket_bytes),
        SinkWaits(reductions_in_flight=3),
        HoistStarts(prefetch=3),
    ]
