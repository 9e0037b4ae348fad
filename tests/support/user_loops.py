"""Training loops as users write them: each runs unchanged on the plain model and on a sharded one.

The truth is the plain model, which every rank trains on the batches of all ranks, joined; the loss is a mean over rows.
A sharded run has to log the same losses (as means over the ranks), gradients and parameters, or to end with an error
of zgraph's own, on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import zgraph
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole

FEATURES, WIDTH, CLASSES, ROWS = 5, 7, 3, 4
STEPS = 3
# Of the largest entry: a batch of all ranks' rows is summed in another order than theirs.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-11}  # by torch's default dtype
MODES = ("eager", "fx", "inductor", "step")

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual layer; the model has two equal ones, which share compiled graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    """Parts that loops call alone, two heads, a scalar parameter, and a number that loops change."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.other = nn.Linear(WIDTH, CLASSES)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.depth = 2
        self.fails = False

    def features(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        for number in range(self.depth):
            if self.fails and number == 1:
                raise ArithmeticError("not finite, says the user's check")
            h = self.blocks[number % 2](h)
        return h

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.head(h) * self.gain, self.other(h)


def draw(seed: int, *shape: int, classes: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if classes is not None:
        return torch.randint(classes, shape, generator=generator)
    return torch.randn(*shape, generator=generator)


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """With an epsilon that keeps rounding in gradients near zero as small as it is."""
    return torch.optim.AdamW(parameters, lr=1e-2, **{"eps": 1e-3, "foreach": False, **options})


def ce(outputs: tuple[Tensor, Tensor] | Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs[0], y)


def both(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], y) + F.cross_entropy(outputs[1], y)


@dataclass
class Log:
    """What a loop did, in the order in which it says so; of sharded tensors this rank's rows."""

    entries: list[tuple[str, Tensor | None]] = field(default_factory=list)

    def add(self, name: str, value: Tensor | None) -> None:
        if value is None:
            self.entries.append((name, None))
            return
        if isinstance(value, DTensor):
            value = DTensor.from_local(
                value.to_local().detach().double().clone(),
                value.device_mesh,
                value.placements,
                shape=value.shape,
                stride=value.stride(),
            )
        self.entries.append((name, value if isinstance(value, DTensor) else value.detach().double().clone()))


def rows_of(value: Tensor, like: Tensor) -> Tensor:
    """Those rows of a whole tensor that this rank has of `like`."""
    if not isinstance(like, DTensor):
        return value
    assert like.shape == value.shape
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            parts = value.chunk(like.device_mesh.size(axis), placement.dim)
            place = like.device_mesh.get_local_rank(axis)
            value = parts[place] if place < len(parts) else value.narrow(placement.dim, 0, 0)
    return value


class Run:
    """A model and what a loop needs to train it.

    Attributes:
        model: the plain model, or what `zgraph.shard` has returned.
        call: the model, compiled or not.
        ranks: whose batches this process trains on.
    """

    def __init__(
        self,
        mode: str,
        stage: int | None,
        options: dict[str, Any] | None = None,
        build: Callable[[], nn.Module] = Net,
    ) -> None:
        torch.manual_seed(3)
        self.mode, self.stage = mode, stage
        self.model: Any = build()
        self.is_sharded = stage is not None
        self.ranks = [dist.get_rank()] if self.is_sharded else list(range(dist.get_world_size()))
        if stage is not None:
            self.model = zgraph.shard(self.model, zero_stage=stage, **(options or {}))
        self.call: Any = self.compiled(self.model)
        self.logged = Log()

    def shard_again(self) -> None:
        if self.stage is not None:
            zgraph.shard(self.model, zero_stage=self.stage)

    def compiled(self, function: Any) -> Any:
        """A module or function as the loop calls it: compiled, where the run's mode is to compile forwards."""
        if self.is_sharded and self.mode == "fx":
            return with_fx(function)
        if self.is_sharded and self.mode == "inductor":
            return torch.compile(function, backend="zgraph")
        return function

    def step(self, optimizers: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator of a function that does a whole step, captured where the run's mode is "step"."""
        if self.is_sharded and self.mode == "step":
            return zgraph.training_step(self.model, optimizers, options={"lowering": "fx"})
        return lambda function: function

    def no_sync(self, last: bool = False) -> AbstractContextManager[None]:
        return zgraph.no_sync(self.model) if self.is_sharded and not last else contextlib.nullcontext()

    def batch(self, number: int, rows: int = ROWS) -> Batch:
        seeds = [1000 * number + rank for rank in self.ranks]
        return (
            torch.cat([draw(seed, rows, FEATURES) for seed in seeds]),
            torch.cat([draw(seed + 500, rows, classes=CLASSES) for seed in seeds]),
        )

    def batches(self, steps: int = STEPS, rows: int = ROWS) -> Iterator[tuple[int, Tensor, Tensor]]:
        for number in range(steps):
            yield number, *self.batch(number, rows)

    def each_batch(self, train: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Steps of a function that leaves the gradients, and returns the loss."""
        for _, x, y in self.batches():
            self.log_loss(train(x, y))
            self.log_grads()

    def log_loss(self, loss: Tensor) -> None:
        """A mean over this process's rows, of which that over the ranks is logged."""
        value = whole(loss.detach()).double().reshape(1).clone()
        if self.is_sharded:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.logged.add("loss", value)

    def log_grads(self, model: nn.Module | None = None) -> None:
        for name, parameter in (model or self.model).named_parameters():
            self.logged.add(f"gradient of {name}", parameter.grad)

    def log(self, name: str, value: Tensor | None) -> None:
        """A value that is the same on all ranks, or sharded."""
        self.logged.add(name, value)

    def finish(self) -> Log:
        for name, parameter in self.model.named_parameters():
            self.logged.add(f"parameter {name}", parameter)
        return self.logged


Loop = Callable[[Run], None]


def follow(loop: Loop, mode: str, stage: int | None, build: Callable[[], nn.Module] = Net) -> Log:
    run = Run(mode, stage, build=build)
    loop(run)
    return run.finish()


def difference(found: Log, expected: Log, zeros: bool = False) -> str:
    """The first and the worst of what differs; empty if nothing does.

    Args:
        zeros: where the truth has no gradient, zeros are right as well: a compiled graph gives them to what only an
            output needs that the loss does not use.
    """
    names, wanted = ([name for name, _ in log.entries] for log in (found, expected))
    if names != wanted:
        return f"logged {names}, not {wanted}"
    texts: list[tuple[float, str]] = []
    # Summands of a single number may cancel in one step: it is compared with the largest that it is in any step.
    numbers: dict[str, float] = {}
    for name, truth in expected.entries:
        if truth is not None and truth.numel() == 1:
            numbers[name] = max(numbers.get(name, 0.0), truth.abs().item())
    for place, ((name, value), (_, truth)) in enumerate(zip(found.entries, expected.entries, strict=True)):
        if value is None or truth is None:
            if value is not truth and not (zeros and truth is None and not value.any()):
                texts.append((float("inf"), f"{place}: {name} is {value}, not {truth}"))
            continue
        rows, mine = rows_of(truth, value), value.to_local() if isinstance(value, DTensor) else value
        if mine.shape != rows.shape:
            texts.append((float("inf"), f"{place}: {name} is {list(mine.shape)}, not {list(rows.shape)}"))
            continue
        largest = numbers.get(name) or truth.abs().max().item()
        off = (mine - rows).abs().max().item() / (largest + 1e-6) if mine.numel() else 0.0
        if not off <= TOLERANCES[torch.get_default_dtype()]:
            texts.append((off, f"{place}: {name} is {off:.1e} off"))
    if not texts:
        return ""
    worst = max(texts, key=lambda text: text[0])[1]
    return f"{len(texts)} of {len(names)} wrong; first {texts[0][1]}; worst {worst}"


def verdict(
    loop: Loop,
    mode: str,
    stage: int,
    zeros: bool = False,
    build: Callable[[], nn.Module] = Net,
    expected: Log | None = None,
) -> tuple[str, str]:
    """ "right", "wrong", "refused" or "error", and why.

    Args:
        expected: what the plain model does, where that is known.
    """
    if expected is None:
        expected = follow(loop, "eager", None, build)
    if mode != "eager":
        torch.compiler.reset()
    try:
        found = follow(loop, mode, stage, build)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        own = isinstance(error, zgraph.ZgraphError | ValueError) and str(error).startswith("zgraph")
        return ("refused" if own and not isinstance(error, zgraph.CollectiveError) else "error"), text
    text = difference(found, expected, zeros)
    return ("wrong" if text else "right"), text


def check_right(build: Callable[[], nn.Module], loop: Loop, mode: str, stage: int) -> None:
    """Check that a loop over a model of one's own does with shards as without."""
    kind, text = verdict(loop, mode, stage, build=build)
    assert kind == "right", f"{kind}: {text}"


def refusal(run: Callable[[], object]) -> str:
    """The text of the error of zgraph's own that a call ends with.

    Raises:
        AssertionError: it ends without one.
    """
    try:
        run()
    except (zgraph.ZgraphError, ValueError) as error:
        assert str(error).startswith("zgraph"), error
        return str(error)
    raise AssertionError("nothing was refused")


def judged(loop: Loop, mode: str, stages: tuple[int, ...], refused: dict[int, str]) -> int:
    """Run a loop at these stages on this rank; how many were right.

    Raises:
        AssertionError: one is neither right nor refused as said. Ranks are then started anew, whose groups may be left
            in disorder.
    """
    right = 0
    expected = follow(loop, "eager", None)
    for stage in stages:
        kind, text = verdict(loop, mode, stage, zeros=mode in ("fx", "inductor"), expected=expected)
        if stage in refused:
            assert kind in ("refused", "error") and refused[stage] in text, f"stage {stage}: {kind}: {text}"
        else:
            assert kind == "right", f"stage {stage}: {kind}: {text}"
            right += 1
    return right


Refused = dict[tuple[str, str], str | dict[int, str]]


def _refused(refused: Refused, name: str, mode: str) -> dict[int, str]:
    text = refused.get((name, mode), {})
    return dict.fromkeys(range(4), text) if isinstance(text, str) else text


def check(ranks: Ranks, loop: Loop, mode: str, stages: tuple[int, ...], refused: Refused) -> None:
    texts = _refused(refused, loop.__name__, mode)
    right = sum(stage not in texts for stage in stages)
    assert ranks.run(judged, loop, mode, stages, texts) == [right] * ranks.world


def has_a_step(loop: Loop) -> bool:
    """Whether it has a function that does a whole step, which `zgraph.training_step` may capture."""
    return "run.step(" in inspect.getsource(loop)


def rows(
    loops: dict[str, Loop], telling: dict[tuple[str, str], int], wrong: dict[tuple[str, str, int], str] | None = None
) -> list[Any]:
    """Return rows of (name, mode, stages): two stages at once without a compiler, one row for each compiled stage.

    A graph takes seconds, and stages differ only in the collectives, which the runs without a compiler cross with
    every loop. So of the compiled rows one stage, which changes from loop to loop, is not long.

    Args:
        telling: another stage that is not long, by loop and mode.
        wrong: why a row is known to fail.
    """
    found: list[Any] = []
    for place, (name, loop) in enumerate(loops.items()):
        first, second = ((1, 3), (0, 2))[:: 1 - 2 * (place % 2)]
        found += [pytest.param(name, "eager", first), pytest.param(name, "eager", second)]
        for mode in ("fx", *(["step"] if has_a_step(loop) else [])):
            known = telling.get((name, mode))
            in_turn = place % 4 if place % 4 != known else (place + 1) % 4
            for stage in range(4):
                marks = [] if stage in (known, in_turn) else [pytest.mark.long]
                if (name, mode, stage) in (wrong or {}):
                    marks.append(pytest.mark.xfail(strict=True, reason=(wrong or {})[name, mode, stage]))
                found.append(pytest.param(name, mode, (stage,), marks=marks))
        found.append(pytest.param(name, "inductor", (place % 4,), marks=pytest.mark.long))
    return found


def copied(parameters: Any) -> list[Tensor]:
    return [copy.deepcopy(parameter.detach()) for parameter in parameters]
