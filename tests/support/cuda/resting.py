"""Compiles what trains, or serves, a model whose parameters and state rest on the host of a GPU that is not there.

Runs in the process of `tests.support.cuda.pretended_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.cuda import triton_driver
from tests.support.cuda.tracing import compile_only
from zgraph.analysis.liveness import memory_curve
from zgraph.compiler.agreement import places_of_updates
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.memory_ledger import ledger_of
from zgraph.driver.compile_frame import FrameCompiler
from zgraph.driver.options import CompileOptions
from zgraph.graph import meta, nodes
from zgraph.passes import presets
from zgraph.planner.whole_step import plan_whole_step
from zgraph.sharding.scope import state_of
from zgraph.step.capture.capture import capture
from zgraph.step.capture.lifted import Lifted
from zgraph.tiers.lanes import DISK
from zgraph.tiers.stream_lanes import StreamLanes
from zgraph.torch_compat.aot import boxed
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world
from zgraph.torch_compat.operators import is_fused_update

WIDTH, LAYERS, WORLD = 64, 3, 4


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is compiled.

    Attributes:
        offload: where parameters and state rest.
        what: "step" for the whole step, "first step" for the one that makes the optimizer's state, "three calls" for
            forward and backward, or "inference".
        lowering: "fx" or "inductor".
        zero_stage, param_dtype: as `zgraph.shard` takes them.
        optimizer: name of the optimizer, in torch.optim or "AdamW8bit".
        fused: whether an optimizer of torch is fused.
        hardware: by which is planned; None: by rules.
    """

    offload: zgraph.Offload
    what: str = "step"
    lowering: str = "fx"
    zero_stage: int = 3
    param_dtype: torch.dtype | None = None
    optimizer: str = "AdamW"
    fused: bool = True
    hardware: zgraph.Hardware | None = None

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW8bit":
            return zgraph.AdamW8bit(model.parameters())
        return getattr(torch.optim, self.optimizer)(model.parameters(), fused=self.fused)

    def pipeline(self) -> zgraph.PassList:
        found = None
        if self.hardware is not None:
            passes = presets.planned(bucket_bytes=4 * WIDTH * WIDTH)
            found = zgraph.PassList(passes, target=zgraph.Target(hardware=self.hardware))
        return presets.with_streams(found)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What one compiled graph copies between device and host, in the order in which graphs are compiled.

    Attributes:
        direction: of the graph.
        reloads, stores, offloads, spills, returns: how many are started.
        from_disk, to_disk: how many of them, on the disk's lane.
        resting: inputs that rest on the host or on disk.
        readers: operators that read these otherwise, by name; but
        updates: that run on the host, beside compute, with
        updated_on: the device types of what they are given.
        streamed: fused updates that run on the device.
        signed: what ranks agree on of where updates run.
        devices: device types of the inputs that rest, as the graph has them.
        host_bytes, disk_bytes, device_bytes: of parameters and state, as the ledger of the plan has them.
        staging_bytes: of the host, between disk and GPU.
    """

    direction: str
    reloads: int
    stores: int
    offloads: int
    spills: int
    returns: int
    from_disk: int
    to_disk: int
    resting: int
    readers: list[str]
    updates: int
    updated_on: list[str]
    streamed: int
    signed: list[str]
    devices: list[str]
    host_bytes: int
    disk_bytes: int
    device_bytes: int
    staging_bytes: int


def copies_of(direction: str, gm: fx.GraphModule) -> Copies:
    """Count what a final graph copies."""
    device, host, disk = ledger_of(memory_curve(gm.graph))
    on_disk = [node for node in nodes.call_functions(gm.graph, nodes.is_copy_start) if meta.lane(node) == DISK]
    resting = [node for node in gm.graph.find_nodes(op="placeholder") if meta.space(node) is not None]
    beside = [node for node in gm.graph.nodes if meta.beside(node) is not None]
    others = (user for node in resting for user in node.users if user.op != "output" and user not in beside)
    readers = [user for user in others if not nodes.is_copy_start(user)]
    given = [meta.value(source) for node in beside for source in node.all_input_nodes]
    return Copies(
        direction=direction,
        reloads=len([*nodes.call_functions(gm.graph, nodes.is_reload)]),
        stores=len([*nodes.call_functions(gm.graph, nodes.is_store)]),
        offloads=len([*nodes.call_functions(gm.graph, nodes.is_offload)]),
        spills=len([*nodes.call_functions(gm.graph, nodes.is_spill)]),
        returns=len([*nodes.call_functions(gm.graph, nodes.is_return)]),
        from_disk=sum(map(nodes.is_reload, on_disk)),
        to_disk=sum(not nodes.is_reload(node) for node in on_disk),
        resting=len(resting),
        readers=[node.name for node in readers],
        updates=sum(not nodes.is_update_wait(node) for node in beside),
        updated_on=sorted({value.device.type for value in given if isinstance(value, Tensor)}),
        streamed=sum(is_fused_update(node.target) and node not in beside for node in gm.graph.nodes),
        signed=places_of_updates(gm.graph),
        devices=sorted({meta.tensor_value(node).device.type for node in resting}),
        host_bytes=host.parameters + host.state,
        disk_bytes=disk.parameters + disk.state,
        device_bytes=device.parameters + device.state,
        staging_bytes=host.staging,
    )


class CompilesOnly(FrameCompiler):
    """Compiles graphs, and returns what yields tensors without values: kernels cannot run here."""

    def lower(
        self, direction: Direction, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[[list[Any]], Any]:
        outputs = [meta.value(node) if isinstance(node, fx.Node) else node for node in nodes.returned_by(gm.graph)]
        super().lower(direction, gm, inputs, **kwargs)

        def run(args: list[Any]) -> list[Any]:
            args.clear()
            return [torch.empty_like(each) if isinstance(each, Tensor) else each for each in outputs]

        return boxed(run)


def compile_resting(case: Rest) -> list[Copies]:
    """Compile it, and count."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    found: list[Copies] = []

    def keep(plan: FramePlan, late: Sequence[int]) -> None:
        found.extend(copies_of(direction, gm) for direction, gm in plan.graphs.items())

    options = CompileOptions(lowering=case.lowering, passes=case.pipeline())
    triton_driver.pretend()

    def compiler_of(frame: Frame, options: CompileOptions = options) -> FrameCompiler:
        known = zgraph.PassContext(planned_backend="nccl", update=case.offload.update)
        return CompilesOnly(frame, options, known=known, on_plan=keep)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compiler_of(Frame.of_dynamo(gm)).compile(gm, inputs)

    with (
        fake_world(WORLD),
        mock.patch.object(AsyncCompile, "triton", compile_only),
        config.patch(compile_threads=1, fx_graph_cache=False),
    ):
        mode = fake_mode()
        with mode, torch.device("cuda"):
            parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
            model: nn.Module = nn.Sequential(*parts)
            x = torch.zeros(8, WIDTH)
        zgraph.shard(model, zero_stage=case.zero_stage, param_dtype=case.param_dtype, offload=case.offload)
        if "step" in case.what:
            optimizer = case.optimizer_of(model)

            def step(x: Tensor) -> Tensor:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            state = state_of(model)
            assert state is not None and state.scope.resting is not None
            if case.what == "step":
                planned = replace(options, lowering="fx")  # its capture is not decomposed
                plan_whole_step(step, model, [optimizer], (x,), lambda frame: compiler_of(frame, planned))
            if case.what == "first step" or case.lowering == "inductor":
                found.clear()
                lifted = Lifted.of(model, [optimizer])
                captured = capture(step, lifted, (x,), {}, decompose=case.lowering == "inductor")
                frame = Frame(name="step/0", reason="", inputs=lifted.tensors(), is_step=True)
                compiler_of(frame).compile_step(captured.gm)
            return found
        compiled = torch.compile(model, backend=backend, dynamic=False)
        try:
            with mode, torch.set_grad_enabled(case.what == "three calls"):
                result = compiled(x)
                if case.what == "three calls":
                    result.sum().backward()
        finally:
            torch.compiler.reset()
    return found


@dataclass(frozen=True, kw_only=True)
class Places:
    """Device types in a plain loop, where nothing is compiled.

    Attributes:
        shards: of parameters.
        read: of a parameter as its module reads it.
        returns: nodes of autograd between that and the parameter that copy its gradient.
        stepped: of state while the optimizer steps.
        state: of state with dims after the step, and after
        settled: a captured step has taken over, with its
        counts: numbers of steps.
    """

    shards: list[str]
    read: list[str]
    returns: list[str]
    stepped: list[str]
    state: list[str]
    settled: list[str]
    counts: list[str]


def plain_places(case: Rest) -> Places:
    """Where tensors are in a forward, a backward and an `optimizer.step()` that are not compiled."""
    read: list[Tensor] = []
    stepped: list[Tensor] = []
    with fake_world(WORLD):
        mode = fake_mode()
        with mode, torch.device("cuda"):
            model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            x = torch.zeros(8, WIDTH)
        zgraph.shard(model, zero_stage=case.zero_stage, offload=case.offload)
        with mode:
            optimizer = case.optimizer_of(model)
            model[0].register_forward_pre_hook(lambda part, args: read.append(cast(Any, part).weight))

            def watch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                stepped.extend(_state(optimizer))

            for _ in range(2):  # the second step has state
                model(x)
                hook = optimizer.register_step_pre_hook(watch)
                _make_state(model, optimizer)
                hook.remove()
            state = _state(optimizer)
            Lifted.of(model, [optimizer]).settle()
            settled, counts = _state(optimizer), _state(optimizer, ndim=0)
        return Places(
            shards=_devices(model.parameters()),
            read=_devices(read),
            returns=[name for one in read[:1] for name in _copies_back(one)],
            stepped=_devices(stepped),
            state=_devices(state),
            settled=_devices(settled),
            counts=_devices(counts),
        )


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step plainly, on gradients that no backward has computed: eager autograd takes streams, which are not there."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _copies_back(read: Tensor) -> Iterable[str]:
    node = read.grad_fn
    while node is not None:
        if "Copy" in node.name():
            yield node.name()
        node = node.next_functions[0][0] if node.next_functions else None


def _state(optimizer: torch.optim.Optimizer, ndim: int = 1) -> list[Tensor]:
    values = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return [value for value in values if min(value.ndim, 1) == ndim]


def _devices(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({(local_of(one) if isinstance(one, DTensor) else one).device.type for one in tensors})


def _spaces(model: nn.Module, tensors: Iterable[Tensor]) -> list[str]:
    state = state_of(model)
    assert state is not None and state.scope.resting is not None
    resting = state.scope.resting
    return sorted({str(resting.space_of(local_of(one) if isinstance(one, DTensor) else one)) for one in tensors})


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Device types after programs for a GPU have run on tensors without values.

    Attributes:
        shards, grads: of parameters.
        state, counts: of the optimizer, with dims and without.
        dtypes: of state with dims.
        spaces: in which parameters and state with dims rest.
        result: of the loss.
        host_waits: how often the host has waited for copies.
        programs: compiled ones that have run.
    """

    shards: list[str]
    grads: list[str]
    state: list[str]
    counts: list[str]
    dtypes: list[torch.dtype]
    spaces: list[str]
    result: list[str]
    host_waits: int
    programs: int


class Fixed(nn.Module):
    """Layers that hold what they are given: an argument of a step must have values."""

    x: Tensor

    def __init__(self) -> None:
        super().__init__()
        parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*parts)
        self.register_buffer("x", torch.zeros(8, WIDTH))

    def forward(self) -> Tensor:
        return self.layers(self.x)


def run_resting(case: Rest, calls: int = 3, clears: bool = True) -> Ran:
    """Train by `zgraph.training_step`, or in three calls by a compiled model and a plain step.

    Args:
        case: with the lowering "fx", whose programs need no kernels.
        calls: of the step, after the optimizer has made its state.
        clears: whether gradients are cleared at its end.
    """
    waits: list[int] = []
    reports = zgraph.Report()
    options: dict[str, Any] = {"lowering": "fx", "report": reports}
    with (
        fake_world(WORLD),
        mock.patch.object(StreamLanes, "finish", lambda lanes: waits.append(1)),
    ):
        mode = fake_mode()
        with mode, torch.device("cuda"):
            model = Fixed()
        zgraph.shard(model, zero_stage=case.zero_stage, param_dtype=case.param_dtype, offload=case.offload)
        optimizer = case.optimizer_of(model)
        forward: Any = model
        if case.what == "three calls":
            forward = torch.compile(model, backend="zgraph", options=options, dynamic=False)

        def step() -> Tensor:
            loss = forward().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()
            return loss.detach()

        run: Any = zgraph.training_step(model, optimizer, options=options)(step) if case.what == "step" else step
        try:
            with mode:
                _make_state(model, optimizer)  # new tensors that are like no other cannot be made outside of the mode
            with nullcontext() if case.what == "step" else mode:
                losses = [run() for _ in range(calls)]
        finally:
            torch.compiler.reset()
        return Ran(
            shards=_devices(model.parameters()),
            grads=_devices(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
            state=_devices(_state(optimizer)),
            counts=_devices(_state(optimizer, ndim=0)),
            dtypes=sorted({one.dtype for one in _state(optimizer)}, key=str),
            spaces=_spaces(model, [*model.parameters(), *_state(optimizer)]),
            result=_devices(losses),
            host_waits=len(waits),
            programs=len(reports.graphs),
        )
