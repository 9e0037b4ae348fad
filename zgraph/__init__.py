"""zgraph: sharded training as compiler passes over torch.compile graphs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zgraph import metrics as metrics
    from zgraph import passes as passes
    from zgraph.analysis.calibration import calibrate
    from zgraph.analysis.hardware import Hardware
    from zgraph.checkpoint import (
        Checkpoint,
        SafePlanner,
        SafeReader,
        latest_checkpoint,
        load_checkpoint,
        runtime_state,
        save_checkpoint,
    )
    from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
    from zgraph.compiler.pass_list import PassList
    from zgraph.compiler.target import Target
    from zgraph.errors import (
        AgreementError,
        CheckpointError,
        CollectiveError,
        DiskError,
        PreconditionError,
        VerifyError,
        ZgraphError,
        ZgraphWarning,
    )
    from zgraph.optimizers.gradients import GradScaler, clip_grad_norm_
    from zgraph.optimizers.local_step import step_on_shards
    from zgraph.optimizers.loss_scale import reset_error_feedback, set_loss_scale
    from zgraph.optimizers.replicas import Replicas
    from zgraph.planner.plan import plan
    from zgraph.planner.plan_pipeline import plan_pipeline
    from zgraph.planner.split_stages import split_stages
    from zgraph.reporting.export.folder import report
    from zgraph.reporting.metrics.metrics import Metrics
    from zgraph.reporting.network import graph_of
    from zgraph.reporting.of_model import explain, measure, summary
    from zgraph.reporting.summary import Report
    from zgraph.sharding.materialize import materialize
    from zgraph.sharding.no_sync import no_sync
    from zgraph.sharding.pipeline.stage import PipelineStage
    from zgraph.sharding.shard import shard
    from zgraph.sharding.state_dict import full_state_dict
    from zgraph.step.training_step import training_step
    from zgraph.tiers.offload import Offload
    from zgraph.tiers.tier import Tier


class _Checkout(Distribution):
    """The package metadata that Dynamo reads, so that `backend="zgraph"` also works from a checkout."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return "Metadata-Version: 2.1\nName: zgraph\nVersion: 0\n"
        if filename == "entry_points.txt":
            return "[torch_dynamo_backends]\nzgraph = zgraph.driver.backend:zgraph\n"
        return None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.parent / path


class _CheckoutFinder(DistributionFinder):
    """Let `importlib.metadata` find the checkout; an installed zgraph is found first.

    The alternative, registering with Dynamo, would load Dynamo, which takes seconds.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        asked = DistributionFinder.Context() if context is None else context
        # A search by package name or folder asks for installed packages only.
        return [_Checkout()] if asked.name is None and asked.path is sys.path else []


sys.meta_path.append(_CheckoutFinder())

# If torch is loaded already, refuse an unsupported version now, and register with a Dynamo that has already looked for
# backends. Otherwise the first public name does this: `zgraph --help` must not load torch, which takes seconds.
if sys.modules.get("torch") is not None:
    importlib.import_module("zgraph.torch_compat.dynamo").register_late("zgraph", "zgraph.driver.backend")

# The module of each public name, imported at the first access: DTensor and Dynamo take seconds to load.
_HOMES = MappingProxyType(
    {
        "AgreementError": "zgraph.errors",
        "Checkpoint": "zgraph.checkpoint",
        "CheckpointError": "zgraph.errors",
        "CollectiveError": "zgraph.errors",
        "DiskError": "zgraph.errors",
        "Fact": "zgraph.compiler.graph_pass",
        "GradScaler": "zgraph.optimizers.gradients",
        "GraphPass": "zgraph.compiler.graph_pass",
        "Hardware": "zgraph.analysis.hardware",
        "Metrics": "zgraph.reporting.metrics.metrics",
        "Offload": "zgraph.tiers.offload",
        "PassContext": "zgraph.compiler.graph_pass",
        "PassList": "zgraph.compiler.pass_list",
        "PipelineStage": "zgraph.sharding.pipeline.stage",
        "PreconditionError": "zgraph.errors",
        "Replicas": "zgraph.optimizers.replicas",
        "Report": "zgraph.reporting.summary",
        "SafePlanner": "zgraph.checkpoint",
        "SafeReader": "zgraph.checkpoint",
        "Target": "zgraph.compiler.target",
        "Tier": "zgraph.tiers.tier",
        "VerifyError": "zgraph.errors",
        "ZgraphError": "zgraph.errors",
        "ZgraphWarning": "zgraph.errors",
        "calibrate": "zgraph.analysis.calibration",
        "clip_grad_norm_": "zgraph.optimizers.gradients",
        "explain": "zgraph.reporting.of_model",
        "reset_error_feedback": "zgraph.optimizers.loss_scale",
        "full_state_dict": "zgraph.sharding.state_dict",
        "graph_of": "zgraph.reporting.network",
        "latest_checkpoint": "zgraph.checkpoint",
        "load_checkpoint": "zgraph.checkpoint",
        "materialize": "zgraph.sharding.materialize",
        "measure": "zgraph.reporting.of_model",
        "no_sync": "zgraph.sharding.no_sync",
        "plan": "zgraph.planner.plan",
        "plan_pipeline": "zgraph.planner.plan_pipeline",
        "report": "zgraph.reporting.export.folder",
        "runtime_state": "zgraph.checkpoint",
        "save_checkpoint": "zgraph.checkpoint",
        "set_loss_scale": "zgraph.optimizers.loss_scale",
        "shard": "zgraph.sharding.shard",
        "split_stages": "zgraph.planner.split_stages",
        "step_on_shards": "zgraph.optimizers.local_step",
        "summary": "zgraph.reporting.of_model",
        "training_step": "zgraph.step.training_step",
    }
)
_MODULES = ("metrics", "passes")
# Names that run operators of the dialect uncompiled. The kernels are in a higher layer, so they are imported here.
_WITH_KERNELS = frozenset({"Offload"})


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        importlib.import_module("zgraph.errors").renamed("zgraph.Pipeline", "zgraph.PassList")
        name = "PassList"
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module 'zgraph' has no attribute {name!r}")
    importlib.import_module("zgraph.torch_compat")
    if name in _MODULES:
        return importlib.import_module(f"zgraph.{name}")
    if name in _WITH_KERNELS:
        importlib.import_module("zgraph.codegen")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AgreementError",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "DiskError",
    "Fact",
    "GradScaler",
    "GraphPass",
    "Hardware",
    "Metrics",
    "Offload",
    "PassContext",
    "PassList",
    "PipelineStage",
    "PreconditionError",
    "Replicas",
    "Report",
    "SafePlanner",
    "SafeReader",
    "Target",
    "Tier",
    "VerifyError",
    "ZgraphError",
    "ZgraphWarning",
    "calibrate",
    "clip_grad_norm_",
    "explain",
    "full_state_dict",
    "graph_of",
    "latest_checkpoint",
    "load_checkpoint",
    "materialize",
    "measure",
    "metrics",
    "no_sync",
    "passes",
    "plan",
    "plan_pipeline",
    "report",
    "reset_error_feedback",
    "runtime_state",
    "save_checkpoint",
    "set_loss_scale",
    "shard",
    "split_stages",
    "step_on_shards",
    "summary",
    "training_step",
]
