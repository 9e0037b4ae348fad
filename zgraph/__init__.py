"""zgraph: sharded training as compiler passes over torch.compile graphs."""

import torch

from zgraph.torch_compat import require_supported_torch

require_supported_torch(torch.__version__)

from zgraph import ops  # noqa: E402
from zgraph import passes as passes  # noqa: E402
from zgraph.analysis.calibration import calibrate  # noqa: E402
from zgraph.analysis.hardware import Hardware  # noqa: E402
from zgraph.checkpoint import (  # noqa: E402
    Checkpoint,
    SafePlanner,
    SafeReader,
    latest_checkpoint,
    load_checkpoint,
    runtime_state,
    save_checkpoint,
)
from zgraph.codegen import compressed_kernels as compressed_kernels  # noqa: E402  (registers them)
from zgraph.codegen import low_rank_kernels as low_rank_kernels  # noqa: E402  (these too)
from zgraph.codegen.kernels.triton import sum_blocks  # noqa: E402  (registers it)
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext  # noqa: E402
from zgraph.compiler.pipeline import Pipeline  # noqa: E402
from zgraph.dialect import compressed as compressed_ops  # noqa: E402  (registers the dialect)
from zgraph.dialect import (
    grouped_gathers,
    weight_differences,
)
from zgraph.dialect import low_rank as low_rank_ops  # noqa: E402  (here as well)
from zgraph.errors import (  # noqa: E402
    AgreementError,
    CheckpointError,
    CollectiveError,
    PreconditionError,
    VerifyError,
    ZgraphError,
    ZgraphWarning,
)
from zgraph.optimizers.gradients import GradScaler, clip_grad_norm_  # noqa: E402
from zgraph.optimizers.local_step import step_on_shards  # noqa: E402
from zgraph.optimizers.loss_scale import forget_errors, set_loss_scale  # noqa: E402
from zgraph.planning import plan  # noqa: E402
from zgraph.reporting.of_model import explain, measure, summary  # noqa: E402
from zgraph.reporting.summary import Report  # noqa: E402
from zgraph.sharding.materialize import materialize  # noqa: E402
from zgraph.sharding.no_sync import no_sync  # noqa: E402
from zgraph.sharding.shard import shard  # noqa: E402
from zgraph.sharding.state_dict import follow_compiled_modules, full_state_dict  # noqa: E402

follow_compiled_modules()

__all__ = [
    "AgreementError",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "Fact",
    "GradScaler",
    "GraphPass",
    "Hardware",
    "PassContext",
    "Pipeline",
    "PreconditionError",
    "Report",
    "SafePlanner",
    "SafeReader",
    "VerifyError",
    "ZgraphError",
    "ZgraphWarning",
    "calibrate",
    "clip_grad_norm_",
    "explain",
    "forget_errors",
    "full_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "materialize",
    "measure",
    "no_sync",
    "ops",
    "passes",
    "plan",
    "runtime_state",
    "save_checkpoint",
    "set_loss_scale",
    "shard",
    "step_on_shards",
    "summary",
]
