"""`zgraph.plan`: compiles a training step for a cluster on one machine, and predicts its memory and time there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from zgraph.analysis.cuda_workspace import resting_bytes
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import EXACT, Allocator
from zgraph.compiler.pipeline import Pipeline
from zgraph.compiler.target import Target
from zgraph.errors import ZgraphError
from zgraph.passes import presets
from zgraph.planner.frames import FramePlanner
from zgraph.planner.memory import plan_ledger, rest_on_paper
from zgraph.planner.pipeline import plan_pipeline
from zgraph.planner.planned_step import Plan, PlannedGraph
from zgraph.planner.schedules.axes import Axes
from zgraph.planner.whole_step import StepMaker, loop_body, plan_whole_step
from zgraph.sharding.scope import sharded_parameters
from zgraph.sharding.shard import shard
from zgraph.tiers.offload import Offload
from zgraph.tiers.tier import HOST
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world, groups_of_ranks, is_distributed_ready

Sharder = Callable[..., object]


def plan(
    model_fn: Callable[[], nn.Module | Sequence[nn.Module]],
    *,
    world_size: int | None = None,
    world: Mapping[str, int] | None = None,
    batch: Callable[[], tuple[Any, ...]],
    shard_fn: Sharder = shard,
    hardware: Hardware | str = "h100",
    pipeline: Pipeline | None = None,
    allocator: Allocator = EXACT,
    offload: Offload | None = None,
    optimizer_fn: Callable[[nn.Module], optim.Optimizer] | None = None,
    step_fn: StepMaker | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
) -> Plan:
    """Compile a training step as rank 0 of a cluster would, without a cluster, a GPU or the model's memory.

    Parameters and activations have shapes but no values, and collectives move nothing. The step is the model's forward
    and the backward of its result, as `torch.compile` runs them; with an optimizer it is the whole step, one graph, as
    `zgraph.training_step` runs it. Models that this process has compiled before are compiled anew afterwards.

    With a "pp" axis it is the step of a pipeline: forwards and backwards of all micro-batches through stages that are
    `zgraph.PipelineStage`, in the order of torch's schedules. Equal stages are planned once. Neither the optimizer's
    update nor a loss computed outside of the stages is included. If the pipeline has a target with budget_bytes,
    `plan.pipeline.stages[i].keep_bytes` is the most for which no rank exceeds it.

    Args:
        model_fn: returns the model. Its dtype comes from its options or torch.set_default_dtype, because torch cannot
            convert modules without values. With a "pp" axis it returns an `nn.Sequential`, which `zgraph.split_stages`
            cuts into stages, or a list of the stages; rank r has the stages r, r + ranks, ..., and those of a V under
            "ZBVZeroBubble".
        world_size: number of ranks of a cluster with only data parallelism.
        world: alternatively, sizes of the cluster's axes, the outermost first, such as {"pp": 4, "dp": 8, "tp": 2}.
            Further axes are "replicate" and "ep", for hybrid sharding and experts.
        batch: returns the arguments of one rank's forward; with a "pp" axis, of one micro-batch.
        shard_fn: shards the model like `zgraph.shard(model)`; called in a process group of the cluster's size. With
            `world` it is called like `zgraph.shard(model, mesh)`, with the model or a stage and the mesh of all axes
            but "pp"; on a "tp" axis it parallelizes the model over `mesh["tp"]`, then shards it over `mesh["dp"]`.
        hardware: hardware of each rank, or the name of a preset.
        pipeline: pipeline of passes as for torch.compile; None: `presets.default()`. Its target replaces `hardware`.
        allocator: how sizes are rounded.
        offload: where parameters and the optimizer's state are stored between uses, as for `zgraph.shard`, if shard_fn
            does not set it. No file is made. None: on the device, or as set by shard_fn.
        optimizer_fn: returns the optimizer of the sharded model, such as
            `lambda model: torch.optim.AdamW(model.parameters())`. None: only forward and backward are planned.
        step_fn: returns the function that `zgraph.training_step` would decorate, given model and optimizer; the
            function's arguments come from batch. None: forward, backward, `optimizer.step()`, `optimizer.zero_grad()`.
        micro_batches: number of micro-batches in a pipeline's step.
        schedule: schedule of a pipeline: "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble" or
            "ZBVZeroBubble", as named by torch. None: "Interleaved1F1B" with several chunks, else "1F1B". The plan
            compares all possible schedules.
        chunks: stages on each rank of a pipeline, if an `nn.Sequential` is cut. None: 1.

    Raises:
        ValueError: an argument is invalid: world_size or world, the preset, model_fn or batch, the result of batch, the
            use of the axes by shard_fn, step_fn without optimizer_fn, a model that cannot be cut into the stages, a
            schedule that torch does not have for them, or the offload. Or the step does not fit into the target's
            budget_bytes, or the offload's host_budget_bytes; the message names what would fit.
        ZgraphError: this process is already in a process group, or the model or the step cannot be compiled.
    """
    _check_functions(model_fn, batch)
    if step_fn is not None and optimizer_fn is None:
        raise ValueError("zgraph.plan: there is a step_fn and no optimizer_fn; pass both, or neither.")
    axes = _axes_of(world_size, world)
    ranks = world_size if axes is None else axes.world_size
    assert ranks is not None
    if axes is None or axes.stages == 1:
        _check_no_pipeline(micro_batches=micro_batches, schedule=schedule, chunks=chunks)
    else:
        _check_pipeline(micro_batches, chunks, optimizer_fn=optimizer_fn, offload=offload)
    if is_distributed_ready():
        raise ZgraphError(
            "zgraph.plan: this process is in a process group already, and a plan needs one of its own; call it in a "
            "process that was not started by torchrun, or after destroy_process_group()."
        )
    machine = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    pipeline = pipeline or Pipeline(presets.default())
    if pipeline.target is None:
        pipeline = replace(pipeline, target=Target(hardware=machine))
    with fake_world(ranks):
        mesh = None if axes is None else axes.mesh()
        mode = fake_mode()
        with mode:
            model, inputs = model_fn(), batch()
        if not isinstance(inputs, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph.plan: batch returned a {type(inputs).__name__}; return the tuple of forward's arguments, such "
                "as (tokens,) if there is one."
            )
        if axes is not None and mesh is not None and axes.stages > 1:
            assert micro_batches is not None
            planner = FramePlanner(machine, pipeline, allocator, axes)
            planned = plan_pipeline(
                model,
                inputs,
                planner,
                axes,
                mode=mode,
                shard_stage=lambda stage: _shard(shard_fn, stage, axes, mesh),
                micro_batches=micro_batches,
                schedule=schedule,
                chunks=chunks,
            )
            cublas, communicators = resting_bytes(machine.backend, machine.flops_per_us, groups_of_ranks())
            _check_tensor_parallel(axes, planned.graphs)
            return Plan(
                world_size=ranks,
                hardware=machine,
                ledger=planned.ledger,
                cublas_bytes=cublas,
                communicator_bytes=communicators,
                graphs=planned.graphs,
                curves=planned.curves,
                compiled=planner.report,
                axes=axes,
                pipeline=planned.plan,
            )
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"zgraph.plan: model_fn returned a {type(model).__name__}; return a module, or add a pp axis to world "
                "for a list of stages."
            )
        _shard(shard_fn, model, axes, mesh)
        resting = rest_on_paper(model, offload)
        update = None if resting is None else resting.options.update
        host_budget_bytes = None if resting is None else resting.options.host_budget_bytes
        planner = FramePlanner(machine, presets.with_streams(pipeline), allocator, axes, host_budget_bytes, update)
        optimizer = None if optimizer_fn is None else optimizer_fn(model)
        if optimizer is not None:
            if resting is not None and machine.is_gpu:
                resting.options.check_updates(optimizer)
            plan_whole_step((step_fn or loop_body)(model, optimizer), model, optimizer, inputs, planner.compiler_of)
        else:
            planner.compile(model, inputs)  # plans forward and backward together
        cublas, communicators = resting_bytes(machine.backend, machine.flops_per_us, groups_of_ranks())
        ledger = plan_ledger(model, optimizer, resting, planner.curves, pinned=machine.is_gpu)
    if not planner.graphs:
        raise ZgraphError("zgraph.plan: nothing was compiled; the model's forward is disabled for torch.compile.")
    if axes is not None:
        _check_tensor_parallel(axes, planner.graphs)
    if resting is not None:
        host = next(line for line in ledger if line.space == HOST.name)
        resting.check_budget(host.parameters, host.state, host.step, host.staging)
    return Plan(
        world_size=ranks,
        hardware=machine,
        ledger=ledger,
        cublas_bytes=cublas,
        communicator_bytes=communicators,
        graphs=tuple(planner.graphs),
        curves=tuple(planner.curves),
        compiled=planner.report,
        optimizer="" if optimizer is None else type(optimizer).__name__,
        host_budget_bytes=host_budget_bytes,
        axes=axes,
    )


def _axes_of(world_size: object, world: Mapping[str, int] | None) -> Axes | None:
    """The axes of the cluster; None if only the number of ranks is given."""
    if world is not None and world_size is not None:
        raise ValueError(f"zgraph.plan: world_size={world_size!r} and world={world!r}; write one of them.")
    if world is not None:
        return Axes(world)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"zgraph.plan: world_size={world_size!r}; write the number of ranks of the cluster, or its axes, such as "
            'world={"dp": 8, "tp": 2}.'
        )
    return None


def _check_no_pipeline(**options: object) -> None:
    """Refuse options that only a pipeline has."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    if given:
        raise ValueError(
            f"zgraph.plan: {given}, and no pipeline; add its ranks to the axes, such as "
            'world={"pp": 4, "dp": 8}, or leave it out.'
        )


def _check_pipeline(micro_batches: object, chunks: object, **left_out: object) -> None:
    """Check the options of a pipeline, and refuse those that its plan does not support."""
    for name, value in (("micro_batches", micro_batches), ("chunks", 1 if chunks is None else chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"zgraph.plan: {name}={value!r} with a pipeline; write how many, such as {name}=8.")
    given = ", ".join(name for name, value in left_out.items() if value is not None)
    if given:
        raise ValueError(
            f"zgraph.plan: {given} with a pipeline, whose schedule runs outside of whole steps; leave it out: moments "
            "of AdamW are counted all the same."
        )


SHARD_ON_AXES = (
    "write a function of model and mesh that parallelizes and then shards: parallelize_module(model, mesh["
    '"tp"], ...); zgraph.shard(model, mesh["dp"]).'
)


def _shard(shard_fn: Sharder, model: nn.Module, axes: Axes | None, mesh: DeviceMesh | None) -> None:
    """Call the user's function to shard a model over all axes but that of the pipeline."""
    if axes is None or mesh is None:
        shard_fn(model)
        return
    inner = mesh[axes.inner]
    if _takes_a_mesh(shard_fn):
        shard_fn(model, inner)
    elif axes.inner == tuple(axes.sizes) == ("dp",):
        shard_fn(model)
    else:
        raise ValueError(
            f"zgraph.plan: shard_fn accepts only the model, and a cluster of {axes} has several axes; {SHARD_ON_AXES}"
        )
    for name, param in sharded_parameters(model).items():
        layout = param.spec.layout
        used = [axes.along(group) for group in (layout.gather_group, layout.replica_group) if group]
        if any("tp" in axis.split(" x ") for axis in used):
            raise ValueError(
                f"zgraph.plan: shard_fn shards {name} over the tensor-parallel axis tp as well, as if it were "
                f"data-parallel; {SHARD_ON_AXES}"
            )


def _takes_a_mesh(shard_fn: Sharder) -> bool:
    try:
        inspect.signature(shard_fn).bind(None, None)
    except TypeError:
        return False
    return True


def _check_tensor_parallel(axes: Axes, graphs: Sequence[PlannedGraph]) -> None:
    """Refuse a tensor-parallel axis along which nothing is sent: all its ranks would compute the same."""
    if axes.sizes.get("tp", 1) > 1 and not any("tp" in graph.traffic for graph in graphs):
        raise ValueError(
            f"zgraph.plan: nothing travels over the axis tp of {axes}, whose ranks all compute the same; "
            f"shard_fn parallelizes nothing over it: {SHARD_ON_AXES}"
        )


def _check_functions(model_fn: object, batch: object) -> None:
    """Refuse a model or a batch in place of a function, because its tensors would be real."""
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ValueError(
            f"zgraph.plan: model_fn is a {type(model_fn).__name__}; pass a function that makes the model, such as "
            "lambda: Net(), so that it is built without memory for its parameters."
        )
    if not callable(batch):
        raise ValueError(
            f"zgraph.plan: batch is a {type(batch).__name__}; pass a function that returns the tuple of forward's "
            "arguments, such as lambda: (torch.zeros(8, 1024),)."
        )
