"""All ranks of a group in one process: an interpreter that stops at collectives and exchanges their tensors.

An independent judge of passes: it knows what a collective and a marker mean, and nothing of how zgraph lowers them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tests.support.graphs import inputs_for, tensors_in
from zgraph.graph import nodes

Step = Generator[tuple[fx.Node, list[Any]], Any, list[Any]]


def run_together(graphs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What each rank's graph returns when all run at once, by rank.

    Raises:
        AssertionError: two ranks are at different collectives, which would hang or corrupt real ones.
    """
    ranks = [_run(gm, list(values)) for gm, values in zip(graphs, inputs, strict=True)]
    results: list[list[Any]] = []
    answers: list[Any] = [None] * len(ranks)
    while True:
        calls: list[tuple[fx.Node, list[Any]]] = []
        for rank, answer in zip(ranks, answers, strict=True):
            try:
                calls.append(rank.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not calls, f"{len(results)} ranks are done, others wait in {[node.name for node, _ in calls]}"
            return results
        assert len({(node.target, node.name) for node, _ in calls}) == 1, [node.name for node, _ in calls]
        answers = _exchange(calls[0][0], [args for _, args in calls])


def _run(gm: fx.GraphModule, inputs: list[Any]) -> Step:
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: env[argument])
        if node.op == "output":
            return list(args[0])
        if nodes.is_start(node) or nodes.is_marker(node):
            env[node] = yield node, list(args)
        else:
            env[node] = args[0] if nodes.is_wait(node) else node.target(*args, **kwargs)
    raise AssertionError("the graph has no output")


def _exchange(node: fx.Node, args: list[list[Any]]) -> list[Any]:
    world = len(args)
    sent = [entry[0] for entry in args]
    if nodes.is_grouped_gather(node):
        return [[torch.cat(member) for member in zip(*sent, strict=True)]] * world
    assert len({(tensor.dtype, tuple(tensor.shape)) for tensor in sent}) == 1 or nodes.is_marker(node)
    if nodes.is_all_gather(node):
        return [torch.cat(sent)] * world
    if nodes.is_all_to_all(node):
        return [torch.cat([tensor.chunk(world)[rank] for tensor in sent]) for rank in range(world)]
    if nodes.is_reduce_scatter(node):
        return list(_sum(sent).chunk(world))
    if nodes.is_all_reduce(node):
        return [_sum(sent).clone() for _ in range(world)]
    _, _, *policy = args[0]
    if nodes.is_unshard(node):
        _, dtype, _, _, stage, *_ = policy
        return [tensor.to(dtype, copy=True) for tensor in sent] if stage == 0 else [torch.cat(sent).to(dtype)] * world
    dtype, wire, mean_dtype, stage, reduction, *_ = policy
    narrow = mean_dtype or wire or sent[0].dtype
    if wire is not None and wire.itemsize <= sent[0].dtype.itemsize:
        sent = [tensor.to(wire) for tensor in sent]
    total = _sum([tensor.float() for tensor in sent])
    mean = total / world if reduction == "mean" else total
    if stage == 0:
        return [mean.to(narrow if world > 1 else dtype).to(dtype)] * world
    mean = mean.to(dtype)
    rows = -(-mean.shape[0] // world)
    return [mean[rank * rows : (rank + 1) * rows] for rank in range(world)]


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def assert_same_results(
    before: Sequence[fx.GraphModule], after: Sequence[fx.GraphModule], *, whole_numbers: bool = False
) -> None:
    """Graphs before and after a pass, one a rank, return the same bits for the same random inputs."""
    inputs = [inputs_for(gm, seed, whole_numbers=whole_numbers) for seed, gm in enumerate(before)]
    expected = run_together(before, inputs)
    found = run_together(after, inputs)
    for one, other in zip(expected, found, strict=True):
        left, right = tensors_in(one), tensors_in(other)
        assert left and len(left) == len(right)
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(a, b), f"output {position} differs by {(a - b).abs().max()}"
