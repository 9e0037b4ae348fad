"""Training loops that run as one graph and as the plain lines they are, to be compared bit for bit."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support import models
from tests.support.resting import check_rests
from tests.support.step_scripts import Frugal
from tests.support.whole_tensors import kind_of, whole

P = zgraph.passes
BATCH, LENGTH = 2, 7
STEPS = 3
H100 = zgraph.Hardware.preset("h100")
LR = 1e-2

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=LR, momentum=0.9, weight_decay=0.1),
    "sgd_foreach": lambda given: torch.optim.SGD(given, lr=LR, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda given: torch.optim.Adam(given, lr=LR, amsgrad=True),
    "adamw_foreach": lambda given: torch.optim.AdamW(given, lr=LR, foreach=True),
    "adamw_fused": lambda given: torch.optim.AdamW(given, lr=LR, fused=True),
    "adamw_8bit": lambda given: zgraph.AdamW8bit(given, lr=LR, weight_decay=0.1),
    "adam_fused": lambda given: torch.optim.Adam(given, lr=LR, weight_decay=0.1, maximize=True, fused=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=LR, lr_decay=0.1),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=LR, momentum=0.9, centered=True),
    "adamax": lambda given: torch.optim.Adamax(given, lr=LR),
    "adadelta": lambda given: torch.optim.Adadelta(given, lr=LR),
}


@dataclass(frozen=True, kw_only=True)
class Chosen(P.OffloadActivations):
    """Offloads what was chosen, as under a budget."""

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        return super().run(gm, replace(ctx, plan_bytes=1))


@dataclass(frozen=True)
class Case:
    """One training loop."""

    stage: int = 3
    optimizer: str = "adamw_fused"
    clip: str = "none"  # "torch", "zgraph"
    accumulation: int = 1
    no_sync: bool = False
    precision: str = "fp32"  # "bf16", "autocast", "bf16 weights"
    width: int = 10
    loco: bool = False
    reset_every: int = P.LoCo().reset_every
    dropout: float = 0.0
    schedule: bool = False
    frozen: bool = False
    zero_first: bool = False
    compiled: bool = False
    resume: bool = False
    on_shards: bool = False  # the plain loop's optimizer steps on local shards
    checkpointed: bool = False
    lowering: str = "fx"
    planned: bool = False  # by costs
    hardware: zgraph.Hardware = H100  # whose
    frugal: bool = False  # by costs, under a budget that nothing fits
    offload: bool = False  # every activation; if frugal what costs choose
    at_rest: zgraph.Offload | None = None  # of parameters and optimizer state
    streamed: bool = False  # updates of what rests on the host run on copies, which are read well ahead
    gated: bool = False  # a model of which backward can compute much again at no cost
    sites: int = 1  # each of which shards the model over its own ranks
    started: bool = False  # the first step is a plain one: the captured one finds the state, and is compiled once

    @property
    def is_checked(self) -> bool:
        """Whether the captured step is compared with its lines in its first calls, too, which then run under fx."""
        return not self.loco and self.at_rest is None and self.lowering == "fx"

    def options(self) -> dict[str, Any]:
        method = P.LoCo(reset_every=self.reset_every)
        compression = P.CompressGradients(method=method, min_numel=64) if self.loco else None
        has_costs = self.frugal or self.planned
        # Interleaved micro-batches sum gradients in another order than the plain lines.
        preset = P.presets.planned if has_costs else P.presets.default
        passes = preset(bucket_bytes=4096, interleave_micro_batches=False)
        if self.frugal:
            frugal = Frugal(offload_least_bytes=1 if self.offload else None)
            passes = [frugal if isinstance(one, P.ChooseLifetimes) else one for one in passes]
        if self.offload:
            place = next(i for i, one in enumerate(passes) if isinstance(one, P.ChooseLifetimes))
            passes.insert(place + 1, Chosen() if self.frugal else P.OffloadActivations(least_bytes=1))
        if self.gated:
            free = P.RecomputeActivations(least_bytes=0)
            passes = [free if isinstance(one, P.RecomputeActivations) else one for one in passes]
        if self.streamed:
            streamed = P.StreamStates(updates="streamed", prefetch=4)
            passes = [streamed if isinstance(one, P.StreamStates) else one for one in passes]
        if compression is not None:
            place = next(i for i, one in enumerate(passes) if isinstance(one, P.LowerReductions))
            passes.insert(place, compression)
        target = zgraph.Target(hardware=self.hardware) if has_costs else None
        return {
            "lowering": self.lowering,
            "passes": zgraph.PassList(passes, target=target, replay_all=dist.get_rank() == 0 and not self.started),
        }


class Loop:
    """A model, its optimizer, and one step of its loop; calls `after_step` after each, and `finish` after the last."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.after_step: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = lambda: None
        shape = (case.sites, dist.get_world_size() // case.sites)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("site", "dp"))
        torch.manual_seed(0)
        plain = models.Language(case.dropout, layers=1, width=case.width)
        model: Any = models.GatedLanguage(case.dropout) if case.gated else plain
        if case.precision == "bf16 weights":
            model.bfloat16()
        if case.frozen:
            model.blocks[0].qkv.weight.requires_grad_(False)
            model.embed.weight.requires_grad_(False)
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.precision == "bf16" else {}
        self.model = zgraph.shard(model, self.mesh["dp"], zero_stage=case.stage, offload=case.at_rest, **dtypes)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        others = [parameter for parameter in trained if parameter.ndim <= 1]
        self.optimizer = OPTIMIZERS[case.optimizer]([{"params": matrices}, {"params": others, "lr": LR / 2}])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9) if case.schedule else None

    def plain(self, options: dict[str, Any] | None = None) -> Callable[[Tensor, Tensor], Any]:
        """The loop body as anybody would write it; with options its model is compiled."""
        case, model, opt = self.case, self.model, self.optimizer
        called: Any = model if options is None else torch.compile(model, backend="zgraph", options=options)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
                logits: Any = checkpoint(called, x, use_reentrant=False) if case.checkpointed else called(x)
                return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

        def step(x: Tensor, y: Tensor) -> Any:
            if case.zero_first:
                opt.zero_grad()
            metrics: dict[str, Any] = {"loss": torch.zeros(()), "rows": x.shape[0]}
            for number, (inputs, targets) in enumerate(
                zip(x.chunk(case.accumulation), y.chunk(case.accumulation), strict=True)
            ):
                last = number == case.accumulation - 1
                waits = zgraph.no_sync(model) if case.no_sync and not last else contextlib.nullcontext()
                with waits:
                    loss = loss_of(inputs, targets) / case.accumulation
                    loss.backward()
                metrics["loss"] = metrics["loss"] + loss.detach()
            if case.clip != "none":
                clip = torch.nn.utils.clip_grad_norm_ if case.clip == "torch" else zgraph.clip_grad_norm_
                metrics["norm"] = clip([p for p in model.parameters() if p.requires_grad], 0.5)
            opt.step()
            if not case.zero_first:
                opt.zero_grad()
            return metrics

        return step

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        rows = BATCH * self.case.accumulation
        x, y = torch.randint(0, models.VOCABULARY, (2, rows, LENGTH), generator=generator)
        return x, y

    def advance(self) -> None:
        self.after_step()
        if self.scheduler is not None:
            self.scheduler.step()


@dataclass
class Outcome:
    """Everything a loop leaves behind."""

    metrics: list[dict[str, Any]]
    parameters: dict[str, Tensor]
    state: dict[str, Any]
    grads: dict[str, Tensor | None]
    random: Tensor
    graphs: int = 0
    notes: tuple[str, ...] = ()


def train(
    case: Case,
    *,
    whole_step: bool,
    steps: int = STEPS,
    prepare: Callable[[Loop], None] = lambda loop: None,
    finish: Callable[[Any], None] = lambda function: None,
) -> Outcome:
    """Run a loop; as one graph, or as the plain lines.

    Args:
        prepare: is given the loop before its first step.
        finish: is given the function behind the last one.
    """
    loop = Loop(case)
    prepare(loop)
    options = case.options()
    report = zgraph.Report()
    if whole_step:
        more = {"report": report, "check": case.is_checked}
        function: Any = zgraph.training_step(loop.model, loop.optimizer, options=options | more)(loop.plain())
    else:
        # Compression exists in compiled graphs alone.
        function = loop.plain(options if case.compiled or case.loco else None)
        if case.on_shards:
            zgraph.step_on_shards(loop.optimizer)
    torch.manual_seed(7 + dist.get_rank())
    metrics: list[dict[str, Any]] = []
    for number in range(steps):
        if case.resume and number == steps // 2:
            _reload(loop)
        found = (loop.plain() if case.started and number == 0 else function)(*loop.batch(number))
        metrics.append({key: _number(value) for key, value in found.items()})
        loop.advance()
    loop.finish()
    finish(function)
    if case.at_rest is not None:
        check_rests(loop.model, [loop.optimizer])
    return Outcome(
        metrics=metrics,
        parameters={name: whole(parameter.detach()) for name, parameter in loop.model.named_parameters()},
        state=_state_of(loop.optimizer),
        grads={
            name: None if parameter.grad is None else whole(parameter.grad)
            for name, parameter in loop.model.named_parameters()
        },
        random=torch.get_rng_state(),
        graphs=len(report.graphs),
        notes=tuple(report.notes),
    )


def _reload(loop: Loop) -> None:
    """Store model and optimizer, spoil them, and load them again."""
    stored = io.BytesIO()
    torch.save(loop.optimizer.state_dict(), stored)
    weights = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.5)
    for entries in loop.optimizer.state.values():
        for value in entries.values():
            value.add_(1)
    stored.seek(0)
    loop.model.load_state_dict(weights)
    loop.optimizer.load_state_dict(torch.load(stored, weights_only=False))


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        f"{number}.{key}": (kind_of(value), whole(value) if isinstance(value, Tensor) else value)
        for number, entries in enumerate(optimizer.state.values())
        for key, value in entries.items()
    }


def _number(value: Any) -> Any:
    return whole(value).item() if isinstance(value, Tensor) else value


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Equal bit for bit; a failure says what differs, in words: asserts of ranks do not show values."""
    assert len(found.metrics) == len(expected.metrics)
    assert list(found.state) == list(expected.state)
    differing = [
        f"{name} of step {step} is {ours.get(name)!r}, not {theirs.get(name)!r}"
        for step, (ours, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True))
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    ]
    others = {
        "parameters": [name for name, one in expected.parameters.items() if not _equal(found.parameters[name], one)],
        "entries of state": [
            name
            for name, (kind, value) in expected.state.items()
            if found.state[name][0] != kind or not _equal(found.state[name][1], value)
        ],
        "gradients": [name for name, one in expected.grads.items() if not _equal(found.grads[name], one)],
        "states of random numbers": [] if _equal(found.random, expected.random) else ["that of torch"],
    }
    differing += [f"{len(names)} {kind} differ, first {names[0]}" for kind, names in others.items() if names]
    assert not differing, "; ".join(differing)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)


def compare(case: Case) -> int:
    """Run a case both ways, the plain one on the device alone; the number of graphs that the captured one needed."""
    found = train(case, whole_step=True)
    assert_same(found, train(replace(case, at_rest=None, offload=False), whole_step=False))
    return found.graphs
