"""Error feedback in checkpoints: bitwise on as many ranks, the mean of all ranks' errors on others."""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.compressing import compressing, feedback_of, kept_tensors
from tests.support.ranks import Ranks, fresh_ranks
from zgraph.checkpoint.error_feedback import cut_error, facts_of, flat_error, plan_restore, sizes_of, tensors_of
from zgraph.checkpoint.safe_reader import read_metadata
from zgraph.codegen.kernels import reference
from zgraph.compression.methods import BlockMethod, CompressionMethod, TwoHop
from zgraph.passes import ErrorFeedback, LoCo, NoFeedback

SHAPES = {"first.weight": (13, 6), "second.weight": (5, 13)}  # nothing divides them
WIDE = LoCo(group=32, error_dtype=torch.float32)
NARROW = LoCo(group=32)


@dataclass(frozen=True, kw_only=True)
class Halved(ErrorFeedback):
    """A user's own method, run by zgraph's kernels: each error is half the one before, half what is lost now."""

    name: ClassVar[str] = "halved_by_a_test"

    @property
    def residual_decay(self) -> float:
        return 0.5


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make(
    method: CompressionMethod | TwoHop, *, seed: int = 0, replicas: int = 1, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    passes = {key: options.pop(key) for key in ("mean_codec",) if key in options}
    torch.manual_seed(seed)
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = zgraph.shard(Odd(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return compressing(model, method, **passes), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    losses: list[str] = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(7, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def counts(model: nn.Module) -> dict[str, tuple[int, int, int, int]]:
    return {
        f"{name} {slot}": (f.numel, f.chunks, f.reductions, f.steps)
        for name, slots in feedback_of(model).items()
        for slot, f in slots.items()
    }


def decoded(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has not sent of each whole gradient, element by element: written anew for this test."""
    found: dict[str, Tensor] = {}
    for name, slots in feedback_of(model).items():
        feedback, shape = slots.get("first_hop"), SHAPES[name]
        if feedback is None or not feedback.tensors:
            continue
        error = feedback.tensors["error"].double()
        if "error_scale" in feedback.tensors:
            error *= feedback.tensors["error_scale"].double()[:, :, None]
        elements: list[float] = []
        for chunk in range(feedback.chunks):
            elements += error[chunk].reshape(-1).tolist()[: feedback.numel]
        found[name] = torch.tensor(elements[: shape[0] * shape[1]], dtype=torch.float64).view(shape)
    return found


class Started(dict[int, Ranks]):
    """Ranks by their number, which start when they are asked for."""

    def __init__(self, two: Ranks, stack: contextlib.ExitStack) -> None:
        super().__init__({2: two})
        self.stack = stack

    def __missing__(self, world: int) -> Ranks:
        self[world] = self.stack.enter_context(fresh_ranks(world))
        return self[world]


@pytest.fixture(scope="module")
def worlds(ranks: Ranks) -> Iterator[Mapping[int, Ranks]]:
    with contextlib.ExitStack() as started:
        yield Started(ranks, started)


# --- as many ranks: bitwise -------------------------------------------------------------------------------------------


def resume(folder: str, how: str, method: CompressionMethod | TwoHop, options: dict[str, Any]) -> dict[str, Any]:
    """Save after two steps, train two more; a new model that has never run takes over and trains two."""
    model, optimizer = make(method, **options)
    zgraph.set_loss_scale(model, 1.0)
    train(model, optimizer, range(2))
    if how == "own":
        path = zgraph.save_checkpoint(folder, model, optimizer, step=2)
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state | {"runtime": zgraph.runtime_state(model)}, checkpoint_id=folder)
    saved = kept_tensors(model)
    losses = train(model, optimizer, range(2, 4))
    expected, expected_counts = kept_tensors(model), counts(model)

    other, optimizer = make(method, seed=7, **options)
    if how == "ran":
        train(other, optimizer, range(1))
    if how == "own":
        zgraph.load_checkpoint(path, other, optimizer)
    else:
        for parameter in other.parameters() if how == "new" else ():  # so that there is a state to load into
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": other.state_dict(), "optimizer": optimizer.state_dict()}
        runtime = zgraph.runtime_state(other, load_from=folder if how == "new" else None)
        dcp.load(state | {"runtime": runtime}, storage_reader=zgraph.SafeReader(folder), planner=zgraph.SafePlanner())
        other.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    loaded = kept_tensors(other)
    again = train(other, optimizer, range(2, 4))
    found = kept_tensors(other)
    return {
        "loaded": sorted(saved) == sorted(loaded) and all(torch.equal(loaded[name], saved[name]) for name in saved),
        "losses": again == losses,
        "kept": all(torch.equal(found[name], expected[name]) for name in expected),
        "counts": counts(other) == expected_counts,
        "slots": sorted({name.split()[1] for name in saved}),
        "filled": all(tensor.count_nonzero() > 0 for tensor in saved.values()),
    }


SAME = [
    ("own", NARROW, {}, 2, ["first_hop"]),
    ("own", NARROW, {"zero_stage": 0, "mean_codec": LoCo(bits=8, group=32)}, 2, ["first_hop", "means"]),
    ("own", TwoHop(inter_host=WIDE, ranks_per_host=1), {}, 2, ["second_hop"]),
    ("new", NARROW, {}, 2, ["first_hop"]),
    ("ran", WIDE, {}, 2, ["first_hop"]),
    # Hosts of two ranks; else two hops are those of a host for each rank, above.
    ("new", replace(NARROW, hops=1), {"replicas": 2}, 4, ["first_hop", "second_hop"]),
]


@pytest.mark.parametrize(
    ("how", "method", "options", "world", "slots"),
    SAME,
    ids=["stage3", "stage0 means", "two hops", "dcp, new process", "dcp, model that ran", "dcp, hybrid"],
)
def test_as_many_ranks_continue_bitwise(
    worlds: Mapping[int, Ranks],
    tmp_path: Path,
    how: str,
    method: CompressionMethod | TwoHop,
    options: dict[str, Any],
    world: int,
    slots: list[str],
) -> None:
    for result in worlds[world].run(resume, str(tmp_path), how, method, options):
        assert result["slots"] == slots and result["filled"]
        assert result["loaded"] and result["losses"] and result["kept"] and result["counts"]


# --- another division: the mean ---------------------------------------------------------------------------------------


def save(folder: str, method: CompressionMethod | TwoHop, options: dict[str, Any]) -> dict[str, Tensor]:
    """A run after three steps, saved both ways: step_00000003/ and dcp/."""
    model, optimizer = make(method, **options)
    train(model, optimizer, range(3))
    zgraph.save_checkpoint(folder, model, optimizer, step=3)
    dcp.save({"runtime": zgraph.runtime_state(model)}, checkpoint_id=f"{folder}/dcp")
    return decoded(model)


@dataclass
class Saved:
    """What NARROW has left on two ranks at stage 3; `errors` by rank."""

    folder: Path
    errors: list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return Saved(folder, ranks.run(save, str(folder), NARROW, {}))


def load(folder: str, method: CompressionMethod | TwoHop, options: dict[str, Any], how: str = "own") -> dict[str, Any]:
    model, optimizer = make(method, seed=3, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zgraph.ZgraphWarning)
        if how == "own":
            zgraph.load_checkpoint(f"{folder}/step_00000003", model, optimizer)
        else:
            path = f"{folder}/dcp"
            dcp.load({"runtime": zgraph.runtime_state(model, load_from=path)}, checkpoint_id=path)
    warned = [str(each.message) for each in caught if issubclass(each.category, zgraph.ZgraphWarning)]
    loaded, kept, before = decoded(model), kept_tensors(model), counts(model)
    losses = train(model, optimizer, range(3, 4))  # refused, were it cut otherwise than the model compresses
    return {
        "decoded": loaded,
        "kept": kept,
        "counts": before,
        "goes on": len(losses) == 1 and all(after[2] > 0 for after in counts(model).values()),
        "warned": warned,
    }


def half_a_code(kept: dict[str, Tensor], name: str) -> float:
    """Of the coarsest group."""
    scale = kept.get(f"{name} first_hop error_scale")
    return 0.0 if scale is None else scale.double().max().item() * 0.51


RESHARDED = [
    (2, {}, 3, {}, NARROW, "own"),
    (2, {}, 4, {}, WIDE, "own"),  # as a user's method below does
    (2, {}, 2, {"zero_stage": 0}, NARROW, "own"),
    (3, {"zero_stage": 0}, 2, {"zero_stage": 1}, WIDE, "dcp"),
    (3, {"reduction": "sum"}, 2, {"reduction": "sum"}, NARROW, "own"),
    (2, {}, 3, {}, Halved(group=32), "own"),
]


@pytest.mark.parametrize(
    ("old", "old_options", "new", "new_options", "method", "how"),
    RESHARDED,
    ids=[
        "2 to 3",
        "2 to 4, fp32",
        "stage 3 to 0",
        "dcp, 3 to 2, stage 0 to 1, fp32",
        "3 to 2, sum",
        "2 to 3, a user's",
    ],
)
def test_another_division_preserves_the_mean_of_the_errors(
    worlds: Mapping[int, Ranks],
    saved: Saved,
    tmp_path: Path,
    old: int,
    old_options: dict[str, Any],
    new: int,
    new_options: dict[str, Any],
    method: BlockMethod,
    how: str,
) -> None:
    if (old, old_options, method) != (2, {}, NARROW):
        saved = Saved(tmp_path, worlds[old].run(save, str(tmp_path), method, old_options))
    loaded = worlds[new].run(load, str(saved.folder), method, new_options, how)
    for name, shape in SHAPES.items():
        before = torch.stack([errors[name] for errors in saved.errors])
        after = torch.stack([result["decoded"][name] for result in loaded])
        assert before[0].count_nonzero() > 0.8 * before[0].numel() and not torch.equal(before[0], before[1])
        expected = before.mean(0)
        if "reduction" in old_options:  # what the ranks together have not sent of a sum
            expected = before.sum(0) / new
        for rank in range(new):
            wanted = before[rank] if old == new else expected
            step = half_a_code(loaded[rank]["kept"], name)
            torch.testing.assert_close(after[rank], wanted, rtol=1e-6, atol=step + 1e-9)
        rows = new_options.get("zero_stage", 3) > 0
        chunk = -(-shape[0] // new) * shape[1] if rows else -(-shape[0] * shape[1] // new)
        for result in loaded:
            assert result["counts"][f"{name} first_hop"] == (chunk, new, 3, 3)
    for result in loaded:
        assert result["goes on"] and result["warned"] == []


DROPPED = [
    (
        2,
        {"zero_stage": 0, "mean_codec": WIDE},
        NARROW,
        3,
        {"zero_stage": 0, "mean_codec": WIDE},
        "means of 1",
        ["first_hop"],
    ),
    (3, {}, TwoHop(inter_host=WIDE, ranks_per_host=1), 2, {}, "second_hop", []),
]


@pytest.mark.parametrize(
    ("old", "old_options", "method", "new", "new_options", "slot", "left"), DROPPED, ids=["means", "two hops"]
)
def test_errors_of_parts_are_dropped_with_a_warning(
    worlds: Mapping[int, Ranks],
    tmp_path: Path,
    old: int,
    old_options: dict[str, Any],
    method: CompressionMethod | TwoHop,
    new: int,
    new_options: dict[str, Any],
    slot: str,
    left: list[str],
) -> None:
    worlds[old].run(save, str(tmp_path), method, old_options)
    for result in worlds[new].run(load, str(tmp_path), method, new_options):
        (text,) = result["warned"]
        assert f"another division among ranks: first.weight ({slot}), second.weight ({slot}). Their share" in text
        assert sorted({key.split(" ", 1)[1] for key in result["counts"]}) == left and result["goes on"]
        assert all(found[2:] == (3, 3) for found in result["counts"].values())


def load_alone(folder: str) -> str:
    model = Odd()
    with pytest.warns(zgraph.ZgraphWarning, match=r"start as zeros") as caught:
        zgraph.load_checkpoint(f"{folder}/step_00000003", model)
    return str(caught[0].message)


def test_one_process_drops_them_with_a_warning(saved: Saved) -> None:
    assert "first.weight (first_hop), second.weight (first_hop)" in load_alone(str(saved.folder))


# --- what is stored ---------------------------------------------------------------------------------------------------


def test_each_rank_writes_its_own_row(saved: Saved) -> None:
    metadata = read_metadata(saved.folder / "step_00000003")
    entry = metadata.state_dict_metadata["feedback.first.weight.first_hop.error"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == (2, 2, 2, 32) and entry.properties.dtype == torch.int8
    assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(0, 0, 0, 0), (1, 0, 0, 0)]
    files = {
        index.offset[0]: info.relative_path  # type: ignore[index]
        for index, info in metadata.storage_data.items()
        if index.fqn == "feedback.first.weight.first_hop.error"
    }
    assert files[0].startswith("__0_") and files[1].startswith("__1_")


# --- refused ----------------------------------------------------------------------------------------------------------


def refuse(folder: str, method: CompressionMethod, ran: bool, how: str) -> dict[str, Any]:
    model, optimizer = make(method, seed=3)
    if ran:
        train(model, optimizer, range(1))
    before = kept_tensors(model), model.first.weight.full_tensor().clone(), counts(model)
    text = ""
    try:
        if how == "own":
            zgraph.load_checkpoint(f"{folder}/step_00000003", model, optimizer)
        else:
            dcp.load({"runtime": zgraph.runtime_state(model)}, checkpoint_id=f"{folder}/dcp")
    except (zgraph.CheckpointError, dcp.CheckpointException) as error:
        text = str(error)
    after = kept_tensors(model)
    unchanged = (
        before[0].keys() == after.keys()
        and all(torch.equal(after[name], before[0][name]) for name in after)
        and torch.equal(model.first.weight.full_tensor(), before[1])
        and counts(model) == before[2]
    )
    first = ""
    if how == "own":
        if text:  # what the message says
            zgraph.reset_error_feedback(model)
            zgraph.load_checkpoint(f"{folder}/step_00000003", model, optimizer)
        try:
            train(model, optimizer, range(1))
        except zgraph.ZgraphError as error:
            first = str(error)
        zgraph.reset_error_feedback(model)
        optimizer.zero_grad()
        assert len(train(model, optimizer, range(1))) == 1
    return {"text": text, "unchanged": unchanged, "first": first}


def test_another_method_is_refused_and_nothing_is_loaded(ranks: Ranks, saved: Saved) -> None:
    for result in ranks.run(refuse, str(saved.folder), ErrorFeedback(group=32), True, "own"):
        assert "keeps an error of first.weight that " in result["text"] and "ErrorFeedback" in result["text"]
        assert result["unchanged"] and "keeps the error of" in result["first"]


def test_fresh_model_refuses_another_method_at_first_reduction(ranks: Ranks, saved: Saved) -> None:
    for result in ranks.run(refuse, str(saved.folder), NoFeedback(group=32), False, "own"):
        assert result["text"] == ""
        assert re.search(r"weight keeps the error of .*LoCo.* compressed by .*NoFeedback", result["first"])


def test_plain_dcp_does_not_lose_errors_in_silence(ranks: Ranks, saved: Saved) -> None:
    for result in ranks.run(refuse, str(saved.folder), NARROW, False, "dcp"):
        assert "error, error_scale of first.weight (first_hop), which were not read" in result["text"]
        assert "zgraph.runtime_state(model, load_from=path)" in result["text"] and result["unchanged"]


def refuse_damage() -> list[str]:
    model, optimizer = make(NARROW)
    train(model, optimizer, range(1))
    module = model._orig_mod
    facts, sizes = facts_of(module), sizes_of(tensors_of(module, copies=True))
    zgraph.reset_error_feedback(model)
    texts: list[str] = []
    shape = (2, 2, 2, 32)
    for changed in (
        {"error_scale": None},
        {"error": ((3, *shape[1:]), torch.int8)},
        {"error": (shape, torch.int16)},
        {"error": ((2, 2, 3, 32), torch.int8)},
        {"error": ((2, 2, 2, 0), torch.int8)},
        {"extra": (shape, torch.int8)},
    ):
        found = dict(sizes["first.weight"]["first_hop"])
        for key, entry in changed.items():
            found.pop(key, None)
            if entry is not None:
                found[key] = (torch.Size(entry[0]), entry[1])
        division = facts["first.weight"]["division"]
        elsewhere = {**facts["first.weight"], "division": division | {"by_rows": False}}
        slots = {"first_hop": elsewhere["slots"]["first_hop"] | {"numel": 39}}  # as another stage cuts it
        try:
            plan_restore({"first.weight": elsewhere | {"slots": slots}}, {"first.weight": {"first_hop": found}}, module)
        except zgraph.CheckpointError as error:
            texts.append(str(error))
        else:
            texts.append("accepted")
    return texts


def test_damaged_entries_are_refused(ranks: Ranks) -> None:
    for missing, rows, *shapes in ranks.run(refuse_damage):
        assert "keeps error_scale of first.weight (first_hop), which were not read" in missing
        assert "where 2 ranks have saved a row each; it is damaged" in rows
        for text in shapes:
            assert "in 2 chunks of 39 elements, which is not the error of a gradient of its shape" in text


def scale_of_losses(folder: str) -> dict[str, Any]:
    model, optimizer = make(NARROW)
    scaler = zgraph.GradScaler("cpu", init_scale=1024.0)
    zgraph.set_loss_scale(model, scaler)
    train(model, optimizer, range(2))
    path = zgraph.save_checkpoint(folder, model, optimizer, step=3, extra={"scaler": scaler.state_dict()})
    saved = kept_tensors(model)

    other, optimizer = make(NARROW, seed=3)
    scaler = zgraph.GradScaler("cpu")
    zgraph.set_loss_scale(other, scaler)  # 65536, before anything is loaded
    scaler.load_state_dict(zgraph.load_checkpoint(path, other, optimizer).extra["scaler"])
    loaded = kept_tensors(other)
    zgraph.set_loss_scale(other, 256.0)
    rescaled = kept_tensors(other)
    name = "first.weight first_hop error_scale"
    return {
        "as saved": all(torch.equal(loaded[key], saved[key]) for key in saved),
        "quartered": torch.equal(rescaled[name], saved[name] / 4),
    }


def test_errors_come_back_with_their_loss_scale(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(scale_of_losses, str(tmp_path)) == [{"as saved": True, "quartered": True}] * 2


# --- numbers, without processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1e-8, 1.0])
def test_errors_are_quantized_as_the_kernels_do(std: float) -> None:
    generator = torch.Generator().manual_seed(1)
    flat = std * torch.randn(4 * 63 - 5, generator=generator)
    flat[:32] = 0.0
    found = cut_error(flat, 63, 4, 32, quantized=True)
    expected = {
        "error": torch.full((4, 2, 32), 99, dtype=torch.int8),
        "error_scale": torch.full((4, 2), 99.0, dtype=torch.bfloat16),
    }
    whole = torch.nn.functional.pad(torch.nn.functional.pad(flat, (0, 5)).view(4, 63), (0, 1)).view(4, 2, 32)
    expected["error"].zero_()  # the old error, of which nothing is kept
    reference.keep_error(expected, whole, torch.zeros_like(whole), 0.0, torch.ones(4, 2, 1, dtype=torch.bool))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("numel", "chunks", "group"), [*itertools.product((1, 32, 63, 1000), (1, 3), (8, 32))])
def test_cutting_is_undone_by_flattening(numel: int, chunks: int, group: int) -> None:
    total = max(1, chunks * numel - 2)
    flat = torch.randn(total, generator=torch.Generator().manual_seed(numel))
    kept = cut_error(flat, numel, chunks, group, quantized=False)
    kept["error"][:, -1, numel - (kept["error"].shape[1] - 1) * group :] = float("nan")  # what fills up is not read
    assert torch.equal(flat_error(kept, numel, total), flat)
