"""Parameters and optimizer state on the host of a GPU: what is copied, and that nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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

pytestmark = pytest.mark.slow  # each compiles two graphs, in a process of its own

HOST = zgraph.Offload(params="host", optimizer="host")
STATE = zgraph.Offload(optimizer="host")
SHARDS = zgraph.Offload(params="host")
PARAMETERS = 2 * LAYERS
MOMENTS = 2 * PARAMETERS
# Backward reads all weights but that of the first layer, which stages 1 and 2 have kept; and no bias.
GATHERS = {0: PARAMETERS + LAYERS - 1, 1: PARAMETERS, 2: PARAMETERS, 3: PARAMETERS + LAYERS - 1}


def check(found: list[Copies]) -> None:
    """On the graph's side inputs at rest are the GPU's, and copies are all that touches them."""
    for copies in found:
        assert copies.readers == []
        assert copies.devices == ["cuda"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_copies_ahead_of_each_use_and_back_behind_each_update(stage: int, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, Rest(offload=HOST, zero_stage=stage))
    check(found)
    (step,) = found
    assert step.resting == step.stores == PARAMETERS + MOMENTS
    assert step.reloads == GATHERS[stage] + PARAMETERS + MOMENTS
    assert step.offloads == 0
    held = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 // (WORLD if stage else 1)
    assert step.host_bytes == 3 * held
    assert step.device_bytes == PARAMETERS * 4, "step counts"


def test_state_goes_to_the_host_as_it_is_made(on_gpu: Callable[..., Any]) -> None:
    (step,) = on_gpu(compile_resting, Rest(offload=HOST, what="first step"))
    check([step])
    assert (step.resting, step.stores, step.offloads) == (PARAMETERS, PARAMETERS, MOMENTS)


@pytest.mark.parametrize(
    "case",
    [
        Rest(offload=STATE),
        Rest(offload=SHARDS),
        Rest(offload=HOST, param_dtype=torch.bfloat16),
        Rest(offload=HOST, optimizer="SGD", zero_stage=2),
        Rest(offload=HOST, fused=False),
        Rest(offload=replace(HOST, delayed_update_after=2)),
        Rest(offload=HOST, lowering="inductor"),
    ],
    ids=["state", "shards", "bf16", "sgd", "foreach", "delayed", "inductor"],
)
def test_every_kind_of_step_only_copies(case: Rest, on_gpu: Callable[..., Any]) -> None:
    found: list[Copies] = on_gpu(compile_resting, case)
    check(found)
    assert all(copies.stores == copies.resting > 0 for copies in found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forward_and_backward_copy_shards_in_and_gradients_out(stage: int, on_gpu: Callable[..., Any]) -> None:
    forward, backward = on_gpu(compile_resting, Rest(offload=SHARDS, zero_stage=stage, what="three calls"))
    check([copies for copies in (forward, backward) if copies.resting])
    assert (forward.reloads, forward.offloads) == (PARAMETERS, 0)
    assert (backward.reloads, backward.offloads) == (GATHERS[stage] - PARAMETERS, PARAMETERS)
    assert forward.stores == backward.stores == 0


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
    [(HOST, "cpu", "cpu", "cpu"), (STATE, "cuda", "cuda", "cpu"), (SHARDS, "cpu", "cpu", "cuda")],
    ids=["all", "state", "shards"],
)
def test_a_plain_loop_steps_where_parameters_rest(
    offload: zgraph.Offload, shards: str, stepped: str, state: str, on_gpu: Callable[..., Any]
) -> None:
    """Modules read parameters on the GPU, gradients go back to the parameters, and state comes to them to step."""
    found: Places = on_gpu(plain_places, Rest(offload=offload))
    assert found.read == ["cuda"]
    assert found.shards == [shards]
    assert found.returns == (["ToCopyBackward0"] if shards == "cpu" else [])
    assert found.stepped == [stepped]
    assert found.state == found.settled == [state]
    assert found.counts == ["cuda"], "where a captured step of a fused optimizer counts"


@pytest.mark.parametrize(
    ("case", "shards", "state", "counts"),
    [
        (Rest(offload=HOST), "cpu", "cpu", "cuda"),
        (Rest(offload=STATE, fused=False, zero_stage=1), "cuda", "cpu", "cpu"),
        (Rest(offload=HOST, what="three calls"), "cpu", "cpu", "cpu"),
        (Rest(offload=STATE, what="three calls"), "cuda", "cpu", "cuda"),
    ],
    ids=["step", "state", "three calls", "three calls, state"],
)
def test_programs_leave_everything_where_it_rests(
    case: Rest, shards: str, state: str, counts: str, on_gpu: Callable[..., Any]
) -> None:
    """The generated programs run, on tensors without values; the host waits at the end of each that copies."""
    found: Ran = on_gpu(run_resting, case, 3, False)
    assert (found.shards, found.state, found.counts) == ([shards], [state], [counts])
    assert found.grads == [shards], "where torch keeps them"
    assert found.result == ["cuda"]
    if case.what == "step":
        assert found.host_waits == 3
    else:
        assert found.host_waits == (6 if case.offload.params else 0), "forward and backward"


def test_what_a_gpu_cannot_do_yet_is_refused(on_gpu: Callable[..., Any]) -> None:
    disk = zgraph.Offload(params="host", optimizer="disk", path="scratch")
    with pytest.raises(ValueError, match=r'optimizer="disk" is not available on a mesh of cuda yet; write optimizer="'):
        on_gpu(compile_resting, Rest(offload=disk))
