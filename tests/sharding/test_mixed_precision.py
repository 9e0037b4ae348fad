"""Half precision equals the replicated model bit for bit: narrow parameters, autocast, loss scaling, token weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zgraph
from tests.support import models
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.judges.replicated import (
    Case,
    Replicated,
    assert_equal,
    batches,
    compare,
    token_batch,
    verified,
    whole,
)
from tests.support.ranks import Ranks, every_world, worlds


def _cases(label: str, half: torch.dtype) -> dict[str, Case]:
    parameters = {"param_dtype": half}
    return {
        f"{label}_parameters": Case(build=models.Uneven, options=parameters, evaluate=True),
        f"{label}_language": Case(
            build=lambda: models.Language(layers=1), batch=token_batch, options=parameters, evaluate=True
        ),
        f"{label}_wide_request": Case(build=models.Uneven, options=parameters | {"reduce_dtype": torch.float32}),
        f"{label}_wire": Case(build=models.Uneven, options={"reduce_dtype": half}),
        f"{label}_wide_means": Case(build=models.Uneven, options={"reduce_dtype": half, "mean_dtype": torch.float32}),
        f"{label}_accumulated": Case(build=models.Uneven, options=parameters, micro_batches=2),
        f"{label}_sum": Case(build=models.Uneven, options=parameters | {"reduction": "sum"}),
        f"{label}_reused": Case(build=models.Reused, options=parameters),
        f"{label}_frozen": Case(build=models.Frozen, options=parameters),
        f"{label}_graph_breaks": Case(build=models.Broken, options=parameters),
        f"{label}_retain_graph": Case(build=models.Uneven, options=parameters, backwards=2),
        f"{label}_experts": Case(
            build=models.Routed, options=parameters | {"units": (models.Experts,)}, zeros=("moe.",)
        ),
        f"{label}_autocast": Case(build=models.Uneven, autocast=half, evaluate=True),
        f"{label}_autocast_language": Case(
            build=lambda: models.Language(layers=1), batch=token_batch, autocast=half, evaluate=True
        ),
        f"{label}_autocast_reused": Case(build=models.Reused, autocast=half),
        f"{label}_autocast_attention": Case(build=models.Attending, autocast=half),
        f"{label}_autocast_batch_norm": Case(build=models.Normalised, autocast=half, evaluate=True),
        f"{label}_autocast_graph_breaks": Case(build=models.Broken, autocast=half),
        f"{label}_autocast_wire": Case(build=models.Uneven, autocast=half, options={"reduce_dtype": half}),
        f"{label}_autocast_parameters": Case(build=models.Uneven, autocast=half, options=parameters),
    }


# bf16 takes every road; fp16 those on which its range or its mantissa could make a difference.
FP16 = ("fp16_parameters", "fp16_wire", "fp16_sum", "fp16_autocast_language")

CASES = {
    **_cases("bf16", torch.bfloat16),
    **{name: case for name, case in _cases("fp16", torch.float16).items() if name in FP16},
    # Both narrow, neither holds the other's values: what travels is the one that was asked for.
    "fp16_parameters_bf16_wire": Case(
        build=models.Uneven, options={"param_dtype": torch.float16, "reduce_dtype": torch.bfloat16}
    ),
    "bf16_parameters_fp16_wire": Case(
        build=models.Uneven, options={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}
    ),
}

# The telling ones run at both ends of the stages, with and without a compiler; the others once.
TELLING = ("fp16_parameters", "bf16_language", "bf16_experts", "bf16_autocast", "fp16_autocast_language")
OTHERS = [name for name in CASES if name not in TELLING]
AT_BOTH_ENDS = ("fp16_parameters", "bf16_autocast")


def run_case(name: str, zero_stage: int, mode: str) -> int:
    return compare(CASES[name], zero_stage, mode)


def telling() -> list[Any]:
    """Return rows of a table. Compiled, the others run at one end in turns; the other end is long."""
    rows: list[Any] = []
    for place, (world, zero_stage) in enumerate([(2, 3), (3, 0)]):
        for number, name in enumerate(TELLING):
            for mode in ("eager", "fx"):
                has_twin = mode == "fx" and name not in AT_BOTH_ENDS and place != number % 2
                marks = [pytest.mark.long] if has_twin else []
                title = f"{name}-ranks{world}-{zero_stage}-{mode}"
                rows.append(pytest.param(name, world, zero_stage, mode, id=title, marks=marks))
    return rows


@pytest.mark.parametrize(("name", "ranks", "zero_stage", "mode"), telling(), indirect=["ranks"], scope="session")
def test_equals_the_replicated_model(ranks: Ranks, name: str, zero_stage: int, mode: str) -> None:
    assert min(ranks.run(run_case, name, zero_stage, mode)) > 0


@pytest.mark.parametrize("name", [*OTHERS[::2], *long(*OTHERS[1::2])])
def test_equals_the_replicated_model_at_stage_3_compiled(ranks: Ranks, name: str) -> None:
    assert min(ranks.run(run_case, name, 3, "fx")) > 0


@pytest.mark.parametrize("mode", ["fx", *long("eager")])
@pytest.mark.parametrize("name", ["bf16_wire", "bf16_wide_means", "bf16_accumulated"])
@worlds(3)
def test_means_of_replicated_gradients_are_rounded_once(ranks: Ranks, name: str, mode: str) -> None:
    assert min(ranks.run(run_case, name, 0, mode)) > 0


# --- batch norm -----------------------------------------------------------------------------------------------------


def batch_norm_beside_narrow_parameters() -> list[str]:
    model = models.Normalised()
    zgraph.shard(model.layers[1])
    zgraph.shard(model, param_dtype=torch.bfloat16)
    called = with_fx(model)
    called(torch.randn(8, 6)).float().square().mean().backward()
    return [str(parameter.grad.dtype) for parameter in model.parameters()]


def test_batch_norm_keeps_fp32_parameters_when_it_is_sharded_first(ranks: Ranks) -> None:
    # torch's batch norm refuses narrow weights beside fp32 statistics on CPU: a param_dtype for all cannot work.
    assert ranks.run(batch_norm_beside_narrow_parameters) == [["torch.float32"] * 6] * 2


# --- loss scaling ---------------------------------------------------------------------------------------------------

SCALE = 1024.0
OVERFLOWS_IN_STEP = 1
ROWS = 8


class Scaled(nn.Module):
    """A scalar, which is replicated and comes first, and a weight whose last row can overflow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(6, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.linear(x)
        return torch.cat([columns[:, :1] * self.scalar, columns[:, 1:]], dim=1)


def overflowing_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """In one step the gradient of the last output leaves the range of fp16: 1024 * 2 * 10000 / 32 > 65504."""
    inputs, target = torch.randn(4, 6, generator=generator), torch.randn(4, ROWS, generator=generator)
    if step == OVERFLOWS_IN_STEP:
        target[:, -1] = 10_000.0
    return inputs, target


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def train_scaled(zero_stage: int, mode: str, explicit: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(5)
    case = Case(build=Scaled, batch=overflowing_batch, options={"param_dtype": torch.float16})
    model = case.build()
    reference = Replicated(case, copy.deepcopy(model), zero_stage)
    zgraph.shard(model, zero_stage=zero_stage, **case.options)
    called = with_fx(model, passes=verified()) if mode == "fx" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    expected_optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    scaler = zgraph.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    expected_scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scales: list[float] = []
    for step in range(5):
        case.loss = lambda output, target: expected_scaler.scale(squared_error(output, target))
        _, expected = reference.step(step)
        for name, parameter in reference.model.named_parameters():
            parameter.grad = expected[name]
        inputs, target = batches(case, step)[rank]
        scaler.scale(squared_error(called(inputs), target)).backward()
        bad = not all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
        # The last row lies on the last rank; replicated, on all.
        overflows = step == OVERFLOWS_IN_STEP and (zero_stage == 0 or rank == world - 1)
        assert bad == overflows, f"step {step}: inf found {bad}, expected {overflows}"
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        if explicit:
            # The largest entry is exact, whoever computes it: clipping by it keeps the comparison bitwise.
            scaler.unscale_(optimizer)
            expected_scaler.unscale_(expected_optimizer)
            found = zgraph.clip_grad_norm_(model.parameters(), 0.1, norm_type=math.inf)
            norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1, norm_type=math.inf, foreach=False)
            if step != OVERFLOWS_IN_STEP:
                assert norm > 0.1, "nothing is clipped"
                assert_equal(f"norm of step {step}", whole(found), norm)
        scaler.step(optimizer)
        scaler.update()
        expected_scaler.step(expected_optimizer)
        expected_scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert scaler.get_scale() == expected_scaler.get_scale()
        if step == OVERFLOWS_IN_STEP:
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter.to_local(), old), "a rank has stepped"
        for name, parameter in model.named_parameters():
            assert_equal(f"{name} after step {step}", whole(parameter.detach()), reference.model.get_parameter(name))
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE], scales


@pytest.mark.parametrize("explicit", [True, False], ids=["unscale", "step"])
@pytest.mark.parametrize("mode", ["eager", "fx"])
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 0), (2, 3), (3, 0), (4, 3)], indirect=["ranks"], scope="session")
def test_all_ranks_skip_a_step_in_which_one_shard_overflows(
    ranks: Ranks, zero_stage: int, mode: str, explicit: bool
) -> None:
    ranks.run(train_scaled, zero_stage, mode, explicit)


def one_step_with_an_inf(scaler_class: type[torch.amp.GradScaler], build: type[nn.Module], fused: bool) -> list[Any]:
    """Rank 1 finds an inf in its shard of the last weight: did this rank step, and what is its scale?"""
    model = zgraph.shard(build())
    fused_or_not: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **fused_or_not)
    scaler = scaler_class("cpu", init_scale=SCALE)
    scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
    if dist.get_rank() == 1:
        [*_, weight] = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        weight.grad.to_local()[0, 0] = math.inf
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    stepped = any(not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    return [stepped, scaler.get_scale()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("build", [Scaled, models.Frozen, models.Uneven])
def test_ranks_agree_on_an_overflow_in_one_of_them(ranks: Ranks, build: type[nn.Module], fused: bool) -> None:
    found = ranks.run(one_step_with_an_inf, zgraph.GradScaler, build, fused)
    assert found == [[False, SCALE / 2]] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("build", [Scaled, models.Uneven])
def test_torchs_own_scaler_agrees_too(ranks: Ranks, build: type[nn.Module], fused: bool) -> None:
    """Also where the first gradient, by whose placements DTensor reduces the flag, is replicated."""
    found = ranks.run(one_step_with_an_inf, torch.amp.GradScaler, build, fused)
    assert found == [[False, SCALE / 2]] * 2


# --- losses weighted by tokens --------------------------------------------------------------------------------------


class TokenLoss:
    """The sum over this rank's tokens, divided by the tokens of all ranks. -100 marks padding."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        logits = output.float().flatten(0, -2)
        return F.cross_entropy(logits, target.flatten(), ignore_index=-100, reduction="sum") / self.tokens


def ragged_tokens(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each rank has another number of sequences, and pads them at other places."""
    tokens = torch.randint(0, 23, (1 + rank, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 2 + (step + rank) % 4 :] = -100
    return tokens[:, :-1], targets


def train_token_weighted(zero_stage: int, mode: str, half: bool) -> None:
    torch.manual_seed(5)
    loss = TokenLoss()
    options: dict[str, Any] = {"reduction": "sum"} | ({"param_dtype": torch.bfloat16} if half else {})
    case = Case(build=lambda: models.Language(layers=1), batch=ragged_tokens, options=options, loss=loss)
    model = case.build()
    reference = Replicated(case, copy.deepcopy(model), zero_stage)
    zgraph.shard(model, zero_stage=zero_stage, **options)
    called = with_fx(model, passes=verified()) if mode == "fx" else model
    for step in range(3):
        inputs, target = batches(case, step)[dist.get_rank()]
        tokens = (target != -100).sum()
        dist.all_reduce(tokens)
        loss.tokens = int(tokens)
        assert loss.tokens == sum(int((other != -100).sum()) for _, other in batches(case, step))
        _, expected = reference.step(step)
        loss(called(inputs), target).backward()
        for name, parameter in model.named_parameters():
            assert_equal(f"gradient of {name} in step {step}", whole(parameter.grad), expected[name])
        model.zero_grad()


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "mode", "half"),
    [
        (2, 0, "eager", False),
        (3, 3, "eager", False),
        (3, 3, "fx", True),
        *long((2, 0, "fx", False), (2, 0, "fx", True), (3, 3, "fx", False)),  # every two are met before
    ],
    indirect=["ranks"],
    scope="session",
)
def test_a_token_weighted_sum_equals_the_replicated_model(ranks: Ranks, zero_stage: int, mode: str, half: bool) -> None:
    ranks.run(train_token_weighted, zero_stage, mode, half)


CLASSES = 11


def ragged_features(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    count = 3 + 4 * rank
    return torch.randn(count, 6, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def whole_batch_gradient(zero_stage: int) -> float:
    """The largest error of a sharded gradient against the whole batch's, in units of its bound."""
    torch.manual_seed(5)
    loss = TokenLoss()
    case = Case(build=lambda: nn.Linear(6, CLASSES), batch=ragged_features, loss=loss)
    model = case.build()
    alone = copy.deepcopy(model)
    zgraph.shard(model, zero_stage=zero_stage, reduction="sum")
    parts = batches(case, 0)
    inputs, target = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loss.tokens = len(target)
    loss(model(parts[dist.get_rank()][0]), parts[dist.get_rank()][1]).backward()
    loss(alone(inputs), target).backward()

    # Row v of the gradient is the sum over T tokens of g_tv x_t, with |g_tv| <= 1/T, in some order: each of both sums
    # is off by at most (T + N) u sum|g x| <= (T + N) u sum|x| / T (u = 2^-24, the unit roundoff). What goes into g has
    # been rounded too. A logit, a sum of K products and a bias, by at most (K + 1) u L with L the largest sum of
    # absolute values in it; an error d in the logits moves a probability by at most a factor of exp(2 d); exp, the sum
    # over V classes, the division, minus one, 1/T and the product with x add at most V + 6 roundings. First order; both
    # sides are rounded, which doubles it.
    tokens, features = inputs.shape
    largest = (inputs.abs() @ alone.weight.detach().abs().t() + alone.bias.detach().abs()).max().item()
    roundings = tokens + len(parts) + 2 * (features + 1) * largest + CLASSES + 6
    unit = 2 * roundings * 2**-24 / tokens
    bounds = {"weight": unit * inputs.abs().sum(0), "bias": torch.tensor(unit * tokens)}
    worst = 0.0
    for name, parameter in model.named_parameters():
        error = (whole(parameter.grad) - alone.get_parameter(name).grad).abs()
        worst = max(worst, (error / bounds[name]).max().item())
    return worst


@pytest.mark.parametrize("zero_stage", [0, 3])
@every_world
def test_token_weighted_sum_is_the_whole_batchs_gradient(ranks: Ranks, zero_stage: int) -> None:
    assert max(ranks.run(whole_batch_gradient, zero_stage)) <= 1
