"""State dicts of sharded models: whole ones load and are made, also compiled, copied and broadcast."""

from __future__ import annotations

import contextlib
import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph
from tests.support.checkpoints import Noisy, difference, make, snapshot, train
from tests.support.compiled import with_fx
from tests.support.memory.heap_peak import SLACK_BYTES, WIDTH, Peak
from tests.support.ranks import Ranks, every_world

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
        *((compiled, prefixed, compiled == prefixed) for compiled in (False, True) for prefixed in (False, True)),
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
def test_wrong_state_dict_raises_like_torch_and_changes_nothing(ranks: Ranks, what: str, text: str) -> None:
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
def test_full_state_dict_equals_plain_models_on_rank_zero(ranks: Ranks, compiled: bool) -> None:
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


def test_full_state_dict_gathers_the_users_dtensors(ranks: Ranks) -> None:
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


def test_full_state_dict_holds_one_whole_parameter_at_once() -> None:
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


def test_hugging_face_saves_and_loads_a_full_state_dict(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(through_hugging_face, str(tmp_path)) == [[], []]


# --- copies ---------------------------------------------------------------------------------------------------------


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
