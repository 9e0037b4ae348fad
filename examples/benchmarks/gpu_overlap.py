"""Part of gpu.py: eight ranks looped back on the device, whose collectives take as long as a link makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_setting import RANKS, Row, Setting, config_of, median_ms
from loopback import Wire, loopback
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from workload import LanguageModel, ModelConfig, make_batch

import zgraph
from zgraph.analysis.hardware import Hardware, Link
from zgraph.passes import presets


def hardware_of(setting: Setting, gbytes_per_s: float) -> Hardware:
    """What zgraph is told of the machine: the preset nearest to it, with a link of that rate."""
    name = "cpu"
    if setting.on_cuda:
        device = torch.cuda.get_device_name(setting.device).lower()
        name = next((each for each in ("h200", "h100", "a100") if each in device), "h100")
    link = Link(latency_us=5.0, bytes_per_us=gbytes_per_s * 1e3)
    return replace(Hardware.preset(name), intra_host=link, inter_host=link, ranks_per_host=RANKS)


def run_overlap(setting: Setting) -> Iterator[Row]:
    """Steps of one of eight ranks, whose collectives take as long as their link makes them."""
    config = config_of(setting, vocabulary=8192, width=1024, layers=6, heads=16, sequence=512, batch=8)
    for gbytes_per_s in (1.0,) if setting.tiny else (400.0, 50.0, 10.0):
        hardware = hardware_of(setting, gbytes_per_s)
        for planned in (False,) if setting.tiny else (False, True):
            passes = presets.planned() if planned else presets.default()
            torch.compiler.reset()
            yield _overlap_row(setting, config, hardware, passes, f"{gbytes_per_s:g} GB/s, {_name(planned)}")


def _name(planned: bool) -> str:
    return "planned" if planned else "rules"


def _overlap_row(setting: Setting, config: ModelConfig, hardware: Hardware, passes: list[Any], what: str) -> Row:
    wire = Wire(backend="nccl", when="started")
    with loopback(RANKS, wire):
        torch.manual_seed(0)
        param_dtype = torch.bfloat16 if setting.on_cuda else None
        mesh = init_device_mesh(setting.device.type, (RANKS,), mesh_dim_names=("dp",))
        model = zgraph.shard(LanguageModel(config).to(setting.device), mesh, param_dtype=param_dtype)
        pipeline = zgraph.Pipeline(passes, target=zgraph.Target(hardware=hardware))  # of rules for the prediction alone
        options: dict[str, Any] = {"lowering": setting.lowerings[-1], "pipeline": pipeline}
        called: Any = torch.compile(model, backend="zgraph", options=options)
        tokens = make_batch(config, 0, 0).to(setting.device)

        def step() -> Tensor:
            loss = called(tokens)
            loss.backward()
            model.zero_grad()
            return loss.detach()

        at_once = step()
        wire.poisons = False
        compute_ms = median_ms(setting, step)
        wire.when, wire.transfer_us = "timed", _transfer_us(hardware, serial := [0.0])
        wire.poisons = True
        equal = torch.equal(step(), at_once)
        wire.poisons, serial[0] = False, 0.0
        step()
        serial_ms = serial[0] / 1e3
        step_ms = median_ms(setting, step)
        with zgraph.measure(model):
            for _ in range(2):
                step()
        explained = zgraph.explain(model)
        blocked_us = sum(sum(found.blocked_us.values()) for found in explained.measured.values())
        predicted_us = sum(graph.exposed_us or 0.0 for graph in explained.graphs)
    return {
        "what": what,
        "compute ms": round(compute_ms, 3),
        "collectives ms": round(serial_ms, 3),
        "step ms": round(step_ms, 3),
        "exposed ms": round(step_ms - compute_ms, 3),
        "blocked in waits ms": round(blocked_us / 1e3, 3),
        "predicted exposed ms": round(predicted_us / 1e3, 3),
        "said": None if equal else "late collectives change the loss",
        "ok": equal,
    }


def _transfer_us(hardware: Hardware, total: list[float]) -> Callable[[str, int, int], float]:
    def transfer_us(kind: str, sent_bytes: int, ranks: int) -> float:
        needed = float(hardware.collective_us(kind, sent_bytes, ranks))
        total[0] += needed
        return needed

    return transfer_us
