"""The passes, one per file; `presets.default()` is the list that runs if no pipeline is given."""

from zgraph.compression.low_rank import LowRank
from zgraph.compression.methods import ErrorFeedback, LoCo, NoFeedback, RngKey, TensorMethod, TwoHop
from zgraph.compression.sign_momentum import SignMomentum
from zgraph.passes import presets
from zgraph.passes.bucket_collectives import BucketCollectives
from zgraph.passes.choose_lifetimes import ChooseLifetimes
from zgraph.passes.compress_gradients import CompressGradients
from zgraph.passes.compute.fuse_attention import FuseAttention
from zgraph.passes.compute.read_codes import ReadCodes
from zgraph.passes.dedupe_gathers import DedupeGathers
from zgraph.passes.hoist_starts import HoistStarts
from zgraph.passes.lower_gathers import LowerGathers
from zgraph.passes.lower_reductions import LowerReductions
from zgraph.passes.memory.offload_activations import OffloadActivations
from zgraph.passes.memory.schedule_copies import ScheduleCopies
from zgraph.passes.memory.stream_states import StreamStates
from zgraph.passes.quantize_gathers import QuantizeGathers
from zgraph.passes.schedule_overlap import ScheduleOverlap
from zgraph.passes.sink_waits import SinkWaits
from zgraph.passes.step.fuse_updates import FuseUpdates
from zgraph.passes.step.interleave_micro_batches import InterleaveMicroBatches
from zgraph.passes.step.orthogonalize_on_owners import OrthogonalizeOnOwners
from zgraph.passes.step.recompute_activations import RecomputeActivations
from zgraph.passes.step.split_updates import SplitUpdates
from zgraph.passes.step.update_as_reduced import UpdateAsReduced

__all__ = [
    "BucketCollectives",
    "ChooseLifetimes",
    "CompressGradients",
    "DedupeGathers",
    "ErrorFeedback",
    "FuseAttention",
    "FuseUpdates",
    "HoistStarts",
    "InterleaveMicroBatches",
    "LoCo",
    "LowRank",
    "LowerGathers",
    "LowerReductions",
    "NoFeedback",
    "OffloadActivations",
    "OrthogonalizeOnOwners",
    "QuantizeGathers",
    "ReadCodes",
    "RecomputeActivations",
    "RngKey",
    "ScheduleCopies",
    "ScheduleOverlap",
    "SignMomentum",
    "SinkWaits",
    "SplitUpdates",
    "StreamStates",
    "TensorMethod",
    "TwoHop",
    "UpdateAsReduced",
    "presets",
]
