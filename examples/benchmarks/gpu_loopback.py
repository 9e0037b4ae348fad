"""Parts of gpu.py: one of eight ranks on one GPU, whose collectives are copies that come late or over a slow link."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from builders import shard_fully
from gpu_setting import RANKS, Row, Setting, attempt, local, lone_ms, repeatable, same_bits, steps_ms
from loopback import Wire, loopback
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from workload import ModelConfig

import zgraph
from zgraph.analysis.hardware import Hardware, Link
from zgraph.passes import BucketCollectives, LoCo, presets

LATE_US = 300.0  # of each collective


def coalesced() -> list[Any]:
    passes = presets.default()
    return [replace(one, gathers="coalesced") if isinstance(one, BucketCollectives) else one for one in passes]


WAYS: dict[str, Callable[[], list[Any]]] = {
    "rules": presets.default,
    "planned": presets.planned,
    "coalesced": coalesced,
    "LoCo": lambda: presets.default(compression=LoCo()),
}


def _compiled(
    setting: Setting, config: ModelConfig, way: str, lowering: str, target: zgraph.Target
) -> tuple[nn.Module, Any]:
    """The sharded model, and what is called."""
    model = zgraph.shard(setting.model(config), setting.mesh(RANKS), param_dtype=setting.dtype)
    options: dict[str, Any] = {"lowering": lowering, "passes": zgraph.PassList(WAYS[way](), target=target)}
    return model, torch.compile(model, backend="zgraph", options=options)


def loopback_bits(setting: Setting) -> Iterator[Row]:
    """Loss and gradients of collectives that come late, into memory full of NaN, against those that come at once."""
    config = setting.config(vocabulary=2048, width=256, layers=4, heads=4, sequence=128, batch=4)
    cases = [(way, lowering) for lowering in setting.lowerings for way in (WAYS if lowering == "fx" else ("rules",))]
    for way, lowering in cases:
        yield attempt(f"late and poisoned, {way}, {lowering}", _late, setting, config, way, lowering)


def _late(setting: Setting, config: ModelConfig, way: str, lowering: str) -> Row:
    runs = [_two_steps(setting, config, way, lowering, late=late) for late in (False, True)]
    return same_bits(way, *runs, finite=all(bool(one.isfinite().all()) for one in runs[1]))


def _two_steps(setting: Setting, config: ModelConfig, way: str, lowering: str, *, late: bool) -> list[Tensor]:
    """Losses and gradients of two steps."""
    wire = Wire(backend="nccl", when="waited" if late else "started", poisons=late)
    if late:
        wire.transfer_us = lambda kind, sent_bytes, ranks: LATE_US
    with loopback(RANKS, wire), repeatable():
        model, called = _compiled(setting, config, way, lowering, zgraph.Target(hardware=Hardware.preset("h100")))
        found: list[Tensor] = []
        for step in range(2):
            loss = called(setting.tokens(config, step))
            loss.backward()
            found += [local(loss), *(local(one.grad) for one in model.parameters() if one.grad is not None)]
            model.zero_grad()
    return found


# --- over an emulated link --------------------------------------------------------------------------------------------


def overlap(setting: Setting) -> Iterator[Row]:
    """Exposed milliseconds, measured and predicted, of kernels that are real and a link that is emulated."""
    config = setting.config(vocabulary=8192, width=1024, layers=6, heads=16, sequence=512, batch=32)  # not the host
    machine = setting.calibrated()
    for gbytes_per_s in (1.0,) if setting.dry else (50.0, 10.0):
        link = Link(latency_us=5.0, bytes_per_us=gbytes_per_s * 1e3)
        hardware = replace(
            machine, intra_host=link, inter_host=link, ranks_per_host=RANKS, links={}, backend="nccl",
            cpu_us_per_collective=0.0, cpu_us_per_wire_byte=0.0,
        )  # fmt: skip
        for name in ("FSDP2", "rules", "planned", "LoCo"):
            what = f"emulated link of {gbytes_per_s:g} GB/s, {name}"
            row = attempt(what, _exposed, setting, config, hardware, name)
            yield row | ({"ok": None} if name == "FSDP2" else {})


def _exposed(setting: Setting, config: ModelConfig, hardware: Hardware, name: str) -> Row:
    wire = Wire(backend="nccl", when="started", poisons=False)
    with loopback(RANKS, wire):
        tokens = setting.tokens(config)
        if name == "FSDP2":  # compiled blocks, as its users compile it
            model = called = setting.model(config)
            policy = MixedPrecisionPolicy(param_dtype=setting.dtype)
            shard_fully(model, model.blocks, setting.compiler, mesh=setting.mesh(RANKS), mp_policy=policy)
        else:  # the target of "rules" and "LoCo" is for the prediction alone
            target = zgraph.Target(hardware=hardware, time_kernels=setting.on_cuda)
            model, called = _compiled(setting, config, name, setting.lowerings[-1], target)

        def step() -> None:
            called(tokens).backward()
            model.zero_grad()

        def typical_ms() -> float:
            return statistics.median(steps_ms(setting, step, steps=3) for _ in range(1 if setting.dry else 5))

        for _ in range(2):
            step()
        compute_ms = typical_ms()
        serial: list[float] = []

        def transfer_us(kind: str, sent_bytes: int, ranks: int) -> float:
            serial.append(float(hardware.collective_us(kind, sent_bytes, ranks)))
            return serial[-1]

        wire.when, wire.transfer_us = "timed", transfer_us
        step()
        collectives_ms = sum(serial) / 1e3
        step_ms = typical_ms()
        figures = {
            "compute ms": compute_ms,
            "collectives ms": collectives_ms,
            "step ms": step_ms,
            "exposed ms": step_ms - compute_ms,
            "step alone ms": lone_ms(setting, step, repeats=3),
        }
        if name != "FSDP2":
            predicted_us = sum(graph.exposed_us or 0.0 for graph in zgraph.explain(model).graphs)
            figures["predicted exposed ms"] = predicted_us / 1e3
    return {name: round(value, 3) for name, value in figures.items()}
