"""Modules that ranks may skip: the bits of the loop in which a rank that skips one adds zeros, and clear refusals."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, fresh_ranks, worlds
from tests.support.skipped_modules import Net, Tower
from zgraph.errors import AgreementError, CollectiveError, ZgraphError
from zgraph.passes import presets
from zgraph.sharding.scope import state_of

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Loop:
    """How a user trains.

    Attributes:
        kind: "plain"; "parts": the tower is called before the model; "recomputed": in a checkpointed region; "frozen"
            in part; "scaled" by a GradScaler; "autocast"; "summed" gradients of two backwards; "window": three
            micro-batches, two of them under no_sync; "hybrid": two replicas.
        stage: of the rest of the model.
        dtype: param_dtype.
        lowering: "" does not compile.
        passes: "default", "planned" or "LoCo".
    """

    kind: str = "plain"
    stage: int = 3
    dtype: torch.dtype | None = None
    lowering: str = ""
    passes: str = "default"


Trained = tuple[list[list[Tensor | None]], list[Tensor]]


def options_of(loop: Loop) -> dict[str, Any]:
    if loop.passes == "planned":
        target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"))
        return {"lowering": loop.lowering, "passes": zgraph.PassList(presets.planned(), target=target)}
    return {"lowering": loop.lowering}


def trained(loop: Loop, *, skips: bool, steps: int = 6) -> Trained:
    """Gradients of each step, and the parameters after the last one; ranks without an image skip, or add zeros."""
    torch.compiler.reset()
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Net()
    model.recomputes = loop.kind == "recomputed"
    model.tower.enter.requires_grad_(loop.kind != "frozen")
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")) if loop.kind == "hybrid" else None
    optional = [model.tower] if skips else []
    zgraph.shard(model, mesh, zero_stage=loop.stage, param_dtype=loop.dtype, optional=optional)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compiled: Callable[[Any], Any] = lambda part: part  # noqa: E731
    if loop.lowering:
        compiled = lambda part: torch.compile(part, backend="zgraph", options=options_of(loop))  # noqa: E731
    run, tower = compiled(model), compiled(model.tower)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=loop.kind == "scaled")
    draw, found = random.Random(1), []
    micro_batches = {"window": 3, "summed": 2}.get(loop.kind, 1)
    for step in range(steps):
        for number in range(micro_batches):
            have = [draw.random() < 0.4 for _ in range(world)]
            runs = have[rank] if skips else any(have) or loop.kind == "window"
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            text, image = torch.randn(2, 4, generator=generator), torch.randn(2, 6, generator=generator)
            share = torch.tensor(float(have[rank])) if runs and not skips else None
            waits = loop.kind == "window" and number < 2
            with (
                zgraph.no_sync(model) if waits else contextlib.nullcontext(),
                torch.autocast("cpu", BF16, enabled=loop.kind == "autocast"),
            ):
                if loop.kind == "parts":
                    loss = run(text, None, share, tower(image) if runs else None)
                else:
                    loss = run(text, image if runs else None, share)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads: list[Any] = [parameter.grad for parameter in model.parameters()]
        found.append([None if grad is None else grad.full_tensor().clone() for grad in grads])
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)  # a norm of other shards is rounded otherwise
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    held: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return found, [one.full_tensor() for one in held]


def compared(loop: Loop) -> None:
    """Every gradient of every step, and which are None, as if ranks without an image had added zeros."""
    (grads, held), (others, expected) = trained(loop, skips=True), trained(loop, skips=False)
    for step, (ours, theirs) in enumerate(zip(grads, others, strict=True)):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert (one is None) == (other is None), (step, place)
            assert one is None or (other is not None and torch.equal(one, other)), (step, place)
    assert all(map(torch.equal, held, expected))


CASES = (
    Loop(stage=3, lowering="fx"),
    Loop("plain", 2, BF16, "fx", "planned"),
    Loop("parts", 3, None, "fx"),
    Loop("parts", 1, None),
    Loop("recomputed", 3, BF16, "fx"),
    Loop("recomputed", 2),
    Loop("frozen", 1, BF16, "fx"),
    Loop("scaled", 2, FP16),
    Loop("autocast", 0, None, "fx"),
    Loop("autocast", 3),
    Loop("summed", 1, None, "fx"),
    Loop("summed", 3, BF16),
    Loop("window", 0, BF16, "fx"),  # stages 2 and 3 reduce each micro-batch, and round in another order
    Loop("window", 1),
)


@worlds(3)
@pytest.mark.parametrize("loop", CASES, ids=str)
def test_a_rank_that_skips_a_module_adds_zeros(ranks: Ranks, loop: Loop) -> None:
    ranks.run(compared, loop)


@worlds(4)
@pytest.mark.parametrize("loop", [Loop("hybrid", 3, BF16, "fx"), *long(Loop("hybrid", 1))], ids=str)
def test_replicas_skip_modules(ranks: Ranks, loop: Loop) -> None:
    ranks.run(compared, loop)


def compared_by_inductor() -> None:
    """Inductor rounds the other graph of the loop with zeros otherwise, so the truth is the same loop not compiled."""
    loop = Loop(lowering="inductor")
    (grads, _), (others, _) = (
        trained(loop, skips=True, steps=3),
        trained(replace(loop, lowering=""), skips=True, steps=3),
    )
    for ours, theirs in zip(grads, others, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (other is not None and torch.allclose(one, other, rtol=1e-4, atol=1e-6))


@pytest.mark.long  # a C++ compiler takes seconds for each graph
def test_inductor_compiles_each_rank_its_own_graphs(ranks: Ranks) -> None:
    ranks.run(compared_by_inductor)


# --- loops of users -----------------------------------------------------------------------------------------------


class Run:
    """A model, and whether this rank skips its tower, or adds zeros; rank 0 has images in the first micro-batch."""

    def __init__(self, *, skips: bool, compiles: bool, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.skips, self.model = skips, Net()
        self.tower = self.model.tower
        zgraph.shard(self.model, optional=[self.tower] if skips else [], **options)
        made: Any = torch.compile(self.model, backend="zgraph", options={"lowering": "fx"}) if compiles else self.model
        self.called = made
        self.number = 0

    def loss(self, ranks: tuple[int, ...]) -> Tensor:
        """Of the next micro-batch, of which these ranks have an image."""
        self.number += 1
        has = dist.get_rank() in ranks
        generator = torch.Generator().manual_seed(10 * self.number + dist.get_rank())
        text, image = torch.randn(2, 4, generator=generator), torch.randn(2, 6, generator=generator)
        share = None if self.skips else torch.tensor(float(has))
        return self.called(text, image if has or not self.skips else None, share)

    def penalty(self) -> Tensor:
        weight: Any = self.tower.enter.weight
        return 0.01 * weight.full_tensor().square().sum()


def penalized(run: Run) -> None:
    (run.loss((0,)) + run.penalty()).backward()


def penalized_on_a_rank(run: Run) -> None:
    loss = run.loss((0,))
    if run.skips and dist.get_rank() == 0:
        loss = loss + run.penalty()
    elif not run.skips:
        loss = loss + run.penalty() * (dist.get_rank() == 0)
    loss.backward()


def cleared_in_a_window(run: Run) -> None:
    """Stage 3 does not wait for a window, so the loop with zeros clears all that it has, too."""
    run.loss((0, 1)).backward()
    with zgraph.no_sync(run.model):
        run.loss((0,)).backward()
    run.model.zero_grad(set_to_none=False)
    run.loss((1,)).backward()


def one_rank_never_sees(run: Run) -> None:
    with zgraph.no_sync(run.model):
        run.loss((0,)).backward()
    run.loss((0,)).backward()
    run.model.zero_grad()
    run.loss((0,)).backward()


def two_forwards_and_one_backward(run: Run) -> None:
    (run.loss((0,)) + run.loss((1,))).backward()


def stepped_by_a_closure(run: Run) -> None:
    def closure() -> Tensor:
        loss = run.loss((0,))
        run.model.zero_grad()
        loss.backward()
        return loss

    torch.optim.SGD(run.model.parameters(), lr=0.1).step(closure)


LOOPS = (
    *((penalized, stage, compiles, None) for stage, compiles in ((3, False), (1, True))),
    (penalized_on_a_rank, 3, False, None),
    (cleared_in_a_window, 3, False, None),
    (one_rank_never_sees, 3, True, BF16),
    (one_rank_never_sees, 3, False, BF16),
    (two_forwards_and_one_backward, 2, False, BF16),
    (stepped_by_a_closure, 3, False, None),
)


def loop_compared(loop: Callable[[Run], None], stage: int, compiles: bool, dtype: torch.dtype | None) -> None:
    found: list[list[Any]] = []
    for skips in (True, False):
        run = Run(skips=skips, compiles=compiles, zero_stage=stage, param_dtype=dtype)
        loop(run)
        grads: list[Any] = [parameter.grad for parameter in run.model.parameters()]
        found.append([None if grad is None else grad.full_tensor() for grad in grads])
    # Where the weight is sharded, the penalty's gradient is reduced separately, and added to a mean.
    same = torch.allclose if loop is penalized else torch.equal
    for place, (one, other) in enumerate(zip(*found, strict=True)):
        assert (one is None) == (other is None), place
        assert one is None or same(one, other), place


@pytest.mark.parametrize(("loop", "stage", "compiles", "dtype"), LOOPS)
def test_loops_of_users(
    ranks: Ranks, loop: Callable[[Run], None], stage: int, compiles: bool, dtype: torch.dtype | None
) -> None:
    ranks.run(loop_compared, loop, stage, compiles, dtype)


# --- windows, copies, hooks -------------------------------------------------------------------------------------------


def batch(runs: bool) -> tuple[Any, ...]:
    return torch.randn(2, 4), torch.randn(2, 6) if runs else None, None


def sharded(**options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    zgraph.shard(model, optional=[model.tower], **options)
    torch.manual_seed(dist.get_rank())
    return model


def reduced(model: nn.Module) -> list[Tensor]:
    """The tower's gradients, which must be on every rank, and equal."""
    found: list[Any] = [parameter.grad for parameter in model.get_submodule("tower.enter").parameters()]
    for grad in found:
        every = [torch.empty_like(grad.to_local()) for _ in range(dist.get_world_size())]
        dist.all_gather(every, grad.to_local())
        assert every[0].any() and all(torch.equal(every[0], other) for other in every)
    return found


def train_copies() -> None:
    """Parameters that came after the call of `shard`: from materialize, a copy, and a state dict."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with torch.device("meta"):
        empty = Net()
    zgraph.shard(empty, optional=[empty.tower])
    zgraph.materialize(empty)
    assigned = sharded()
    assigned.load_state_dict(assigned.state_dict(), assign=True)
    for model in (empty, assigned, copy.deepcopy(sharded())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(*batch(last)).backward()
        reduced(model)
        optimizer.step()


def train_compiled_copies() -> None:
    model = sharded()
    for each in (model, copy.deepcopy(model)):
        compiled: Any = torch.compile(each, backend="zgraph", options={"lowering": "fx"})
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        compiled(*batch(dist.get_rank() == 0)).backward()
        reduced(each)
        optimizer.step()


def train_reentrant_regions() -> None:
    """The region of a reentrant checkpoint runs a backward within the backward."""
    model: Any = Net()
    zgraph.shard(model, optional=[model.tower])
    image = torch.randn(2, 6, requires_grad=True)
    seen = checkpoint(model.tower, image, use_reentrant=True) if dist.get_rank() == 0 else None
    model(torch.randn(2, 4), None, None, seen).backward()
    reduced(model)


def train_part_by_part() -> None:
    """A part that was sharded first, and has a module to skip."""
    model: Any = Net()
    zgraph.shard(model.tower, optional=[model.tower.enter])
    zgraph.shard(model)
    assert len(state_of(model).scope.optional) == 1  # pyright: ignore[reportOptionalMemberAccess]
    model(*batch(True)).backward()
    reduced(model)


def hooked_before_materialize() -> None:
    """torch moves a tensor to another device without the hooks that run on it."""
    with torch.device("meta"):
        model: Any = zgraph.shard(nn.Linear(4, 4))
    calls: list[Any] = []
    model.weight.register_post_accumulate_grad_hook(calls.append)
    zgraph.materialize(model)
    model(torch.ones(2, 4)).sum().backward()
    assert calls == [model.weight]


def train_where_none_runs() -> None:
    """No gradient, no state of the optimizer, and one small message; else one exchange for all parameters."""
    model: Any = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    counter = state_of(model).scope.models[0].exchanges  # pyright: ignore[reportOptionalMemberAccess]
    counts: list[int] = []
    for runs in (False, dist.get_rank() == 0):
        before = counter.count
        model(*batch(runs)).backward()
        counts.append(counter.count - before)
        grads = [parameter.grad is not None for parameter in model.tower.parameters()]
        assert grads == [runs or any(counts[1:])] * 6 + [False] * 2
        optimizer.step()
        states = [bool(optimizer.state.get(parameter)) for parameter in model.tower.parameters()]
        assert states == grads
        optimizer.zero_grad()
    assert counts[1] == counts[0] + 2, counts  # a reduction has two exchanges: pieces, then means


@pytest.mark.parametrize(
    "function",
    [
        train_copies,
        train_compiled_copies,
        train_reentrant_regions,
        train_part_by_part,
        hooked_before_materialize,
        train_where_none_runs,
    ],
)
def test_what_is_around_optional_modules(ranks: Ranks, function: Callable[[], None]) -> None:
    ranks.run(function)


# --- refusals ---------------------------------------------------------------------------------------------------------


def hook(model: Any, last: bool) -> None:
    model.tower.enter.weight.register_hook(lambda grad: grad * 0.5)
    model(*batch(last)).backward()


def accumulate_hook(model: Any, last: bool) -> None:
    model.tower.enter.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model(*batch(last)).backward()


def grad(model: Any, last: bool) -> None:
    torch.autograd.grad(model(*batch(True)), list(model.tower.enter.parameters()))


def open_window(model: Any, last: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zgraph.no_sync(model):
        model(*batch(last)).backward()
    optimizer.step()


def edited_in_a_window(model: Any, last: bool) -> None:
    """Only the rank with a waiting gradient sees that another one, from before the window, was changed with it."""
    model(*batch(True)).backward()
    with zgraph.no_sync(model):
        model(*batch(last)).backward()
    for parameter in model.tower.enter.parameters():
        parameter.grad.mul_(0.5)
    model(*batch(not last)).backward()


def open_window_in_a_closure(model: Any, last: bool) -> None:
    def closure() -> Tensor:
        with zgraph.no_sync(model):
            loss = model(*batch(last))
        loss.backward()
        return loss

    torch.optim.SGD(model.parameters(), lr=0.1).step(closure)


def other_backward(model: Any, last: bool) -> None:
    """One rank trains the tower, and the others the rest."""
    (model.tower(torch.randn(2, 6)) if last else model(*batch(False))).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def stage_of_a_pipeline(model: Any, last: bool) -> None:
    zgraph.PipelineStage(model, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


REFUSALS = (
    (hook, "tower.enter.weight is optional and has a gradient hook"),
    (accumulate_hook, "change .grad after backward"),
    (grad, "Call backward\\(\\), and read .grad"),
    (open_window, "Run the last micro-batch outside of no_sync"),
    (edited_in_a_window, "in place between the forwards of a window"),
    (open_window_in_a_closure, "Run the last micro-batch outside of no_sync"),
    (other_backward, "do not do the same"),
    (stage_of_a_pipeline, "leave optional out of zgraph.shard"),
)


def refuse_all() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    for loop, text in REFUSALS:
        with pytest.raises((AgreementError, ZgraphError, ValueError), match=text):
            loop(sharded(), last)


def refuse_options() -> None:
    model = Net()
    with pytest.raises(ValueError, match="names the model itself"):
        zgraph.shard(model, optional=[model])
    with pytest.raises(ValueError, match="names Tower; name modules inside"):
        zgraph.shard(model, optional=[Tower()])
    with pytest.raises(ValueError, match="in units or in optional"):
        zgraph.shard(model, units=[Tower], optional=[model.tower])
    with pytest.raises(ValueError, match="leave them out of ignored"):
        zgraph.shard(model, ignored=[model.tower.norm], optional=[model.tower])
    with pytest.raises(ValueError, match="offloaded parameters"):
        zgraph.shard(model, offload=zgraph.Offload(params="host"), optional=[model.tower])


def test_refusals_name_the_line_to_write(ranks: Ranks) -> None:
    ranks.run(refuse_options)
    ranks.run(refuse_all)


def train_until_one_dies(steps: int, dies_at: int) -> str:
    """Random masks until a rank is gone; the step in which the others get an error."""
    model, rank, draw = sharded(), dist.get_rank(), random.Random(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        runs = [draw.random() < 0.3 for _ in range(dist.get_world_size())][rank]
        try:
            loss = model(*batch(runs))
            if rank == 1 and step == dies_at:
                os._exit(1)
            loss.backward()
            optimizer.step()
        except CollectiveError:
            return f"an error in step {step}"
        optimizer.zero_grad()
    return "ended"


def test_a_thousand_masks_and_a_rank_that_dies() -> None:
    with fresh_ranks(3) as ranks:
        first, died, last = ranks.outcomes(train_until_one_dies, 1000, 700)
        assert died == (False, "died")
        assert first == last == (True, "an error in step 700"), (first, last)
