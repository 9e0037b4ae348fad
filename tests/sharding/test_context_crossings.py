"""Sequences shared by ranks, together with other features: right, or refused by the line to write."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support import context as cp
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.passes import CompressGradients, LowRank, NoFeedback, QuantizeGathers, SignMomentum, TwoHop, presets
from zgraph.sharding.context.positions import own_tokens

P = zgraph.PassList
TARGET = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), budget_bytes=2**18)
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6}  # of sums in another order, relative to a parameter's largest


class Both:
    """Muon for the matrices of the block, SGD for the rest; one optimizer for plain lines."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        is_matrix = {name: one.ndim == 2 and "block" in name for name, one in named}
        muon = torch.optim.Muon([one for name, one in named if is_matrix[name]], lr=0.02)
        if type(named[0][1]) is not nn.Parameter:
            zgraph.step_on_shards(muon)
        self.both = muon, torch.optim.SGD([one for name, one in named if not is_matrix[name]], lr=cp.LR)

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=cp.LR)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)


def adamw_8bit(model: nn.Module) -> Any:
    return zgraph.AdamW8bit(model.parameters(), lr=1e-2, eps=1e-3)


def by_value(parameters: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.01)


def by_norm(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training: `run` and `stage` as in `cp.Case`; options of `zgraph.shard`; "DISK" in them becomes a folder."""

    run: str = "step"
    stage: int = 3
    dtype: torch.dtype = torch.float64
    optimizer: Callable[[nn.Module], Any] = adamw
    passes: Any = None
    lowering: str = "fx"
    clip: Callable[[Any], object] | None = None
    micro_batches: int = 1
    shard: Mapping[str, Any] = field(default_factory=dict[str, Any])


HOST = zgraph.Offload(params="host", optimizer="host")
ROWS = {
    "planned": Row(run="compile", stage=2, passes=P(presets.planned(), target=TARGET), micro_batches=2),
    "planned_step": Row(passes=P(presets.planned(), target=TARGET), micro_batches=2),
    "interleaved": Row(passes=P(presets.default(interleave_micro_batches=True)), micro_batches=3),
    "clipped_by_value": Row(run="compile", stage=1, optimizer=sgd, clip=by_value),
    "clipped_by_norm": Row(stage=2, optimizer=sgd, clip=by_norm),
    "muon": Row(run="eager", stage=1, dtype=torch.float32, optimizer=Both),
    "muon_compiled": Row(run="compile", dtype=torch.float32, optimizer=Both, micro_batches=2),
    "adamw_8bit": Row(dtype=torch.float32, optimizer=adamw_8bit, shard={"offload": HOST}, lowering="inductor"),
    "adamw_8bit_plain": Row(run="compile", stage=1, dtype=torch.float32, optimizer=adamw_8bit),
    "on_host": Row(run="compile", shard={"offload": HOST}),
    "on_disk": Row(micro_batches=2, shard={"offload": "DISK"}),
    "state_on_disk": Row(stage=2, shard={"offload": "STATE"}),
    "warm_up": Row(stage=0, passes=P(presets.default(compression=SignMomentum(warmup=100)))),
}


def _trained(row: Row, shard: Mapping[str, Any] | None, folder: str = "", steps: int = 2) -> list[Tensor]:
    """Return parameters after training on whole sequences; sharded with the arguments `shard`, if there are any."""
    model = cp.started(cp.Case()).to(row.dtype)
    if shard is not None:
        on_disk: dict[str, dict[str, Any]] = {
            "DISK": {"params": "disk", "optimizer": "disk", "path": folder},
            "STATE": {"optimizer": "disk", "path": folder},
        }
        more = {
            name: zgraph.Offload(**on_disk[one]) if isinstance(one, str) else one for name, one in row.shard.items()
        }
        zgraph.shard(model, zero_stage=row.stage, **more, **shard)
    opt = row.optimizer(model)
    options: dict[str, Any] = {"lowering": row.lowering} | ({} if row.passes is None else {"passes": row.passes})
    is_compiled = shard is not None and row.run == "compile"
    run: Any = torch.compile(model, backend="zgraph", options=options) if is_compiled else model
    is_step = shard is not None and row.run == "step"

    def lines(given: list[dict[str, Tensor]]) -> None:
        for place, one in enumerate(given):
            waits = shard is not None and not is_step and place < len(given) - 1
            with zgraph.no_sync(model) if waits else contextlib.nullcontext():
                (run(**one) / len(given)).backward()
        if row.clip is not None:
            row.clip(model.parameters())
        opt.step()
        opt.zero_grad()

    step: Any = zgraph.training_step(model, opt, options=options)(lines) if is_step else lines
    has_context = shard is not None and "context" in shard
    for number in range(steps):
        numbers = range(number * row.micro_batches, (number + 1) * row.micro_batches)
        given = [cp.batch(one, is_even=False) for one in numbers]
        step([zgraph.context_batch(model, one) for one in given] if has_context else given)
    return [whole(one.detach()).clone() for one in model.parameters()]


def _with_context() -> dict[str, Any]:
    return {"mesh": cp.mesh_of(2, 2), "context": "cp"}


def _without_context() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2,))}


def _apart(row: Row, folder: str) -> float:
    return cp.furthest(_trained(row, _with_context(), folder), _trained(replace(row, passes=None), None))


@worlds(2)
@pytest.mark.parametrize("name", ROWS)
def test_features_train_as_one_rank(ranks: Ranks, name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    apart = ranks.run(_apart, row, str(tmp_path / "disk"))
    assert max(apart) <= ROUNDING[row.dtype], apart


# --- lossy methods ----------------------------------------------------------------------------------------------------


def _lossy(row: Row, **options: Any) -> tuple[float, float]:
    """Return how far training is from that of ranks that have whole sequences, and from the exact one, as norms."""
    passes = [
        replace(one, min_numel=64) if isinstance(one, CompressGradients | QuantizeGathers) else one
        for one in presets.default(**options)
    ]
    row = replace(row, passes=P(passes), dtype=torch.float32, optimizer=sgd)
    found = _trained(row, _with_context())
    others = _trained(row, _without_context()), _trained(replace(row, passes=None), None)
    start = list(cp.started(cp.Case()).float().parameters())

    def norm(left: list[Any], right: list[Any]) -> float:
        return sum(float((one - other).norm() ** 2) for one, other in zip(left, right, strict=True)) ** 0.5

    whole_sequences, exact = (norm(found, other) / norm(others[1], start) for other in others)
    return whole_sequences, exact


@worlds(2)
@pytest.mark.parametrize(
    ("row", "options"),
    [
        (Row(run="compile"), {"compression": LowRank(rank=4, least_saving=1.0)}),
        (Row(stage=2), {"gather_compression": NoFeedback(bits=8)}),
        (Row(run="compile", lowering="inductor"), {"gather_compression": NoFeedback(bits=8)}),
    ],
    ids=["low_rank", "quantized_gathers", "quantized_gathers_inductor"],
)
def test_lossy_methods_lose_what_they_lose_on_whole_sequences(ranks: Ranks, row: Row, options: dict[str, Any]) -> None:
    """Factors of low rank depend on the mean gradient only, and codes of parameters on no gradient."""
    for whole_sequences, exact in ranks.run(_lossy_of, row, options):
        assert whole_sequences < 1e-5
        assert exact > 1e-3


def _lossy_of(row: Row, options: dict[str, Any]) -> tuple[float, float]:
    return _lossy(row, **options)


@worlds(2)
def test_codes_in_two_hops(ranks: Ranks) -> None:
    """Codes of gradients of parts of sequences differ from those of whole ones, and lose as little."""
    found = ranks.run(_lossy_of, Row(run="compile", stage=2), {"compression": TwoHop(ranks_per_host=2)})
    assert found[0] == found[1]
    assert 0 < found[0][1] < 0.1


# --- other front doors ------------------------------------------------------------------------------------------------


def _resumed(folder: str, saves_context: bool) -> float:
    """Train two steps with or without a context axis, and two more the other way."""

    def made(has_context: bool) -> tuple[nn.Module, Any]:
        model = cp.started(cp.Case())
        zgraph.shard(model, **_with_context() if has_context else _without_context())
        return model, adamw(model)

    def train(model: nn.Module, opt: Any, steps: range, cuts: bool) -> None:
        for number in steps:
            given = cp.batch(number, is_even=False)
            model(**zgraph.context_batch(model, given) if cuts else given).backward()
            opt.step()
            opt.zero_grad()

    model, opt = made(saves_context)
    train(model, opt, range(2), saves_context)
    saved = zgraph.save_checkpoint(folder, model, opt, step=2)
    model, opt = made(not saves_context)
    zgraph.load_checkpoint(saved, model, opt)
    train(model, opt, range(2, 4), not saves_context)
    plain = cp.started(cp.Case())
    train(plain, adamw(plain), range(4), cuts=False)
    return cp.furthest([whole(one.detach()) for one in model.parameters()], list(plain.parameters()))


@worlds(2)
@pytest.mark.parametrize("saves_context", [True, False])
def test_checkpoints_load_with_and_without_context(ranks: Ranks, tmp_path: Path, saves_context: bool) -> None:
    assert max(ranks.run(_resumed, str(tmp_path), saves_context)) < ROUNDING[torch.float64]


class Stack(nn.Module):
    """Blocks that may be dropped, and an adapter that may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.adapter = nn.Embedding(cp.VOCABULARY, cp.WIDTH), nn.Linear(cp.WIDTH, cp.WIDTH)
        self.blocks = nn.ModuleList(cp.Block(4, 2) for _ in range(3))
        self.head = nn.Linear(cp.WIDTH, cp.VOCABULARY)

    def forward(self, x: Tensor, targets: Tensor, adapts: bool = False) -> Tensor:
        h = self.embed(x)
        h = h + self.adapter(h) if adapts else h
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def _stack(run: str, adapts: list[Any], drops: bool) -> float | str:
    torch.manual_seed(0)
    model = Stack().double()
    plain = copy.deepcopy(model)
    found: list[list[Tensor]] = []
    for one in (model, plain):
        is_shared = one is model
        if is_shared:
            zgraph.shard(one, **_with_context(), zero_stage=2, optional=[] if drops else [model.adapter])
        if drops:
            zgraph.LayerDrop(one.blocks, theta=0.5, gamma=10.0)
        opt = sgd(one)
        called: Any = with_fx(one) if is_shared and run == "compile" else one

        def lines(given: dict[str, Tensor], is_adapted: bool, called: Any = called, opt: Any = opt) -> None:
            called(**given, adapts=is_adapted).backward()
            opt.step()
            opt.zero_grad()

        is_step = is_shared and run == "step"
        step = zgraph.training_step(one, opt, options={"lowering": "fx"})(lines) if is_step else lines
        for number, here in enumerate(adapts):
            given = cp.batch(number, is_even=False)
            is_adapted = here[dist.get_rank()] if isinstance(here, tuple) else here
            try:
                step(zgraph.context_batch(model, given) if is_shared else given, is_adapted)
            except zgraph.ZgraphError as error:
                return str(error)
        found.append([whole(parameter.detach()) for parameter in one.parameters()])
    return cp.furthest(*found)


@worlds(2)
@pytest.mark.parametrize("run", ["eager", "compile", "step"])
def test_optional_modules_run_on_all_ranks_of_a_sequence_or_on_none(ranks: Ranks, run: str) -> None:
    assert all(float(found) < ROUNDING[torch.float64] for found in ranks.run(_stack, run, [True, False], False))
    for found in ranks.run(_stack, run, [(True, False)], False):
        assert "optional modules" in found
        assert "need to run the same lines" in found


@worlds(2)
@pytest.mark.parametrize(
    ("run", "refusal"), [("eager", None), ("compile", "Leave torch.compile out"), ("step", "Leave the decorator out.")]
)
def test_dropped_layers(ranks: Ranks, run: str, refusal: str | None) -> None:
    for found in ranks.run(_stack, run, [False] * 4, True):
        if refusal is None:
            assert float(found) < ROUNDING[torch.float64]
        else:
            assert refusal in str(found)


def _sites() -> float:
    """Two sites of two ranks: their ranks share sequences, or have whole ones."""
    found: list[list[Tensor]] = []
    for context in ("cp", None):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "dp", "cp"))
        model = cp.started(cp.Case())
        zgraph.shard(model, mesh["dp", "cp"] if context else mesh["cp"], context=context)
        opt = sgd(model)
        outer = zgraph.OuterSteps(model, mesh["site"], every=2, codec=None)
        for number in range(4):
            given = cp.batch(10 * number + mesh["site"].get_local_rank(), is_even=False)
            model(**zgraph.context_batch(model, given) if context else given).backward()
            opt.step()
            opt.zero_grad()
            outer.step()
        outer.finish()
        found.append([whole(one.detach()).clone() for one in model.parameters()])
    return cp.furthest(*found)


@worlds(4)
def test_sites_with_context(ranks: Ranks) -> None:
    assert max(ranks.run(_sites)) < 1e-5  # rounds are in fp32


# --- evaluation -------------------------------------------------------------------------------------------------------


def _evaluated() -> tuple[float, float, str, str]:
    model, plain, given = cp.started(cp.Case()), cp.started(cp.Case()), cp.batch(0, is_even=False)
    zgraph.shard(model, **_with_context())
    run = with_fx(model)
    run(**zgraph.context_batch(model, given)).backward()
    tokens = {"x": given["x"]}
    with torch.no_grad():
        loss = run(**zgraph.context_batch(model, given))
        dist.all_reduce(loss)
        refused = _refusal(lambda: run(**zgraph.context_batch(model, tokens)))
        scores = run(**zgraph.context_batch(model, tokens, uneven=True))
        expected = own_tokens(plain(given["x"]), 1, dist.get_rank(), 2)
    # A batch for evaluation says nothing of training.
    trained = _refusal(lambda: run(zgraph.context_batch(model, given)["x"]))
    return float((loss / 2 - plain(**given)).abs()), float((scores - expected).abs().max()), refused, trained


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (zgraph.ZgraphError, ValueError) as error:
        return str(error)
    return "passed"


@worlds(2)
def test_evaluation_after_training(ranks: Ranks) -> None:
    for loss, scores, refused, trained in ranks.run(_evaluated):
        assert max(loss, scores) < ROUNDING[torch.float64]
        assert "that also without a loss" in refused
        assert "different numbers of targets" in trained


def _weighted() -> tuple[str, float]:
    """A mean by weights of tokens, outside of the model."""
    model, plain, given = cp.started(cp.Case()), cp.started(cp.Case()), cp.batch(0, is_even=True)
    zgraph.shard(model, **_with_context())
    weights = torch.rand(given["x"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    given["weights"] = weights

    def loss(one: nn.Module, batch: dict[str, Tensor], total: Tensor) -> Tensor:
        losses = F.cross_entropy(one(batch["x"]).flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return (losses * batch["weights"].flatten()).sum() / total

    refused = _refusal(lambda: loss(model, zgraph.context_batch(model, given), weights.sum()))
    (2 * loss(model, zgraph.context_batch(model, given, uneven=True), weights.sum())).backward()
    loss(plain, given, weights.sum()).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return refused, max(float((whole(one.grad) - two.grad).abs().max()) for one, two in pairs)  # pyright: ignore


@worlds(2)
def test_weights_of_tokens(ranks: Ranks) -> None:
    for refused, apart in ranks.run(_weighted):
        assert "(the sum of weights) of all ranks" in refused
        assert apart < ROUNDING[torch.float64]
