"""zgraph: sharded training as compiler passes over torch.compile graphs."""

import torch

from zgraph.torch_compat import require_supported_torch

require_supported_torch(torch.__version__)

from zgraph import ops  # noqa: E402  (registers the dialect)
from zgraph import passes as passes  # noqa: E402
from zgraph.errors import (  # noqa: E402
    AgreementError,
    CollectiveError,
    PreconditionError,
    VerifyError,
    ZgraphError,
    ZgraphWarning,
)
from zgraph.graph_pass import Fact, GraphPass, PassContext  # noqa: E402
from zgraph.materialize import materialize  # noqa: E402
from zgraph.pipeline import Pipeline  # noqa: E402
from zgraph.report.summary import Report  # noqa: E402
from zgraph.sharding import shard  # noqa: E402

__all__ = [
    "AgreementError",
    "CollectiveError",
    "Fact",
    "GraphPass",
    "PassContext",
    "Pipeline",
    "PreconditionError",
    "Report",
    "VerifyError",
    "ZgraphError",
    "ZgraphWarning",
    "materialize",
    "ops",
    "passes",
    "shard",
]
