"""Part of gpu.py: what it costs to keep parameters and state on the host, beside FSDP2 and torchao."""

# pyright: reportPrivateImportUsage=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_setting import (
    Row,
    Setting,
    alone,
    attempt,
    built,
    cast_to,
    config_of,
    host_mib,
    lone_ms,
    peak_of,
    requested_mib,
    steps_ms,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from workload import ModelConfig, make_batch

import zgraph
from zgraph.passes import presets

ALL = {"params": "host", "optimizer": "host"}
OURS: dict[str, dict[str, Any] | None] = {
    "nothing on the host": None,
    "state, updated on the device": {"optimizer": "host", "update": "device"},
    "all, updated on the device": {**ALL, "update": "device"},
    "all, updated there": {**ALL, "update": "host"},
    "all, updated where it is faster": ALL,
}
Step = Callable[[], object]


def offload(setting: Setting) -> Iterator[Row]:
    """Whole steps of 0.47 B parameters in bf16, weights and state in fp32."""
    config = config_of(setting, vocabulary=16384, width=2048, layers=8, heads=16, sequence=512, batch=8)
    with alone(setting):
        yield attempt("torch.compile", lambda: _figures(setting, config, _plain))
        for name, given in OURS.items():
            build = lambda s, c, o=given: _ours(s, c, o)  # noqa: E731
            yield attempt(f"zgraph, on the host: {name}", lambda b=build: _figures(setting, config, b))
        for name, build in (("FSDP2, CPUOffloadPolicy", _fsdp2), ("torchao, CPUOffloadOptimizer", _torchao)):
            yield attempt(name, lambda b=build: _figures(setting, config, b)) | {"ok": None}  # a peer's


def _figures(setting: Setting, config: ModelConfig, build: Callable[[Setting, ModelConfig], Step]) -> Row:
    step = build(setting, config)
    for _ in range(2):
        step()
    held = requested_mib(setting)
    figures: Row = {"ms": round(steps_ms(setting, step, steps=3), 2), "alone ms": round(lone_ms(setting, step, 3), 2)}
    return figures | {"held MiB": round(held, 1)} | peak_of(setting, step) | host_mib()


def _plain(setting: Setting, config: ModelConfig) -> Step:
    model = built(setting, config)
    called = torch.compile(cast_to(_dtype(setting), model), backend=setting.compiler)
    return _loop(called, model, torch.optim.AdamW(model.parameters(), fused=True), _tokens(setting, config))


def _ours(setting: Setting, config: ModelConfig, given: dict[str, Any] | None) -> Step:
    offload = None if given is None else zgraph.Offload(**given)
    mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
    model = zgraph.shard(built(setting, config), mesh, param_dtype=_dtype(setting), offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    hardware = zgraph.calibrate(cache=setting.scratch.parent / "calibrated")
    pipeline = zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=hardware))

    @zgraph.training_step(model, optimizer, options={"lowering": setting.lowerings[-1], "passes": pipeline})
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    tokens = _tokens(setting, config)
    step.function(tokens)  # makes the state
    return lambda: step(tokens)


def _fsdp2(setting: Setting, config: ModelConfig) -> Step:
    model = built(setting, config)
    mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=_dtype(setting))}
    if setting.on_cuda:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        block.compile(backend=setting.compiler)
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _loop(model, model, torch.optim.AdamW(model.parameters(), fused=True), _tokens(setting, config))


def _torchao(setting: Setting, config: ModelConfig) -> Step:
    from torchao.optim import CPUOffloadOptimizer

    model = built(setting, config)
    called = torch.compile(cast_to(_dtype(setting), model), backend=setting.compiler)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    return _loop(called, model, optimizer, _tokens(setting, config))


def _loop(called: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Any, tokens: Tensor) -> Step:
    def step() -> None:
        called(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tokens(setting: Setting, config: ModelConfig) -> Tensor:
    return make_batch(config, 0, 0).to(setting.device)


def _dtype(setting: Setting) -> torch.dtype | None:
    return torch.bfloat16 if setting.on_cuda else None
