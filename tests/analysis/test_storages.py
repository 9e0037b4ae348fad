"""Which storages a graph allocates, and how long they live."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.support.graphs import Drawing, deep, fake_world, inputs_for, mlp, traced
from tests.support.random_steps import draw_step
from zgraph.analysis.cost import FREE
from zgraph.analysis.storages import storages_of
from zgraph.graph import nodes
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions
from zgraph.scheduling.simulate import simulate

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def alive_bytes(gm: fx.GraphModule) -> list[int]:
    """Bytes of distinct storages of real tensors at each node, what came in left out: a graph run node by node."""
    order = list(gm.graph.nodes)
    last: dict[fx.Node, fx.Node] = {}
    for node in order:
        for source in node.all_input_nodes:
            last[source] = node
            if nodes.is_wait(node):  # a collective in flight holds what it reads
                last |= dict.fromkeys(source.all_input_nodes, node)
    env: dict[fx.Node, Any] = {}
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs_for(gm, 0), strict=True))
    theirs = {value.untyped_storage().data_ptr() for value in given.values() if isinstance(value, Tensor)}
    found: list[int] = []
    for node in order:
        if node.op == "placeholder":
            env[node] = given[node]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        tensors = [part for value in env.values() for part in (value if isinstance(value, tuple | list) else [value])]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
        found.append(sum(size for pointer, size in sizes.items() if pointer not in theirs))
        env = {known: value for known, value in env.items() if last.get(known, order[-1]) is not node}
    return found


def predicted(gm: fx.GraphModule) -> list[int]:
    order = list(gm.graph.nodes)
    free = {node: FREE for node in order if node.op == "call_function"}
    return list(simulate(order, free).memory.bytes_during)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_hold_what_is_predicted(seed: int) -> None:
    gm = draw_step(seed, layers=6).gm
    assert predicted(gm) == alive_bytes(gm)


@pytest.mark.parametrize("build", [mlp, deep])
@pytest.mark.parametrize("passes", [[], [BucketCollectives(bucket_bytes=300)]], ids=["single", "buckets"])
def test_lowered_graphs_hold_what_is_predicted(build: Any, passes: list[Any]) -> None:
    found = traced(build, [LowerGathers(), LowerReductions(), *passes])
    for gm in found.graphs.values():
        assert predicted(gm) == alive_bytes(gm)


def test_views_hold_their_base_and_tuples_their_parts() -> None:
    """split makes views of x + x; max makes two tensors, of which the unused one dies with the tuple."""
    drawing = Drawing()
    x = drawing.input("x", 4, 8)
    twice = drawing.call(aten.add.Tensor, x, x)
    parts = drawing.call(aten.split.Tensor, twice, 2)
    second = drawing.call(operator.getitem, parts, 1)
    most = drawing.call(aten.max.dim, second, 0)
    value = drawing.call(operator.getitem, most, 0)
    gm = drawing.done(drawing.call(aten.neg.default, value))
    assert predicted(gm) == alive_bytes(gm)


def test_saved_activations_end_in_backward_and_shards_do_not() -> None:
    drawing = Drawing()
    saved, shard = drawing.input("saved", 8, 8), drawing.input("shard", 4, 8)
    whole = drawing.wait(drawing.start_gather(shard, "w"))
    gm = drawing.done(drawing.call(aten.mm.default, saved, whole))
    order = list(gm.graph.nodes)
    assert [one.first for one in storages_of(order, inputs_die=True)] == [saved, order[2], order[-2]]
    assert [one.first for one in storages_of(order)] == [order[2], order[-2]]
    by_first = {one.first: one for one in storages_of(order)}
    assert not by_first[order[2]].outlives and by_first[order[-2]].outlives
