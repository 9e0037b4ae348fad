"""1-bit Adam in whole steps: plain AdamW in the warm-up, then the bits of a twin in plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import zgraph
from tests.support.graphs import Keep
from tests.support.judges.sign_momentum import Momenta, update
from tests.support.ranks import Ranks, RanksPool, worlds
from tests.support.whole_tensors import whole
from zgraph.graph.traffic import transfers

P = zgraph.passes
WARMUP, STEPS = 3, 6
BF16 = {"param_dtype": torch.bfloat16}


class Net(nn.Module):
    """Matrices whose rows no number of ranks divides, a table of which one row is never read, and vectors."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.up = nn.Linear(12, 33)
        self.down = nn.Linear(33, 12 if tied else 5, bias=False)
        self.head = nn.Linear(12, 7, bias=False) if tied else nn.Identity()
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.table(x))))).square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        shard: options of zgraph.shard besides the stage.
        replicas: replicas of shards (hybrid sharding).
        k, waits: micro-batches, and whether all but the last are under no_sync.
        clips: clip gradients.
        dtype: of the weights.
        tied: the head has the table's weight.
        scaled: losses are scaled by a GradScaler.
        compresses: False: plain AdamW.
        optimizer: options of AdamW.
    """

    stage: int = 2
    lowering: str = "fx"
    shard: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replicas: int = 1
    k: int = 1
    waits: bool = False
    clips: bool = False
    dtype: torch.dtype = torch.float32
    tied: bool = False
    scaled: bool = False
    autocast: bool = False
    compresses: bool = True
    warmup: int | Literal["auto"] = WARMUP
    beta1: float = 0.9
    optimizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    preset: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def method(self) -> P.SignMomentum:
        return P.SignMomentum(warmup=self.warmup, beta1=self.beta1, group=16)

    def passes(self) -> list[zgraph.GraphPass]:
        passes = P.presets.default(compression=self.method if self.compresses else None, **self.preset)
        return [replace(one, min_numel=16) if isinstance(one, P.CompressGradients) else one for one in passes]


class Training:
    """A model, its optimizer, and its step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, shape = case, (case.replicas, dist.get_world_size() // case.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp"))
        mesh = mesh["dp"] if case.replicas == 1 else mesh
        self.model = zgraph.shard(Net(tied=case.tied).to(case.dtype), mesh, zero_stage=case.stage, **case.shard)
        chosen: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.9), "fused": True, **case.optimizer}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **chosen)
        options = {"lowering": case.lowering, "passes": zgraph.PassList(case.passes(), replay_all=True)}
        self.step = zgraph.training_step(self.model, self.optimizer, options=options)(self.plain())

    def plain(self) -> Callable[[list[Tensor]], Tensor]:
        case, model, optimizer = self.case, self.model, self.optimizer
        scaler = zgraph.GradScaler(model, init_scale=8.0)

        def step(batches: list[Tensor]) -> Tensor:
            total = torch.zeros(())
            for number, x in enumerate(batches):
                last = number == len(batches) - 1
                with zgraph.no_sync(model) if case.waits and not last else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                        loss = model(x) / len(batches)
                    (scaler.scale(loss) if case.scaled else loss).backward()
                total += loss.detach()
            if case.scaled:
                scaler.step(optimizer)
                scaler.update()
                return total
            if case.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    def batches(self, number: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(100 * number + dist.get_rank())
        return [torch.randint(0, 6, (4,), generator=random) for _ in range(self.case.k)]

    def train(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            self.step(self.batches(number))

    def values(self) -> dict[str, Tensor]:
        return {name: whole(one.detach()).clone() for name, one in self.model.named_parameters()}

    def state(self, key: str) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: whole(self.optimizer.state[one][key]).clone() for name, one in named}

    def found(self) -> dict[str, Tensor]:
        """Everything that a step may change."""
        states = {
            f"{key} {name}": one for key in ("exp_avg", "exp_avg_sq", "step") for name, one in self.state(key).items()
        }
        return {**self.values(), **states}


def different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def local_gradients(case: Case, values: Mapping[str, Tensor], batches: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of this rank's own batches, in plain PyTorch, summed in fp32."""
    dtype = case.shard.get("param_dtype", torch.float32)
    given = {name: value.to(dtype).requires_grad_() for name, value in values.items()}
    net, sums = Net(), dict[str, Tensor]()
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = functional_call(net, given, (x,)) / len(batches)
        for name, grad in zip(given, torch.autograd.grad(loss, [*given.values()]), strict=True):
            sums[name] = sums[name] + grad.float() if name in sums else grad.float()
    return sums


def differences(case: Case) -> dict[str, list[str]]:
    """What differs from AdamW in the warm-up, and from the twin after it."""
    training, plain = Training(case), Training(replace(case, compresses=False))
    wrong: dict[str, list[str]] = {}
    for number in range(WARMUP):
        training.train(number, number + 1)
        plain.train(number, number + 1)
        wrong[f"step {number}"] = different(training.found(), plain.found())
    squares, (group,) = training.state("exp_avg_sq"), training.optimizer.param_groups
    momenta = {
        name: Momenta(case.method, value.shape, case.stage > 0 and case.replicas == 1)
        for name, value in squares.items()
        if value.ndim > 1
    }
    for number in range(WARMUP, STEPS):
        values = training.values()
        grads = local_gradients(case, values, training.batches(number))
        training.train(number, number + 1)
        means = {name: one.mean(grads[name]) for name, one in momenta.items()}
        expected = {
            name: update(values[name], mean, squares[name], float(WARMUP), group) for name, mean in means.items()
        }
        expected |= {f"exp_avg {name}": mean for name, mean in means.items()}
        expected |= {f"exp_avg_sq {name}": squares[name] for name in means}
        expected |= {f"step {name}": torch.tensor(float(WARMUP)) for name in means}
        wrong[f"step {number}"] = different(training.found(), expected)
    return {step: names for step, names in wrong.items() if names}


@worlds(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0),
        Case(stage=1, k=2, waits=True),
        Case(stage=2, shard=BF16),
        Case(stage=3, autocast=True),
        Case(stage=0, k=2, waits=True, shard=BF16),
        Case(stage=3, k=2, preset={"interleave_micro_batches": True}),
        Case(stage=2, replicas=2),
    ],
    ids=["0", "1, no_sync", "2, bf16", "3, autocast", "0, no_sync, bf16", "3, interleaved", "replicas"],
)
def test_steps_equal_adamw_and_then_the_twin(ranks: Ranks, case: Case) -> None:
    assert ranks.run(differences, case) == [{}] * ranks.world


@worlds(3)
@pytest.mark.parametrize("stage", [0, 3])
def test_on_a_number_of_ranks_that_divides_no_rows(ranks: Ranks, stage: int) -> None:
    assert ranks.run(differences, Case(stage=stage)) == [{}] * 3


@worlds(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0, lowering="inductor", autocast=True),
        Case(stage=2, lowering="inductor", shard=BF16, clips=True),
        Case(stage=3, shard={"offload": zgraph.Offload(params="host", optimizer="host")}),
        Case(stage=1, optimizer={"lr": torch.tensor(0.02), "maximize": True}),
        Case(stage=0, dtype=torch.bfloat16, tied=True),
        Case(stage=3, dtype=torch.bfloat16, tied=True),
    ],
    ids=["inductor, 0", "inductor, 2", "at rest on the host", "a tensor as rate", "bf16 weights, 0", "bf16 weights, 3"],
)
def test_laws_that_hold_for_any_gradients(ranks: Ranks, case: Case) -> None:
    """Inductor rounds gradients differently, so that signs may differ; these laws are exact even so."""
    assert ranks.run(broken_laws, case) == [[]] * 2


@worlds(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_replicas_of_shards(ranks: Ranks, stage: int) -> None:
    assert ranks.run(broken_laws, Case(stage=stage, replicas=2, clips=True)) == [[]] * 4


def broken_laws(case: Case) -> list[str]:
    """Parameters that violate what holds for any gradients."""
    training = Training(case)
    training.train(0, WARMUP)
    squares, before = training.state("exp_avg_sq"), training.values()
    training.train(WARMUP, STEPS)
    broken = [name for name, one in training.values().items() if not one.isfinite().all() or one.equal(before[name])]
    for name, one in training.state("exp_avg_sq").items():
        if one.equal(squares[name]) != (one.ndim > 1):
            broken.append(f"exp_avg_sq {name}")
    for key, values in (("", training.values()), ("exp_avg ", training.state("exp_avg"))):
        for name, one in values.items():
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, one)
            broken += [f"{key}{name} on replicas" for other in found if not other.equal(one)]
    return broken


# --- resume -----------------------------------------------------------------------------------------------------------


def saved(path: Path, case: Case, at: int) -> list[str]:
    """What differs after a resume; also saves a checkpoint."""
    training = Training(case)
    training.train(0, at)
    place = zgraph.save_checkpoint(path, training.model, training.optimizer, step=at)
    training.train(at, 2 * STEPS)
    other = Training(case)
    zgraph.load_checkpoint(place, other.model, other.optimizer)
    other.train(at, 2 * STEPS)
    return different(other.found(), training.found())


@worlds(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("at", [WARMUP - 1, WARMUP + 2], ids=["in the warm-up", "after it"])
@pytest.mark.parametrize("warmup", [WARMUP, "auto"])
def test_a_resumed_run_is_the_same(ranks: Ranks, tmp_path: Path, stage: int, at: int, warmup: Any) -> None:
    case = Case(stage=stage, warmup=warmup)
    assert ranks.run(saved, tmp_path, case, at) == [[], []]


def goes_on(path: Path, stage: int) -> list[str]:
    """Second moments that change after a resume."""
    training = Training(Case(stage=stage))
    (place,) = path.iterdir()
    zgraph.load_checkpoint(place, training.model, training.optimizer)
    before = {name: one for name, one in training.state("exp_avg_sq").items() if one.ndim > 1}
    training.train(STEPS, STEPS + 2)
    return different(training.state("exp_avg_sq"), before)


@worlds(3)
@pytest.mark.parametrize("stage", [0, 2])
def test_another_number_of_ranks_stays_behind_the_warm_up(
    pool: RanksPool, ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    pool.of(2).run(saved, tmp_path, Case(), STEPS)
    assert ranks.run(goes_on, tmp_path, stage) == [[]] * 3


# --- the end of the warm-up ----------------------------------------------------------------------------------------


def length_of_warm_up() -> tuple[int, int]:
    """Steps after which second moments stay as they are, and those by the rule."""
    # Weights that stay as they are have gradients that differ by their batches only.
    training = Training(Case(warmup="auto", optimizer={"lr": 0.0}))
    last, expected, ended = None, 0, 0
    for number in range(1, 200):
        before = training.state("exp_avg_sq") if number > 1 else {}
        training.train(number - 1, number)
        squares = training.state("exp_avg_sq")
        matrices = [one for one in squares.values() if one.ndim > 1]
        if number > 1 and all(one.equal(before[name]) for name, one in squares.items() if one.ndim > 1):
            ended = number - 1
            break
        if number % 10 == 0:  # 1 / (1 - beta2)
            now = sum(one.double().sum().item() for one in matrices) / (1 - 0.9**number)
            if expected == 0 and last is not None and 0.96 <= now / last <= 1 / 0.96:
                expected = number
            last = now
    return ended, expected


@worlds(2)
def test_auto_ends_once_second_moments_are_stable(ranks: Ranks) -> None:
    found = ranks.run(length_of_warm_up)
    assert found[0] == found[1] and found[0][0] == found[0][1] > 0


# --- bytes ------------------------------------------------------------------------------------------------------------


def sent(stage: int, compresses: bool) -> int:
    """Bytes of the reductions of two matrices in a step, per rank."""
    layers = [nn.Linear(256, 384, bias=False), nn.Linear(384, 256, bias=False)]
    model = zgraph.shard(nn.Sequential(*layers), zero_stage=stage, reduce_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept = Keep()
    method = P.SignMomentum(warmup=1) if compresses else None
    options: dict[str, Any] = {"lowering": "fx", "passes": [*P.presets.default(compression=method), kept]}

    @zgraph.training_step(model, optimizer, options=options)
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.randn(2, 256))
    found = [one for one in transfers(kept.kept["step"].graph) if one.parameters]
    return sum(one.sent_bytes for one in found if stage == 0 or not one.kind.startswith("all_gather"))


@worlds(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_bytes(ranks: Ranks, stage: int) -> None:
    """18 bytes for 128 elements, to each other rank and, if each needs the mean, from it."""
    (signs, *_), (bf16, *_) = ranks.run(sent, stage, True), ranks.run(sent, stage, False)
    ways = 2 if stage == 0 else 1
    assert signs == ways * 2 * 256 * 384 // 2 // 128 * 18
    assert bf16 == ways * 2 * 256 * 384 // 2 * 2
    assert signs / bf16 <= 0.09


# --- refusals ---------------------------------------------------------------------------------------------------------


def said_by(case: Case, *, captured: bool = True) -> str:
    training = Training(case)
    options: Any = {"passes": case.passes(), "lowering": "fx"}
    try:
        if captured:
            training.train(0, STEPS)
        else:
            torch.compile(training.model, backend="zgraph", options=options)(training.batches(0)[0]).backward()
    except Exception as error:
        return str(error)
    return ""


@worlds(2)
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(optimizer={"fused": False, "foreach": True}), "torch.optim.AdamW(..., fused=True)"),
        (Case(optimizer={"amsgrad": True}), "amsgrad=True"),
        (Case(scaled=True), "a GradScaler"),
        (Case(k=2), "interleave_micro_batches=True"),
        (Case(stage=0, k=2), "zgraph.no_sync(model)"),
        (Case(warmup="auto", shard={"offload": zgraph.Offload(optimizer="host")}), "such as warmup=1000"),
        (Case(warmup=1, beta1=0.8), "write SignMomentum(beta1=0.9)"),
    ],
)
def test_unsupported_loops_are_refused(ranks: Ranks, case: Case, said: str) -> None:
    assert all(said in found for found in ranks.run(said_by, case))


@worlds(2)
def test_plain_lines_are_refused(ranks: Ranks) -> None:
    assert all("@zgraph.training_step(" in found for found in ranks.run(plain_lines))


def plain_lines() -> str:
    return said_by(Case(), captured=False)


def test_options_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match=r"write SignMomentum\(warmup=3\)"):
        P.CompressGradients(method=P.SignMomentum(warmup=1), warmup_steps=3)
    with pytest.raises(ValueError, match="leave mean_codec out"):
        P.CompressGradients(method=P.SignMomentum(warmup=1), mean_codec=P.LoCo())
