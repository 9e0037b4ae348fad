"""`zgraph.plan`: compiles a training step for a cluster on one machine, and says what it will take there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn, optim

from zgraph.analysis.cost import CostModel
from zgraph.analysis.cuda_workspace import resting_bytes
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import EXACT, Allocator, MemoryCurve, memory_curve, step_curve
from zgraph.compile_frame import FrameCompiler
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.pipeline import Pipeline
from zgraph.compiler.target import Target
from zgraph.errors import ZgraphError
from zgraph.graph.traffic import transfers
from zgraph.options import CompileOptions
from zgraph.passes import presets
from zgraph.plan_memory import plan_ledger, rest_on_paper
from zgraph.plan_whole_step import StepMaker, delays_updates, loop_body, plan_whole_step
from zgraph.planned_step import Plan, PlannedGraph
from zgraph.reporting.summary import Report
from zgraph.scheduling.simulate import simulate
from zgraph.sharding.offload import Offload
from zgraph.sharding.shard import shard
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world, groups_of_ranks, is_distributed_ready


def plan(
    model_fn: Callable[[], nn.Module],
    *,
    world_size: int,
    batch: Callable[[], tuple[Any, ...]],
    shard_fn: Callable[[nn.Module], object] = shard,
    hardware: Hardware | str = "h100",
    pipeline: Pipeline | None = None,
    allocator: Allocator = EXACT,
    offload: Offload | None = None,
    optimizer_fn: Callable[[nn.Module], optim.Optimizer] | None = None,
    step_fn: StepMaker | None = None,
) -> Plan:
    """Compile a training step as rank 0 of a cluster would, without a cluster, a GPU or the model's memory.

    Parameters and activations have shapes but no values, collectives move nothing. The step is the model's forward and
    the backward of what it returns, as `torch.compile` runs them; with an optimizer it is the whole step, one graph, as
    `zgraph.training_step` runs it. What this process has compiled before is compiled anew afterwards.

    Args:
        model_fn: makes the model; its dtype comes from its options or torch.set_default_dtype, for torch cannot convert
            modules without values.
        world_size: ranks of the cluster.
        batch: makes the arguments of one rank's forward.
        shard_fn: shards the model as `zgraph.shard(model)` does; called in a process group of the cluster's size.
        hardware: of each rank, or the name of a preset.
        pipeline: as given to torch.compile; None: `presets.default()`. A target of its own counts instead of hardware.
        allocator: how sizes are rounded.
        offload: where parameters and the optimizer's state rest between uses, as for `zgraph.shard`, for a shard_fn
            that does not say so itself. No file is made. With delayed_update_after the step is one that applies the
            gradients of the call before, which takes an optimizer_fn. None: on the device, or where shard_fn says.
        optimizer_fn: makes the optimizer of the sharded model, such as
            `lambda model: torch.optim.AdamW(model.parameters())`. None: forward and backward are planned alone.
        step_fn: makes the function that `zgraph.training_step` would decorate, of model and optimizer; it takes what
            batch makes. None: forward, backward, `optimizer.step()` and `optimizer.zero_grad()`.

    Raises:
        ValueError: world_size is not a number of ranks, there is no such preset, model_fn or batch is not a function,
            batch returns something else than a tuple, there is a step_fn and no optimizer_fn, or the offload cannot be
            honoured; or the step does not fit into the target's budget_bytes, or the offload's host_budget_bytes: says
            what would.
        ZgraphError: this process is in a process group already, or the model or the step cannot be compiled.
    """
    _check_functions(model_fn, batch)
    if step_fn is not None and optimizer_fn is None:
        raise ValueError("zgraph.plan: there is a step_fn and no optimizer_fn; pass both, or neither.")
    if isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"zgraph.plan: world_size={world_size!r}; write the number of ranks of the cluster.")
    if is_distributed_ready():
        raise ZgraphError(
            "zgraph.plan: this process is in a process group already, and a plan needs one of its own; call it in a "
            "process that was not started by torchrun, or after destroy_process_group()."
        )
    machine = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    pipeline = pipeline or Pipeline(presets.default())
    if pipeline.target is None:
        pipeline = replace(pipeline, target=Target(hardware=machine))
    # No lowering is needed, but fx costs nothing: what runs has no values.
    report = Report(keep_passes=True)
    options = CompileOptions(lowering="fx", report=report)
    known = PassContext(machine=machine, planned_backend=machine.backend)
    costs = CostModel(machine)
    graphs: list[PlannedGraph] = []
    curves: list[MemoryCurve] = []

    def keep(plan: FramePlan) -> None:
        graphs.extend(_planned(direction, plan, costs) for direction in plan.graphs)
        curves.append(_curve(plan, allocator, "cuda" if machine.backend == "nccl" else "cpu"))

    def compiler_of(frame: Frame) -> FrameCompiler:
        return FrameCompiler(frame, options, known=known, on_plan=keep)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compiler_of(Frame.of_dynamo(gm)).compile(gm, inputs)

    with fake_world(world_size):
        with fake_mode():
            model, inputs = model_fn(), batch()
        if not isinstance(inputs, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph.plan: batch returned a {type(inputs).__name__}; return the tuple of forward's arguments, such "
                "as (tokens,) where there is one."
            )
        shard_fn(model)
        resting = rest_on_paper(model, offload, machine, has_optimizer=optimizer_fn is not None)
        streaming = presets.with_streams(pipeline, delays=delays_updates(resting))
        options = replace(options, pipeline=streaming)
        optimizer = None if optimizer_fn is None else optimizer_fn(model)
        if optimizer is not None:
            plan_whole_step((step_fn or loop_body)(model, optimizer), model, optimizer, inputs, compiler_of)
        else:
            compiled: Any = torch.compile(model, backend=backend, dynamic=False)
            try:
                compiled(*inputs)  # forward and backward are planned at once
            finally:
                torch.compiler.reset()  # or the next plans of the same classes would meet the limit of recompiles
        cublas, communicators = resting_bytes(machine.backend, machine.flops_per_us, groups_of_ranks())
        ledger = plan_ledger(model, optimizer, resting, curves)
    if not graphs:
        raise ZgraphError("zgraph.plan: nothing was compiled; the model's forward is disabled for torch.compile.")
    if resting is not None:
        resting.check_budget(ledger[1].parameters, ledger[1].state, ledger[1].step)
    return Plan(
        world_size=world_size,
        hardware=machine,
        ledger=ledger,
        cublas_bytes=cublas,
        communicator_bytes=communicators,
        graphs=tuple(graphs),
        curves=tuple(curves),
        compiled=report,
        optimizer="" if optimizer is None else type(optimizer).__name__,
        host_budget_bytes=None if resting is None else resting.options.host_budget_bytes,
    )


def _check_functions(model_fn: object, batch: object) -> None:
    """Refuse a model and a batch that were made already; theirs would be real tensors."""
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


def _planned(direction: Direction, plan: FramePlan, costs: CostModel) -> PlannedGraph:
    graph = plan.graphs[direction].graph
    order = list(graph.nodes)
    timeline = simulate(order, {node: costs.cost(node) for node in order}, plan.ctx.sharing)
    sent = sum(transfer.sent_bytes for transfer in transfers(graph))
    return PlannedGraph(direction, len(order), sent, timeline)


def _curve(plan: FramePlan, allocator: Allocator, device_type: str) -> MemoryCurve:
    if "forward" not in plan.graphs:
        (whole,) = plan.graphs.values()
        return memory_curve(whole.graph, allocator=allocator, device_type=device_type)
    forward, backward = (plan.graphs[direction].graph for direction in ("forward", "backward"))
    assert plan.ctx.user_outputs is not None
    return step_curve(
        forward, backward, user_outputs=plan.ctx.user_outputs, allocator=allocator, device_type=device_type
    )
