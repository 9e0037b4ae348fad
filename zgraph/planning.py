"""`zgraph.plan`: compiles a training step for a cluster on one machine, and says what it will take there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn, optim
from torch.distributed.tensor import DTensor

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
from zgraph.plan_whole_step import StepMaker, loop_body, plan_whole_step, state_bytes
from zgraph.reporting.export.folder import write_report
from zgraph.reporting.summary import Report
from zgraph.reporting.tables import Table, as_html, duration, size
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline
from zgraph.sharding.shard import shard
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world, groups_of_ranks, is_distributed_ready

GIB = 2**30
LARGEST = 3  # storages that tables name at each frame's peak
ADAM_MOMENTS = 2  # of each trained element, in its parameter's dtype


@dataclass(frozen=True)
class PlannedGraph:
    """One graph of the step.

    Attributes:
        direction: "forward", "backward", "inference" or "step".
        nodes: of the final graph.
        sent_bytes: by one rank, when it runs once.
        timeline: on the simulator.
    """

    direction: Direction
    nodes: int
    sent_bytes: int
    timeline: Timeline

    @property
    def exposed_us(self) -> float:
        return sum(self.timeline.exposed_us.values())

    @property
    def busy(self) -> dict[str, float]:
        """The part of the graph's time for which each lane is busy."""
        return {str(lane): self.timeline.utilisation(lane) for lane in self.timeline.busy_us}


@dataclass(frozen=True)
class Plan:
    """What one training step will take on each rank of a cluster; `print` it.

    Attributes:
        world_size, hardware: of the cluster.
        parameter_bytes: at rest on the rank that holds most, buffers included.
        moment_bytes: state of the optimizer beside them: what the planned one keeps, else AdamW's two moments.
        cublas_bytes, communicator_bytes: beside tensors, on GPUs: workspaces in the allocator, buffers of NCCL outside.
        step_bytes: peak of the step beside these: activations, gathered parameters, gradients. Frames that a
            graph break separates are counted one by one.
        graphs: in the order in which they were compiled.
        curves: memory over each frame, forward and backward together.
        compiled: what `report` writes.
        optimizer: name of the optimizer whose step is planned with the rest; "" if none is.
    """

    world_size: int
    hardware: Hardware
    parameter_bytes: int
    moment_bytes: int
    cublas_bytes: int
    communicator_bytes: int
    graphs: tuple[PlannedGraph, ...]
    curves: tuple[MemoryCurve, ...]
    compiled: Report = field(default_factory=Report, repr=False, compare=False)
    optimizer: str = ""

    @property
    def step_bytes(self) -> int:
        return max((curve.peak_bytes for curve in self.curves), default=0)

    @property
    def peak_bytes(self) -> int:
        """Bytes of one rank: at rest, the step's peak, and what libraries hold; without the driver's context."""
        libraries = self.cublas_bytes + self.communicator_bytes
        return self.parameter_bytes + self.moment_bytes + self.step_bytes + libraries

    @property
    def sent_bytes(self) -> int:
        """On the wire, by one rank in one step."""
        return sum(graph.sent_bytes for graph in self.graphs)

    @property
    def step_us(self) -> float:
        """The whole step; without the optimizer if none was planned."""
        return sum(graph.timeline.step_us for graph in self.graphs)

    def report(self, directory: str | Path) -> Path:
        """Write the plan to a folder, as `zgraph.report` does for a compiled model; the folder of rank 0.

        Args:
            directory: where the folder of rank 0 goes.
        """
        return write_report(Path(directory), self.compiled, self.moment_bytes, self.world_size)

    def __str__(self) -> str:
        capacity = self.hardware.memory_bytes / GIB
        lines = [
            f"zgraph.plan for {self.world_size} ranks of {self.hardware.name}",
            f"memory of a rank: parameters {size(self.parameter_bytes)}, {self._state} {size(self.moment_bytes)}, "
            f"peak of the step beside them {size(self.step_bytes)}; "
            f"together {size(self.peak_bytes)} of {capacity:.0f} GiB",
            *(
                [f"  cuBLAS workspaces {size(self.cublas_bytes)}, NCCL communicators {size(self.communicator_bytes)}"]
                if self.cublas_bytes
                else []
            ),
            *(f"  {_peak(curve)}" for curve in self.curves if curve.nodes),
            f"{self._title}: {self.step_us / 1e3:.2f} ms, {size(self.sent_bytes)} sent by each rank",
        ]
        for graph in self.graphs:
            used = ", ".join(f"{lane} {share:.0%}" for lane, share in graph.busy.items())
            lines.append(
                f"  {graph.direction}: {graph.nodes} nodes, {graph.timeline.step_us / 1e3:.2f} ms, "
                f"{size(graph.sent_bytes)} sent, {graph.exposed_us / 1e3:.2f} ms exposed; busy: {used}"
            )
        return "\n".join(lines)

    def tables(self) -> list[Table]:
        """The same, for a terminal or a notebook."""
        memory = {
            "parameters": self.parameter_bytes,
            self._state: self.moment_bytes,
            "peak of the step beside them": self.step_bytes,
            "cuBLAS workspaces": self.cublas_bytes,
            "NCCL communicators": self.communicator_bytes,
            "together": self.peak_bytes,
            f"memory of {self.hardware.name}": self.hardware.memory_bytes,
        }
        peaks = tuple(
            (size(curve.peak_bytes), curve.nodes[curve.peak_position].name, ", ".join(curve.unknown))
            for curve in self.curves
            if curve.nodes
        )
        at_peak = [
            (str(entry.node.name), size(entry.bytes), curve.nodes[curve.peak_position].name)
            for curve in self.curves
            for entry in curve.alive_at(curve.peak_position)[:LARGEST]
        ]
        graphs = [
            (
                graph.direction,
                str(graph.nodes),
                size(graph.sent_bytes),
                duration(graph.timeline.step_us),
                duration(graph.exposed_us),
                ", ".join(f"{lane} {share:.0%}" for lane, share in graph.busy.items()),
            )
            for graph in self.graphs
        ]
        exposed_us = sum(graph.exposed_us for graph in self.graphs)
        step = ("step", "", size(self.sent_bytes), duration(self.step_us), duration(exposed_us), "")
        return [
            Table(
                f"memory of one of {self.world_size} ranks",
                (),
                tuple((name, size(count)) for name, count in memory.items() if count),
            ),
            Table("peak of each frame", ("bytes", "while this runs", "of unknown size"), peaks),
            Table("largest at the peak", ("of node", "bytes", "while this runs"), tuple(at_peak)),
            Table(
                self._title,
                ("graph", "nodes", "sent", "time", "exposed", "busy lanes"),
                (*graphs, *([step] if len(graphs) > 1 else [])),
            ),
        ]

    @property
    def _state(self) -> str:
        return f"state of {self.optimizer}" if self.optimizer else "AdamW's moments"

    @property
    def _title(self) -> str:
        return f"step with {self.optimizer}" if self.optimizer else "step without optimizer"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        names = ("world_size", "parameter_bytes", "moment_bytes", "cublas_bytes", "communicator_bytes", "step_bytes")
        return {
            **{name: getattr(self, name) for name in (*names, "peak_bytes", "sent_bytes", "step_us")},
            "optimizer": self.optimizer or None,
            "hardware": self.hardware.name,
            "memory_bytes": self.hardware.memory_bytes,
            "fits": self.peak_bytes <= self.hardware.memory_bytes,
            "graphs": [
                {
                    "direction": graph.direction,
                    "nodes": graph.nodes,
                    "sent_bytes": graph.sent_bytes,
                    "step_us": graph.timeline.step_us,
                    "exposed_us": graph.exposed_us,
                    "busy": graph.busy,
                }
                for graph in self.graphs
            ],
        }

    def _repr_html_(self) -> str:
        return as_html(self.tables())


def plan(
    model_fn: Callable[[], nn.Module],
    *,
    world_size: int,
    batch: Callable[[], tuple[Any, ...]],
    shard_fn: Callable[[nn.Module], object] = shard,
    hardware: Hardware | str = "h100",
    pipeline: Pipeline | None = None,
    allocator: Allocator = EXACT,
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
        optimizer_fn: makes the optimizer of the sharded model, such as
            `lambda model: torch.optim.AdamW(model.parameters())`. None: forward and backward are planned alone.
        step_fn: makes the function that `zgraph.training_step` would decorate, of model and optimizer; it takes what
            batch makes. None: forward, backward, `optimizer.step()` and `optimizer.zero_grad()`.

    Raises:
        ValueError: world_size is not a number of ranks, there is no such preset, model_fn or batch is not a function,
            batch returns something else than a tuple, or there is a step_fn and no optimizer_fn.
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
    options = CompileOptions(pipeline=pipeline, lowering="fx", report=report)
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
        sharded = [_local(value) for value in (*model.parameters(), *model.buffers())]
        trained = [_local(value) for value in model.parameters() if value.requires_grad]
    if not graphs:
        raise ZgraphError("zgraph.plan: nothing was compiled; the model's forward is disabled for torch.compile.")
    return Plan(
        world_size=world_size,
        hardware=machine,
        parameter_bytes=_bytes(sharded),
        moment_bytes=ADAM_MOMENTS * _bytes(trained) if optimizer is None else state_bytes(optimizer),
        cublas_bytes=cublas,
        communicator_bytes=communicators,
        graphs=tuple(graphs),
        curves=tuple(curves),
        compiled=report,
        optimizer="" if optimizer is None else type(optimizer).__name__,
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


def _peak(curve: MemoryCurve) -> str:
    """One line: the peak of a frame, the node that runs then, and the largest storages alive."""
    position = curve.peak_position
    largest = ", ".join(f"{entry.node.name} {size(entry.bytes)}" for entry in curve.alive_at(position)[:LARGEST])
    unknown = f"; without {', '.join(curve.unknown)}, whose size depends on data" if curve.unknown else ""
    return f"peak {size(curve.peak_bytes)} while {curve.nodes[position].name} runs: {largest}{unknown}"


def _local(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
