"""Errors a user meets: who, where, what was found, what to do."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, fresh_ranks


def message_of(function_name: str) -> str:
    """The text of what a scenario raises."""
    try:
        SCENARIOS[function_name]()
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return f"{type(inner).__name__}: {inner}"
    return "nothing was raised"


def _optimizer_before_shard() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zgraph.shard(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _optimizer_before_shard_compiled() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([{"params": model.weight, "lr": 0.1}, {"params": [model.bias]}])
    zgraph.shard(model)
    with_fx(model)(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _kept_reference() -> None:
    model = nn.Linear(4, 4)
    kept = list(model.parameters())
    zgraph.shard(model)
    model(torch.ones(2, 4)).sum().backward()
    raise AssertionError(f"works with {len(kept)} kept parameters")


def _resized() -> None:
    model = zgraph.shard(nn.Linear(4, 4))
    compiled = with_fx(model)
    compiled(torch.ones(2, 4)).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    compiled(torch.ones(2, 4))


def _moved() -> None:
    model = zgraph.shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    model.to("meta")
    model(torch.ones(2, 4))


def _cast() -> None:
    model = zgraph.shard(nn.Linear(4, 4)).to(torch.bfloat16)
    with_fx(model)(torch.ones(2, 4))


def _replaced() -> None:
    model = zgraph.shard(nn.Linear(4, 4))
    model.weight = nn.Parameter(torch.ones(4, 4))
    model(torch.ones(2, 4))


def _three_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 1, dist.get_world_size()), mesh_dim_names=("pp", "replicas", "dp"))
    zgraph.shard(nn.Linear(4, 4), mesh)


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    zgraph.shard(model, mesh)


def _another_mesh() -> None:
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zgraph.shard(model[0], init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    zgraph.shard(model, init_device_mesh("cpu", (1, world), mesh_dim_names=("outer", "dp"))["outer"])


def _untied() -> None:
    model = models.Language()
    zgraph.shard(model.head)
    zgraph.shard(model)


def _twice_differentiated() -> None:
    model = zgraph.shard(nn.Linear(4, 1))
    x = torch.ones(2, 4)
    loss = model(x).square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(grad.to_local().square().sum() for grad in grads).backward()


def _unknown_option() -> None:
    torch.compile(nn.Linear(2, 2), backend="zgraph", options={"lowring": "fx"})(torch.ones(1, 2))


def _lowering() -> None:
    torch.compile(nn.Linear(2, 2), backend="zgraph", options={"lowering": "tvm"})(torch.ones(1, 2))


class _Marked(nn.Parameter):
    """A class of parameters, as torchao's weights have."""


def _own_class() -> None:
    model = nn.Module()
    model.weight = _Marked(torch.ones(4))
    zgraph.shard(model)


def _complex() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    zgraph.shard(model)


def _mode() -> None:
    torch.compile(nn.Linear(2, 2), backend="zgraph", mode="max-autotune")(torch.ones(1, 2))


def _options_of_another_kind() -> None:
    torch.compile(nn.Linear(2, 2), backend="zgraph", options=["fx"])(torch.ones(1, 2))  # type: ignore[arg-type]


def _group_for_a_mesh() -> None:
    zgraph.shard(nn.Linear(2, 2), dist.group.WORLD)  # type: ignore[arg-type]


def _dtype_by_name() -> None:
    zgraph.shard(nn.Linear(2, 2), param_dtype="bfloat16")  # type: ignore[arg-type]


def _stepped(lines: Callable[[Any, Any], object], stage: int = 3) -> None:
    """A loop with these lines between backward and step."""
    model: Any = zgraph.shard(nn.Linear(4, 4), zero_stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    lines(model, optimizer)
    optimizer.step()


def _with_a_criterion() -> None:
    model, criterion = zgraph.shard(nn.Linear(4, 4)), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    criterion(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()


def _all_in_a_window() -> None:
    model = zgraph.shard(nn.Linear(4, 4), zero_stage=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zgraph.no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _read_in_a_step() -> None:
    model = zgraph.shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @zgraph.training_step(model, optimizer)
    def step(x: Tensor) -> float:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    step(torch.ones(2, 4))


SCENARIOS = {
    "data": lambda: _stepped(lambda model, _: setattr(model.weight, "data", torch.ones(4, 4))),
    "loss_reads": lambda: _stepped(lambda model, _: model(torch.ones(2, 4)).sum() + model.weight.norm()),
    "reduces": lambda: _stepped(lambda model, _: dist.all_reduce(model.weight.grad)),
    "own_number": lambda: _stepped(lambda model, _: model.weight.grad.div_(dist.get_rank() + 1)),
    "plain_mask": lambda: _stepped(lambda model, _: model.weight.grad.mul_(torch.full((4, 4), 1.0 + dist.get_rank()))),
    "alone": lambda: _stepped(lambda model, _: dist.get_rank() or model.weight.grad.norm().item()),
    "crit": _with_a_criterion,
    "window": _all_in_a_window,
    "read_in_step": _read_in_a_step,
    "complex": _complex,
    "own_class": _own_class,
    "optimizer": _optimizer_before_shard,
    "optimizer_compiled": _optimizer_before_shard_compiled,
    "kept_reference": _kept_reference,
    "resized": _resized,
    "moved": _moved,
    "cast": _cast,
    "replaced": _replaced,
    "three_axes": _three_axes,
    "tensor_parallel": _tensor_parallel,
    "another_mesh": _another_mesh,
    "untied": _untied,
    "twice": _twice_differentiated,
    "stage": lambda: zgraph.shard(nn.Linear(2, 2), zero_stage=4),
    "reduction": lambda: zgraph.shard(nn.Linear(2, 2), reduction="average"),  # type: ignore[arg-type]
    "dtype": lambda: zgraph.shard(nn.Linear(2, 2), param_dtype=torch.int8),
    "unit": lambda: zgraph.shard(nn.Linear(2, 2), units=[nn.LayerNorm]),
    "unknown_option": _unknown_option,
    "lowering": _lowering,
    "mode": _mode,
    "options_of_another_kind": _options_of_another_kind,
    "group_for_a_mesh": _group_for_a_mesh,
    "dtype_by_name": _dtype_by_name,
}

EXPECTED = {
    "complex": r"ValueError: .*weight is complex.*torch\.view_as_real",
    "own_class": r"ValueError: .*weight is a _Marked, a class of its own.*call zgraph\.shard on the modules without it",
    "optimizer": r"Error: .*optimizer created before zgraph\.shard still holds weight.*after zgraph\.shard\(model\)",
    "optimizer_compiled": (
        r"^ZgraphError: .*optimizer created before zgraph\.shard still holds weight.*after zgraph\.shard\(model\)"
    ),
    "kept_reference": r"works with 2 kept parameters",
    "resized": (
        r"^ZgraphError: .*weight was sharded as \[4, 4\] torch\.float32 on cpu "
        r"and is now \[6, 4\] .*before zgraph\.shard"
    ),
    "moved": r"weight is on the meta device and has no values; call zgraph\.materialize",
    "cast": r"weight was sharded as .* torch\.float32 on cpu and is now .* torch\.bfloat16 on cpu",
    "replaced": r"^ZgraphError: .*weight is no longer the DTensor that zgraph\.shard made.*before zgraph\.shard",
    "three_axes": r"ValueError: .*mesh has 3 axes \('pp', 'replicas', 'dp'\).*mesh\[\('replicas', 'dp'\)\]",
    "tensor_parallel": r"ValueError: .*the axis 'tp' is used twice.*tensor-parallel over it.*mesh\[\"dp\"\]",
    "another_mesh": r"ValueError: .*0\.weight was sharded on .* one model needs one mesh",
    "untied": r"ValueError: .*embed\.weight is tied to weight.*shard both in one call",
    "twice": r"ZgraphError: .*(weight|bias) was differentiated a second time.*create_graph=True",
    "stage": r"ValueError: .*zero_stage=4 is not available; write zero_stage=0, 1, 2 or 3",
    "reduction": r"ValueError: .*reduction='average' is unknown; write \"mean\", \"sum\", or",
    "dtype": r"ValueError: .*param_dtype=torch\.int8 is not a floating-point dtype",
    "unit": r"ValueError: .*units names LayerNorm, which the model does not contain",
    "unknown_option": r"ValueError: .*unknown option 'lowring'; did you mean 'lowering'\?",
    "lowering": r"ValueError: .*lowering='tvm' is not available; write \{\"lowering\": \"inductor\"\} or",
    "mode": r"ValueError: .*mode='max-autotune' belongs to .*Inductor.*leave mode out, and write options=",
    "options_of_another_kind": r"ValueError: .*options is \['fx'\]; write a dict, such as options=\{\"lowering\"",
    "group_for_a_mesh": r"ValueError: .*mesh is a ProcessGroup; write init_device_mesh.*DeviceMesh\.from_group",
    "dtype_by_name": r"ValueError: .*param_dtype='bfloat16' is not a torch\.dtype; write torch\.bfloat16",
}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_message_says_what_was_found_and_what_to_do(ranks: Ranks, scenario: str) -> None:
    for text in ranks.run(message_of, scenario):
        assert re.search(EXPECTED[scenario], text, re.DOTALL), text


PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
SHOWN = re.findall(r"<!-- (\w+) -->\n\n```text\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


def test_the_page_of_errors_has_twenty_of_them() -> None:
    assert len({name for name, _ in SHOWN}) == len(SHOWN) == 20


@pytest.mark.parametrize(("scenario", "shown"), SHOWN)
def test_the_page_of_errors_has_the_text_that_is_raised(ranks: Ranks, scenario: str, shown: str) -> None:
    expected = ".*".join(map(re.escape, shown.split("…")))
    for text in ranks.run(message_of, scenario):
        assert re.search(expected, text, re.DOTALL), text


def test_option_error_is_a_value_error_with_advice() -> None:
    called = torch.compile(nn.Linear(2, 2), backend="zgraph", options={"lowring": "fx"})  # type: ignore[dict-item]
    for _ in range(2):  # the frame is not skipped afterwards
        with pytest.raises(ValueError) as caught:
            called(torch.ones(1, 2))
        assert str(caught.value) == "zgraph: unknown option 'lowring'; did you mean 'lowering'?"
        shown = "".join(traceback.format_exception(caught.value)).rstrip()
        assert shown.endswith(f"ValueError: {caught.value}") and "BackendCompilerFailed" not in shown


@pytest.mark.parametrize("value", [0, -1, 0.5, True, float("nan"), "64", None])
def test_an_option_in_bytes_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"sink_waits: in_flight_bytes={value!r} holds nothing; write a ")):
        zgraph.passes.SinkWaits(in_flight_bytes=value)


def test_without_a_process_group_shard_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"no process group.*torchrun.*leave zgraph\.shard out"):
        zgraph.shard(nn.Linear(2, 2))


def outside_the_mesh() -> str:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0])
    try:
        zgraph.shard(nn.Linear(2, 2), mesh)
    except ValueError as error:
        return str(error)
    return "sharded"


def test_a_mesh_without_this_rank_is_refused(ranks: Ranks) -> None:
    inside, outside = ranks.run(outside_the_mesh)
    assert inside == "sharded"
    assert "rank 1 is not part of the mesh [0]" in outside


class Dying(nn.Module):
    """Rank 1 leaves between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def train_until_rank_one_dies(mode: str) -> str:
    model = zgraph.shard(Dying())
    pipeline = zgraph.PassList(
        [entry for entry in zgraph.passes.presets.default() if entry.name != "bucket_collectives"]
    )
    called = with_fx(model, passes=pipeline) if mode == "fx" else model
    called(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)  # until the others have left the barrier
        os._exit(1)
    started = time.monotonic()
    try:
        for _ in range(100):
            called(torch.ones(2, 4)).sum().backward()
    except zgraph.CollectiveError as error:
        return f"{time.monotonic() - started < 60} {error}"
    return "nothing was raised"


@pytest.mark.parametrize("mode", ["eager", "fx"])
def test_after_a_rank_dies_others_name_collective_and_parameter(mode: str) -> None:
    with fresh_ranks(3, timeout_s=30) as ranks:
        answers: list[tuple[bool, Any]] = ranks.outcomes(train_until_rank_one_dies, mode)
    assert answers[1] == (False, "died")
    for rank in (0, 2):
        good, text = answers[rank]
        assert good, text
        found = re.match(r"True zgraph: (all_gather|all_to_all|reduce_grad)\S* of (first|second)\.(weight|bias)", text)
        assert found, text
        assert f"failed on rank {rank}" in text


def no_placement_left_behind() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex"):
        zgraph.shard(model)
    return [type(parameter).__name__ for parameter in model.parameters()]


def test_a_refused_model_is_left_as_it_was(ranks: Ranks) -> None:
    for found in ranks.run(no_placement_left_behind):
        assert set(found) == {"Parameter"}


def replicated_scalar() -> bool:
    model = zgraph.shard(models.Uneven(), zero_stage=3)
    return list(model.shift.placements) == [Replicate()] and list(model.gain.placements) == [Shard(0)]


def test_scalars_are_replicated_and_short_vectors_sharded(ranks: Ranks) -> None:
    assert ranks.run(replicated_scalar) == [True, True]
