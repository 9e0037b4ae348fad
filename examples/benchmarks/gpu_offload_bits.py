"""Part of gpu.py: what rests on the host or on disk is trained to the bits of what rests on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_setting import Row, Setting, alone, attempt, built, config_of, host_mib, local, repeatable, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from workload import ModelConfig, make_batch

import zgraph
from zgraph.passes import presets

STEPS = 3
CLOSE = 1e-3  # of losses, where an update rounds as another device does
STATE = zgraph.Offload(optimizer="host", update="device")
ALL = zgraph.Offload(params="host", optimizer="host")
ALL_TO_DEVICE = replace(ALL, update="device")
Passes = Callable[[], list[Any]]


@dataclass(frozen=True)
class Found:
    """Losses, and parameters and state at the end, on the host."""

    losses: list[Tensor]
    tensors: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [*self.losses, *self.tensors]


def offload_bits(setting: Setting) -> Iterator[Row]:
    """Steps of AdamW, of which the first is plain and the others are captured.

    A GPU's update rounds otherwise than a CPU's. What is updated on the host is compared with a plain loop whose
    parameters rest there. Moments of bf16 are updated to the same bits everywhere.
    """
    config = config_of(setting, vocabulary=8192, width=512, layers=4, heads=8, sequence=128, batch=4)
    disk = zgraph.Offload(params="disk", optimizer="disk", path=setting.scratch / "rests")
    rounded: dict[str, Any] = {"moments_dtype": torch.bfloat16}
    with alone(setting), repeatable():
        plain = _steps(setting, config, None)
        yield same_bits("control: nothing on the host, twice", _steps(setting, config, None).all, plain.all)
        for name, offload in (
            *(("state on the host", STATE), ("all on the host", ALL_TO_DEVICE)),
            ("all on disk", disk),
        ):
            yield _row(f"{name}, updated on the device", plain, lambda o=offload: _steps(setting, config, o))
        activations: Passes = lambda: presets.default(offload_activations=True)  # noqa: E731
        yield _row("activations on the host", plain, lambda: _steps(setting, config, None, passes=activations))
        on_host = _steps(setting, config, ALL, captured=False)
        yield _row("all on the host, updated there", on_host, lambda: _steps(setting, config, ALL))
        yield {"what": "updated there, beside updates on the device", **_close(on_host, plain)}
        expected = _steps(setting, config, replace(ALL_TO_DEVICE, **rounded))
        yield {"what": "bf16 moments, beside moments of fp32", **_close(expected, plain)}
        for name, offload in (("all on the host, updated there", ALL), ("all on disk", disk)):
            run = lambda o=offload: _steps(setting, config, replace(o, **rounded))  # noqa: E731
            yield _row(f"bf16 moments, {name}", expected, run)
        calls = _three_calls(setting, config, None)
        yield same_bits("in three calls, all on the host", _three_calls(setting, config, ALL), calls)


def _row(what: str, expected: Found, run: Callable[[], Found]) -> Row:
    def row() -> Row:
        found = same_bits(what, run().all, expected.all, **host_mib())
        del found["what"]
        return found

    return attempt(what, row)


def _close(found: Found, expected: Found) -> Row:
    off = max(float(abs(one / other - 1)) for one, other in zip(found.losses, expected.losses, strict=True))
    return {"losses differ by": f"{off:.1e}", "ok": off < CLOSE}


def _steps(
    setting: Setting,
    config: ModelConfig,
    offload: zgraph.Offload | None,
    *,
    captured: bool = True,
    passes: Passes = presets.default,
) -> Found:
    model = _model(setting, config, offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    pipeline = zgraph.PassList(passes())

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[Tensor] = []
    for number in range(STEPS):
        # Moments of bf16 are made by a captured step alone.
        is_plain = not captured or (number == 0 and (offload is None or offload.moments_dtype is None))
        run = step.function if is_plain else step
        losses.append(local(run(make_batch(config, number, 0).to(setting.device))))
    state = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return Found(losses, [local(one) for one in (*model.parameters(), *state)])


def _three_calls(setting: Setting, config: ModelConfig, offload: zgraph.Offload | None) -> list[Tensor]:
    """Losses, gradients and their last rows, of compiled calls; no step, which would be another device's."""
    model = _model(setting, config, offload)
    called: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    found: list[Tensor] = []
    for number in range(2):
        loss = called(make_batch(config, number, 0).to(setting.device))
        loss.backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        found += [local(loss), *(local(grad) for grad in grads), *(local(grad[-1:]) for grad in grads)]
        model.zero_grad()
    return found


def _model(setting: Setting, config: ModelConfig, offload: zgraph.Offload | None) -> nn.Module:
    mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("dp",))
    return zgraph.shard(built(setting, config), mesh, offload=offload)
