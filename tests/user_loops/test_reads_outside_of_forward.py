"""Parameters that the loop, a criterion or a closure reads, past the forward of the model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import zgraph
from tests.support.ranks import Ranks
from tests.support.user_loops import Net, Refused, Run, adamw, both, ce, check, draw, rows
from zgraph.sharding.whole_read import WholeRead


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def weight_in_the_loss(run: Run) -> None:
    """The loss multiplies by a head's weight itself, as losses fused with the last layer do."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        outputs = run.call(x)
        loss = both(outputs, y) + F.cross_entropy(x @ full(run.model.enter.weight).T @ full(run.model.head.weight).T, y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def penalty_on_all(run: Run) -> None:
    """L2 by hand, in each micro-batch of a window."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        for last in (False, True):
            with run.no_sync(last):
                loss = both(run.call(x), y) + 0.01 * sum(full(one).square().sum() for one in run.model.parameters())
                loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def weight_alone(run: Run) -> None:
    """A loss of weights, without a forward of the model."""
    opt = adamw(run.model.parameters())
    for _, x, y in run.batches():
        opt.zero_grad()
        loss = ce(x @ full(run.model.enter.weight).T @ full(run.model.head.weight).T, y)
        loss.backward()
        opt.step()
        run.log_loss(loss)
        run.log_grads()


def penalty_of_dtensors(run: Run) -> None:
    """L2 by hand, as one writes it for the plain model."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y) + 0.01 * sum(one.square().sum() for one in run.model.parameters())
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def penalty_by_itself(run: Run) -> None:
    """A loss of weights, rows of them and a plain mask, with a backward of its own, before or after a batch's."""
    model, opt = run.model, torch.optim.SGD(run.model.parameters(), lr=0.05)
    for step, x, y in run.batches():
        opt.zero_grad()
        for is_penalty in (step % 2 == 0, step % 2 == 1):
            if is_penalty:
                mask = torch.arange(model.enter.weight.shape[1]) > 1
                penalty = model.head.weight[[0, 2]].square().sum() + (model.enter.weight * mask).square().sum()
                penalty.backward()
            else:
                loss = both(run.call(x), y)
                loss.backward()
                run.log_loss(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        run.log_grads()


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.temperature, y)


def criterion_with_parameters(run: Run) -> None:
    """A trained loss that is not sharded."""
    _train_with(run, Tempered())


def sharded_criterion(run: Run) -> None:
    _train_with(run, zgraph.shard(Tempered(), zero_stage=run.stage) if run.stage is not None else Tempered())


def _train_with(run: Run, criterion: nn.Module) -> None:
    opt = adamw([*run.model.parameters(), *criterion.parameters()], weight_decay=0.0)

    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = criterion(run.call(x)[0], y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)
    run.log("temperature", next(criterion.parameters()))


LOOPS = {
    loop.__name__: loop
    for loop in (
        weight_in_the_loss,
        penalty_on_all,
        penalty_of_dtensors,
        penalty_by_itself,
        weight_alone,
        criterion_with_parameters,
        sharded_criterion,
    )
}
REFUSED: Refused = {
    ("criterion_with_parameters", mode): "steps a parameter [] that is not sharded, together with sharded ones"
    for mode in ("eager", "fx", "inductor")
} | {
    ("penalty_of_dtensors", mode): "Write parameter.full_tensor(), whose gradient is averaged over the ranks."
    for mode in ("eager", "fx", "inductor", "step")
}
TELLING = {("weight_in_the_loss", "fx"): 3, ("weight_in_the_loss", "step"): 2}


@pytest.mark.parametrize(("name", "mode", "stages"), rows(LOOPS, TELLING))
def test_parameters_read_by_the_loop(ranks: Ranks, name: str, mode: str, stages: tuple[int, ...]) -> None:
    check(ranks, LOOPS[name], mode, stages, REFUSED)


def refusal_of(action: Any) -> str:
    with pytest.raises(zgraph.ZgraphError) as caught:
        action()
    return str(caught.value)


class Closed(nn.Module):
    """Its activation holds the parameter that it had when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 3)
        self.gain = gain = nn.Parameter(torch.ones(3))
        self.scale = lambda h: h * gain

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.enter(x))


def train_closed(compiles: bool) -> str:
    model = zgraph.shard(Closed())
    call = torch.compile(model, backend="zgraph", options={"lowering": "fx"}) if compiles else model
    return refusal_of(lambda: call(draw(1, 4, 5)).sum().backward())


@pytest.mark.parametrize("compiles", [False, True])
def test_parameters_replaced_by_shard_are_not_trained(ranks: Ranks, compiles: bool) -> None:
    for text in ranks.run(train_closed, compiles):
        assert "a gradient has reached the tensor that gain was before zgraph.shard" in text


def prune_after_shard() -> str:
    model = zgraph.shard(Net(), zero_stage=0)
    text = refusal_of(lambda: prune.l1_unstructured(model.head, "weight", 0.5))
    other = nn.Linear(2, 2)  # whose optimizer has nothing to do with that
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters()).step()
    return text


def test_pruning_comes_before_shard(ranks: Ranks) -> None:
    for text in ranks.run(prune_after_shard):
        assert "weight of a sharded Linear is about to become a tensor that is not a parameter" in text


def read_copies() -> None:
    model = zgraph.shard(Net())
    weight = model.head.weight.full_tensor()
    assert weight.requires_grad and torch.equal(weight, model.head.weight.detach().full_tensor())
    with torch.no_grad():
        assert not model.head.weight.full_tensor().requires_grad
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.add_(1)
    assert torch.equal(twin.head.weight.full_tensor(), weight + 1)
    alone = copy.deepcopy(model.head.weight)
    assert "write copy.detach().full_tensor()" in refusal_of(alone.full_tensor)
    assert torch.equal(alone.detach().full_tensor(), weight)
    read = pickle.loads(pickle.dumps(model.head.weight.full_tensor))
    assert "was made without its model" in refusal_of(read)
    model.float()  # swaps what parameters are, with their attributes
    assert isinstance(model.head.weight.full_tensor, WholeRead)
    saved = io.BytesIO()
    torch.save(dict(model.named_parameters()), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["head.weight"].detach().full_tensor(), weight)


def read_in_another_dtype() -> tuple[torch.dtype, torch.dtype | None]:
    model = zgraph.shard(Net(), param_dtype=torch.bfloat16)
    weight = model.head.weight.full_tensor()
    weight.sum().backward()
    assert torch.equal(weight, model.head.weight.detach().full_tensor())
    return weight.dtype, model.head.weight.grad.dtype


def test_bf16_model_is_read_in_its_parameters_dtype(ranks: Ranks) -> None:
    assert ranks.run(read_in_another_dtype) == [(torch.float32, torch.float32)] * 2


def test_copies_are_read_as_what_they_are(ranks: Ranks) -> None:
    ranks.run(read_copies)
