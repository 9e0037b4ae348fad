"""Parts of gpu.py: what rests on the host or on disk is trained to the same bits, and what that costs beside peers."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from builders import adamw, whole_step
from gpu_setting import (
    Row,
    Setting,
    Step,
    attempt,
    by_fsdp2,
    by_torch,
    host_mib,
    lanes,
    local,
    lone_ms,
    peak_of,
    repeatable,
    same_bits,
    steps_ms,
    whole_zgraph,
)
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from workload import ModelConfig

import zgraph
from zgraph.passes import presets

STEPS = 3
CLOSE = 1e-3  # of losses, where an update rounds as another device does
STATE = zgraph.Offload(optimizer="host", update="device")
ALL = zgraph.Offload(params="host", optimizer="host")
ALL_TO_DEVICE = replace(ALL, update="device")
WAYS = {
    "nothing on the host": None,
    "state, updated on the device": STATE,
    "all, updated on the device": ALL_TO_DEVICE,
    "all, updated there": replace(ALL, update="host"),
    "all, updated where it is faster": ALL,
}


# --- bits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Losses, and parameters and state at the end, on the host."""

    losses: list[Tensor]
    tensors: list[Tensor]

    def beside(self, what: str, plain: Found) -> Row:
        """A row that holds if losses are close."""
        off = max(float(abs(one / other - 1)) for one, other in zip(self.losses, plain.losses, strict=True))
        return {"what": what, "losses differ by": f"{off:.1e}", "ok": off < CLOSE}


def offload_bits(setting: Setting) -> Iterator[Row]:
    """Steps of AdamW; the first is plain where that updates in the same place, all others are captured.

    A GPU's update rounds otherwise than a CPU's. What is updated on the host is compared with a plain loop whose
    parameters rest there. Moments of bf16 are updated to the same bits everywhere.
    """
    config = setting.config(vocabulary=8192, width=512, layers=4, heads=8, sequence=128, batch=4)
    disk = zgraph.Offload(params="disk", optimizer="disk", path=setting.scratch / "rests")

    def steps(offload: zgraph.Offload | None, **options: Any) -> Found:
        return _steps(setting, config, offload, **options)

    def row(what: str, expected: Found, offload: zgraph.Offload | None, **options: Any) -> Row:
        def run() -> Row:
            found = steps(offload, **options)
            pair = ([*one.losses, *one.tensors] for one in (found, expected))
            return same_bits(what, *pair, **host_mib())

        return attempt(what, run)

    with setting.alone(), repeatable():
        plain = steps(None)
        yield row("control: nothing on the host, twice", plain, None)
        for name, offload in {
            "state on the host": STATE,
            "all on the host": ALL_TO_DEVICE,
            "all on disk": disk,
        }.items():
            yield row(f"{name}, updated on the device", plain, offload)
        yield row("activations on the host", plain, None, offload_activations=True)
        on_host = steps(ALL, captured=False)
        yield row("all on the host, updated there", on_host, ALL)
        yield on_host.beside("updated there, beside updates on the device", plain)
        expected = steps(None, make=zgraph.AdamW8bit)
        yield expected.beside("AdamW8bit, beside AdamW", plain)
        for name, offload in {"all on the host, updated there": ALL, "all on disk": disk}.items():
            yield row(f"AdamW8bit, {name}", expected, offload, make=zgraph.AdamW8bit)
        calls = _three_calls(setting, config, None)
        yield same_bits("in three calls, all on the host", _three_calls(setting, config, ALL), calls)


def _steps(
    setting: Setting,
    config: ModelConfig,
    offload: zgraph.Offload | None,
    *,
    captured: bool = True,
    make: Any = None,
    **of_preset: Any,
) -> Found:
    model = zgraph.shard(setting.model(config), setting.mesh(), offload=offload)
    optimizer = adamw(model) if make is None else make(model.parameters(), lr=1e-3)
    step = whole_step(model, optimizer, {"lowering": "fx", "passes": zgraph.PassList(presets.default(**of_preset))})
    losses: list[Tensor] = []
    for number in range(STEPS):
        # A plain step updates where parameters rest.
        alike = offload is None or (offload.params, offload.update) == ("host", None)
        is_plain = not captured or (number == 0 and alike)
        losses.append(local((step.function if is_plain else step)(setting.tokens(config, number))))
    state = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return Found(losses, [local(one) for one in (*model.parameters(), *state)])


def _three_calls(setting: Setting, config: ModelConfig, offload: zgraph.Offload | None) -> list[Tensor]:
    """Losses, gradients and their last rows, of compiled calls; no step, which would be another device's."""
    model = zgraph.shard(setting.model(config), setting.mesh(), offload=offload)
    called: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    found: list[Tensor] = []
    for number in range(2):
        loss = called(setting.tokens(config, number))
        loss.backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        found += [local(loss), *(local(grad) for grad in grads), *(local(grad[-1:]) for grad in grads)]
        model.zero_grad()
    return found


# --- time and memory --------------------------------------------------------------------------------------------------


def offload(setting: Setting) -> Iterator[Row]:
    """Whole steps of 0.47 B parameters in bf16, weights and state in fp32."""
    config = setting.config(vocabulary=16384, width=2048, layers=8, heads=16, sequence=512, batch=8)
    with setting.alone():
        yield attempt("torch.compile", _figures, setting, config, by_torch)
        for name, given in WAYS.items():
            yield attempt(f"zgraph, on the host: {name}", _figures, setting, config, _ours, given)
        for name, build in (("FSDP2, CPUOffloadPolicy", _fsdp2), ("torchao, CPUOffloadOptimizer", _torchao)):
            yield attempt(name, _figures, setting, config, build) | {"ok": None}  # a peer's


def _figures(setting: Setting, config: ModelConfig, build: Callable[..., Step], *given: Any) -> Row:
    step = build(setting, setting.model(config), setting.tokens(config), *given)
    for _ in range(2):
        step()
    figures: Row = {"ms": round(steps_ms(setting, step, steps=3), 2), "alone ms": round(lone_ms(setting, step, 3), 2)}
    return figures | peak_of(setting, step) | host_mib() | lanes(setting, step)


def _ours(setting: Setting, model: nn.Module, tokens: Tensor, offload: zgraph.Offload | None) -> Step:
    pipeline = zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=setting.calibrated()))
    return whole_zgraph(setting, model, tokens, {"passes": pipeline}, offload=offload)


def _fsdp2(setting: Setting, model: Any, tokens: Tensor) -> Step:
    options = {"offload_policy": CPUOffloadPolicy()} if setting.on_cuda else {}
    return by_fsdp2(setting, model, model.blocks, tokens, **options)


def _torchao(setting: Setting, model: nn.Module, tokens: Tensor) -> Step:
    from torchao.optim import CPUOffloadOptimizer

    return by_torch(setting, model, tokens, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True))
