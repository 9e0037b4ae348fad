"""Markers that AOTAutograd does not trace: which these are, and the bits of the uncompiled model however it reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

import zgraph
from tests.support.ranks import Ranks, worlds
from zgraph.driver.late_markers import LateMarkers
from zgraph.graph import edits, nodes
from zgraph.sharding.local_shards import compile_on_local_shards, markers_for_reads


class Reads(nn.Module):
    """Reads its weight as a function says."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


def plainly(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.weight, module.bias)


def twice(module: Any, x: Tensor) -> Any:
    return F.linear(F.linear(x, module.weight, module.bias).relu(), module.weight)


def as_result(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.weight, module.bias), module.weight


def as_view(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.weight, module.bias), module.weight.t()[1:], module.bias


def as_gradient(module: Any, x: Tensor) -> Any:
    return module.weight + 0, x + module.bias  # the gradient of weight is that of the result


class ByWeight(torch.autograd.Function):
    """Adds a penalty whose gradient is the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], ctx.saved_tensors[0]


def as_own_gradient(module: Any, x: Tensor) -> Any:
    return ByWeight.apply(x + module.bias, module.weight)


def of_detached(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.weight.detach(), module.bias)


def without_gradients(module: Any, x: Tensor) -> Any:
    with torch.no_grad():
        shift = module.weight.mean()
    return F.linear(x, module.weight, module.bias) - shift


def unread(module: Any, x: Tensor) -> Any:
    return x @ module.weight


def frozen(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.weight, module.bias)


# Markers that remain in the traced graph of a model of two such modules.
READS: dict[Callable[[Any, Tensor], Any], int] = {
    plainly: 0,
    twice: 0,
    as_result: 1,
    as_view: 2,
    as_gradient: 0,
    as_own_gradient: 4,  # an autograd function may be that of a unit, whose reductions have one order on all ranks
    of_detached: 0,
    without_gradients: 0,
    unread: 0,
    frozen: 0,
}


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"zero_stage": 0},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
)


class Both(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = Reads(plainly), Reads(read)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).tanh())


def model_of(read: Callable[[Any, Tensor], Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Both(read)
    model.last.weight.requires_grad_(read is not frozen)
    return zgraph.shard(model, **options)


def batch() -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


def markers_left(read: Callable[[Any, Tensor], Any]) -> int:
    """The number of markers that AOTAutograd would trace."""
    left: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def count(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            LateMarkers(gm, inputs, ())
            left.append(len(list(nodes.call_functions(gm.graph, nodes.is_unshard))))
            return gm

        traced = edits.copy_of(gm)
        markers_for_reads(traced)
        compile_on_local_shards(traced, inputs, count)
        return gm  # as other backends of torch run it

    torch._dynamo.reset()
    model = model_of(read)
    found = results(torch.compile(model, backend=backend), batch())
    assert differing(results(model_of(read), batch()), found) == []
    return left[0]


def differing_from_eager(read: Callable[[Any, Tensor], Any], options: dict[str, Any]) -> list[str]:
    """The names of gradients and results that differ from those of the uncompiled model."""
    torch._dynamo.reset()
    eager = model_of(read, **options)
    compiled = torch.compile(copy.deepcopy(eager), backend="zgraph", options={"lowering": "fx"})
    both = [results(run, batch()) for run in (eager, compiled)]
    with torch.no_grad():
        evaluated = [dict(enumerate(leaves_of(run(batch())))) for run in (eager, compiled)]
    return differing(*both) + differing(*evaluated)


def differing(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[str]:
    return [str(name) for name, value in one.items() if not same(value, other[name])]


def leaves_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def results(run: Any, x: Tensor) -> dict[str, Any]:
    leaves = leaves_of(run(x))
    torch.stack([leaf.float().square().sum() for leaf in leaves]).sum().backward()
    grads = {name.replace("_orig_mod.", ""): one.grad for name, one in run.named_parameters()}
    return grads | {f"result {number}": leaf.detach() for number, leaf in enumerate(leaves)}


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(*(value.full_tensor() if hasattr(value, "full_tensor") else value for value in (one, other)))


def every_read() -> dict[str, list[str]]:
    return {f"{read.__name__}, {options}": differing_from_eager(read, options) for read in READS for options in OPTIONS}


@worlds(2)
def test_reads_have_the_bits_of_the_uncompiled_model(ranks: Ranks) -> None:
    for found in ranks.run(every_read):
        assert {name: differing for name, differing in found.items() if differing} == {}


@worlds(2)
def test_only_returned_parameters_keep_their_markers(ranks: Ranks) -> None:
    assert ranks.run(all_left) == [{read.__name__: left for read, left in READS.items()}] * 2


def all_left() -> dict[str, int]:
    return {read.__name__: markers_left(read) for read in READS}
