"""Hazards of writes in place: who must stay before whom without using their result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from tests.support.graphs import Drawing, fake_world
from zgraph.analysis.hazards import hazards
from zgraph.torch_compat.collectives import wait_op

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def pairs(gm: fx.GraphModule) -> set[tuple[str, str]]:
    found = hazards(list(gm.graph.nodes))
    return {(one.name, node.name) for node, earlier in found.items() for one in earlier}


def test_reads_and_writes_of_one_tensor_keep_their_order() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4)
    read = drawing.call(aten.neg.default, x, name="read")
    drawing.call(aten.add_.Tensor, x, 1, name="write")
    drawing.call(aten.mul_.Tensor, x, 2, name="write_again")
    again = drawing.call(aten.neg.default, x, name="read_again")
    gm = drawing.done(read, again)
    assert pairs(gm) == {("read", "write"), ("write", "write_again"), ("write_again", "read_again")}


def test_reads_alone_have_no_order() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4)
    gm = drawing.done(drawing.call(aten.neg.default, x), drawing.call(aten.abs.default, x))
    assert pairs(gm) == set()


def test_sent_tensor_is_read_until_the_wait() -> None:
    drawing = Drawing()
    shard = drawing.input("shard", 4, 8)
    start = drawing.start_gather(shard, "w")
    wait = drawing.wait(start)
    drawing.call(aten.add_.Tensor, shard, 1, name="write")
    gm = drawing.done(wait)
    assert pairs(gm) == {(start.name, "write"), (wait.name, "write")}


def test_views_read_nothing_and_storage_parts_are_distinguished() -> None:
    drawing = Drawing()
    bucket = drawing.call(aten.clone.default, drawing.input("x", 8), name="bucket")
    first = drawing.call(aten.slice.Tensor, bucket, 0, 0, 4, name="first")
    second = drawing.call(aten.slice.Tensor, bucket, 0, 4, 8, name="second")
    read = drawing.call(aten.neg.default, second, name="read")
    drawing.call(aten.add_.Tensor, first, 1, name="write_first")
    drawing.call(aten.add_.Tensor, second, 1, name="write_second")
    gm = drawing.done(drawing.call(aten.neg.default, bucket, name="read_both"), read)
    assert pairs(gm) == {("read", "write_second"), ("write_first", "read_both"), ("write_second", "read_both")}


def test_view_with_replaced_input_shares_the_new_inputs_storage() -> None:
    """As passes leave it: the fake value of the view is that of another storage."""
    drawing = Drawing()
    bucket = drawing.call(aten.clone.default, drawing.input("x", 8), name="bucket")
    other = drawing.call(aten.clone.default, drawing.input("y", 4), name="other")
    parts = [drawing.call(aten.slice.Tensor, bucket, 0, place, place + 4) for place in (0, 4)]
    moved = drawing.call(aten.view.default, other, [2, 2], name="moved")
    moved.args = (parts[1], [2, 2])
    drawing.call(aten.add_.Tensor, parts[0], 1, name="write_first")
    drawing.call(aten.add_.Tensor, parts[1], 1, name="write_second")
    gm = drawing.done(drawing.call(aten.neg.default, moved, name="read"), other)
    assert pairs(gm) == {("write_second", "read")}


def test_lists_are_read_and_written_member_by_member() -> None:
    drawing = Drawing()
    x, y, grad = (drawing.input(name, 4) for name in ("x", "y", "grad"))
    drawing.call(aten._foreach_add_.List, [x, y], [grad, grad], name="update")
    gm = drawing.done(drawing.call(aten.neg.default, y, name="read"))
    assert pairs(gm) == {("update", "read")}


def test_random_operators_and_own_collectives_keep_their_order() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4)
    draws = [drawing.call(aten.bernoulli.p, x, 0.5, name=f"draw_{number}") for number in range(2)]
    own = drawing.start_gather(x, "")
    gm = drawing.done(*draws, drawing.call(wait_op(), own))
    assert pairs(gm) == {("draw_0", "draw_1"), ("draw_1", own.name)}
