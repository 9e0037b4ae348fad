"""`zgraph.plan_pipeline`: compiles the stages of a pipeline in one process, and simulates schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import EXACT, Allocator
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compiler.pass_list import PassList
from zgraph.errors import is_count
from zgraph.planner.cluster import Cluster, Sharder, check_functions
from zgraph.planner.frames import FramePlanner
from zgraph.planner.planned_step import Plan
from zgraph.planner.schedules.axes import Axes
from zgraph.planner.stages import plan_stages
from zgraph.sharding.shard import shard

OPTIONS = ("micro_batches", "schedule", "chunks")  # that only pipelines have
OF_STEPS = ("optimizer_fn", "offload", "step_fn")  # that only plans of whole steps have


def check_of_steps(name: str, given: Mapping[str, Any]) -> None:
    """Refuse options for whole steps, such as `optimizer_fn`: a pipeline's schedule runs outside whole steps.

    Raises:
        ValueError: such an option is given.
        TypeError: an unknown argument is given.
    """
    unknown = [key for key in given if key not in OF_STEPS]
    if unknown:
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
    found = [key for key, value in given.items() if value is not None]
    if found:
        raise ValueError(
            f"{name}: {', '.join(found)} with a pipeline, whose schedule runs outside whole steps; leave it out: "
            "moments of AdamW are counted all the same. Or plan the model without a pp axis: zgraph.plan(model_fn, "
            f"world_size=8, batch=batch, {found[0]}=...)."
        )


def plan_pipeline(
    model_fn: Callable[[], nn.Module | Sequence[nn.Module]],
    *,
    world: Mapping[str, int],
    batch: Callable[[], tuple[Any, ...]],
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    shard_fn: Sharder = shard,
    hardware: Hardware | str = "h100",
    passes: PassList | Sequence[GraphPass] | None = None,
    allocator: Allocator = EXACT,
    **of_steps: Any,
) -> Plan:
    """Compile a pipeline's step as its ranks would, without a cluster, a GPU or the model's memory.

    In a step, stages of type `zgraph.PipelineStage` run forward and backward for each micro-batch, in the order of a
    schedule of torch. Equal stages are planned once. The plan includes neither the optimizer's update nor a loss
    outside the stages; optimizer state is counted as two moments of AdamW. If passes have a target with budget_bytes,
    `plan.pipeline.stages[i].keep_bytes` is the largest value for which no rank exceeds the budget.

    Args:
        model_fn: makes the model: an `nn.Sequential`, which `zgraph.split_stages` cuts, or a list of stages. Rank r
            has the stages r, r + ranks, ...; under "ZBVZeroBubble", stage r and the r-th stage from the end.
        world: axes of the cluster and their sizes, the outermost first, such as {"pp": 4, "dp": 8, "tp": 2}.
        batch: makes the arguments of forward for one micro-batch of one rank.
        micro_batches: number of micro-batches in a step.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble" or "ZBVZeroBubble", as named by torch.
            None: "Interleaved1F1B" with several chunks, else "1F1B". The plan compares all possible schedules.
        chunks: stages on each rank, if an `nn.Sequential` is cut. None: 1.
        shard_fn: shards a stage; called with the stage and the mesh of all axes but "pp", see `zgraph.plan`.
        hardware, passes, allocator: as for `zgraph.plan`.
        of_steps: the options `offload`, `optimizer_fn` and `step_fn` of `zgraph.plan`, which are refused here.

    Raises:
        ValueError: an argument is invalid, the model cannot be cut into the stages, torch has no such schedule for
            them, or the step does not fit into the target's budget_bytes.
        ZgraphError: this process is already in a process group, or a stage cannot be compiled.
    """
    check_of_steps("zgraph.plan_pipeline", of_steps)
    check_functions("zgraph.plan_pipeline", model_fn, batch)
    axes = Axes(world)
    if axes.stages == 1:
        raise ValueError(
            f"zgraph.plan_pipeline: world={dict(world)!r} has no pp axis; add one, such as "
            '{"pp": 4, "dp": 8}, or call zgraph.plan.'
        )
    for name, value in (("micro_batches", micro_batches), ("chunks", 1 if chunks is None else chunks)):
        if not is_count(value):
            raise ValueError(f"zgraph.plan_pipeline: {name}={value!r}; write how many, such as {name}=8.")
    assert micro_batches is not None
    cluster = Cluster.of("zgraph.plan_pipeline", axes, axes.world_size, hardware, passes)
    with cluster.joined() as (mesh, mode):
        model, inputs = cluster.made(mode, model_fn, batch)
        planner = FramePlanner(cluster.machine, cluster.passes, allocator, axes)
        planned = plan_stages(
            model,
            inputs,
            planner,
            axes,
            mode=mode,
            shard_stage=lambda stage: cluster.shard(shard_fn, stage, mesh),
            micro_batches=micro_batches,
            schedule=schedule,
            chunks=chunks,
        )
        cublas_bytes, communicator_bytes = cluster.libraries_bytes()
    cluster.check_tensor_parallel(planned.graphs)
    return Plan(
        world_size=cluster.ranks,
        hardware=cluster.machine,
        ledger=planned.ledger,
        cublas_bytes=cublas_bytes,
        communicator_bytes=communicator_bytes,
        graphs=planned.graphs,
        curves=planned.curves,
        compiled=planner.report,
        axes=axes,
        pipeline=planned.plan,
    )
