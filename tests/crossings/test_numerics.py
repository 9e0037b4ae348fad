"""Sharded training equals the replicated model bit for bit: outputs, every gradient, parameters after AdamW steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zgraph
from tests.support import models
from tests.support.budget import long
from tests.support.judges.replicated import Case, compare, growing_batch, growing_features, token_batch
from tests.support.ranks import Ranks, worlds


def _stage_by_part(model: nn.Module, zero_stage: int) -> nn.Module:
    assert isinstance(model, models.Language)
    zgraph.shard(model.blocks[0], zero_stage=3 - zero_stage)
    return zgraph.shard(model, zero_stage=zero_stage)


def _every_part_alone(model: nn.Module, zero_stage: int) -> nn.Module:
    """Parts whose parameters have equal names, as `for block in blocks: shard(block)` makes them."""
    for part in model.children():
        zgraph.shard(part, zero_stage=zero_stage)
    return zgraph.shard(model, zero_stage=zero_stage)


CASES = {
    "tied_scalar_attention": Case(build=lambda: models.Language(layers=1), batch=token_batch, evaluate=True),
    "uneven_shards": Case(build=models.Uneven, evaluate=True),
    "frozen": Case(build=models.Frozen),
    "reused": Case(build=models.Reused, evaluate=True),
    "partly_read": Case(build=models.PartlyRead),
    "dropout": Case(build=lambda: models.Language(dropout=0.3, layers=1), batch=token_batch, evaluate=True),
    "autocast": Case(build=models.Frozen, autocast=torch.bfloat16, evaluate=True),
    "bf16_parameters": Case(
        build=lambda: models.Language(layers=1),
        batch=token_batch,
        options={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        evaluate=True,
    ),
    "bf16_gradients": Case(build=models.Uneven, options={"reduce_dtype": torch.bfloat16}),
    "sum": Case(build=models.Uneven, options={"reduction": "sum"}),
    "divisor": Case(build=models.Uneven, options={"reduction": 6}),
    "graph_breaks": Case(build=models.Broken, evaluate=True),
    "dynamic_sizes": Case(build=lambda: models.Language(layers=1), batch=growing_batch),
    "dynamic_features": Case(build=models.Uneven, batch=growing_features),
    "retain_graph": Case(build=models.Uneven, backwards=2),
    "routed_experts": Case(build=models.Routed, options={"units": (models.Experts,)}, zeros=("moe.",), evaluate=True),
    "multihead_attention": Case(build=models.Attending),
    "batch_norm": Case(build=models.Normalised, evaluate=True),
    "checkpointed": Case(build=models.Checkpointed),
    "every_part_alone": Case(
        build=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)),
        split=_every_part_alone,
    ),
    "strided_gradients": Case(build=models.Strided),
    "unbound_views": Case(build=models.Unbound),
    "sometimes_untouched": Case(build=models.Adapted, options={"units": (models.Adapter,)}, zeros=("adapter.",)),
    "stages_by_part": Case(build=models.Language, batch=token_batch, split=_stage_by_part),
}


# Between them they reach every pass.
REACHING = ("uneven_shards", "frozen", "reused", "graph_breaks", "sum")
# What runs at both ends of the stages, with and without a compiler, on 2 ranks and on 3, which divides nothing.
EVERYWHERE = ("uneven_shards", "tied_scalar_attention", "routed_experts", "bf16_parameters", "graph_breaks")
ALONE_AND_FOUR = ("uneven_shards", "routed_experts")


def run_case(name: str, zero_stage: int, mode: str) -> int:
    return compare(CASES[name], zero_stage, mode)


def everywhere() -> list[Any]:
    """Return rows of a table.

    Rows with others like them are long: uneven shards at stage 0 have windows below, and a model that is not one of
    `REACHING` is compiled on three ranks, and on two at stages 0, and 1 or 2.
    """
    rows: list[Any] = []
    for world, zero_stage in ((2, 0), (2, 3), (3, 3)):
        for name, mode in itertools.product(EVERYWHERE, ("eager", "fx")):
            others = (zero_stage == 0 and name == "uneven_shards") or (
                (world, zero_stage) == (2, 3) and name not in REACHING
            )
            has_twins = others or (zero_stage == 0 and mode == "eager")
            marks = [pytest.mark.long] if has_twins and not (zero_stage and name in REACHING) else []
            rows.append(
                pytest.param(world, zero_stage, name, mode, id=f"ranks{world}-{zero_stage}-{name}-{mode}", marks=marks)
            )
    return rows


@pytest.mark.parametrize(("ranks", "zero_stage", "name", "mode"), everywhere(), indirect=["ranks"], scope="session")
def test_equals_the_replicated_model(ranks: Ranks, name: str, zero_stage: int, mode: str) -> None:
    assert min(ranks.run(run_case, name, zero_stage, mode)) > 0


@pytest.mark.parametrize("name", ALONE_AND_FOUR)
@pytest.mark.parametrize(
    ("ranks", "zero_stage", "mode"),
    [(1, 3, "fx"), (3, 0, "fx"), (4, 3, "eager"), (4, 3, "fx")],
    indirect=["ranks"],
    scope="session",
    ids=["ranks1-3-fx", "ranks3-0-fx", "ranks4-3-eager", "ranks4-3-fx"],
)
def test_equals_the_replicated_model_on_any_number_of_ranks(
    ranks: Ranks, name: str, zero_stage: int, mode: str
) -> None:
    assert min(ranks.run(run_case, name, zero_stage, mode)) > 0


def elsewhere() -> list[Any]:
    """Compiled, what is not fast runs on two replicated or on three sharded ranks in turns.

    The other way, and eager mode, are long.
    """
    rows: list[Any] = []
    for number, name in enumerate(name for name in CASES if name not in EVERYWHERE):
        for place, row in enumerate([(2, 0, "fx"), (3, 3, "fx"), (2, 3, "eager")]):
            marks = [] if name in REACHING or place == number % 2 else [pytest.mark.long]
            title = f"{name}-ranks{row[0]}-{row[1]}-{row[2]}"
            rows.append(pytest.param(name, *row, id=title, marks=marks))
    return rows


@pytest.mark.parametrize(("name", "ranks", "zero_stage", "mode"), elsewhere(), indirect=["ranks"], scope="session")
def test_many_models_equal_the_replicated_model(ranks: Ranks, name: str, zero_stage: int, mode: str) -> None:
    assert min(ranks.run(run_case, name, zero_stage, mode)) > 0


# Steps of several micro-batches.
WINDOWS = {
    "uneven_shards": Case(build=models.Uneven, micro_batches=3),
    "tied_scalar": Case(build=lambda: models.Language(layers=1), batch=token_batch, micro_batches=2, evaluate=True),
    "reused": Case(build=models.Reused, micro_batches=2),
    "frozen_autocast": Case(build=models.Frozen, autocast=torch.bfloat16, micro_batches=2),
    "bf16": Case(
        build=lambda: models.Language(layers=1),
        batch=token_batch,
        micro_batches=2,
        options={"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    ),
    "graph_breaks": Case(build=models.Broken, micro_batches=2),
    "dynamic_sizes": Case(build=models.Uneven, batch=growing_features, micro_batches=2),
    "sum": Case(build=models.Uneven, options={"reduction": "sum"}, micro_batches=2),
    "routed_experts": Case(build=models.Routed, options={"units": (models.Experts,)}, zeros=("moe.",), micro_batches=2),
    "checkpointed": Case(build=models.Checkpointed, micro_batches=2),
}


def run_window(name: str, zero_stage: int, mode: str) -> int:
    return compare(WINDOWS[name], zero_stage, mode)


@pytest.mark.parametrize(
    ("ranks", "mode", "zero_stage"),
    [
        *((2, "eager", stage) for stage in (0, 2)),
        *((2 + stage % 2, "fx", stage) for stage in (1, 2, 3)),
        (2, "eager", 1),
        (2, "eager", 3),
        (2, "fx", 0),
        *long(*((3 - stage % 2, "fx", stage) for stage in range(4))),  # on the other number of ranks
    ],
    indirect=["ranks"],
    scope="session",
)
def test_accumulated_gradients_equal_the_replicated_model(ranks: Ranks, zero_stage: int, mode: str) -> None:
    assert min(ranks.run(run_window, "uneven_shards", zero_stage, mode)) > 0


@pytest.mark.parametrize("mode", ["fx", *long("eager")])
@pytest.mark.parametrize(
    ("name", "zero_stage"), [(name, index % 3) for index, name in enumerate(WINDOWS) if name != "uneven_shards"]
)
def test_accumulation_in_many_models(ranks: Ranks, name: str, zero_stage: int, mode: str) -> None:
    """Stages 0, 1 and 2, in turns."""
    assert min(ranks.run(run_window, name, zero_stage, mode)) > 0


@pytest.mark.parametrize(
    ("name", "zero_stage"),
    [
        ("tied_scalar_attention", 1),
        ("routed_experts", 2),
        *long(("uneven_shards", 1), ("bf16_parameters", 2), ("graph_breaks", 1)),
    ],
)
def test_a_window_of_one_equals_the_replicated_model(ranks: Ranks, name: str, zero_stage: int) -> None:
    """Without no_sync stages 1 and 2 are one thing, so each model takes one of them."""
    assert min(ranks.run(run_case, name, zero_stage, "fx")) > 0


HYBRID = {
    "uneven_shards": Case(build=models.Uneven, replicas=2, evaluate=True),
    "accumulated_sum": Case(build=models.Uneven, options={"reduction": "sum"}, micro_batches=2, replicas=2),
    "accumulated_divisor": Case(build=models.Uneven, options={"reduction": 6}, micro_batches=2, replicas=2),
    "bf16": Case(
        build=models.Uneven,
        options={"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
        micro_batches=2,
        replicas=2,
    ),
    "bf16_fp32_sums": Case(build=models.Uneven, options={"param_dtype": torch.bfloat16}, replicas=2),
    "batch_norm": Case(build=models.Normalised, evaluate=True, replicas=2),
}


def run_hybrid(name: str, zero_stage: int, mode: str) -> int:
    return compare(HYBRID[name], zero_stage, mode)


@pytest.mark.parametrize(
    ("name", "mode", "ranks", "zero_stage"),
    [
        *(("uneven_shards", "fx", 4, stage) for stage in (0, 3)),
        *long(("uneven_shards", "fx", 4, 1), ("uneven_shards", "fx", 4, 2)),  # bf16 has them
        ("uneven_shards", "fx", 2, 3),
        ("uneven_shards", "eager", 4, 3),
        *long(("uneven_shards", "eager", 4, 0)),
        *(("bf16", "fx", 4, stage) for stage in (1, 3)),
        # The other stages of what is not compiled, or narrow.
        *long(*(("uneven_shards", "eager", 4, stage) for stage in (1, 2)), ("uneven_shards", "eager", 2, 3)),
        *long(*(("bf16", "fx", 4, stage) for stage in (0, 2)), ("bf16", "fx", 2, 3)),
    ],
    indirect=["ranks"],
    scope="session",
)
def test_hybrid_sharding_equals_the_replicated_model(ranks: Ranks, name: str, zero_stage: int, mode: str) -> None:
    """4 ranks as 2 x 2; 2 ranks as 2 x 1, where nothing is sharded and all is replicated."""
    assert min(ranks.run(run_hybrid, name, zero_stage, mode)) > 0


@pytest.mark.parametrize(
    ("name", "zero_stage"), [("accumulated_sum", 0), ("bf16_fp32_sums", 0), ("bf16_fp32_sums", 3), ("batch_norm", 3)]
)
@worlds(4)
def test_hybrid_sharding_of_more_models(ranks: Ranks, name: str, zero_stage: int) -> None:
    assert min(ranks.run(run_hybrid, name, zero_stage, "fx")) > 0


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_equals_when_only_submodules_are_compiled(ranks: Ranks, zero_stage: int) -> None:
    assert min(ranks.run(run_case, "uneven_shards", zero_stage, "part")) > 0
