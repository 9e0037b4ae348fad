"""Lines between backward and step that write to rows of weights and gradients, which other ranks may hold."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.user_loops import CLASSES, FEATURES, MODES, Net, Refused, Run, both, check, draw, refusal, rows
from tests.support.whole_tensors import whole

ROWS = torch.tensor([1, 5])


def added_to(tensor: Tensor) -> None:
    tensor[2:4] += 0.25


def swapped(tensor: Tensor) -> None:
    tensor[0], tensor[6] = tensor[6].clone(), tensor[0].clone()


def kept_view(tensor: Tensor) -> None:
    """A view that was taken before its tensor changed writes to the tensor as it is then."""
    row = tensor[4]
    tensor.mul_(2.0)
    row.add_(1.0)


def read_again(tensor: Tensor) -> None:
    """What is read of a view has what was written to the rest, and to its own parts."""
    view = tensor[:6]
    tensor.mul_(1.5)
    view[:2] = 0.25
    view.sub_(view.mean())


def one_by_one(tensor: Tensor) -> None:
    for row in tensor:
        row.div_(1 + row.abs().sum())


BY_NUMBERS: tuple[Callable[[Tensor], object], ...] = (  # in the order in which a loop makes them
    lambda tensor: tensor[:3].mul_(2.0),
    added_to,
    swapped,
    kept_view,
    read_again,
    one_by_one,
    lambda tensor: torch.mul(tensor, 1.25, out=tensor),
    lambda tensor: torch.add(tensor[:2], tensor[2:4], out=tensor[4:6]),
    lambda tensor: tensor.__setitem__(0, 0.5),
    lambda tensor: tensor.__setitem__((slice(None), 1), -0.5),
    lambda tensor: tensor[1:6][1:3].zero_(),
    lambda tensor: tensor.data[6].fill_(0.125),
    lambda tensor: tensor.detach()[3].neg_(),
    lambda tensor: tensor.t()[:, 2].mul_(3.0),
    lambda tensor: tensor.chunk(2)[1].clamp_(max=0.2),
    lambda tensor: tensor.narrow(0, 2, 2).add_(1.0),
    lambda tensor: tensor.__setitem__(tensor > 1.0, 1.0),
    lambda tensor: tensor[5].copy_(tensor[2]),
)
BY_TENSORS: tuple[Callable[[Tensor], object], ...] = (
    lambda tensor: tensor.__setitem__(ROWS, 0.75),
    lambda tensor: tensor.index_fill_(0, ROWS, 0.25),
    lambda tensor: tensor.__setitem__([0, 2], tensor[[2, 0]] * 0.5),
    lambda tensor: torch.add(tensor, torch.ones(tensor.shape[1]), out=tensor),
    lambda tensor: tensor.index_copy_(0, ROWS, draw(1, 2, tensor.shape[1])),
    lambda tensor: tensor.mul_((torch.arange(len(tensor)) >= 3).float().unsqueeze(1)),
    lambda tensor: tensor[2:5].add_(draw(2, 3, tensor.shape[1])),
    lambda tensor: tensor.copy_(draw(3, *tensor.shape)),
)


WRITES = BY_NUMBERS + BY_TENSORS


def writes(run: Run, pick: Callable[[nn.Module], Tensor], by: tuple[Callable[[Tensor], object], ...]) -> None:
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        with torch.no_grad():
            for write in by:
                write(pick(run.model))
        opt.step()
        return loss.detach()

    run.each_batch(train)


def gradient(model: Any) -> Tensor:
    return model.enter.weight.grad


def weight(model: Any) -> Tensor:
    return model.enter.weight


def rows_of_gradients(run: Run) -> None:
    """New tokens learn, old ones do not: `embedding.weight.grad[:old] = 0`, and its like."""
    writes(run, gradient, BY_NUMBERS)


def rows_of_weights(run: Run) -> None:
    """A padding row is zeroed, a row is drawn anew, a column is set."""
    writes(run, weight, BY_NUMBERS)


def rows_by_tensors(run: Run) -> None:
    """Rows are chosen by an index, a gradient is masked, noise is added: by tensors that are plain on every rank."""
    writes(run, gradient, BY_TENSORS)
    writes(run, weight, BY_TENSORS)


def rows_between_micro_batches(run: Run) -> None:
    """Some rows of what has been accumulated are dropped."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)
    for _, x, y in run.batches():
        opt.zero_grad()
        with run.no_sync():
            both(run.call(x), y).backward()
        gradient(run.model)[:3] = 0
        loss = both(run.call(-x), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()


def rows_in_hooks(run: Run) -> None:
    """One hook returns a gradient with other rows, another one writes to rows of what has been accumulated."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)

    def changed(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:3] = 0
        return grad

    def shrunk(tensor: Tensor) -> None:
        assert tensor.grad is not None
        tensor.grad[4:].mul_(0.5)

    weight(run.model).register_hook(changed)
    weight(run.model).register_post_accumulate_grad_hook(shrunk)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def numbers_of_gradients(run: Run) -> None:
    """What the loop does depends on numbers that it reads of gradients and weights."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)
    for _, x, y in run.batches():
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        run.log_loss(loss)
        norms = [p.grad.norm().item() for p in run.model.parameters()]
        run.log("norms", torch.tensor(norms))
        for p, norm in zip(run.model.parameters(), norms, strict=True):
            if bool((p.grad > 0.5 * p.grad.abs().max()).any()) and torch.isfinite(p.grad).all():
                p.grad.mul_(1 / (1 + norm + abs(float(p.mean())) + p.sum().item()))
        run.log_grads()
        opt.step()


def random_numbers(run: Run) -> None:
    """A head is drawn anew, and noise is added to weights and gradients; every rank has the same seed."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)
    torch.manual_seed(5)
    nn.init.normal_(run.model.head.weight)
    nn.init.trunc_normal_(run.model.enter.weight, std=0.4)
    run.model.other.weight.data[1:].uniform_(-0.2, 0.2)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        for p in run.model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        opt.step()
        return loss.detach()

    for step, x, y in run.batches():
        torch.manual_seed(step)
        run.log_loss(train(x, y))
        run.log_grads()


LOOPS = {
    loop.__name__: loop
    for loop in (
        rows_of_gradients,
        rows_of_weights,
        rows_by_tensors,
        rows_between_micro_batches,
        rows_in_hooks,
        numbers_of_gradients,
        random_numbers,
    )
}
IN_A_WINDOW = {1: "was changed in place between the forwards of a window"}
REFUSED: Refused = {
    ("rows_by_tensors", "step"): "by the values of a plain tensor",
    **{("rows_between_micro_batches", mode): IN_A_WINDOW for mode in MODES},
}
TELLING = {("rows_of_gradients", "step"): 3, ("rows_of_weights", "fx"): 2, ("random_numbers", "step"): 0}


@pytest.mark.parametrize(("name", "mode", "stages"), rows(LOOPS, TELLING))
def test_rows_of_sharded_tensors_are_written(ranks: Ranks, name: str, mode: str, stages: tuple[int, ...]) -> None:
    check(ranks, LOOPS[name], mode, stages, REFUSED)


def each_rank_its_own(stage: int) -> list[str]:
    """Rows that ranks choose or fill differently; nothing is written."""
    model: Any = zgraph.shard(Net(), zero_stage=stage)
    before = model.enter.weight.detach().full_tensor().clone()
    mine = float(dist.get_rank())
    with torch.no_grad():
        texts = [
            refusal(lambda: model.enter.weight.__setitem__(torch.tensor([int(mine)]), 0.0)),
            refusal(lambda: model.enter.weight.add_(torch.full((FEATURES,), mine))),
            refusal(lambda: model.enter.weight[1:3].copy_(torch.full((2, FEATURES), mine))),
        ]
    assert torch.equal(model.enter.weight.detach().full_tensor(), before)
    return texts


def one_rank_alone(line: str) -> str:
    """Of two ranks, the first makes a line that both must make; the other one goes on."""
    model: Any = zgraph.shard(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> None:
        both(model(draw(1, 4, FEATURES)), draw(2, 4, classes=CLASSES)).backward()
        if dist.get_rank() == 0:
            ALONE[line](model.enter.weight)
        opt.step()

    return refusal(step)


ALONE: dict[str, Callable[[Any], object]] = {
    "reading a number": lambda weight: weight.grad.norm().item(),
    "taking rows": lambda weight: weight.grad[0],
    "drawing random numbers": lambda weight: torch.randn_like(weight.grad),
    "aten.mm": lambda weight: weight @ weight.t(),
    "aten.sort": lambda weight: weight.grad.sort(dim=0),
    "aten.div": lambda weight: weight.detach() / weight.detach().norm(),
    "writing to a plain tensor": lambda weight: torch.zeros(weight.shape).copy_(weight.detach()),
    "full_tensor() or redistribute()": lambda weight: weight.detach().full_tensor(),
    "writing to parts": lambda weight: weight.grad.mul_(torch.ones(1, FEATURES)),
}


@pytest.mark.parametrize("line", ALONE)
def test_a_rank_that_reads_or_writes_alone_is_told(ranks: Ranks, line: str) -> None:
    for text in ranks.run(one_rank_alone, line):
        assert f"rank 0 waits for {line}" in text and "rank 1 for optimizer.step()" in text


def refused_lines() -> tuple[str, ...]:
    model: Any = zgraph.shard(Net())
    rows = model.enter.weight.detach()[:3]
    return (
        refusal(lambda: torch._foreach_mul_([rows, rows], 2.0)),
        refusal(lambda: rows.t_()),
    )


def test_lines_that_cannot_be_followed_are_refused(ranks: Ranks) -> None:
    for several, reshaped in ranks.run(refused_lines):
        assert "writes to several views of sharded rows in one call" in several
        assert "changes the shape of a sharded tensor in place" in reshaped


class Laid(nn.Module):
    """A parameter with strides of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def written_by_strides(stage: int) -> list[bool]:
    """Whether random numbers and writes by strides are those of the plain model."""
    found: list[bool] = []
    for weight in (torch.zeros(5, 7).t(), torch.zeros(6, 3, 2, 2).contiguous(memory_format=torch.channels_last)):
        plain, sharded = Laid(weight.clone()), Laid(weight.clone())
        zgraph.shard(sharded, zero_stage=stage)
        for one in (plain.weight, sharded.weight):
            torch.manual_seed(2)
            with torch.no_grad():
                one.normal_().add_(torch.rand_like(one))
                one.as_strided((2,), (1,)).fill_(3.0)
                nn.init.trunc_normal_(one[:3])
        whole: Any = sharded.weight.detach()
        found.append(torch.equal(whole.full_tensor(), plain.weight.detach()))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_rows_and_random_numbers_follow_the_strides(ranks: Ranks, stage: int) -> None:
    assert ranks.run(written_by_strides, stage) == [[True, True]] * ranks.world


def drawn_by_each_rank(stage: int) -> tuple[Tensor, Tensor]:
    """Whole weights after ranks with different seeds have drawn them; and a scalar."""
    model: Any = zgraph.shard(Net(), zero_stage=stage)
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model.enter.weight)
    nn.init.normal_(model.gain)
    return model.enter.weight.detach().full_tensor(), model.gain.detach().full_tensor()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_different_seeds_draw_one_tensor(ranks: Ranks, stage: int) -> None:
    (weight, gain), (same, same_gain) = ranks.run(drawn_by_each_rank, stage)
    assert torch.equal(weight, same) and torch.equal(gain, same_gain)
    assert len(weight.unique()) == weight.numel()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_write_different_rows_are_told(ranks: Ranks, stage: int) -> None:
    for texts in ranks.run(each_rank_its_own, stage):
        assert all("that differs between ranks" in text for text in texts), texts


def on_four_ranks(mesh: str) -> None:
    """Every write, to shards that lie on one of two axes of a mesh, or on both."""
    torch.manual_seed(3)
    plain = nn.Sequential(OrderedDict(enter=nn.Linear(6, 8), head=nn.Linear(8, 3)))
    model = copy.deepcopy(plain)
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if mesh == "tensor parallel":
        parallelize_module(model, axes["inner"], {"enter": ColwiseParallel(output_layouts=Replicate())})
        axes = axes["outer"]
    zgraph.shard(model, axes)
    for net in (plain, model):
        net(draw(1, 4, 6)).square().mean().backward()
    for pick in (gradient, weight):
        for place, write in enumerate(WRITES):
            with torch.no_grad():
                for net in (plain, model):
                    write(pick(net))
            found = DTensor.full_tensor(cast(DTensor, pick(model).detach()))
            torch.testing.assert_close(found, pick(plain).detach(), msg=lambda text, place=place: f"{place}: {text}")


@pytest.mark.parametrize("mesh", ["replicas", "tensor parallel"])
@worlds(4)
def test_rows_are_written_on_meshes_of_two_axes(ranks: Ranks, mesh: str) -> None:
    ranks.run(on_four_ranks, mesh)


def saved_and_copied() -> tuple[bool, ...]:
    model: Any = zgraph.shard(Net())
    both(model(draw(1, 4, FEATURES)), draw(2, 4, classes=CLASSES)).backward()
    file = io.BytesIO()
    torch.save([model.state_dict(), model.enter.weight.grad, model.enter.weight.grad[:2]], file)
    file.seek(0)
    state, grad, part = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model.enter.weight.grad)
    copied[:] = 0
    again = copy.copy(model.enter.weight.grad)
    again[0] = 4.0  # the same memory
    apart = copy.deepcopy(model.enter.weight.grad[:3])
    apart[1] = 5.0
    return (
        type(state["enter.weight"]) is type(grad) is type(part) is DTensor,
        torch.equal(part.to_local()[1], model.enter.weight.grad[1].to_local()),
        bool(model.enter.weight.grad.abs().sum().full_tensor() > 0),
        not copied.to_local().any(),
        bool((model.enter.weight.grad[0] == 4.0).all()),
        bool((apart[1] == 5.0).all()) and not bool((model.enter.weight.grad[1] == 5.0).any()),
    )


def test_saved_tensors_are_plain_dtensors(ranks: Ranks) -> None:
    assert ranks.run(saved_and_copied) == [(True,) * 6] * 2


def rows_after_a_list() -> tuple[float, float]:
    torch.manual_seed(0)
    model = zgraph.shard(nn.Linear(4, 6))
    rows = model.weight.detach()[1:5]
    before = rows.sum().item()
    torch._foreach_mul_([one.detach() for one in model.parameters()], 2.0)
    return rows.sum().item(), 2 * before


def test_rows_taken_before_a_list_is_updated_show_the_update(ranks: Ranks) -> None:
    """As optimizers update: many tensors of one layout in one call, which runs on the shards."""
    for found, expected in ranks.run(rows_after_a_list):
        assert found == expected


def noisy(stage: int) -> tuple[Tensor, Tensor]:
    """A gradient, and what an operator returns that writes its noise to another argument."""
    model = zgraph.shard(nn.Linear(5, 7), zero_stage=stage)
    model(torch.randn(4, 5)).square().sum().backward()
    grad = model.weight.grad
    return whole(grad).clone(), whole(F.rrelu(grad, 0.1, 0.3, training=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_operator_that_writes_to_one_argument_may_return_another_tensor(ranks: Ranks, stage: int) -> None:
    (grad, found), (_, other) = ranks.run(noisy, stage)
    factors = found / grad
    assert torch.equal(found, other)
    assert (factors[grad >= 0] == 1).all()
    assert ((factors[grad < 0] >= 0.1) & (factors[grad < 0] <= 0.3)).all()
