"""Graphs of steps on a GPU that CUDA graphs can hold, and those that they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import zgraph
from tests.support.graphs import fake_world
from zgraph.codegen.cuda_graph_refusals import check_recordable
from zgraph.graph import meta
from zgraph.torch_compat.collectives import all_gather_op, wait_op
from zgraph.torch_compat.fake_values import step_mode

aten, dialect = torch.ops.aten, torch.ops.zgraph
RESIDENT = 2  # of the inputs below: a shard and its handle


def step_of(build: Callable[..., Any], argument_on: str = "cuda") -> fx.GraphModule:
    """A graph that takes a shard, its handle, a step count on the host, and an argument."""
    mode, graph = step_mode(), fx.Graph()
    inputs = [graph.placeholder(name) for name in ("shard", "handle", "count", "x")]
    with mode:
        places = ("cuda", torch.float32), ("cpu", torch.uint8), ("cpu", torch.float32), (argument_on, torch.float32)
        for node, (device, dtype) in zip(inputs, places, strict=True):
            meta.set_value(node, torch.empty(4, 4, device=device, dtype=dtype))
        found = build(lambda target, *args: meta.create(graph, target, args), *inputs)
    graph.output((found,))
    return fx.GraphModule({}, graph)


def plain(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(aten.add_.Tensor, shard, call(aten.mm.default, x, shard))


def summed(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(dialect.sum_ranks.default, x, 2, 2, torch.float32)


def negated(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(aten.neg.default, x)


def of_one_rank(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(wait_op(), call(all_gather_op(), shard, 1, ""))


@pytest.mark.parametrize("build", [plain, summed, negated, of_one_rank])
def test_kernels_alone_are_recorded(build: Callable[..., Any]) -> None:
    check_recordable(step_of(build), RESIDENT)


def counted_on_the_host(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(aten.add_.Scalar, count, 1)


def copied_from_the_host(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(aten.copy_.default, shard, count)


def read(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(aten._local_scalar_dense.default, call(aten.select.int, call(aten.select.int, shard, 0, 0), 0, 0))


def gathered(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(wait_op(), call(all_gather_op(), shard, 2, "0"))


def written(call: Any, shard: Any, handle: Any, count: Any, x: Any) -> Any:
    return call(aten.mul_.Tensor, call(aten.view.default, x, [16]), 2.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (counted_on_the_host, r"add_.* computes with a tensor on the host \(count\).*keep step counts on the GPU"),
        (copied_from_the_host, r"copy_.* computes with a tensor on the host \(count\)"),
        (read, r".* reads a tensor's value on the host in each call; use an optimizer with fused=True"),
        (gathered, r"all_gather.* communicates over fake, which passes through the host; initialise the group with"),
        (written, r"mul_.* writes to an argument, which would change only the graph's copy; write to your own copy"),
    ],
)
def test_a_refusal_names_the_operator_and_what_to_do(build: Callable[..., Any], message: str) -> None:
    expected = f"cannot be recorded as a CUDA graph: {message}.*leave out cuda_"
    with fake_world(2), pytest.raises(zgraph.ZgraphError, match=expected):
        check_recordable(step_of(build), RESIDENT)


def test_resident_tensors_may_be_written() -> None:
    check_recordable(step_of(written), RESIDENT + 2)


def test_host_argument_is_refused_where_it_is_used() -> None:
    check_recordable(step_of(of_one_rank, argument_on="cpu"), RESIDENT)
    with pytest.raises(zgraph.ZgraphError, match=r"a tensor on the host \(x\).*put .* arguments .* there"):
        check_recordable(step_of(negated, argument_on="cpu"), RESIDENT)
