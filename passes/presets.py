"""Pipelines that work: plain lists, to be edited."""

from __future__ import annotations

from zgraph.analysis.hardware import Hardware
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compression.low_rank import LowRank
from zgraph.compression.methods import BlockMethod, CompressionMethod, TwoHop
from zgraph.passes.bucket_collectives import BucketCollectives
from zgraph.passes.choose_lifetimes import ChooseLifetimes
from zgraph.passes.compress_gradients import CompressGradients
from zgraph.passes.dedupe_gathers import DedupeGathers
from zgraph.passes.hoist_starts import HoistStarts
from zgraph.passes.lower_gathers import LowerGathers
from zgraph.passes.lower_reductions import LowerReductions
from zgraph.passes.quantize_gathers import QuantizeGathers, WeightDifferences
from zgraph.passes.schedule_overlap import ScheduleOverlap
from zgraph.passes.set_target import SetTarget
from zgraph.passes.sink_waits import SinkWaits


def default(
    *,
    bucket_bytes: int | None = None,
    hardware: Hardware | None = None,
    budget_bytes: int | None = None,
    time_kernels: bool = False,
    compression: CompressionMethod | TwoHop | LowRank | None = None,
    gather_compression: BlockMethod | WeightDifferences | None = None,
) -> list[GraphPass]:
    """Gathers and reductions, bucketed and overlapped; the ZeRO stage comes from each parameter.

    Args:
        bucket_bytes: the most that one collective carries, counted on whole parameters and gradients.
            None: what suits the links of the hardware. Without hardware, on NCCL, those of the preset that the GPUs'
            name stands for, see `BucketCollectives`; elsewhere 2 MiB, which suits Ethernet.
        hardware: plan buckets and order by what they cost there: `zgraph.calibrate()`, or
            `zgraph.Hardware.preset(...)`. None: by rules that need no costs: three gathers ahead, three reductions in
            flight.
        budget_bytes: what a step may hold at any moment, of what it allocates; see `SetTarget`. Decides what backward
            gathers and computes again. Needs `hardware`; a budget that is too small is an error of the compile, which
            says what would do.
        time_kernels: run each kernel once while compiling, which takes seconds, instead of estimating what it takes;
            needs the `hardware` of this machine.
        compression: such as `zgraph.passes.LoCo()`: gradients travel as codes of a few bits, or `LowRank()`: as thin
            factors; see `CompressGradients`. Lossy. None: as they are.
        gather_compression: such as `zgraph.passes.NoFeedback(bits=8)`: parameters travel as codes, and forwards read
            what these stand for, see `QuantizeGathers`. Lossy. None: as they are.

    Raises:
        ValueError: a budget without hardware, by which alone it can be kept.
    """
    lowered = [
        DedupeGathers(),
        ChooseLifetimes(),
        *([] if gather_compression is None else [QuantizeGathers(method=gather_compression)]),
        LowerGathers(),
        *([] if compression is None else [CompressGradients(method=compression)]),
        LowerReductions(),
        BucketCollectives(bucket_bytes="auto" if bucket_bytes is None and hardware is None else bucket_bytes),
    ]
    if hardware is not None:
        return [
            SetTarget(hardware=hardware, budget_bytes=budget_bytes, time_kernels=time_kernels),
            *lowered,
            ScheduleOverlap(),
        ]
    if time_kernels:
        raise ValueError(
            "presets.default: time_kernels=True has no use without costs to plan by; add hardware=zgraph.calibrate()."
        )
    if budget_bytes is not None:
        raise ValueError(
            f"presets.default: budget_bytes={budget_bytes} is kept by a schedule that needs costs; add "
            'hardware=zgraph.calibrate(), or zgraph.Hardware.preset("h100").'
        )
    return [*lowered, SinkWaits(reductions_in_flight=3), HoistStarts(prefetch=3)]
