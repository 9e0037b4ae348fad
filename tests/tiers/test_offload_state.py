"""Parameters and optimizer state that rest on the host or on disk: the same bits, and less on the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covertable import make
from torch import nn

import zgraph
from tests.support.budget import long
from tests.support.memory.allocations import counted
from tests.support.memory.live_tensors import local
from tests.support.ranks import Ranks, every_world, worlds
from tests.support.resting import DISK, HOST, MIXED, SHARDS, STATE, under
from tests.support.whole_steps import Case, Loop, assert_same, compare, train
from tests.support.whole_tensors import whole
from zgraph.sharding.scope import state_of

CASES = {
    "stage 3": Case(at_rest=HOST, clip="torch", schedule=True),
    "stage 0": Case(at_rest=HOST, stage=0, optimizer="sgd", clip="zgraph", accumulation=3, no_sync=True),
    "stage 1": Case(at_rest=STATE, stage=1, optimizer="adam", accumulation=3, no_sync=True, schedule=True),
    "stage 2, foreach": Case(at_rest=HOST, stage=2, optimizer="adamw_foreach", clip="torch", precision="bf16"),
    "shards alone": Case(at_rest=SHARDS, optimizer="sgd_foreach", accumulation=2, no_sync=True),
    "loco": Case(at_rest=HOST, loco=True, accumulation=2, clip="torch"),
    "resumed": Case(at_rest=HOST, resume=True, stage=3, optimizer="adamw_fused", precision="bf16"),
    "planned": Case(at_rest=STATE, frugal=True, clip="zgraph"),
    "planned, streamed": Case(at_rest=HOST, frugal=True, streamed=True, schedule=True, accumulation=2, no_sync=True),
    "planned, stage 1": Case(at_rest=HOST, frugal=True, stage=1, precision="bf16", offload=True),
}
SOME = ("planned, streamed", "stage 3", "shards alone", "stage 1")  # the pairs below have all features of the others
ROWS = [*SOME, *long(*(name for name in CASES if name not in SOME))]


@worlds(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_step_on_offloaded_state_equals_the_plain_loop(ranks: Ranks, name: str) -> None:
    assert ranks.run(compare, replace(CASES[name], started=name != "stage 3"))


def updated_by_two_threads(kind: Any) -> None:
    """Large enough for several threads of torch's kernel, beside compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [trained_on_two_threads(kind, offload) for offload in (zgraph.Offload(optimizer="host"), None)]
    finally:
        torch.set_num_threads(threads)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def trained_on_two_threads(kind: Any, offload: zgraph.Offload | None) -> list[torch.Tensor]:
    """Parameters and moments after three captured steps, or after the plain lines."""
    torch.manual_seed(0)
    model = zgraph.shard(nn.Linear(2000, 1100), zero_stage=2, offload=offload)
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    x = torch.randn(8, 2000)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = step if offload is None else zgraph.training_step(model, optimizer, options={"lowering": "fx"})(step)
    for _ in range(3):
        run()
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [local(one) for one in [*model.parameters(), *state]]


@worlds(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_updates_on_several_threads_are_those_of_the_plain_loop(ranks: Ranks, kind: Any) -> None:
    ranks.run(updated_by_two_threads, kind)


DISK_CASES = {
    "stage 3": Case(clip="torch", schedule=True, precision="bf16"),
    "stage 1": Case(stage=1, optimizer="adam", accumulation=2, no_sync=True),
    "resumed": Case(resume=True, optimizer="sgd", loco=True),
    "planned": Case(frugal=True, stage=2, optimizer="adam", clip="torch", precision="bf16"),
}


@worlds(2)
@pytest.mark.parametrize("name", ["stage 3", *long(*[*DISK_CASES][1:])])  # of which the pairs below have all features
def test_step_with_state_on_disk_equals_the_plain_loop(ranks: Ranks, name: str, tmp_path: Path) -> None:
    at_rest = zgraph.Offload(params="disk", optimizer="disk", path=tmp_path)
    assert ranks.run(compare, replace(DISK_CASES[name], at_rest=at_rest))


ALONE = {
    "fp32": Case(optimizer="adamw_fused"),
    "bf16, accumulation": Case(optimizer="adamw_fused", precision="bf16", accumulation=2, no_sync=True, clip="torch"),
    "autocast, planned": Case(optimizer="sgd", precision="autocast", frugal=True, schedule=True),
    "resumed, foreach": Case(optimizer="adamw_foreach", resume=True, frozen=True, checkpointed=True),
}


@worlds(1)
@pytest.mark.parametrize("name", ALONE)
def test_updates_of_one_rank_write_to_what_backward_has_read(ranks: Ranks, name: str, tmp_path: Path) -> None:
    at_rest = zgraph.Offload(params="disk", optimizer="disk", path=tmp_path)
    assert ranks.run(compare, replace(ALONE[name], at_rest=at_rest, streamed=True))


# --- any two features -------------------------------------------------------------------------------------------------


LEVELS: dict[str, list[Any]] = {
    "at_rest": [HOST, DISK, MIXED, STATE],  # what stands first is met most often
    "optimizer": ["adamw_fused", "sgd", "adamw_foreach", "adam"],
    "stage": [3, 2, 1, 0],
    "precision": ["fp32", "bf16", "autocast"],
    "window": ["one batch", "accumulation", "no_sync"],
    "plan": ["rules", "planned", "frugal"],
    "clip": ["torch", "none", "zgraph"],
    "offload": [False, True],
    "loco": [False, True],
    "resume": [False, True],
    "frozen": [False, True],
    "checkpointed": [False, True],
}


def case_of(window: str, plan: str, at_rest: zgraph.Offload, **levels: Any) -> Case:
    micro_batches = {} if window == "one batch" else {"accumulation": 2, "no_sync": window == "no_sync"}
    return Case(at_rest=at_rest, planned=plan == "planned", frugal=plan == "frugal", **micro_batches, **levels)


# Every other one is compiled once instead of twice.
PAIRS = [
    replace(case_of(**dict(zip(LEVELS, row, strict=True))), started=bool(number % 2))
    for number, row in enumerate(make([*LEVELS.values()], salt="1"))
]


def name_of(case: Case) -> str:
    """What is not as it is by default."""
    plain = asdict(Case())
    changed = {name: value for name, value in asdict(case).items() if value != plain[name]}
    rests = case.at_rest
    where = "" if rests is None else f"{rests.params}-{rests.optimizer}"
    return "-".join(
        [where, *(name if value is True else f"{value}" for name, value in changed.items() if name != "at_rest")]
    )


@worlds(2)
@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_any_two_features_step_as_the_plain_loop(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    ranks.run(compare, replace(case, at_rest=under(tmp_path, case.at_rest)))


# --- ranks of which the last one pads ---------------------------------------------------------------------------------


# Pairs of what such ranks met in no other row, each from the host and from a disk at least once.
UNEVEN = [
    Case(at_rest=HOST, precision="autocast", optimizer="sgd", accumulation=2, no_sync=True, planned=True),
    Case(at_rest=DISK, loco=True, accumulation=2, no_sync=True, optimizer="adam", planned=True),
    Case(at_rest=DISK, lowering="inductor", precision="autocast", optimizer="sgd"),
    Case(at_rest=HOST, lowering="inductor", loco=True, accumulation=2, optimizer="sgd", planned=True),
]


def beside_the_device(case: Case) -> list[int]:
    """A captured step beside the same on the device, whose kernels round alike; this rank's rows of each parameter."""
    on_device = replace(case, at_rest=None)
    assert_same(train(case, whole_step=True), train(on_device, whole_step=True))
    return [local(one).shape[0] for one in Loop(on_device).model.parameters() if one.ndim]


@worlds(3)
@pytest.mark.parametrize("case", UNEVEN, ids=name_of)
def test_ranks_that_pad_their_rows_step_as_on_the_device(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    case = replace(case, started=True, at_rest=under(tmp_path, case.at_rest))
    first, second, last = ranks.run(beside_the_device, case)
    assert first == second and any(more > less for more, less in zip(first, last, strict=True))


# --- without a captured step ------------------------------------------------------------------------------------------


def in_three_calls(case: Case) -> None:
    """Forward and backward compiled, and a plain step of the optimizer."""
    found = train(replace(case, compiled=True, on_shards=True), whole_step=False)
    assert_same(found, train(replace(case, at_rest=None, offload=False), whole_step=False))


@worlds(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(at_rest=HOST, clip="zgraph", resume=True),
        # The same with other features.
        Case(at_rest=DISK, precision="bf16", optimizer="sgd", accumulation=2, no_sync=True, stage=2),
        Case(at_rest=MIXED, offload=True, optimizer="adam", precision="autocast", schedule=True),
        Case(at_rest=DISK, offload=True, planned=True, resume=True, frozen=True, clip="torch"),
        Case(at_rest=STATE, stage=1, optimizer="adamw_foreach", accumulation=2, no_sync=True, offload=True),
    ],
    ids=name_of,
)
def test_compiled_model_with_step_on_shards_equals_plain_loop(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    ranks.run(in_three_calls, replace(case, at_rest=under(tmp_path, case.at_rest)))


def close() -> None:
    """Compiled by Inductor, whose kernels round in another order."""
    case = Case(at_rest=HOST, lowering="inductor", optimizer="sgd", clip="zgraph", started=True)
    found, expected = train(case, whole_step=True), train(replace(case, at_rest=None), whole_step=False)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, msg=lambda text, name=name: f"{name}: {text}")


@worlds(2)
def test_compiled_step_on_offloaded_state_is_close_to_plain(ranks: Ranks) -> None:
    ranks.run(close)


def in_turns(folder: str) -> None:
    """A captured step, a checkpoint, the plain lines, the checkpoint again and the step: all on tensors at rest."""
    losses: list[list[float]] = []
    for at_rest in (None, HOST):
        loop = Loop(Case(at_rest=at_rest, clip="torch"))
        plain: Any = loop.plain()
        step: Any = zgraph.training_step(loop.model, loop.optimizer, options=loop.case.options())(plain)
        found = [plain(*loop.batch(0)), step(*loop.batch(1))]
        saved = zgraph.save_checkpoint(Path(folder, str(at_rest is None)), loop.model, loop.optimizer, step=2)
        found.append(plain(*loop.batch(2)))
        zgraph.load_checkpoint(saved, loop.model, loop.optimizer)
        found += [step(*loop.batch(number)) for number in (2, 3)]
        losses.append([_number(metrics["loss"]) for metrics in found])
        assert losses[-1][2] == losses[-1][3]
    assert losses[0] == losses[1]


def _number(value: Any) -> float:
    return whole(value).item()


@worlds(2)
def test_plain_loops_and_checkpoints_work_on_tensors_at_rest(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(in_turns, str(tmp_path))


LAYERS, WIDTH = 12, 128


@dataclass
class Held:
    """Bytes of a training on this rank's device.

    Attributes:
        peak: most, from before the optimizer is made; shards that rest on the device count, too.
        state: of the optimizer.
        shards: of the parameters.
        host: predicted for the host.
    """

    peak: int
    state: int
    shards: int
    host: int


def held_by(at_rest: zgraph.Offload | None) -> Held:
    torch.manual_seed(0)
    torch.compiler.reset()
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    with counted() as built:
        model = zgraph.shard(nn.Sequential(*parts), offload=at_rest)
        parts.clear()
    report = zgraph.Report()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pipeline = zgraph.PassList(zgraph.passes.presets.default(bucket_bytes=4 * WIDTH * WIDTH))

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline, "report": report})
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with counted() as trained:
        for _ in range(3):
            step(torch.randn(2, WIDTH))
    shards = sum(local(parameter).nbytes for parameter in model.parameters())
    peak = report.graphs[-1].peak
    assert peak is not None
    return Held(built.end_bytes + trained.rise_bytes, 2 * shards, shards, dict(peak.elsewhere)["host"])


@worlds(2)
def test_the_device_holds_less_by_what_rests_on_the_host(ranks: Ranks) -> None:
    everything = ranks.run(held_by, None)
    without_state = ranks.run(held_by, STATE)
    neither = ranks.run(held_by, HOST)
    for all_of_it, less, least in zip(everything, without_state, neither, strict=True):
        # But for one update ahead, the one that runs, those on their way back, and what a bucket waits for.
        both = all_of_it.state + all_of_it.shards
        assert all_of_it.peak - less.peak >= all_of_it.state - 4 * all_of_it.state // LAYERS
        assert all_of_it.peak - least.peak >= both - 4 * both // LAYERS
        assert (all_of_it.host, less.host) == (0, all_of_it.state)
        assert least.host == all_of_it.state + all_of_it.shards


def materialized(at_rest: zgraph.Offload | None) -> list[torch.Tensor]:
    """Shards of a model that was built on the meta device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))
    model = zgraph.materialize(zgraph.shard(model, zero_stage=3, offload=at_rest))
    shards = [local(parameter) for parameter in model.parameters()]
    resting = state_of(model[0])
    assert resting is not None
    if at_rest is not None:
        assert resting.scope.resting is not None
        assert {resting.scope.resting.space_of(shard).name for shard in shards if shard.numel()} <= {at_rest.params}
    return [shard.clone() for shard in shards]


@every_world
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_materialized_model_rests_where_it_is_to(ranks: Ranks, tier: Any, tmp_path: Path) -> None:
    at_rest = zgraph.Offload(params=tier, path=tmp_path if tier == "disk" else None)
    for ours, theirs in zip(ranks.run(materialized, at_rest), ranks.run(materialized, None), strict=True):
        for shard, expected in zip(ours, theirs, strict=True):
            assert torch.equal(shard, expected)
