"""`zgraph.plan`: compiles a training step for a cluster on one machine, and says what it will take there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.cost import CostModel
from zgraph.analysis.cuda_workspace import resting_bytes
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import EXACT, Allocator, MemoryCurve, memory_curve, step_curve
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext, Phase
from zgraph.compiler.pipeline import Pipeline
from zgraph.errors import ZgraphError
from zgraph.graph.traffic import transfers
from zgraph.passes import SetTarget, presets
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline
from zgraph.sharding.shard import shard
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world, groups_of_ranks, is_distributed_ready

GIB = 2**30
ADAM_MOMENTS = 2  # of each trained element, in its parameter's dtype


@dataclass(frozen=True)
class PlannedGraph:
    """One graph of the step.

    Attributes:
        direction: "forward", "backward" or "inference".
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


@dataclass(frozen=True)
class Plan:
    """What one training step will take on each rank of a cluster; `print` it.

    Attributes:
        world_size, hardware: of the cluster.
        parameter_bytes: at rest on the rank that holds most, buffers included.
        moment_bytes: AdamW's two moments beside them.
        cublas_bytes, communicator_bytes: beside tensors, on GPUs: workspaces in the allocator, buffers of NCCL outside.
        step_bytes: highest beside these during the step: activations, gathered parameters, gradients. Frames that a
            graph break separates are counted one by one.
        graphs: in the order in which they were compiled.
        curves: memory over each frame, forward and backward together.
    """

    world_size: int
    hardware: Hardware
    parameter_bytes: int
    moment_bytes: int
    cublas_bytes: int
    communicator_bytes: int
    graphs: tuple[PlannedGraph, ...]
    curves: tuple[MemoryCurve, ...]

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
        """Forward and backward, without the optimizer."""
        return sum(graph.timeline.step_us for graph in self.graphs)

    def __str__(self) -> str:
        capacity = self.hardware.memory_bytes / GIB
        lines = [
            f"zgraph.plan for {self.world_size} ranks of {self.hardware.name}",
            f"memory of a rank: parameters {_gib(self.parameter_bytes)}, AdamW's moments {_gib(self.moment_bytes)}, "
            f"highest beside them {_gib(self.step_bytes)}: {_gib(self.peak_bytes)} of {capacity:.0f} GiB",
            *(
                [f"  cuBLAS workspaces {_gib(self.cublas_bytes)}, NCCL communicators {_gib(self.communicator_bytes)}"]
                if self.cublas_bytes
                else []
            ),
            *(f"  {curve.explain(3)}" for curve in self.curves),
            f"step without optimizer: {self.step_us / 1e3:.2f} ms, {_gib(self.sent_bytes)} sent by each rank",
        ]
        for graph in self.graphs:
            used = ", ".join(f"{lane} {graph.timeline.utilisation(lane):.0%}" for lane in graph.timeline.busy_us)
            lines.append(
                f"  {graph.direction}: {graph.nodes} nodes, {graph.timeline.step_us / 1e3:.2f} ms, "
                f"{_gib(graph.sent_bytes)} sent, {graph.exposed_us / 1e3:.2f} ms exposed; busy: {used}"
            )
        return "\n".join(lines)


def plan(
    model_fn: Callable[[], nn.Module],
    *,
    world_size: int,
    batch: Callable[[], tuple[Any, ...]],
    shard_fn: Callable[[nn.Module], object] = shard,
    hardware: Hardware | str = "h100",
    pipeline: Pipeline | None = None,
    allocator: Allocator = EXACT,
) -> Plan:
    """Compile a training step as rank 0 of a cluster would, without a cluster, a GPU or the model's memory.

    Parameters and activations have shapes but no values, collectives move nothing. The step is the model's forward and
    the backward of what it returns. What this process has compiled before is compiled anew afterwards.

    Args:
        model_fn: makes the model; its dtype comes from its options or torch.set_default_dtype, for torch cannot convert
            modules without values.
        world_size: ranks of the cluster.
        batch: makes the arguments of one rank's forward.
        shard_fn: shards the model as `zgraph.shard(model)` does; called in a process group of the cluster's size.
        hardware: of each rank, or the name of a preset.
        pipeline: as given to torch.compile; None: `presets.default()`.
        allocator: how sizes are rounded.

    Raises:
        ValueError: world_size is no number of ranks, or there is no such preset.
        ZgraphError: this process is in a process group already, or the model cannot be compiled.
    """
    if isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"zgraph.plan: world_size={world_size!r}; write the number of ranks of the cluster.")
    if is_distributed_ready():
        raise ZgraphError(
            "zgraph.plan: this process is in a process group already, and a plan needs one of its own; call it in a "
            "process that was not started by torchrun, or after destroy_process_group()."
        )
    machine = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    kept = _Kept(CostModel(machine), "cuda" if machine.backend == "nccl" else "cpu")
    passes = (pipeline or Pipeline(presets.default())).passes
    target = [_StandFor(machine=machine), SetTarget(hardware=machine)]  # a target of the pipeline's own overrides it
    whole = Pipeline([*target, *passes, _Keep(kept=kept, allocator=allocator)])
    with fake_world(world_size):
        with fake_mode():
            model, inputs = model_fn(), batch()
        shard_fn(model)
        # No lowering is needed, but fx costs nothing: what runs has no values.
        options: dict[str, Any] = {"lowering": "fx", "pipeline": whole}
        compiled: Any = torch.compile(model, backend="zgraph", dynamic=False, options=options)
        try:
            compiled(*inputs)  # forward and backward are planned at once
        finally:
            torch.compiler.reset()  # or the next plans of the same classes would meet the limit of recompiles
        cublas, communicators = resting_bytes(machine.backend, machine.flops_per_us, groups_of_ranks())
        sharded = [_local(value) for value in (*model.parameters(), *model.buffers())]
        trained = [_local(value) for value in model.parameters() if value.requires_grad]
    if not kept.graphs:
        raise ZgraphError("zgraph.plan: nothing was compiled; the model's forward is disabled for torch.compile.")
    return Plan(
        world_size=world_size,
        hardware=machine,
        parameter_bytes=_bytes(sharded),
        moment_bytes=ADAM_MOMENTS * _bytes(trained),
        cublas_bytes=cublas,
        communicator_bytes=communicators,
        graphs=tuple(kept.graphs),
        curves=tuple(kept.curves),
    )


@dataclass(eq=False)
class _Kept:
    """What has been compiled so far."""

    costs: CostModel
    device_type: str
    graphs: list[PlannedGraph] = field(default_factory=list[PlannedGraph])
    curves: list[MemoryCurve] = field(default_factory=list[MemoryCurve])


@dataclass(frozen=True, kw_only=True)
class _StandFor(GraphPass):
    """Lets groups that move nothing stand for those of the cluster."""

    machine: Hardware

    name: ClassVar[str] = "plan_stand_for"
    phase: ClassVar[Phase] = "joint"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        ctx.planned_backend = self.machine.backend
        ctx.machine = self.machine
        return False


@dataclass(frozen=True, kw_only=True)
class _Keep(GraphPass):
    """Looks at the final graphs."""

    kept: _Kept
    allocator: Allocator

    name: ClassVar[str] = "plan_keep"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.target_bytes is not None and ctx.direction != "backward":  # the frame is planned anew
            del self.kept.graphs[-len(ctx.graphs) :], self.kept.curves[-1:]
        order = list(gm.graph.nodes)
        timeline = simulate(order, {node: self.kept.costs.cost(node) for node in order}, ctx.sharing)
        sent = sum(transfer.sent_bytes for transfer in transfers(gm.graph))
        self.kept.graphs.append(PlannedGraph(ctx.direction, len(order), sent, timeline))
        if ctx.direction == "inference":
            self.kept.curves.append(memory_curve(gm.graph, allocator=self.allocator, device_type=self.kept.device_type))
        elif ctx.direction == "backward":
            forward, users = ctx.graphs["forward"].graph, ctx.user_outputs
            assert users is not None
            self.kept.curves.append(
                step_curve(
                    *(forward, gm.graph),
                    user_outputs=users,
                    allocator=self.allocator,
                    device_type=self.kept.device_type,
                )
            )
        return False


def _local(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.2f} MiB"
