"""Compiles what trains, or serves, a model whose parameters and state rest on the host of a GPU that is not there.

Runs in the process of `tests.support.cuda.pretended_gpu`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.compile_frame import FrameCompiler
from zgraph.compiler.frame import Frame
from zgraph.compiler.frame_plan import FramePlan
from zgraph.graph import meta, nodes
from zgraph.options import CompileOptions
from zgraph.passes import presets
from zgraph.plan_whole_step import plan_whole_step
from zgraph.step.lifted import Lifted
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world

WIDTH, LAYERS = 64, 3


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is compiled.

    Attributes:
        offload: where parameters and state rest.
        what: "step" for the whole step, "three calls" for forward and backward, or "inference".
        lowering: "fx" or "inductor".
        zero_stage, param_dtype: as `zgraph.shard` takes them.
        optimizer: of torch.optim, with
        fused: or not.
    """

    offload: zgraph.Offload
    what: str = "step"
    lowering: str = "fx"
    zero_stage: int = 3
    param_dtype: torch.dtype | None = None
    optimizer: str = "AdamW"
    fused: bool = True


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What one compiled graph copies between device and host, in the order in which graphs are compiled.

    Attributes:
        direction: of the graph.
        reloads, stores, offloads: how many are started.
        resting: inputs that rest on the host.
        readers: operators that read these otherwise, by name.
        devices: device types of the inputs that rest, as the graph has them.
    """

    direction: str
    reloads: int
    stores: int
    offloads: int
    resting: int
    readers: list[str]
    devices: list[str]


def copies_of(direction: str, gm: fx.GraphModule) -> Copies:
    """Count what a final graph copies."""
    resting = [node for node in gm.graph.find_nodes(op="placeholder") if meta.space(node) is not None]
    readers = [user for node in resting for user in node.users if user.op != "output" and not nodes.is_copy_start(user)]
    return Copies(
        direction=direction,
        reloads=len([*nodes.call_functions(gm.graph, nodes.is_reload)]),
        stores=len([*nodes.call_functions(gm.graph, nodes.is_store)]),
        offloads=len([*nodes.call_functions(gm.graph, nodes.is_offload)]),
        resting=len(resting),
        readers=[node.name for node in readers],
        devices=sorted({meta.tensor_value(node).device.type for node in resting}),
    )


def compile_resting(case: Rest) -> list[Copies]:
    """Compile it, and count."""
    found: list[Copies] = []

    def keep(plan: FramePlan) -> None:
        found.extend(copies_of(direction, gm) for direction, gm in plan.graphs.items())

    options = CompileOptions(lowering=case.lowering, pipeline=presets.with_streams(None))

    def compiler_of(frame: Frame) -> FrameCompiler:
        return FrameCompiler(frame, options, known=zgraph.PassContext(planned_backend="nccl"), on_plan=keep)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compiler_of(Frame.of_dynamo(gm)).compile(gm, inputs)

    with fake_world(4):
        mode = fake_mode()
        with mode, torch.device("cuda"):
            parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
            model: nn.Module = nn.Sequential(*parts)
            x = torch.zeros(8, WIDTH)
        zgraph.shard(model, zero_stage=case.zero_stage, param_dtype=case.param_dtype, offload=case.offload)
        if case.what == "step":
            optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), fused=case.fused)

            def step(x: Tensor) -> Tensor:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            plan_whole_step(step, model, optimizer, (x,), compiler_of)
            return found
        compiled = torch.compile(model, backend=backend, dynamic=False)
        try:
            with mode, torch.set_grad_enabled(case.what == "three calls"):
                compiled(x)
        finally:
            torch.compiler.reset()
    return found


@dataclass(frozen=True, kw_only=True)
class Places:
    """Device types in a plain loop, where nothing is compiled.

    Attributes:
        shards, grads: of parameters between forward, backward and the next.
        read: of a parameter as its module reads it.
        stepped: of state while the optimizer steps.
        state: of state with dims after the step, and after
        settled: a captured step has taken over, with its
        counts: numbers of steps.
    """

    shards: list[str]
    grads: list[str]
    read: list[str]
    stepped: list[str]
    state: list[str]
    settled: list[str]
    counts: list[str]


def plain_places(case: Rest) -> Places:
    """Where tensors are in a forward, a backward and an `optimizer.step()` that are not compiled."""
    read: list[Tensor] = []
    stepped: list[Tensor] = []
    with fake_world(4):
        with fake_mode(), torch.device("cuda"):
            model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            x = torch.zeros(8, WIDTH)
            zgraph.shard(model, zero_stage=case.zero_stage, offload=case.offload)
            optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), fused=case.fused)
            model[0].register_forward_pre_hook(lambda part, args: read.append(part.weight))

            def watch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                stepped.extend(_state(optimizer))

            for _ in range(2):  # the second step has state
                model(x).square().mean().backward()
                grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                hook = optimizer.register_step_pre_hook(watch)
                optimizer.step()
                hook.remove()
            state = _state(optimizer)
            Lifted.of(model, [optimizer]).settle()
            settled, counts = _state(optimizer), _state(optimizer, ndim=0)
        return Places(
            shards=_devices(model.parameters()),
            grads=_devices(grads),
            read=_devices(read),
            stepped=_devices(stepped),
            state=_devices(state),
            settled=_devices(settled),
            counts=_devices(counts),
        )


def _state(optimizer: torch.optim.Optimizer, ndim: int = 1) -> list[Tensor]:
    values = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return [value for value in values if min(value.ndim, 1) == ndim]


def _devices(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({(local_of(one) if isinstance(one, DTensor) else one).device.type for one in tensors})
