"""Small training scripts that run as one graph and as the plain lines they are, to be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn, optim

import zgraph
from tests.support.combinations import off
from tests.support.resting import check_rests
from tests.support.whole_tensors import whole
from zgraph.codegen.cuda_graph import Recorder
from zgraph.driver.options import CompileOptions
from zgraph.step.training_step import TrainingStep

P = zgraph.passes
LR = 0.05
Groups = list[dict[str, Any]]


class Net(nn.Module):
    """Weights whose rows do not divide among the ranks, a scalar, and a branch that need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.side = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.gain
        return self.second(hidden) + self.side(hidden) if side else self.second(hidden)


@dataclass(frozen=True)
class Setting:
    """Of one comparison.

    Attributes:
        script: a class below, or a test's own.
        make: the optimizer, of two groups.
        preset: of the passes; the plain loop is compiled with the same, because graphs alone compress.
        close: compiled by Inductor, whose kernels round in another order.
        bound: how far results may be off then, in norms; 0.0: as torch.testing.assert_close has it for the dtype.
        recompiles: graphs that the captured step may need.
        target: plan by costs, on this target; None: by rules.
        frugal: plan as if for a budget of one byte, so that backward makes again whatever it can.
        more: passes behind those of the preset, for the captured step alone.
        recorder: makes what records the captured step on this device; None: nothing does.
        at_rest: where parameters and optimizer state rest of the captured step, whose plain loop has all on the device.
        activations: the captured step keeps all that backward needs on the host.
        started: the first step of both loops is a plain one. The captured step then finds the optimizer's state, and is
            compiled once instead of twice, which is most of what a comparison takes. No graph is replayed as a whole
            then: those of loops that are not started are, and hold the same passes.
    """

    script: type[Script]
    make: Callable[[Groups], optim.Optimizer]
    stage: int = 3
    steps: int = 6
    preset: dict[str, Any] = field(default_factory=dict[str, Any])
    close: bool = False
    bound: float = 0.0
    recompiles: int = 8
    target: zgraph.Target | None = None
    frugal: bool = False
    more: tuple[zgraph.GraphPass, ...] = ()
    recorder: Callable[[], Recorder] | None = None
    at_rest: zgraph.Offload | None = None
    activations: bool = False
    started: bool = False


@dataclass(frozen=True, kw_only=True)
class Frugal(P.ChooseLifetimes):
    """Plans as if for a budget of one byte, so that backward makes again whatever it can."""

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        return super().run(gm, replace(ctx, plan_bytes=1))


class Script:
    """Three lines of a loop; subclasses have other lines."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.model: Any = zgraph.shard(
            self.build(), zero_stage=setting.stage, offload=setting.at_rest, **self.sharded()
        )
        self.called: Any = self.model
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": LR / 2}]
        self.opt = setting.make(groups)
        self.prepare()

    def build(self) -> nn.Module:
        return Net()

    def sharded(self) -> dict[str, Any]:
        """Options of zgraph.shard."""
        return {}

    def prepare(self) -> None:
        """Make what else the script has."""

    def arguments(self, number: int) -> tuple[Any, ...]:
        return (torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())),)

    def loss(self, x: Tensor) -> Tensor:
        return (self.called(x) - x[:, :3]).square().mean()

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.detach()}

    def advance(self, number: int) -> None:
        """What the script does after each step, outside of it."""

    def optimizers(self) -> list[optim.Optimizer]:
        return [self.opt]

    def left(self) -> dict[str, Any]:
        """Everything that is there at the end."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            found[f"{name}.grad"] = parameter.grad
        for number, optimizer in enumerate(self.optimizers()):
            for place, entries in enumerate(optimizer.state.values()):
                found |= {f"{number}.{place}.{key}": value for key, value in entries.items()}
        return found


def compare(setting: Setting, notes: list[str] | None = None) -> list[str]:
    """Run a script both ways; the reasons of the graphs that the captured one needed, whose notes go to `notes`."""
    ours, report = _run(setting, captured=True)
    if notes is not None:
        notes += report.notes
    theirs, _ = _run(replace(setting, at_rest=None, activations=False), captured=False)
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        found = ours[name]
        assert type(found) is type(expected), name
        if not isinstance(expected, Tensor):
            assert found == expected, name
        elif setting.bound:
            assert off(whole(found), whole(expected), floor=1e-3) <= setting.bound, name
        elif setting.close:
            torch.testing.assert_close(
                whole(found), whole(expected), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert _equal(whole(found), whole(expected)), name
    return [graph.reason for graph in report.graphs]


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but any NaN equals any other."""
    nans = expected.isnan()
    return torch.equal(found.isnan(), nans) and torch.equal(found[~nans], expected[~nans])


def _run(setting: Setting, *, captured: bool) -> tuple[dict[str, Any], zgraph.Report]:
    script, report = setting.script(setting), zgraph.Report()
    passes: list[Any] = (P.presets.default if setting.target is None else P.presets.planned)(**setting.preset)
    passes = [replace(one, min_numel=8) if hasattr(one, "min_numel") else one for one in passes]
    if setting.frugal:
        passes = [Frugal() if isinstance(one, P.ChooseLifetimes) else one for one in passes]
    if setting.activations:
        place = next(number for number, one in enumerate(passes) if isinstance(one, P.ChooseLifetimes))
        passes.insert(place + 1, P.OffloadActivations(least_bytes=1))
    more = setting.more if captured else ()
    replays = dist.get_rank() == 0 and not setting.started
    pipeline = zgraph.PassList([*passes, *more], target=setting.target, replay_all=replays)
    options: dict[str, Any] = {"lowering": "inductor" if setting.close else "fx", "passes": pipeline}
    metrics: dict[str, Any] = {}

    def run(function: Any, numbers: range) -> None:
        for number in numbers:
            found = function(*script.arguments(number))
            metrics.update({f"{key} of step {number}": value for key, value in found.items()})
            script.advance(number)

    before = 1 if setting.started else 0
    run(script.step, range(before))  # as it is: what only graphs do, neither loop does yet
    function: Any = script.step
    if captured:
        function = _captured(setting, script, {**options, "report": report})
    elif setting.preset:
        script.called = torch.compile(script.model, backend="zgraph", options=options)
    run(function, range(before, setting.steps))
    if setting.at_rest is not None:
        check_rests(script.model, script.optimizers())
    return metrics | script.left(), report


def _captured(setting: Setting, script: Script, options: dict[str, Any]) -> Any:
    optimizers = script.optimizers()
    if setting.recorder is not None:
        parsed, recorder = CompileOptions.parse(options), setting.recorder()
        return TrainingStep(script.step, script.model, optimizers, parsed, setting.recompiles, recorder)
    given = optimizers if len(optimizers) > 1 else script.opt
    return zgraph.training_step(script.model, given, options=options, recompile_limit=setting.recompiles)(script.step)


def kinds(reasons: Sequence[str]) -> list[str]:
    """What a graph was made for, without the values."""
    return [reason.partition(":")[0] for reason in reasons]


def first_kinds(make: Any) -> list[str]:
    """Kinds of the graphs of a loop that begins without state, which SGD alone makes of its first gradients."""
    return ["", "state"] if make.__name__ == "sgd" else [""]
