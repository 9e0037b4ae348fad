"""What a captured training step refuses, recompiles for, and leaves to the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.ranks import Ranks, worlds

OPTIONS = {"lowering": "fx"}
OUTSIDE = torch.full((3,), 2.0)


class Small(nn.Module):
    """Two layers, dropout that is off, and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.0)
        self.second = nn.Linear(6, 3)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.norm(self.first(x)))) * self.gain


def elsewhere() -> Tensor:
    return OUTSIDE


def made(stage: int = 3) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(3)
    model = zgraph.shard(Small(), zero_stage=stage)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(number: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


Body = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any]


def reads_a_value(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    loss = model(x).sum()
    loss.backward()
    return loss.item()


def decides_by_a_value(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    loss = model(x).sum()
    if loss > 3:
        loss = loss * 2
    loss.backward()


def reads_from_outside(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    (model(x) * elsewhere()).sum().backward()


def reads_the_optimizers_state(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    opt.step()
    return torch.stack([value for entries in opt.state.values() for value in entries.values()])


def reads_state_that_is_not_made(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    opt.step()
    return opt.state[next(model.parameters())]["exp_avg"].norm()


def clears_the_state(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    opt.state.clear()


def loads_a_state(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def puts_a_number_into_the_state(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    for parameter in model.parameters():
        opt.state[parameter]["norm"] = torch.zeros(2)


def steps_an_optimizer_of_its_own(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()


def steps_before_a_backward(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    first = model(x).sum()
    model(x).sum().backward()
    opt.step()
    first.backward()


def steps_with_a_closure(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    opt.step(lambda: 1.0)


def sets_the_learning_rate(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
    opt.param_groups[0]["lr"] = 0.01


def leaves_the_window_open(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    with zgraph.no_sync(model):
        model(x).sum().backward()


def steps_in_the_window(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    with zgraph.no_sync(model):
        model(x).sum().backward()
    opt.step()


def clips_in_the_window(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    with zgraph.no_sync(model):
        model(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model(x).sum().backward()
    opt.step()


def repeats_dropout(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    hidden: Any = checkpoint(lambda x: nn.functional.dropout(model(x), 0.5).sin(), x, use_reentrant=False)
    hidden.sum().backward()


def reduces_in_place(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    loss = model(x).sum()
    loss.backward()
    dist.all_reduce(loss.detach())


def has_dynamic_shapes(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x[x[:, 0].nonzero()[:, 0]]).sum().backward()


def clears_to_zeros(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    opt.zero_grad(set_to_none=False)


def changes_parameters_between_forwards(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Any:
    first = model(x).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    (first + model(x).sum()).backward()


def _loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    return loss.detach()


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "an object": lambda loss: SimpleNamespace(loss=loss, sizes=[1, 2]),
    "a dict's values": lambda loss: {"loss": loss}.values(),
    "a set": lambda loss: frozenset({(loss, 1)}),
    "text": lambda loss: f"loss {loss}",
    "a generator": lambda loss: (loss for _ in range(2)),
    "a closure": lambda loss: lambda: loss,
}

REFUSED: dict[str, tuple[Body, str]] = {
    "item": (reads_a_value, "test_step_refusals.py:"),
    "if": (decides_by_a_value, "in decides_by_a_value reads a tensor's value"),
    "outside": (reads_from_outside, "register it as a buffer"),
    "state": (reads_the_optimizers_state, "neither an argument"),
    "no state": (reads_state_that_is_not_made, "in reads_state_that_is_not_made reads or changes the state of SGD"),
    "clear": (clears_the_state, "in clears_the_state reads or changes the state of SGD"),
    "load": (loads_a_state, "binds another state to SGD, as load_state_dict does; do it outside the step"),
    "other tensor": (puts_a_number_into_the_state, 'puts a tensor into state["norm"] of SGD that is not placed like'),
    "own optimizer": (steps_an_optimizer_of_its_own, "steps an optimizer that it was not given, of class SGD"),
    "step between": (steps_before_a_backward, "between a forward that reads it and that forward's backward"),
    "closure": (steps_with_a_closure, "a closure"),
    "lr": (sets_the_learning_rate, "scheduler.step() outside"),
    "open window": (leaves_the_window_open, "ends while gradients from forwards under zgraph.no_sync"),
    "step in window": (steps_in_the_window, "ends while gradients from forwards under zgraph.no_sync"),
    "clip in window": (clips_in_the_window, "while the window of zgraph.no_sync is open"),
    "checkpointed dropout": (repeats_dropout, "draws random numbers in its backward"),
    "collective": (reduces_in_place, "the collective c10d"),
    "dynamic": (has_dynamic_shapes, "depends on the data"),
    "write": (changes_parameters_between_forwards, "call backward() first, then step"),
    "zeros": (clears_to_zeros, "set_to_none=False"),
}
for _name, _of in RETURNED.items():
    REFUSED[f"returns {_name}"] = (
        lambda model, opt, x, of=_of: of(_loss_of(model, x)),
        "that holds tensors, which a graph cannot make",
    )


def refused() -> dict[str, str]:
    """The error of each; and afterwards the model trains on as if nothing had been tried."""
    found: dict[str, str] = {}
    for name, (body, _) in REFUSED.items():
        model, opt = made(stage=0)
        before = dict(model.named_parameters())
        if name == "state":
            opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(batch()).sum().backward()
            opt.step()
            opt.zero_grad()
        step = zgraph.training_step(model, opt, options=OPTIONS)(lambda x, body=body, m=model, o=opt: body(m, o, x))
        try:
            step(batch())
        except zgraph.ZgraphError as error:
            found[name] = str(error)
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        assert opt.param_groups[0]["params"][0] is before["first.weight"]
        assert all(parameter.grad is None for parameter in model.parameters())
        model(batch()).sum().backward()
        opt.step()
    return found


@worlds(2)
def test_uncapturable_operations_are_refused(ranks: Ranks) -> None:
    for found in ranks.run(refused):
        assert {name: text for name, (_, text) in REFUSED.items() if text not in found.get(name, "not refused")} == {}


def recompiled() -> tuple[list[str], list[bool]]:
    """Reasons of the recompiles, and which parameters and buffers equal those of the plain loop at the end."""
    models: list[nn.Module] = []
    report = zgraph.Report()
    for captured in (True, False):
        model, opt = made()
        models.append(model)

        def step(x: Tensor, factor: float = 1.0, *, model: nn.Module = model, opt: Any = opt) -> Any:
            loss = (model(x) * factor).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return {"loss": loss.detach(), "shape": tuple(x.shape)}

        run: Any = step
        if captured:
            run = zgraph.training_step(model, opt, options=OPTIONS | {"report": report})(step)
        run(batch(0))
        run(batch(1))
        assert run(batch(2, rows=4))["shape"] == (4, 4)
        run(batch(3), 2.0)
        step(batch(4))  # the plain function, in between
        run(batch(5))
        model.eval()
        run(batch(6))
        model.train()
        model.get_submodule("dropout").p = 0.0
        model.gain = 0.5
        run(batch(7))
        for group in opt.param_groups:
            group["lr"] *= 0.5
        run(batch(8))
        opt.param_groups[0]["momentum"] = 0.9
        run(batch(9))
        run(batch(10))
        dict(model.named_parameters())["first.weight"].requires_grad_(False)
        run(batch(11))
    ours, theirs = (list(model.parameters()) + list(model.buffers()) for model in models)
    equal = [torch.equal(a, b) for a, b in zip(map(local, ours), map(local, theirs), strict=True)]
    return [graph.reason.partition(":")[0] for graph in report.graphs], equal


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@worlds(2)
def test_a_call_that_differs_is_compiled_again_and_says_why(ranks: Ranks) -> None:
    for reasons, equal in ranks.run(recompiled):
        assert reasons == ["", "arguments", "arguments", "modes", "modes", "options", "state", "trainable"]
        assert all(equal)


def replaced() -> tuple[list[str], list[bool]]:
    """Reasons of recompiles where tensors are replaced between steps, and what equals the plain loop at the end."""
    models: list[nn.Module] = []
    states: list[list[Tensor]] = []
    report = zgraph.Report()
    for captured in (True, False):
        model, _ = made()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        models.append(model)

        def step(x: Tensor, *, model: nn.Module = model, opt: Any = opt) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        run: Any = step
        if captured:
            run = zgraph.training_step(model, opt, options=OPTIONS | {"report": report})(step)
        run(batch(0))
        run(batch(1))
        first, *_, last = opt.state
        opt.state[first]["exp_avg"] = opt.state[first]["exp_avg"] * 0.5  # another tensor
        opt.state[last]["step"] = opt.state[last]["step"] + 3
        run(batch(2))
        opt.state[first] = opt.state.pop(first)  # at another place
        run(batch(3))
        opt.state[first] = dict(reversed(opt.state[first].items()))
        opt.load_state_dict(opt.state_dict())
        run(batch(4))
        with torch.no_grad():
            layer = model.get_submodule("second")
            old = layer.bias
            layer.bias = new = nn.Parameter(old * 2)
            opt.param_groups[0]["params"] = [new if one is old else one for one in opt.param_groups[0]["params"]]
            opt.state[new] = opt.state.pop(old)
        run(batch(5))
        norm = model.get_submodule("norm")
        norm.running_mean = norm.running_mean + 1
        run(batch(6))
        del opt.state[new]
        run(batch(7))
        run(batch(8))
        new.grad = torch.ones_like(new)
        if captured:
            with pytest.raises(zgraph.ZgraphError, match="have gradients from before the step"):
                run(batch(9))
        new.grad = None
        run(batch(9))
        states.append([value for one in model.parameters() for _, value in sorted(opt.state[one].items())])
    ours, theirs = (list(model.parameters()) + list(model.buffers()) for model in models)
    ours, theirs = ours + states[0], theirs + states[1]
    equal = [torch.equal(a, b) for a, b in zip(map(local, ours), map(local, theirs), strict=True)]
    return [graph.reason.partition(":")[0] for graph in report.graphs], equal


@worlds(2)
def test_tensors_that_were_replaced_are_noticed(ranks: Ranks) -> None:
    for reasons, equal in ranks.run(replaced):
        assert all(equal)
        assert reasons == ["", "state"]  # in another order; a parameter without state gets it before the step


class Trainer:
    """Holds numbers in the places where training scripts have them."""

    def __init__(self) -> None:
        self.model, self.opt = made()
        self.alpha, self.unread = 1.0, 0
        self.config = SimpleNamespace(loss={"scale": 1.0})
        self.criterion = nn.CrossEntropyLoss()
        self.weights = [1.0, 1.0]

    def step(self, x: Tensor) -> Tensor:
        loss = self.criterion(self.model(x), x[:, :3].softmax(1))
        loss = loss * self.alpha * self.config.loss["scale"] * self.weights[1]
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()


def with_numbers_in_objects() -> tuple[list[str], list[bool]]:
    captured, plain = Trainer(), Trainer()
    report = zgraph.Report()
    step = zgraph.training_step(captured.model, captured.opt, options={**OPTIONS, "report": report})(captured.step)
    equal = [torch.equal(step(batch()), plain.step(batch()))]
    for change in (
        lambda one: setattr(one, "unread", 7),
        lambda one: setattr(one, "alpha", 0.5),
        lambda one: one.config.loss.update(scale=2.0),
        lambda one: setattr(one.criterion, "label_smoothing", 0.1),
        lambda one: one.weights.__setitem__(1, 3.0),
    ):
        change(captured)
        change(plain)
        equal.append(torch.equal(step(batch(1)), plain.step(batch(1))))
    return [graph.reason for graph in report.graphs], equal


@worlds(2)
def test_numbers_in_objects_that_the_step_reads_are_no_constants(ranks: Ranks) -> None:
    for reasons, equal in ranks.run(with_numbers_in_objects):
        assert all(equal)
        found = [reason for reason in reasons if reason.startswith("variables")]
        names = ["self.alpha", "self.config.loss['scale']", "self.criterion.label_smoothing", "self.weights[1]"]
        assert len(found) == len(names)
        assert [name in reason for name, reason in zip(names, found, strict=True)] == [True] * len(names)


def limited() -> str:
    model, opt = made()

    @zgraph.training_step(model, opt, options=OPTIONS, recompile_limit=2)
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        opt.zero_grad()
        return loss.detach()

    for rows in (2, 3):
        step(batch(rows=rows))
    with pytest.raises(zgraph.ZgraphError) as caught:
        step(batch(rows=4))
    model(batch()).sum().backward()
    with pytest.raises(zgraph.ZgraphError, match="have gradients from before"):
        zgraph.training_step(model, opt, options=OPTIONS)(step.function)(batch())
    return str(caught.value)


@worlds(2)
def test_recompiles_are_limited(ranks: Ranks) -> None:
    for message in ranks.run(limited):
        assert "2 graphs were made" in message
        assert "raise recompile_limit" in message


def test_options_that_are_not_honoured_are_refused() -> None:
    model = Small()
    other = torch.optim.SGD(Small().parameters(), lr=0.1)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not a parameter of the model"):
        zgraph.training_step(model, other)
    with pytest.raises(ValueError, match="the optimizer is capturable"):
        zgraph.training_step(model, torch.optim.Adam(model.parameters(), capturable=True))
    with pytest.raises(ValueError, match="unknown option"):
        zgraph.training_step(model, good, options={"cuda_graphs": True})
    with pytest.raises(ValueError, match="that it was not given, other"):

        @zgraph.training_step(model, good)
        def _(x: Tensor) -> None:
            other.step()

    good.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hook"):
        zgraph.training_step(model, good)
