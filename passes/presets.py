"""Lists of passes to use or to edit: `default` schedules by fixed rules, `planned` by predicted costs on a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Literal, Never

from zgraph.compiler.graph_pass import GraphPass
from zgraph.compiler.pass_list import PassList
from zgraph.compiler.target import Target
from zgraph.compression.low_rank import LowRank
from zgraph.compression.methods import BlockMethod, CompressionMethod, TwoHop
from zgraph.passes.bucket_collectives import BucketCollectives
from zgraph.passes.choose_lifetimes import ChooseLifetimes
from zgraph.passes.compress_gradients import CompressGradients
from zgraph.passes.compute.read_codes import ReadCodes
from zgraph.passes.dedupe_gathers import DedupeGathers
from zgraph.passes.lower_gathers import LowerGathers
from zgraph.passes.lower_reductions import LowerReductions
from zgraph.passes.memory.offload_activations import OffloadActivations
from zgraph.passes.memory.schedule_copies import ScheduleCopies
from zgraph.passes.memory.stream_states import StreamStates
from zgraph.passes.quantize_gathers import QuantizeGathers
from zgraph.passes.schedule_overlap import RULES, ScheduleOverlap
from zgraph.passes.step.fuse_updates import FuseUpdates
from zgraph.passes.step.interleave_micro_batches import InterleaveMicroBatches
from zgraph.passes.step.orthogonalize_on_owners import OrthogonalizeOnOwners
from zgraph.passes.step.recompute_activations import RecomputeActivations
from zgraph.passes.step.split_updates import SplitUpdates


def default(
    *,
    bucket_bytes: int | None = None,
    compression: CompressionMethod | TwoHop | LowRank | None = None,
    gather_compression: BlockMethod | None = None,
    offload_activations: bool = False,
    interleave_micro_batches: bool = False,
    **unknown: Never,
) -> list[GraphPass]:
    """Return the default passes: bucketed and overlapped gathers and reductions for the ZeRO stage of each parameter.

    Fixed rules schedule them: three gathers are prefetched, and three reductions may be in flight.

    Args:
        bucket_bytes: maximum bytes per collective, counted on whole parameters and gradients. None: on NCCL, the size
            that suits the links in the hardware preset for these GPUs (see `BucketCollectives`); on other backends
            2 MiB, which suits Ethernet.
        compression: lossy gradient compression. `zgraph.passes.LoCo()` and similar methods send codes of a few bits;
            `LowRank()` sends thin factors. See `CompressGradients`. None: gradients are sent uncompressed.
        gather_compression: lossy parameter compression, such as `zgraph.passes.NoFeedback(bits=8)`: forward and
            backward read quantized parameters, see `QuantizeGathers`. None: parameters are sent uncompressed.
        offload_activations: keep the activations saved for backward on the host, see `OffloadActivations`. If the
            target has a budget, only activations that are faster to copy than to recompute are kept there.
        interleave_micro_batches: run all micro-batches of a captured step through a layer before the next layer, see
            `InterleaveMicroBatches`: a step with k micro-batches then sends what one of them sends.

    Raises:
        TypeError: unknown argument. For "hardware" and similar names, the message says to pass a `zgraph.Target`.
    """
    _refuse("default", unknown)
    size = "auto" if bucket_bytes is None else bucket_bytes
    interleaving = InterleaveMicroBatches() if interleave_micro_batches else None
    bucketed = _bucketed(size, compression, gather_compression, offload_activations, interleaving)
    return [*bucketed, *RULES, StreamStates()]


def planned(
    *,
    bucket_bytes: int | None = None,
    compression: CompressionMethod | TwoHop | LowRank | None = None,
    gather_compression: BlockMethod | None = None,
    offload_activations: bool = False,
    interleave_micro_batches: bool | None = None,
    **unknown: Never,
) -> list[GraphPass]:
    """Return the passes of `default`, scheduled for the fastest step on the target's hardware within its budget.

        zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=zgraph.calibrate()))

    State offloaded to the host is updated there or on the device, whichever makes the step faster (see `StreamStates`).

    Args:
        bucket_bytes: as for `default`. None: the size that suits the links of the target's hardware.
        compression, gather_compression, offload_activations: as for `default`.
        interleave_micro_batches: as for `default`. None: if the step is then predicted to be faster, within the budget
            of the target or, without a budget, a quarter more memory than otherwise.

    Raises:
        TypeError: as for `default`.
    """
    _refuse("planned", unknown)
    interleaving = None
    if interleave_micro_batches is not False:
        interleaving = InterleaveMicroBatches(when="always" if interleave_micro_batches else "faster")
    bucketed = _bucketed(bucket_bytes, compression, gather_compression, offload_activations, interleaving)
    return [*bucketed, ScheduleOverlap(), StreamStates(updates="planned"), ScheduleCopies()]


def with_streams(passes: PassList | None) -> PassList:
    """Return a list of passes extended by `StreamStates`, which copies offloaded tensors to the device and back.

    `ScheduleCopies` is added as well if the list plans by costs.

    Args:
        passes: the list to extend; returned unchanged if it already has `StreamStates`. None: `default`.
    """
    found = passes or PassList(default())
    if any(isinstance(one, StreamStates) for one in found.passes):
        return found
    by_costs = any(isinstance(one, ScheduleOverlap) for one in found.passes)
    streams = [StreamStates(updates="planned"), ScheduleCopies()] if by_costs else [StreamStates()]
    return replace(found, passes=[*found.passes, *streams])


def in_plain_order(passes: PassList | None) -> PassList | None:
    """Return a list of passes without the choice to interleave micro-batches, which rounds gradients differently."""
    if passes is None:
        return None
    kept = [one for one in passes.passes if not (isinstance(one, InterleaveMicroBatches) and one.when == "faster")]
    return replace(passes, passes=kept)


def _refuse(preset: str, unknown: Mapping[str, object]) -> None:
    """Raise TypeError for unknown arguments; for a setting of `zgraph.Target`, the message shows how to write it."""
    of_target = {field.name for field in fields(Target)}
    for name in unknown:
        if name in of_target:
            given = "hardware=..." if name == "hardware" else f"hardware=..., {name}=..."
            raise TypeError(
                f"presets.{preset}() takes no {name}, which belongs to the target of the list; write "
                f"zgraph.PassList(presets.planned(), target=zgraph.Target({given}))"
            )
        raise TypeError(f"presets.{preset}() got an unexpected keyword argument {name!r}")


def _bucketed(
    bucket_bytes: int | Literal["auto"] | None,
    compression: CompressionMethod | TwoHop | LowRank | None,
    gather_compression: BlockMethod | None,
    offload_activations: bool,
    interleaving: InterleaveMicroBatches | None,
) -> list[GraphPass]:
    return [
        DedupeGathers(),
        *([] if interleaving is None else [interleaving]),
        RecomputeActivations(),
        ChooseLifetimes(offload_least_bytes=OffloadActivations().least_bytes if offload_activations else None),
        *([OffloadActivations()] if offload_activations else []),
        *([] if gather_compression is None else [QuantizeGathers(method=gather_compression)]),
        LowerGathers(),
        *([] if compression is None else [CompressGradients(method=compression)]),
        LowerReductions(),
        BucketCollectives(bucket_bytes=bucket_bytes),
        OrthogonalizeOnOwners(),
        SplitUpdates(),
        FuseUpdates(),
        ReadCodes(),
    ]
