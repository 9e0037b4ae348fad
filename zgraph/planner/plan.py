"""`zgraph.plan`: compiles a training step of a cluster in one process, and predicts its memory, traffic and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn, optim

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import EXACT, Allocator
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compiler.pass_list import PassList
from zgraph.errors import ZgraphError, is_count, renamed
from zgraph.passes import presets
from zgraph.planner.cluster import Cluster, Sharder, check_functions
from zgraph.planner.frames import FramePlanner
from zgraph.planner.memory import plan_ledger, rest_on_paper
from zgraph.planner.plan_pipeline import OPTIONS as OF_PIPELINES
from zgraph.planner.plan_pipeline import check_of_steps, plan_pipeline
from zgraph.planner.planned_step import Plan
from zgraph.planner.schedules.axes import Axes
from zgraph.planner.whole_step import Optimizers, StepMaker, as_tuple, loop_body, plan_whole_step
from zgraph.sharding.context_batch import expect_parts
from zgraph.sharding.shard import shard
from zgraph.step.outer.fragments import Fragment
from zgraph.tiers.offload import Offload
from zgraph.tiers.placement.host_budget import check_host_budget
from zgraph.tiers.tier import HOST


def plan(
    model_fn: Callable[[], nn.Module],
    *,
    world_size: int | None = None,
    world: Mapping[str, int] | None = None,
    batch: Callable[[], tuple[Any, ...]],
    shard_fn: Sharder = shard,
    hardware: Hardware | str = "h100",
    passes: PassList | Sequence[GraphPass] | None = None,
    allocator: Allocator = EXACT,
    offload: Offload | None = None,
    optimizer_fn: Callable[[nn.Module], Optimizers] | None = None,
    step_fn: StepMaker | None = None,
    **before: Any,
) -> Plan:
    """Compile a training step as rank 0 of a cluster would, without a cluster, a GPU or the model's memory.

    Parameters and activations have shapes but no values, and collectives send nothing. The step is the model's forward
    and the backward of its result, as `torch.compile` runs them. With an optimizer it is the whole step as one graph,
    as `zgraph.training_step` runs it. torch.compile's caches are reset, so other models of this process are compiled
    anew afterwards.

    `zgraph.plan_pipeline` plans the step of a pipeline of stages.

    Args:
        model_fn: makes the model. Its dtype must come from its options or from torch.set_default_dtype, because torch
            cannot convert modules without values.
        world_size: number of ranks of a cluster with only data parallelism.
        world: alternatively, sizes of the cluster's axes, the outermost first, such as {"dp": 8, "tp": 2}.
            Further axes are "replicate", "cp" and "ep", for hybrid sharding, shared sequences and experts.
        batch: returns the arguments of one rank's forward; with a "pp" axis, of one micro-batch. With a "cp" axis, of
            this rank's tokens, [batch, s / cp, ...].
        shard_fn: shards the model like `zgraph.shard(model)`; called in a process group of the cluster's size. With
            `world` it is called like `zgraph.shard(model, mesh)`, with the model or a stage and the mesh of all axes
            but "pp". With a "cp" axis it passes context="cp", as the default does. On a "tp" axis it parallelizes over
            `mesh["tp"]`, then shards it over `mesh["dp"]`.
        hardware: hardware of each rank, or the name of a preset.
        passes: passes as for torch.compile; None: `presets.default()`. The target of a `zgraph.PassList` replaces
            `hardware`.
        allocator: how the allocator of the planned device rounds sizes.
        offload: where parameters and the optimizer's state are stored between uses, as for `zgraph.shard`; only if
            shard_fn sets no offload. No file is made. None: as shard_fn sets it, else on the device.
        optimizer_fn: returns the optimizer of the sharded model, such as
            `lambda model: torch.optim.AdamW(model.parameters())`, or a list of several. None: only forward and backward
            are planned.
        step_fn: called with the model and the result of optimizer_fn; returns the function that `zgraph.training_step`
            decorates, whose arguments come from batch. None: forward, backward, a step of each optimizer,
            `model.zero_grad()`.

    Raises:
        ValueError: world_size, world, hardware, model_fn, batch, the result of batch, or offload is invalid; shard_fn
            misuses the axes; or step_fn is given without optimizer_fn. Or the step exceeds the target's budget_bytes
            or the offload's host_budget_bytes; then the message names what would fit.
        ZgraphError: this process is already in a process group, or the model or the step cannot be compiled.
    """
    if "pipeline" in before:
        renamed("zgraph.plan(pipeline=)", "passes=")
        if passes is not None:
            raise ValueError("zgraph.plan: pipeline= is the former name of passes=; write one.")
        passes = before.pop("pipeline")
    unknown = [name for name in before if name not in OF_PIPELINES]
    if unknown:
        raise TypeError(f"zgraph.plan() got an unexpected keyword argument {unknown[0]!r}")
    check_functions("zgraph.plan", model_fn, batch)
    if step_fn is not None and optimizer_fn is None:
        raise ValueError("zgraph.plan: there is a step_fn and no optimizer_fn; pass optimizer_fn, too.")
    axes = _axes_of(world_size, world)
    if axes is not None and axes.stages > 1:
        renamed("zgraph.plan with a pp axis", "zgraph.plan_pipeline")
        check_of_steps("zgraph.plan", {"optimizer_fn": optimizer_fn, "offload": offload, "step_fn": step_fn})
        shared: dict[str, Any] = {"world": axes.sizes, "shard_fn": shard_fn, "hardware": hardware, "passes": passes}
        return plan_pipeline(model_fn, batch=batch, allocator=allocator, **shared, **before)
    given = ", ".join(f"{name}={value!r}" for name, value in before.items() if value is not None)
    if given:
        raise ValueError(
            f"zgraph.plan: {given}, and no pipeline; call zgraph.plan_pipeline with the ranks of one among the axes, "
            'such as world={"pp": 4, "dp": 8}, or leave it out.'
        )
    ranks = world_size if axes is None else axes.world_size
    assert ranks is not None
    cluster = Cluster.of("zgraph.plan", axes, ranks, hardware, passes)
    machine = cluster.machine
    with cluster.joined() as (mesh, mode):
        model, inputs = cluster.made(mode, model_fn, batch)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"zgraph.plan: model_fn returned a {type(model).__name__}; return a module, or call "
                "zgraph.plan_pipeline for a list of stages."
            )
        cluster.shard(shard_fn, model, mesh)
        expect_parts(model, inputs, machine.is_gpu)
        trained = tuple(Fragment({"": one}, 1, None).numel for one in model.parameters() if one.requires_grad)
        resting = rest_on_paper(model, offload)
        update = None if resting is None else resting.options.update
        host_budget_bytes = None if resting is None else resting.options.host_budget_bytes
        streaming = presets.with_streams(cluster.passes)
        planner = FramePlanner(machine, streaming, allocator, axes, host_budget_bytes, update)
        optimizers: tuple[optim.Optimizer, ...] | None = None
        if optimizer_fn is not None:
            given_optimizers = optimizer_fn(model)
            optimizers = as_tuple(given_optimizers)
            if resting is not None and machine.is_gpu:
                for optimizer in optimizers:
                    resting.options.check_updates(optimizer)
            step = (step_fn or loop_body)(model, given_optimizers)
            plan_whole_step(step, model, optimizers, inputs, planner.compiler_of)
        else:
            planner.compile(model, inputs)  # plans forward and backward together
        cublas_bytes, communicator_bytes = cluster.libraries_bytes()
        ledger = plan_ledger(model, optimizers, resting, planner.curves, pinned=machine.is_gpu)
    if not planner.graphs:
        raise ZgraphError("zgraph.plan: nothing was compiled; the model's forward is disabled for torch.compile.")
    cluster.check_tensor_parallel(planner.graphs)
    if resting is not None:
        host = next(line for line in ledger if line.space == HOST.name)
        check_host_budget(
            resting.options,
            host.parameters,
            host.state,
            host.step,
            host.staging,
            on_gpu=resting.computes_elsewhere,
        )
    return Plan(
        world_size=ranks,
        hardware=machine,
        ledger=ledger,
        cublas_bytes=cublas_bytes,
        communicator_bytes=communicator_bytes,
        graphs=tuple(planner.graphs),
        curves=tuple(planner.curves),
        compiled=planner.report,
        optimizer=" and ".join(type(one).__name__ for one in optimizers or ()),
        host_budget_bytes=host_budget_bytes,
        axes=axes,
        trained=trained,
    )


def _axes_of(world_size: object, world: Mapping[str, int] | None) -> Axes | None:
    """Return the axes of the cluster; None if only the number of ranks is given."""
    if world is not None and world_size is not None:
        raise ValueError(f"zgraph.plan: world_size={world_size!r} and world={world!r}; write one of them.")
    if world is not None:
        return Axes(world)
    if not is_count(world_size):
        raise ValueError(
            f"zgraph.plan: world_size={world_size!r}; write the number of ranks of the cluster, or its axes, such as "
            'world={"dp": 8, "tp": 2}.'
        )
    return None
