"""Checkpoints: any number of ranks resumes, the same number bitwise, and of several the newest stay."""

from __future__ import annotations

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
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.checkpoints import Noisy, difference, make, seed_ranks, snapshot, train
from tests.support.ranks import Ranks, RanksPool, every_world
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import state_of

# --- any number of ranks --------------------------------------------------------------------------------------------


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
def test_kept_tensors_return_on_the_same_ranks_only(pool: RanksPool, ranks: Ranks, tmp_path: Path) -> None:
    pool.of(2).run(keep_and_save, str(tmp_path))
    for rank, found in enumerate(ranks.run(load_kept, str(tmp_path))):
        assert found == ({"up.weight": [1.0 + rank] * 3} if ranks.world == 2 else {})


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


def test_unsavable_checkpoint_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
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


def test_unwritable_directory_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for good, text in ranks.outcomes(save_into_a_file, str(tmp_path / "file")):
        assert not good and "CheckpointError: zgraph.save_checkpoint failed on rank 0" in text
