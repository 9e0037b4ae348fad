"""Parts of gpu.py: one of eight ranks on one GPU, whose collectives are copies that come late or over a slow link."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_setting import (
    RANKS,
    Row,
    Setting,
    attempt,
    built,
    config_of,
    local,
    lone_ms,
    repeatable,
    same_bits,
    steps_ms,
)
from loopback import Wire, loopback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from workload import ModelConfig, make_batch

import zgraph
from zgraph.analysis.hardware import Hardware, Link
from zgraph.passes import BucketCollectives, LoCo, presets

LATE_US = 300.0  # of each collective
Passes = Callable[[], list[Any]]


def coalesced() -> list[Any]:
    passes = presets.default()
    return [replace(one, gathers="coalesced") if isinstance(one, BucketCollectives) else one for one in passes]


WAYS: dict[str, Passes] = {
    "rules": presets.default,
    "planned": presets.planned,
    "coalesced": coalesced,
    "LoCo": lambda: presets.default(compression=LoCo()),
}


def loopback_bits(setting: Setting) -> Iterator[Row]:
    """Loss and gradients of collectives that come late, into memory full of NaN, against those that come at once."""
    config = config_of(setting, vocabulary=2048, width=256, layers=4, heads=4, sequence=128, batch=4)
    cases = [(way, lowering) for lowering in setting.lowerings for way in (WAYS if lowering == "fx" else ("rules",))]
    for way, lowering in cases:
        yield attempt(f"late and poisoned, {way}, {lowering}", lambda w=way, by=lowering: _late(setting, config, w, by))


def _late(setting: Setting, config: ModelConfig, way: str, lowering: str) -> Row:
    runs = [_two_steps(setting, config, WAYS[way], lowering, late=late) for late in (False, True)]
    row = same_bits(way, *runs)
    del row["what"]
    return row | {"finite": all(bool(one.isfinite().all()) for one in runs[1])}


def _two_steps(setting: Setting, config: ModelConfig, passes: Passes, lowering: str, *, late: bool) -> list[Tensor]:
    """Losses and gradients of two steps."""
    wire = Wire(backend="nccl", when="waited" if late else "started", poisons=late)
    if late:
        wire.transfer_us = lambda kind, sent_bytes, ranks: LATE_US
    with loopback(RANKS, wire), repeatable():
        pipeline = zgraph.PassList(passes(), target=zgraph.Target(hardware=Hardware.preset("h100")))
        model = _sharded(setting, config)
        options: dict[str, Any] = {"lowering": lowering, "passes": pipeline}
        called: Any = torch.compile(model, backend="zgraph", options=options)
        found: list[Tensor] = []
        for step in range(2):
            loss = called(make_batch(config, step, 0).to(setting.device))
            loss.backward()
            found += [local(loss), *(local(one.grad) for one in model.parameters() if one.grad is not None)]
            model.zero_grad()
    return found


def _sharded(setting: Setting, config: ModelConfig) -> nn.Module:
    mesh = init_device_mesh(setting.device.type, (RANKS,), mesh_dim_names=("dp",))
    return zgraph.shard(built(setting, config), mesh, param_dtype=torch.bfloat16 if setting.on_cuda else None)


# --- over an emulated link --------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """A step of forward and backward, and what zgraph expects of it."""

    step: Callable[[], Tensor]
    predicted_us: Callable[[], float | None] = lambda: None


def overlap(setting: Setting) -> Iterator[Row]:
    """Exposed milliseconds, measured and predicted, of kernels that are real and a link that is emulated."""
    config = config_of(setting, vocabulary=8192, width=1024, layers=6, heads=16, sequence=512, batch=8)
    machine = zgraph.calibrate(cache=setting.scratch.parent / "calibrated")
    names = ("FSDP2", "rules", "planned", "LoCo")
    for gbytes_per_s in (1.0,) if setting.dry else (50.0, 10.0):
        link = Link(latency_us=5.0, bytes_per_us=gbytes_per_s * 1e3)
        hardware = replace(
            machine, intra_host=link, inter_host=link, ranks_per_host=RANKS, links={}, backend="nccl",
            cpu_us_per_collective=0.0, cpu_us_per_wire_byte=0.0,
        )  # fmt: skip
        for name in names:
            what = f"emulated link of {gbytes_per_s:g} GB/s, {name}"
            row = attempt(what, lambda n=name, h=hardware: _exposed(setting, config, h, n))
            yield row | ({"ok": None} if name == "FSDP2" else {})


def _exposed(setting: Setting, config: ModelConfig, hardware: Hardware, name: str) -> Row:
    wire = Wire(backend="nccl", when="started", poisons=False)
    with loopback(RANKS, wire):
        tokens = make_batch(config, 0, 0).to(setting.device)
        build = _fsdp2 if name == "FSDP2" else _zgraph
        contender = build(setting, config, hardware, name, tokens)
        for _ in range(2):
            contender.step()
        compute_ms = _typical_ms(setting, contender.step)
        serial = [0.0]
        wire.when, wire.transfer_us = "timed", _transfer_us(hardware, serial)
        contender.step()
        collectives_ms = serial[0] / 1e3
        step_ms = _typical_ms(setting, contender.step)
        lone = lone_ms(setting, contender.step, repeats=3)
        predicted_us = contender.predicted_us()
    return {
        "compute ms": round(compute_ms, 3),
        "collectives ms": round(collectives_ms, 3),
        "step ms": round(step_ms, 3),
        "exposed ms": round(step_ms - compute_ms, 3),
        "predicted exposed ms": None if predicted_us is None else round(predicted_us / 1e3, 3),
        "step alone ms": round(lone, 3),
    }


def _typical_ms(setting: Setting, step: Callable[[], object]) -> float:
    return statistics.median(steps_ms(setting, step, steps=3) for _ in range(1 if setting.dry else 5))


def _zgraph(setting: Setting, config: ModelConfig, hardware: Hardware, name: str, tokens: Tensor) -> Contender:
    model = _sharded(setting, config)
    # The target of "rules" and "LoCo" is for the prediction alone.
    target = zgraph.Target(hardware=hardware, time_kernels=setting.on_cuda)
    options: dict[str, Any] = {
        "lowering": setting.lowerings[-1],
        "passes": zgraph.PassList(WAYS[name](), target=target),
    }
    called: Any = torch.compile(model, backend="zgraph", options=options)

    def predicted_us() -> float:
        return sum(graph.exposed_us or 0.0 for graph in zgraph.explain(model).graphs)

    return Contender(_step(called, model, tokens), predicted_us)


def _fsdp2(setting: Setting, config: ModelConfig, hardware: Hardware, name: str, tokens: Tensor) -> Contender:
    """Compiled blocks, as its users compile it."""
    model = built(setting, config)
    mesh = init_device_mesh(setting.device.type, (RANKS,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setting.on_cuda else None)
    for block in model.blocks:
        block.compile(backend=setting.compiler)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Contender(_step(model, model, tokens))


def _step(called: Callable[[Tensor], Tensor], model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = called(tokens)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def _transfer_us(hardware: Hardware, total: list[float]) -> Callable[[str, int, int], float]:
    def transfer_us(kind: str, sent_bytes: int, ranks: int) -> float:
        needed = float(hardware.collective_us(kind, sent_bytes, ranks))
        total[0] += needed
        return needed

    return transfer_us
