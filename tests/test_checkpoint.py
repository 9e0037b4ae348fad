"""Checkpoints: any number of ranks resumes, the same number bitwise; nothing is executed, nothing half-loaded."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import pickle
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.judges.replicated import whole
from tests.support.memory.heap_peak import SLACK_BYTES, WIDTH, Peak
from tests.support.ranks import Ranks, RanksPool, every_world
from tests.support.tiers import slow
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import state_of


class Noisy(nn.Module):
    """Rows that nothing divides, tied weights, dropout, statistics that differ between ranks, and an unread weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(13, 6)
        self.tied = nn.Linear(6, 13, bias=False)
        self.tied.weight = self.up.weight
        self.unread = nn.Linear(3, 1)
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.norm(self.up(x) + self.tied(x))))) + self.shift


def make(seed: int = 0, *, compiled: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = zgraph.shard(Noisy(), **options)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.01, fused=True)
    return (with_fx(model) if compiled else model), optimizer  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """Steps on random data that come from the rank's own generator; the losses, exactly."""
    losses: list[str] = []
    for _ in range(steps):
        loss = model(torch.randn(7, 6) + random.random()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Every whole parameter, this rank's buffers, and the whole optimizer state, by name."""
    found = {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, entries in optimizer.state.items() if optimizer is not None else ():
        for key, value in entries.items():
            found[f"{names[id(parameter)].removeprefix('_orig_mod.')} {key}"] = whole(value.detach()).clone()
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor], *, buffers: bool = True) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in found.items()
        if not torch.equal(value, expected[name]) and (buffers or "running" not in name)
    ]


def seed_ranks() -> None:
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())


# --- any number of ranks --------------------------------------------------------------------------------------------


def save_both_ways(folder: str) -> None:
    model, optimizer = make()
    seed_ranks()
    train(model, optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "runtime": zgraph.runtime_state(model),
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    zgraph.save_checkpoint(f"{folder}/own", model, optimizer, step=3, extra={"data": 10 + dist.get_rank()})
    expected = snapshot(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")


@pytest.fixture(scope="module")
def saved(pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks after three steps: dcp/, own/step_00000003/, and whole values in expected.pt."""
    folder = tmp_path_factory.mktemp("saved")
    pool.of(2).run(save_both_ways, str(folder))
    return folder


def load_own(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = make(seed=1, **options)
    latest = zgraph.latest_checkpoint(f"{folder}/own")
    assert latest is not None
    checkpoint = zgraph.load_checkpoint(latest, model, optimizer)
    differing = difference(snapshot(model, optimizer), torch.load(f"{folder}/expected.pt"), buffers=False)
    noise = torch.rand(4).tolist()
    return {
        "differing": differing,
        "placed": [isinstance(parameter, DTensor) for parameter in model.parameters()],
        "tied": model.up.weight is model.tied.weight,
        "extra": checkpoint.extra,
        "at": (checkpoint.step, checkpoint.ranks),
        "noise": noise,
        "goes on": len(train(model, optimizer, 2)),
    }


@pytest.mark.parametrize("options", [{}, {"zero_stage": 0}, {"zero_stage": 2}], ids=["stage3", "stage0", "stage2"])
@every_world
def test_any_number_of_ranks_loads_what_two_have_saved(ranks: Ranks, saved: Path, options: dict[str, Any]) -> None:
    found = ranks.run(load_own, str(saved), options)
    for rank, result in enumerate(found):
        assert result["differing"] == [] and all(result["placed"]) and result["tied"]
        assert result["at"] == (3, 2)
        assert result["extra"] == {"data": 10 + rank % 2}
        assert result["goes on"] == 2
    # Ranks that were not there have generators of their own, the same ones each time.
    assert len({tuple(result["noise"]) for result in found}) == ranks.world
    assert [result["noise"] for result in ranks.run(load_own, str(saved), options)] == [
        result["noise"] for result in found
    ]


def load_dcp(folder: str, safe: bool) -> list[str]:
    model, optimizer = make(seed=1)
    for parameter in model.unread.parameters():  # torch's helper would make a state for it
        parameter.requires_grad_(False)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "runtime": zgraph.runtime_state(model),
    }
    state["optimizer"]["state"] = {
        name: entries for name, entries in state["optimizer"]["state"].items() if not name.startswith("unread")
    }
    reader = zgraph.SafeReader(f"{folder}/dcp") if safe else dcp.FileSystemReader(f"{folder}/dcp")
    dcp.load(state, storage_reader=reader, planner=zgraph.SafePlanner() if safe else None)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return difference(snapshot(model, optimizer), torch.load(f"{folder}/expected.pt"), buffers=False)


@pytest.mark.parametrize("safe", [True, False], ids=["SafeReader", "FileSystemReader"])
@every_world
def test_plain_dcp_loads_on_any_number_of_ranks(ranks: Ranks, saved: Path, safe: bool) -> None:
    assert ranks.run(load_dcp, str(saved), safe) == [[]] * ranks.world


def torchs_tools_read_a_checkpoint(folder: str) -> list[str]:
    model, _ = make(seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/own/step_00000003")
    return difference(snapshot(model), {k: v for k, v in torch.load(f"{folder}/expected.pt").items() if " " not in k},
                      buffers=False)  # fmt: skip


def test_torchs_own_tools_read_a_checkpoint(ranks: Ranks, saved: Path) -> None:
    assert ranks.run(torchs_tools_read_a_checkpoint, str(saved)) == [[], []]


def load_alone(folder: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Noisy()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], fused=True)
    latest = zgraph.latest_checkpoint(f"{folder}/own")
    assert latest is not None
    zgraph.load_checkpoint(latest, model, optimizer)
    again = zgraph.save_checkpoint(f"{folder}/alone", model, optimizer, step=4, keep=1)
    differing = difference(snapshot(model, optimizer), torch.load(f"{folder}/expected.pt"), buffers=False)
    return {"differing": differing, "lr": [group["lr"] for group in optimizer.param_groups], "again": again.name}


def test_one_process_without_a_group_loads_and_saves(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert load_alone(str(saved)) == {"differing": [], "lr": [0.01, 0.01], "again": "step_00000004"}


# --- the same number: bitwise -----------------------------------------------------------------------------------


def resume(folder: str, compiled: bool, how: str) -> dict[str, Any]:
    model, optimizer = make(compiled=compiled)
    seed_ranks()
    train(model, optimizer, 2)
    if how == "own":
        path = zgraph.save_checkpoint(folder, model, optimizer, step=2)
    else:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "runtime": zgraph.runtime_state(model),
        }
        dcp.save(state, checkpoint_id=folder)
    losses = train(model, optimizer, 3)
    expected = snapshot(model, optimizer)

    other, optimizer = make(seed=5, compiled=compiled)
    seed_ranks()
    torch.rand(3)
    if how == "own":
        zgraph.load_checkpoint(path, other, optimizer)
    else:
        train(other, optimizer, 1)  # so that there is a state to load into
        state = {
            "model": other.state_dict(),
            "optimizer": optimizer.state_dict(),
            "runtime": zgraph.runtime_state(other),
        }
        dcp.load(state, storage_reader=zgraph.SafeReader(folder), planner=zgraph.SafePlanner())
        other.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return {
        "losses": train(other, optimizer, 3) == losses,
        "differing": difference(snapshot(other, optimizer), expected),
    }


@pytest.mark.parametrize("how", ["own", "dcp"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fx"])
@every_world
def test_the_same_number_of_ranks_continues_bitwise(ranks: Ranks, tmp_path: Path, compiled: bool, how: str) -> None:
    """Dropout, data, running statistics of each rank, Adam's moments: all as if nothing had happened."""
    for result in ranks.run(resume, str(tmp_path), compiled, how):
        assert result == {"losses": True, "differing": []}


def step_during_an_async_save(folder: str) -> list[str]:
    model, optimizer = make()
    train(model, optimizer, 2)
    before = snapshot(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "runtime": zgraph.runtime_state(model)}
    # A group of its own: the saving thread's collectives must not mix with those of the steps.
    writing = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    train(model, optimizer, 1)
    writing.result()
    after = snapshot(model, optimizer)
    assert not torch.equal(after["up.weight"], before["up.weight"])

    other, optimizer = make(seed=5)
    train(other, optimizer, 1)
    state = {"model": other.state_dict(), "optimizer": optimizer.state_dict(), "runtime": zgraph.runtime_state(other)}
    dcp.load(state, storage_reader=zgraph.SafeReader(folder), planner=zgraph.SafePlanner())
    other.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return difference(snapshot(other, optimizer), before)


def test_a_step_right_after_async_save_does_not_tear_it(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(step_during_an_async_save, str(tmp_path)) == [[], []]


def ignored_parameters(folder: str) -> list[str]:
    def make_ignoring() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        zgraph.shard(model, ignored=[model[0]])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        state = {f"0.{name}": parameter.detach() for name, parameter in model[0].named_parameters()}
        for name, parameter in model[0].named_parameters():
            state |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
        return {
            key: (value.to_local() if isinstance(value, DTensor) else value).clone() for key, value in state.items()
        }

    model, optimizer = make_ignoring()
    train(model, optimizer, 2)
    path = zgraph.save_checkpoint(folder, model, optimizer, step=1)
    expected = own(model, optimizer)
    train(model, optimizer, 2)
    other, optimizer = make_ignoring()
    zgraph.load_checkpoint(path, other, optimizer)
    return difference(own(other, optimizer), expected)


def test_ignored_parameters_come_back_as_each_rank_had_them(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(ignored_parameters, str(tmp_path)) == [[], []]


# --- runtime tensors ------------------------------------------------------------------------------------------------


def kept_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    reads = [read for part in model.modules() for read in (state_of(part).by_attribute.values())]  # type: ignore[union-attr]
    return {name_of(read.handle): state_behind(read.handle).tensors for read in reads}


def keep_and_save(folder: str) -> None:
    model, optimizer = make()
    kept_tensors(model)["up.weight"]["error"] = torch.full((3,), 1.0 + dist.get_rank())
    zgraph.save_checkpoint(folder, model, optimizer, step=1)


def load_kept(folder: str) -> dict[str, list[float]]:
    model, optimizer = make()
    kept_tensors(model)["down.weight"]["error"] = torch.ones(2)
    zgraph.load_checkpoint(f"{folder}/step_00000001", model, optimizer)
    return {name: kept["error"].tolist() for name, kept in kept_tensors(model).items() if kept}


@every_world
def test_tensors_kept_for_a_parameter_return_on_the_same_ranks_and_are_dropped_on_others(
    pool: RanksPool, ranks: Ranks, tmp_path: Path
) -> None:
    pool.of(2).run(keep_and_save, str(tmp_path))
    for rank, found in enumerate(ranks.run(load_kept, str(tmp_path))):
        assert found == ({"up.weight": [1.0 + rank] * 3} if ranks.world == 2 else {})


# --- plain state dicts ----------------------------------------------------------------------------------------------


def load_plain(compiled: bool, prefixed: bool, assign: bool) -> dict[str, Any]:
    model, optimizer = make(compiled=compiled)
    train(model, optimizer, 1)
    torch.manual_seed(9)
    given = Noisy().state_dict()
    prefix = "_orig_mod." if prefixed else ""
    parameters = [id(parameter) for parameter in model.parameters()]
    result = model.load_state_dict({prefix + key: value for key, value in given.items()}, assign=assign)
    found = snapshot(model)
    losses = train(model, optimizer, 1)
    return {
        "result": (result.missing_keys, result.unexpected_keys),
        "differing": difference(found, dict(given)),
        "same": [id(parameter) for parameter in model.parameters()] == parameters,
        "placed": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "trains": len(losses) == 1 and not torch.equal(snapshot(model)["up.weight"], found["up.weight"]),
    }


# Any two of the three; the other half is slow.
@pytest.mark.parametrize(
    ("compiled", "prefixed", "assign"),
    [
        *((compiled, prefixed, compiled != prefixed) for compiled in (False, True) for prefixed in (False, True)),
        *slow(
            *((compiled, prefixed, compiled == prefixed) for compiled in (False, True) for prefixed in (False, True))
        ),
    ],
)
def test_a_whole_state_dict_loads(ranks: Ranks, compiled: bool, prefixed: bool, assign: bool) -> None:
    for result in ranks.run(load_plain, compiled, prefixed, assign):
        assert result == {"result": ([], []), "differing": [], "same": True, "placed": True, "trains": True}


def load_wrong(compiled: bool, what: str) -> dict[str, Any]:
    model, _ = make(compiled=compiled)
    before = snapshot(model)
    torch.manual_seed(9)
    given = Noisy().state_dict()
    if what == "shape":
        given["unread.weight"] = torch.ones(4, 4)
    elif what == "missing":
        del given["down.bias"]
    elif what == "unexpected":
        given["down.scale"] = torch.ones(2)
    elif what == "no tensor":
        given["down.bias"] = "text"  # type: ignore[assignment]
    elif what == "assigned dtype":
        given["unread.weight"] = given["unread.weight"].double()
    try:
        model.load_state_dict(given, assign=what == "assigned dtype")
    except RuntimeError as error:
        return {"text": str(error), "differing": difference(snapshot(model), before)}
    return {"text": "", "differing": []}


WRONG = [
    ("shape", "size mismatch for unread.weight"),
    ("missing", 'Missing key(s) in state_dict: "down.bias"'),
    ("unexpected", 'Unexpected key(s) in state_dict: "down.scale"'),
    ("no tensor", 'While copying the parameter named "down.bias", expected torch.Tensor'),
    ("assigned dtype", "assign=True would make the sharded unread.weight torch.float64"),
]


@pytest.mark.parametrize(("what", "text"), WRONG, ids=[what for what, _ in WRONG])
def test_a_wrong_state_dict_raises_as_torch_does_and_changes_nothing(ranks: Ranks, what: str, text: str) -> None:
    for result in ranks.run(load_wrong, False, what):
        assert text in result["text"] and result["differing"] == []


@pytest.mark.parametrize("what", ["shape", "no tensor", "assigned dtype"])
def test_a_compiled_model_refuses_wrong_values_and_changes_nothing(ranks: Ranks, what: str) -> None:
    text = dict(WRONG)[what].split()[0]
    for result in ranks.run(load_wrong, True, what):
        assert text in result["text"] and result["differing"] == []


@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_a_compiled_model_says_which_keys_do_not_fit(ranks: Ranks, what: str) -> None:
    for result in ranks.run(load_wrong, True, what):
        assert dict(WRONG)[what].split(" in ")[0] in result["text"]


def names_of_compiled() -> dict[str, Any]:
    plain = list(Noisy().state_dict())
    model, _ = make()
    model.up = with_fx(model.up)  # a part on its own, inside a compiled whole
    compiled = with_fx(model)
    state = compiled.state_dict()
    versions = list(state._metadata)
    not_strict = compiled.load_state_dict({"down.bias": torch.ones(6)}, strict=False)
    not_strict_part = model.load_state_dict({"down.bias": torch.ones(6)}, strict=False)
    round_trip = compiled.load_state_dict(state)
    return {
        "keys": sorted(state) == sorted(plain),
        "leaked": [key for key in [*state, *versions, *model.state_dict()] if "_orig_mod" in key],
        "round trip": (round_trip.missing_keys, round_trip.unexpected_keys),
        "missing": [
            sorted(result.missing_keys) == sorted(set(plain) - {"down.bias", "norm.num_batches_tracked"})
            for result in (not_strict, not_strict_part)
        ],
    }


def test_torch_compile_leaves_no_trace_in_keys(ranks: Ranks) -> None:
    for result in ranks.run(names_of_compiled):
        assert result == {"keys": True, "leaked": [], "round trip": ([], []), "missing": [True, True]}


def broadcast_from_rank_zero() -> list[str]:
    model, _ = make()
    torch.manual_seed(9)
    given = Noisy().state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    torch.manual_seed(9)
    return difference(snapshot(model), dict(Noisy().state_dict()))


def test_torchs_broadcast_from_rank_zero_works(ranks: Ranks) -> None:
    assert ranks.run(broadcast_from_rank_zero) == [[], []]


# --- whole state dicts out ----------------------------------------------------------------------------------------


def full(compiled: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    plain = Noisy()
    plain.unread.half()
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    model = zgraph.shard(plain)
    found = zgraph.full_state_dict(with_fx(model) if compiled else model)
    if dist.get_rank() != 0:
        return {"empty": found == {}}
    return {
        "keys": list(found) == list(expected),
        "plain": all(type(value) is Tensor and value.device.type == "cpu" for value in found.values()),
        "dtypes": [value.dtype for value in found.values()] == [value.dtype for value in expected.values()],
        "differing": difference(found, expected),
        "tied": found["up.weight"].data_ptr() == found["tied.weight"].data_ptr(),
        "own": found["norm.running_mean"].data_ptr() != model.norm.running_mean.data_ptr(),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@every_world
def test_a_full_state_dict_is_that_of_the_plain_model_on_rank_zero(ranks: Ranks, compiled: bool) -> None:
    first, *others = ranks.run(full, compiled)
    assert first == {"keys": True, "plain": True, "dtypes": True, "differing": [], "tied": True, "own": True}
    assert others == [{"empty": True}] * (ranks.world - 1)


def full_with_a_dtensor_of_the_users() -> dict[str, Tensor]:
    model = zgraph.shard(nn.Linear(3, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(15.0).view(5, 3)
    model.register_buffer("table", distribute_tensor(rows, mesh, [Shard(0)]))
    model.register_parameter("scale", nn.Parameter(distribute_tensor(rows + 1, mesh, [Shard(1)])))
    return dict(zgraph.full_state_dict(model))


def test_a_full_state_dict_gathers_a_dtensor_that_the_user_has_put_there(ranks: Ranks) -> None:
    first, *others = ranks.run(full_with_a_dtensor_of_the_users)
    assert others == [{}]
    assert all(type(value) is Tensor for value in first.values())
    rows = torch.arange(15.0).view(5, 3)
    assert torch.equal(first["table"], rows) and torch.equal(first["scale"], rows + 1)


def memory_of_a_full_state_dict() -> dict[str, int]:
    model = zgraph.shard(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)]))
    for _ in range(2):  # the first call makes what torch and gloo keep
        with Peak() as peak:
            found = zgraph.full_state_dict(model)
        result = sum(value.nbytes for value in found.values())
        del found
    return {"rise": peak.rise_bytes, "result": result}


def test_a_full_state_dict_holds_one_whole_parameter_at_a_time() -> None:
    """Besides the result; the others never hold a whole one. In processes of its own: the heap's count is exact."""
    weight_bytes = 4 * WIDTH * WIDTH
    with contextlib.closing(Ranks(2)) as ranks:
        first, second = ranks.run(memory_of_a_full_state_dict)
    assert first["result"] == 8 * weight_bytes and second["result"] == 0
    assert first["rise"] <= 9 * weight_bytes + SLACK_BYTES
    assert second["rise"] <= weight_bytes // 2 + SLACK_BYTES


def through_safetensors(folder: str) -> list[str]:
    from safetensors.torch import load_file, save_file, save_model

    model, _ = make()
    found = zgraph.full_state_dict(model)
    if dist.get_rank() == 0:
        save_file({key: value.clone() for key, value in found.items()}, f"{folder}/file.safetensors")
        plain = Noisy()
        plain.load_state_dict(found)
        save_model(plain, f"{folder}/model.safetensors")
    dist.barrier()
    other, _ = make(seed=4)
    other.load_state_dict(load_file(f"{folder}/file.safetensors"))
    differing = difference(snapshot(other), snapshot(model))
    # save_model leaves out one name of a tie; either one brings both back.
    other, _ = make(seed=4)
    result = other.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
    return differing + difference(snapshot(other), snapshot(model)) + result.unexpected_keys


def test_a_full_state_dict_goes_through_safetensors(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(through_safetensors, str(tmp_path)) == [[], []]


def through_hugging_face(folder: str) -> list[str]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=12, vocab_size=37, n_positions=16)
    torch.manual_seed(2)
    plain = GPT2LMHeadModel(config)
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    model = zgraph.shard(plain)
    found = zgraph.full_state_dict(model)
    if dist.get_rank() == 0:
        torch.manual_seed(8)
        GPT2LMHeadModel(config).save_pretrained(folder, state_dict=found)
    dist.barrier()
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    tied = loaded.lm_head.weight is loaded.transformer.wte.weight
    torch.manual_seed(6)
    other = zgraph.shard(GPT2LMHeadModel(config))
    other.load_state_dict(loaded.state_dict())
    return [
        *difference(dict(loaded.state_dict()), expected),
        *difference(snapshot(other), expected),
        *([] if tied else ["untied"]),
    ]


@pytest.mark.slow  # importing transformers takes most of it
def test_hugging_face_saves_and_loads_a_full_state_dict(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(through_hugging_face, str(tmp_path)) == [[], []]


# --- nothing is executed --------------------------------------------------------------------------------------------


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def poisoned(original: bytes, path: Path, kind: str) -> bytes:
    if kind == "replaced":
        return pickle.dumps(Malicious(path))
    metadata = pickle.loads(original)
    if kind == "inside":
        metadata.planner_data = Malicious(path)
    elif kind == "class":  # sets an attribute of a class that it may name
        build = b"cposix\nsystem\n"
        return (
            b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00__init__"
            + build
            + b"s\x86b."
        )
    elif kind == "outside":
        first = next(iter(metadata.storage_data.values()))
        first.relative_path = "../expected.pt"
    return pickle.dumps(metadata)


@pytest.mark.parametrize("kind", ["replaced", "inside", "class", "outside"])
def test_a_malicious_metadata_file_is_refused_and_not_executed(saved: Path, tmp_path: Path, kind: str) -> None:
    touched = tmp_path / "touched"
    copy = tmp_path / "copy"
    shutil.copytree(saved / "dcp", copy)
    text = poisoned((copy / ".metadata").read_bytes(), touched, kind)
    (copy / ".metadata").write_bytes(text)
    if kind in ("replaced", "inside"):
        pickle.loads(text)
        assert touched.exists()  # torch's own reader would have
        touched.unlink()
    with pytest.raises(zgraph.CheckpointError, match=r"is damaged|names (pathlib|posix)\.\w+"):
        zgraph.SafeReader(copy).read_metadata()
    assert not touched.exists()


def load_entry(folder: str, touched: str) -> dict[str, Any]:
    state: dict[str, Any] = {"entry": None}
    reader = zgraph.SafeReader(folder)
    try:
        dcp.load(state, storage_reader=reader, planner=zgraph.SafePlanner())
    except BaseException as error:
        return {"text": str(error), "touched": Path(touched).exists()}
    return {"text": "", "touched": Path(touched).exists()}


def save_entry(folder: str, touched: str) -> None:
    dcp.save({"entry": Malicious(Path(touched))}, checkpoint_id=folder)


def test_a_malicious_entry_is_refused_and_not_executed(ranks: Ranks, tmp_path: Path) -> None:
    folder, touched = str(tmp_path / "entry"), str(tmp_path / "touched")
    ranks.run(save_entry, folder, touched)
    for result in ranks.run(load_entry, folder, touched):
        assert "Unsupported global" in result["text"] and not result["touched"]


# --- bad checkpoints ------------------------------------------------------------------------------------------------


def load_bad(folder: str, other_model: str, strange: str | None) -> dict[str, Any]:
    """What loading raises, and what it has changed. `strange` is the folder that rank 1 sees instead."""
    model, optimizer = make(seed=1)
    if other_model == "names":
        model = zgraph.shard(models.Uneven())
    elif other_model == "shapes":
        torch.manual_seed(0)
        plain = Noisy()
        plain.unread = nn.Linear(3, 2)
        model = zgraph.shard(plain)
    elif other_model == "dtypes":
        plain = Noisy()
        plain.unread.double()
        model = zgraph.shard(plain)
    if other_model in ("names", "shapes", "dtypes") or other_model == "groups":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    elif other_model == "fewer":
        optimizer = torch.optim.AdamW([model.down.weight], lr=0.5)
    elif other_model == "strange":
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5)
    before, noise = snapshot(model, optimizer), torch.get_rng_state()
    seen = strange if strange is not None and dist.get_rank() == 1 else folder
    try:
        zgraph.load_checkpoint(seen, model, optimizer)
    except zgraph.CheckpointError as error:
        unchanged = difference(snapshot(model, optimizer), before) == [] and torch.equal(torch.get_rng_state(), noise)
        return {"text": str(error), "unchanged": unchanged}
    return {"text": "", "unchanged": False}


OTHER_MODELS = [
    ("names", r"of another model. Missing key\(s\): gain, .*Unexpected key\(s\): up.weight"),
    ("shapes", r"unread.weight is \[1, 3\] torch.float32 in the checkpoint and \[2, 3\] torch.float32 in the model"),
    ("dtypes", r"unread.weight is \[1, 3\] torch.float32 in the checkpoint and \[1, 3\] torch.float64 in the model"),
    ("groups", r"group 0: 3 parameters from up.weight to unread.weight in the checkpoint, 9 parameters from shift to"),
    ("fewer", r"Optimizer state for parameters that this optimizer does not step: "),
    ("strange", r"group 0 of the optimizer holds 1 tensors that are not parameters of the model"),
]


@pytest.mark.parametrize(("other_model", "text"), OTHER_MODELS, ids=[name for name, _ in OTHER_MODELS])
def test_a_checkpoint_of_another_model_changes_nothing(ranks: Ranks, saved: Path, other_model: str, text: str) -> None:
    for result in ranks.run(load_bad, str(saved / "own/step_00000003"), other_model, None):
        assert result["unchanged"], result["text"]
        assert re.search(text, result["text"]), result["text"]


def spoil(folder: Path, how: str) -> None:
    data, page = folder / "__1_0.distcp", folder / "zgraph.json"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "missing file":
        data.unlink()
    elif how == "missing metadata":
        (folder / ".metadata").unlink()
    elif how == "truncated metadata":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:200])
    elif how == "no page":
        page.unlink()
    elif how == "broken page":
        page.write_text(page.read_text()[:50])
    elif how == "empty page":
        page.write_text(json.dumps({"format": "zgraph checkpoint", "version": 1}))
    elif how == "version":
        page.write_text(page.read_text().replace('"version": 1', '"version": 99'))
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "absent":
        shutil.rmtree(folder)


SPOILT = [
    ("truncated", "bytes, and"),
    ("flipped", "another checksum"),
    ("missing file", "__1_0.distcp is missing"),
    ("missing metadata", ".metadata is missing"),
    ("truncated metadata", ".metadata is damaged"),
    ("no page", "zgraph.json is missing"),
    ("broken page", "zgraph.json is damaged"),
    ("empty page", "zgraph.json is damaged"),
    ("version", "version 99, and this zgraph reads 'zgraph checkpoint' version 1"),
    ("empty", "is not a complete checkpoint"),
    ("absent", "there is no checkpoint"),
]


@pytest.mark.parametrize("sees", ["all", "one"])
@pytest.mark.parametrize(("how", "text"), SPOILT, ids=[how for how, _ in SPOILT])
def test_a_spoilt_checkpoint_is_refused_on_all_ranks_and_changes_nothing(
    ranks: Ranks, saved: Path, tmp_path: Path, how: str, text: str, sees: str
) -> None:
    good, bad = saved / "own/step_00000003", tmp_path / "step_00000003"
    shutil.copytree(good, bad)
    spoil(bad, how)
    arguments = (str(bad), "", None) if sees == "all" else (str(good), "", str(bad))
    for result in ranks.run(load_bad, *arguments):
        # Each rank checks its part of the files: what only one sees may be what the other one checks.
        if sees == "all" or result["text"]:
            assert text in result["text"] and result["unchanged"]


# --- saving ---------------------------------------------------------------------------------------------------------


def refused_saves(folder: str) -> list[str]:
    model, optimizer = make(zero_stage=1)
    texts: list[str] = []

    def attempt(**options: Any) -> None:
        try:
            zgraph.save_checkpoint(folder, model, **{"optimizer": optimizer, "step": 1, **options})
        except (ValueError, zgraph.CheckpointError) as error:
            texts.append(str(error))

    attempt(extra={"a": [{"b": nn.Linear(1, 1)}]} if dist.get_rank() == 1 else None)
    attempt(step=dist.get_rank())
    attempt(step=-1)
    attempt(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    with zgraph.no_sync(model):
        model(torch.randn(3, 6)).sum().backward()
    attempt()
    return texts


def test_what_cannot_be_saved_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for texts in ranks.run(refused_saves, str(tmp_path)):
        linear, steps, negative, strange, window = texts
        assert "failed on rank 1: " in linear and "extra['a'][0]['b'] is a torch.nn.modules.linear.Linear" in linear
        assert "ranks save different steps [0, 1]" in steps
        assert "step=-1" in negative
        assert "not parameters of the model" in strange
        assert "window is open" in window
    assert [path.name for path in tmp_path.iterdir()] == []


def load_in_a_window(folder: str) -> dict[str, Any]:
    model, optimizer = make(zero_stage=1)
    zgraph.save_checkpoint(folder, model, optimizer, step=1)
    train(model, optimizer, 1)
    with zgraph.no_sync(model):
        model(torch.randn(3, 6)).sum().backward()
    before = snapshot(model, optimizer)
    try:
        zgraph.load_checkpoint(f"{folder}/step_00000001", model, optimizer)
    except zgraph.CheckpointError as error:
        return {"text": str(error), "changed": difference(snapshot(model, optimizer), before)}
    return {"text": "loaded"}


def test_nothing_is_loaded_into_an_open_window(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(load_in_a_window, str(tmp_path)):
        assert "zgraph.load_checkpoint: a no_sync window is open" in found["text"] and found["changed"] == []


def save_many(folder: str) -> list[str]:
    model, optimizer = make()
    for step in (1, 2, 2, 10):
        train(model, optimizer, 1)
        zgraph.save_checkpoint(folder, model, optimizer, step=step)
    dist.barrier()
    return [str(zgraph.latest_checkpoint(folder)), *sorted(path.name for path in Path(folder).iterdir())]


def test_the_newest_two_stay(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / ".step_00000007.partial").mkdir()  # of a run that was killed
    (tmp_path / "step_00000099").mkdir()  # no page: not complete
    for found in ranks.run(save_many, str(tmp_path)):
        latest, *names = found
        assert latest.endswith("step_00000010")
        assert names == ["step_00000002", "step_00000010", "step_00000099"]


def nothing_to_find(folder: str) -> list[Any]:
    return [zgraph.latest_checkpoint(folder), zgraph.latest_checkpoint(f"{folder}/absent")]


def test_where_there_is_no_checkpoint_none_is_found(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(nothing_to_find, str(tmp_path)) == [[None, None]] * 2


def test_a_replacement_killed_between_its_renames_is_undone(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "own/step_00000003", tmp_path / ".step_00000003.replaced")
    assert zgraph.latest_checkpoint(tmp_path) == tmp_path / "step_00000003"


def save_into_a_file(folder: str) -> None:
    model, optimizer = make()
    zgraph.save_checkpoint(folder, model, optimizer, step=1)


def test_a_directory_that_cannot_be_written_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for good, text in ranks.outcomes(save_into_a_file, str(tmp_path / "file")):
        assert not good and "CheckpointError: zgraph.save_checkpoint failed on rank 0" in text


def copy_of_a_sharded_model() -> list[str]:
    model, _ = make()
    other = copy.deepcopy(model)
    torch.manual_seed(9)
    given = Noisy().state_dict()
    before = snapshot(model)
    other.load_state_dict(given)
    return difference(snapshot(other), dict(given)) + difference(snapshot(model), before)


def test_a_copy_of_a_sharded_model_loads_for_itself(ranks: Ranks) -> None:
    assert ranks.run(copy_of_a_sharded_model) == [[], []]


def compiled_copy() -> list[str]:
    """What a compiled copy fails to load once its original is gone."""
    model, _ = make()
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    compiled: Any = torch.compile(copied)
    torch.manual_seed(9)
    given = Noisy().state_dict()
    compiled.load_state_dict(given)
    return difference(snapshot(copied), dict(given))


def test_a_compiled_copy_loads_keys_without_the_wrapper(ranks: Ranks) -> None:
    assert ranks.run(compiled_copy) == [[]] * ranks.world
