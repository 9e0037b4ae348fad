"""Plans and explanations of steps whose parameters and optimizer state rest elsewhere: the ledger, and what fits."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks, worlds
from zgraph.compiler.memory_ledger import SpaceUse
from zgraph.passes import presets
from zgraph.planner.planned_step import Plan

WIDTH, LAYERS = 64, 4
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
COUNTS = LAYERS * 4  # bytes of the step counts, which stay on the device
CPU = zgraph.Hardware.preset("cpu")
HOST = zgraph.Offload(params="host", optimizer="host")
STATE = zgraph.Offload(optimizer="host")


def build() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def summed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def planned(world: int = 2, offload: zgraph.Offload | None = None, **options: Any) -> Plan:
    given: dict[str, Any] = {"hardware": CPU, "optimizer_fn": adamw, **options}
    given["step_fn"] = None if given["optimizer_fn"] is None else summed
    return zgraph.plan(build, world_size=world, batch=lambda: (torch.zeros(8, WIDTH),), offload=offload, **given)


def within(budget_bytes: int) -> zgraph.PassList:
    return zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=CPU, budget_bytes=budget_bytes))


def eight_bit(model: nn.Module) -> torch.optim.Optimizer:
    return zgraph.AdamW8bit(model.parameters())


def explained(
    offload: zgraph.Offload | None, optimizer_fn: Any = adamw
) -> tuple[int, tuple[SpaceUse, ...], tuple[SpaceUse, ...], str]:
    """Of real ranks: nodes and ledger of the step, ledger of the first one, and what is printed."""
    model = zgraph.shard(build(), offload=offload)
    optimizer, report = optimizer_fn(model), zgraph.Report()

    options = {"lowering": "fx", "report": report}
    step: Any = zgraph.training_step(model, optimizer, options=options)(summed(model, optimizer))
    for _ in range(2):
        step(torch.zeros(8, WIDTH))
    first, last = report.graphs[0], report.graphs[-1]
    return last.nodes, last.ledger, first.ledger, str(zgraph.explain(model))


@worlds(2)
@pytest.mark.parametrize(
    "tiers",
    [(None, "host"), ("host", "disk"), (None, None)],  # one formula for every tier
)
def test_a_plan_keeps_the_books_that_real_ranks_do(ranks: Ranks, tiers: tuple[Any, Any], tmp_path: Path) -> None:
    params, optimizer = tiers
    path = tmp_path if "disk" in tiers else None
    offload = zgraph.Offload(params=params, optimizer=optimizer, path=path) if any(tiers) else None
    nodes, ledger, first, text = ranks.run(explained, offload)[0]
    nowhere = None if path is None else tmp_path / "made by nobody"
    found = planned(offload=None if offload is None else replace(offload, path=nowhere))
    assert found.ledger == ledger and found.graphs[0].nodes == nodes
    assert nowhere is None or not nowhere.exists()
    at_rest = {line.space: (line.parameters, line.state) for line in ledger}
    assert at_rest[params or "device"][0] == PARAMETER_BYTES // 2
    assert at_rest[optimizer or "device"][1] == PARAMETER_BYTES + (0 if optimizer else COUNTS)
    assert {line.space: line.state for line in first} == {space: state for space, (_, state) in at_rest.items()}
    for line in ledger:
        assert (f"memory of a rank, {line.space}: parameters " in text) == (line.together > 0)


def test_the_ledger_follows_the_formulas_also_without_an_optimizer() -> None:
    """Of which two moments are planned."""
    for optimizer_fn, counts in ((adamw, COUNTS), (None, 0)):
        found = planned(4, HOST, optimizer_fn=optimizer_fn)
        shards = PARAMETER_BYTES // 4
        device, host, disk = found.ledger
        assert (host.parameters, host.state, host.step) == (shards, 2 * shards, 0)
        assert (device.parameters, device.state, disk.together) == (0, counts, 0)
        assert (found.peak_bytes, found.host_bytes, found.disk_bytes) == (device.together, 3 * shards, 0)
        assert (found.parameter_bytes, found.moment_bytes) == (shards, 2 * shards + counts)
        assert found.as_json()["memory"][1]["state"] == 2 * shards
        assert "on the host: parameters 16.00 KiB" in str(found)


def test_a_plan_for_gpus_knows_where_updates_run() -> None:
    """The bytes of each lane, and the time of the host's updates."""
    gpu, shards, layers = zgraph.Hardware.preset("h100"), PARAMETER_BYTES // 4, LAYERS
    for offload, out, back, updated in (
        (HOST, shards + 4 * layers, 0, True),
        (replace(HOST, update="device"), 3 * shards, 3 * shards, False),
        (STATE, 2 * shards + 4 * layers, shards, True),
        (replace(STATE, update="device"), 2 * shards, 2 * shards, False),
    ):
        found = planned(4, offload, hardware=gpu)
        lanes = {lane.lane: lane for lane in found.compiled.graphs[0].copies}
        gathered = sum(
            7 * shards // 4 for _ in range(1) if offload.params == "host"
        )  # twice, but the first in backward
        assert lanes["device_to_host"].bytes == out
        assert lanes["host_to_device"].bytes == back + gathered
        assert ("host_updates" in lanes) == updated
        if updated:
            assert lanes["host_updates"].bytes == 4 * shards
            assert lanes["host_updates"].us == pytest.approx(gpu.host_update_us(7 * shards + 4 * layers))
            assert found.ledger[1].step == out, "gradients, and parameters of the device, wait there"
        else:
            assert found.ledger[1].step == 0


def test_pinned_memory_is_counted_as_torch_takes_it() -> None:
    """In powers of two: shards of 22 rows are 5,632 bytes, and take 8,192; a CPU's host memory comes in pages."""
    gpu = zgraph.Hardware.preset("h100")
    for hardware, taken in ((gpu, 8192), (CPU, 22 * WIDTH * 4)):
        _, host, _ = planned(3, HOST, hardware=hardware).ledger
        assert (host.parameters, host.state) == (LAYERS * taken, 2 * LAYERS * taken)
    found = planned(3, HOST, hardware=gpu)
    assert found.ledger[1].step == LAYERS * 8192 + COUNTS, "gradients wait in blocks as large"
    asked = found.ledger[1].together
    assert planned(3, replace(HOST, host_budget_bytes=asked), hardware=gpu).ledger == found.ledger
    with pytest.raises(ValueError, match=f"keeps {asked} bytes on the host of each rank"):
        planned(3, replace(HOST, host_budget_bytes=asked - 1), hardware=gpu)


@worlds(2)
def test_a_plan_counts_the_bytes_of_packed_state(ranks: Ranks) -> None:
    nodes, ledger, _, _ = ranks.run(explained, HOST, eight_bit)[0]
    found = planned(offload=HOST, optimizer_fn=eight_bit)
    assert found.ledger == ledger and found.graphs[0].nodes == nodes
    assert found.ledger[1].state == PARAMETER_BYTES // 2 * 17 // 32


def test_an_offload_of_shard_fn_is_planned_too() -> None:
    by_itself = planned(shard_fn=functools.partial(zgraph.shard, offload=HOST))
    assert by_itself.ledger == planned(offload=HOST).ledger
    assert planned(offload=HOST, shard_fn=functools.partial(zgraph.shard, offload=HOST)).ledger == by_itself.ledger


def test_exceeded_host_budget_is_refused_with_a_suggestion() -> None:
    needed = planned(4, HOST).host_bytes
    found = planned(4, replace(HOST, host_budget_bytes=needed))
    assert f"of host_budget_bytes={needed}" in str(found)
    for optimizer_fn in (adamw, None):
        with pytest.raises(ValueError, match=rf'With optimizer="disk", .* or host_budget_bytes={needed}\.'):
            planned(4, replace(HOST, host_budget_bytes=needed - 1), optimizer_fn=optimizer_fn)
    moved = zgraph.Offload(params="host", optimizer="disk", path="anywhere", host_budget_bytes=needed - 1)
    assert planned(4, moved).host_bytes <= needed - 1


def test_exceeded_device_budget_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="smallest budget that it was found to fit into is") as error:
        planned(offload=HOST, passes=within(1))
    least = int(str(error.value).split("found to fit into is ")[1].split()[0])
    assert planned(offload=HOST, passes=within(least)).step_bytes <= least


def test_a_plan_says_what_would_make_it_fit() -> None:
    """On a CPU what rests on the host takes the same memory."""
    for offload in (None, HOST):
        used = planned(offload=offload)
        small = replace(CPU, memory_bytes=used.peak_bytes + used.host_bytes - 1)
        found = planned(offload=offload, hardware=small)
        assert not found.fits and not found.as_json()["fits"]
        assert f"does not fit, by 1 bytes; what would help: a target with budget_bytes={used.step_bytes - 1}" in str(
            found
        )
        assert 'an offload with optimizer="disk"' in str(found)
        assert replace(found, hardware=CPU).fits
    disk = zgraph.Offload(optimizer="disk", path="anywhere")
    assert planned(offload=disk, hardware=small).fits


def test_tensors_offloaded_from_a_gpu_use_none_of_its_memory() -> None:
    """Gradients go there for each update, or all of it comes to the device, and goes back."""
    gpu = replace(CPU, backend="nccl")
    everything, resting = planned(hardware=gpu), planned(hardware=gpu, offload=HOST)
    streamed = planned(hardware=gpu, offload=replace(HOST, update="device"))
    before, device, host = everything.ledger[0], resting.ledger[0], resting.ledger[1]
    assert (before.parameters, before.state) == (PARAMETER_BYTES // 2, PARAMETER_BYTES + COUNTS)
    assert (device.parameters, device.state) == (0, COUNTS)
    gradients = PARAMETER_BYTES // 2 + COUNTS
    assert (host.parameters, host.state, host.step) == (PARAMETER_BYTES // 2, PARAMETER_BYTES, gradients)
    assert streamed.ledger[1] == replace(host, step=0)
    notes = next(note for note in streamed.compiled.notes if note.startswith("stream_states"))
    assert f" {3 * PARAMETER_BYTES // 2} bytes go back" in notes
    libraries = everything.cublas_bytes + everything.communicator_bytes
    small = replace(gpu, memory_bytes=before.together + libraries - 1)
    assert 'an offload with optimizer="host"' in str(planned(hardware=small))
    assert planned(hardware=small, offload=HOST).fits
    on_disk = planned(hardware=gpu, offload=zgraph.Offload(params="disk", optimizer="disk", path="anywhere"))
    device, host, disk = on_disk.ledger
    assert (disk.parameters, disk.state) == (PARAMETER_BYTES // 2, PARAMETER_BYTES)
    assert (host.parameters, host.state, device.state) == (0, 0, COUNTS)
    assert host.step == host.staging > 0
    tight = zgraph.Offload(params="disk", optimizer="disk", path="anywhere", host_budget_bytes=host.step)
    assert planned(hardware=gpu, offload=tight).ledger == on_disk.ledger
    text = rf"{host.step} of buffers between disk and GPU, and host_budget_bytes={host.step - 1}\. Use more ranks, or"
    with pytest.raises(ValueError, match=text):
        planned(hardware=gpu, offload=replace(tight, host_budget_bytes=host.step - 1))
    packed = planned(hardware=gpu, offload=HOST, optimizer_fn=eight_bit).ledger[1]
    assert PARAMETER_BYTES // 4 < packed.state <= PARAMETER_BYTES // 2 == packed.parameters


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shard_fn": lambda model: model}, "shard_fn shards nothing"),
        (
            {"shard_fn": functools.partial(zgraph.shard, offload=zgraph.Offload(params="host"))},
            "write the same for both, or leave one out",
        ),
        ({"offload": zgraph.Offload(params="host", param_bits=8)}, "param_bits=8 is for inference"),
        (
            {
                "offload": replace(HOST, update="host"),
                "hardware": zgraph.Hardware.preset("h100"),
                "optimizer_fn": lambda model: torch.optim.AdamW(model.parameters()),
            },
            'update="host", but AdamW is not fused',
        ),
    ],
)
def test_an_offload_that_cannot_be_planned_is_refused(options: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"offload": HOST, **options}
    with pytest.raises(ValueError, match=text):
        planned(**given)
