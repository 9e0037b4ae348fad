"""The fx lowering: boxed, in order, dropping values at their last use, and naming what fails."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import zgraph
from tests.graphs import fake_world
from zgraph import meta
from zgraph.codegen.lower import lower_fx
from zgraph.handle import make_handle
from zgraph.torch_compat import all_gather_op, wait_op

aten = torch.ops.aten


def _module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)


def test_the_list_is_emptied_and_each_value_dies_at_its_last_use() -> None:
    alive: list[bool] = []
    watched: list[weakref.ref[Tensor]] = []

    def look(value: Tensor) -> Tensor:
        alive.append(watched[0]() is not None)
        return value + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(look, (x,))
    after = graph.call_function(look, (before,))
    graph.output((after,))
    args = [torch.ones(2)]
    watched.append(weakref.ref(args[0]))
    (result,) = lower_fx(_module(graph))(args)
    assert args == []
    assert alive == [True, False]
    assert torch.equal(result, torch.full((2,), 3.0))


def test_nodes_run_in_the_order_of_the_graph() -> None:
    ran: list[int] = []
    graph = fx.Graph()
    x = graph.placeholder("x")
    for position in (3, 1, 2):
        graph.call_function(lambda value, number: ran.append(number), (x, position))
    graph.output((x,))
    lower_fx(_module(graph))([torch.ones(1)])
    assert ran == [3, 1, 2]


def _gather_graph() -> fx.Graph:
    graph = fx.Graph()
    shard, handle = graph.placeholder("shard"), graph.placeholder("handle")
    start = graph.call_function(all_gather_op(), (shard, 2, "no such group"))
    wait = graph.call_function(wait_op(), (start,))
    for node in (start, wait):
        meta.set_parameters(node, ["h.0.weight"], ["handle"])
    graph.output((wait,))
    assert handle.name == "handle"
    return graph


def test_a_failing_collective_names_the_parameter_of_this_call() -> None:
    """The graph was compiled for block 0 and is shared; the handle says that block 7 called it."""
    run = lower_fx(_module(_gather_graph()))
    with fake_world(2), pytest.raises(zgraph.CollectiveError) as caught:
        run([torch.ones(2), make_handle("h.7.weight")])
    assert "all_gather_into_tensor of h.7.weight failed on rank 0" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [RuntimeError("plain"), KeyError("other")])
def test_any_other_error_passes_through(error: Exception) -> None:
    def fail(value: Any) -> None:
        raise error

    graph = _gather_graph()
    first = next(iter(graph.nodes))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.call_function(fail, (first,))
    with pytest.raises(type(error)) as caught:
        lower_fx(_module(graph))([torch.ones(2), make_handle("w")])
    assert caught.value is error
