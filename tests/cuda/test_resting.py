"""Parameters and optimizer state on the host of a GPU: what is copied, and that nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zgraph
from tests.support.cuda.resting import (
    LAYERS,
    WIDTH,
    WORLD,
    Copies,
    Places,
    Ran,
    Rest,
    compile_resting,
    plain_places,
    run_resting,
)
from tests.support.resting import under
from zgraph.analysis.hardware import Link

HOST = zgraph.Offload(params="host", optimizer="host")
STATE = zgraph.Offload(optimizer="host")
SHARDS = zgraph.Offload(params="host")
STREAMED = replace(HOST, update="device")
DISK = zgraph.Offload(params="disk", optimizer="disk", path="given by `under`")
MIXED = replace(DISK, params="host")
STATE_ON_DISK = replace(DISK, params=None)
SHARDS_ON_DISK = replace(DISK, optimizer=None)
EIGHT_BIT: dict[str, Any] = {"optimizer": "AdamW8bit"}
PARAMETERS = 2 * LAYERS
MOMENTS = 2 * PARAMETERS
PACKED = PARAMETERS
FP32_BYTES = 8 * LAYERS * (WIDTH * WIDTH + WIDTH) // WORLD
PACKED_BYTES = LAYERS * (WIDTH * WIDTH * 17 // 8 + WIDTH * 8) // WORLD
# Backward reads all weights but that of the first layer, which stages 1 and 2 have kept; and no bias.
GATHERS = {0: PARAMETERS + LAYERS - 1, 1: PARAMETERS, 2: PARAMETERS, 3: PARAMETERS + LAYERS - 1}


def check(found: list[Copies]) -> None:
    """Copies, and updates that are given nothing else, are all that touches what rests on the host."""
    for copies in found:
        assert copies.readers == []
        assert copies.updated_on == (["cpu"] if copies.updates else [])
        assert copies.devices == ["cpu" if copies.updates else "cuda"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_copies_before_gathers_and_gradients_to_host_updates(stage: int, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, Rest(offload=HOST, zero_stage=stage))
    check(found)
    (step,) = found
    assert step.resting == PARAMETERS + MOMENTS
    assert step.reloads == GATHERS[stage]
    assert step.offloads == PARAMETERS + step.updates, "gradients, and for each update its step counts"
    assert (step.stores, step.returns) == (0, 0)
    assert step.updates >= 1
    held = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 // (WORLD if stage else 1)
    assert step.host_bytes == 3 * held
    assert step.device_bytes == PARAMETERS * 4, "step counts"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_device_parameters_visit_the_host_for_an_update(stage: int, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, Rest(offload=STATE, zero_stage=stage))
    check(found)
    (step,) = found
    assert (step.resting, step.reloads, step.stores) == (MOMENTS, 0, 0)
    assert (step.offloads, step.returns) == (2 * PARAMETERS + step.updates, PARAMETERS)


def on(folder: Path, case: Rest) -> Rest:
    return replace(case, offload=under(folder, case.offload) or case.offload)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensors_on_disk_are_loaded_before_and_stored_after_use(
    stage: int, on_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    found: list[Copies] = on_gpu(compile_resting, on(tmp_path, Rest(offload=DISK, zero_stage=stage)))
    check(found)
    (step,) = found
    assert step.resting == step.stores == step.to_disk == PARAMETERS + MOMENTS
    assert step.reloads == step.from_disk == GATHERS[stage] + PARAMETERS + MOMENTS
    assert (step.offloads, step.spills, step.returns, step.updates) == (0, 0, 0, 0)
    held = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 // (WORLD if stage else 1)
    assert (step.disk_bytes, step.host_bytes) == (3 * held, 0)
    largest = WIDTH * WIDTH * 4 // (WORLD if stage else 1)
    assert step.staging_bytes == 2 * 2 * largest, "two buffers each way"


@pytest.mark.parametrize("stage", [0, 3])
def test_device_updates_copy_before_each_use_and_back_after(stage: int, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, Rest(offload=STREAMED, zero_stage=stage))
    check(found)
    (step,) = found
    assert step.resting == step.stores == PARAMETERS + MOMENTS
    assert step.reloads == GATHERS[stage] + PARAMETERS + MOMENTS
    assert (step.offloads, step.returns, step.updates) == (0, 0, 0)


def machine(copies: float, updates: float) -> zgraph.Hardware:
    """An H100 with links to its host, and updates there, of so many bytes per microsecond."""
    link = Link(latency_us=1.0, bytes_per_us=copies)
    links: dict[str, Any] = {"host_to_device": link, "device_to_host": link}
    return replace(zgraph.Hardware.preset("h100"), host_memory_bytes_per_us=updates, **links)


@pytest.mark.parametrize("offload", [HOST, STATE], ids=["all", "state"])
@pytest.mark.parametrize(
    ("hardware", "where"),
    [(machine(20_000.0, 20.0), "device"), (machine(50.0, 20_000.0), "host"), (machine(100.0, 350.0), "both")],
    ids=["slow host", "slow link", "balanced"],
)
def test_a_plan_updates_where_the_step_is_fastest(
    hardware: zgraph.Hardware, where: str, offload: zgraph.Offload, on_gpu: Callable[..., Any]
) -> None:
    (step,) = on_gpu(compile_resting, Rest(offload=offload, hardware=hardware))
    elsewhere = {"device": step.updates, "host": step.streamed}.get(where, 0)
    assert elsewhere <= 1, "the update of a bias may hide anywhere"
    assert where != "both" or (step.updates > 0 and step.streamed > 0)
    assert step.readers == [] and step.updated_on == (["cpu"] if step.updates else [])
    on_host = ", ".join(map(str, range(step.updates)))
    count = step.updates + step.streamed
    assert step.signed == ([f"updates {on_host} of {count} on the host"] if step.updates else [])
    assert (step.stores > 0) == (step.streamed > 0)


def test_state_goes_to_the_host_as_it_is_made(on_gpu: Callable[..., Any]) -> None:
    (step,) = on_gpu(compile_resting, Rest(offload=HOST, what="first step"))
    check([step])
    assert (step.resting, step.stores, step.offloads) == (PARAMETERS, PARAMETERS, MOMENTS)


@pytest.mark.parametrize(
    ("case", "from_disk", "to_disk", "spills", "state_bytes"),
    [
        (Rest(offload=DISK, what="first step"), PARAMETERS + GATHERS[3], PARAMETERS + MOMENTS, MOMENTS, FP32_BYTES),
        (Rest(offload=MIXED), MOMENTS, MOMENTS, 0, FP32_BYTES),
        (Rest(offload=STATE_ON_DISK, fused=False, zero_stage=1), MOMENTS, MOMENTS, 0, FP32_BYTES),
        (Rest(offload=SHARDS_ON_DISK, optimizer="SGD", zero_stage=2), 2 * PARAMETERS, PARAMETERS, 0, 0),
        (
            Rest(offload=DISK, lowering="inductor"),
            GATHERS[3] + PARAMETERS + MOMENTS,
            PARAMETERS + MOMENTS,
            0,
            FP32_BYTES,
        ),
        (Rest(offload=DISK, **EIGHT_BIT), GATHERS[3] + PARAMETERS + PACKED, PARAMETERS + PACKED, 0, PACKED_BYTES),
        (
            Rest(offload=DISK, what="first step", **EIGHT_BIT),
            PARAMETERS + GATHERS[3],
            PARAMETERS + PACKED,
            PACKED,
            PACKED_BYTES,
        ),
    ],
    ids=["first", "mixed", "foreach", "sgd", "inductor", "8 bits", "first, 8 bits"],
)
def test_every_kind_of_step_copies_from_disk_and_to_it(
    case: Rest,
    from_disk: int,
    to_disk: int,
    spills: int,
    state_bytes: int,
    on_gpu: Callable[..., Any],
    tmp_path: Path,
) -> None:
    found: list[Copies] = on_gpu(compile_resting, on(tmp_path, case))
    check(found)
    held = LAYERS * (WIDTH * WIDTH + WIDTH) // WORLD
    parameters = 4 * held if case.offload.params == "disk" else 0
    for one in found:
        assert (one.from_disk, one.to_disk, one.spills) == (from_disk, to_disk, spills)
        assert one.disk_bytes == parameters + state_bytes
        assert one.staging_bytes > 0


@pytest.mark.parametrize(
    ("case", "updates"),
    [
        (Rest(offload=HOST, **EIGHT_BIT), True),
        (Rest(offload=STATE, zero_stage=2, **EIGHT_BIT), True),
        (Rest(offload=STREAMED, **EIGHT_BIT), False),
        (Rest(offload=HOST, what="first step", **EIGHT_BIT), False),
    ],
    ids=["all", "state", "on the device", "first"],
)
def test_state_of_8_bits_is_updated_where_other_state_is(case: Rest, updates: bool, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, case)
    check(found)
    (step,) = found
    assert bool(step.updates) == updates
    held = LAYERS * (WIDTH * WIDTH + WIDTH) // WORLD
    in_pages = PACKED_BYTES + LAYERS * (4096 - 2176)  # pinned memory of a weight's state comes in powers of two
    assert step.host_bytes == in_pages + (4 * held if case.offload.params else 0)


@pytest.mark.parametrize(
    ("case", "stores", "offloads", "returns"),  # offloads without step counts, of which each update has a copy
    [
        (Rest(offload=replace(STATE, update="device")), MOMENTS, 0, 0),
        (Rest(offload=SHARDS), PARAMETERS, 0, 0),
        (Rest(offload=HOST, param_dtype=torch.bfloat16), 0, PARAMETERS, 0),
        (Rest(offload=HOST, optimizer="SGD", zero_stage=2), 0, PARAMETERS, 0),
        (Rest(offload=HOST, fused=False), PARAMETERS + MOMENTS, 0, 0),
        (Rest(offload=HOST, lowering="inductor"), 0, PARAMETERS, 0),
        (Rest(offload=STATE, lowering="inductor"), 0, 2 * PARAMETERS, PARAMETERS),
    ],
    ids=["state", "shards", "bf16", "sgd", "foreach", "inductor", "state, inductor"],
)
def test_every_kind_of_step_only_copies_or_updates_there(
    case: Rest, stores: int, offloads: int, returns: int, on_gpu: Callable[..., Any]
) -> None:
    found: list[Copies] = on_gpu(compile_resting, case)
    check(found)
    for one in found:
        counts = one.updates if case.optimizer == "AdamW" else 0
        assert (one.stores, one.offloads - counts, one.returns) == (stores, offloads, returns)
        assert one.resting > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forward_and_backward_copy_shards_in_and_gradients_out(stage: int, on_gpu: Callable[..., Any]) -> None:
    forward, backward = on_gpu(compile_resting, Rest(offload=SHARDS, zero_stage=stage, what="three calls"))
    check([copies for copies in (forward, backward) if copies.resting])
    assert (forward.reloads, forward.offloads) == (PARAMETERS, 0)
    assert (backward.reloads, backward.offloads) == (GATHERS[stage] - PARAMETERS, PARAMETERS)
    assert forward.stores == backward.stores == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_forward_and_backward_copy_disk_shards_and_host_gradients(
    stage: int, on_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    case = on(tmp_path, Rest(offload=SHARDS_ON_DISK, zero_stage=stage, what="three calls"))
    forward, backward = on_gpu(compile_resting, case)
    check([copies for copies in (forward, backward) if copies.resting])
    assert (forward.reloads, forward.from_disk) == (PARAMETERS, PARAMETERS)
    assert backward.reloads == backward.from_disk == GATHERS[stage] - PARAMETERS
    assert (backward.offloads, backward.to_disk, forward.stores, backward.stores) == (PARAMETERS, 0, 0, 0)


@pytest.mark.parametrize(
    ("lowering", "bits"), [("fx", None), ("fx", 4), ("inductor", None)], ids=["fx", "4 bits", "inductor"]
)
def test_inference_reads_each_parameter_from_disk_once(
    lowering: str, bits: Any, on_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    offload = replace(SHARDS_ON_DISK, param_bits=bits)
    case = on(tmp_path, Rest(offload=offload, what="inference", lowering=lowering))
    found: list[Copies] = on_gpu(compile_resting, case)
    check(found)
    (served,) = found
    assert served.reloads == served.from_disk >= PARAMETERS and served.to_disk == 0
    largest = WIDTH * WIDTH * 4 // WORLD
    assert served.staging_bytes == 2 * (largest if bits is None else 4096)


@pytest.mark.parametrize("lowering", ["fx", "inductor"])
def test_inference_copies_each_parameter_once(lowering: str, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, Rest(offload=SHARDS, what="inference", lowering=lowering))
    check(found)
    assert [copies.reloads for copies in found] == [PARAMETERS]


def test_a_backward_for_inductor_copies_gradients_out(on_gpu: Callable[..., Any]) -> None:
    case = Rest(offload=HOST, what="three calls", lowering="inductor")
    forward, backward = on_gpu(compile_resting, case)
    check([forward, backward])
    assert (forward.reloads, backward.offloads) == (PARAMETERS, PARAMETERS)


@pytest.mark.parametrize(
    ("offload", "shards", "stepped", "state"),
    [
        (HOST, "cpu", "cpu", "cpu"),
        (STATE, "cuda", "cuda", "cpu"),
        (SHARDS, "cpu", "cpu", "cuda"),
        (DISK, "cpu", "cpu", "cpu"),
        (STATE_ON_DISK, "cuda", "cuda", "cpu"),
    ],
    ids=["all", "state", "shards", "all on disk", "state on disk"],
)
def test_a_plain_loop_steps_where_parameters_rest(
    offload: zgraph.Offload, shards: str, stepped: str, state: str, on_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    """Modules read parameters on the GPU, gradients go back to the parameters, and state comes to them to step."""
    found: Places = on_gpu(plain_places, on(tmp_path, Rest(offload=offload)))
    assert found.read == ["cuda"]
    assert found.shards == [shards]
    assert found.returns == (["ToCopyBackward0"] if shards == "cpu" else [])
    assert found.stepped == [stepped]
    assert found.state == found.settled == [state]
    assert found.counts == ["cuda"], "where a captured step of a fused optimizer counts"


@pytest.mark.parametrize(
    ("case", "shards", "state", "counts"),
    [
        (Rest(offload=DISK), "cpu", "cpu", "cuda"),
        (Rest(offload=STATE_ON_DISK, **EIGHT_BIT), "cuda", "cpu", "cuda"),
        (Rest(offload=HOST, **EIGHT_BIT), "cpu", "cpu", "cuda"),
        (Rest(offload=DISK, what="three calls"), "cpu", "cpu", "cpu"),
        (Rest(offload=HOST), "cpu", "cpu", "cuda"),
        (Rest(offload=STATE), "cuda", "cpu", "cuda"),
        (Rest(offload=STATE, fused=False, zero_stage=1), "cuda", "cpu", "cpu"),
        (Rest(offload=HOST, what="three calls"), "cpu", "cpu", "cpu"),
        (Rest(offload=STATE, what="three calls"), "cuda", "cpu", "cuda"),
    ],
    ids=[
        *("disk", "state on disk, 8 bits", "8 bits", "three calls, disk"),
        *("step", "state", "state, foreach", "three calls", "three calls, state"),
    ],
)
def test_programs_leave_everything_where_it_rests(
    case: Rest, shards: str, state: str, counts: str, on_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    """The generated programs run, on tensors without values; the host waits at the end of each that copies.

    Where updates on the host are all that touches what rests there, it waits for these alone.
    """
    found: Ran = on_gpu(run_resting, on(tmp_path, case), 3, False)
    assert (found.shards, found.state, found.counts) == ([shards], [state], [counts])
    assert found.grads == [shards], "where torch keeps them"
    assert found.result == ["cuda"]
    assert found.dtypes == [torch.int32 if case.optimizer == "AdamW8bit" else torch.float32]
    assert found.spaces == sorted({case.offload.params or "device", case.offload.optimizer or "device"})
    if case.what == "step":
        assert found.host_waits == (0 if case.offload == STATE and case.fused else 3)
    else:
        assert found.host_waits == (6 if case.offload.params else 0), "forward and backward"


def test_unfused_host_update_on_a_gpu_is_refused(on_gpu: Callable[..., Any]) -> None:
    on_host = replace(HOST, update="host")
    with pytest.raises(ValueError, match=r'update="host", but AdamW is not fused: its updates are many small calls'):
        on_gpu(run_resting, Rest(offload=on_host, fused=False))
