"""Programs with fewer and cheaper calls compute the same bits, in the same storages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.graphs import Drawing, fake_world
from zgraph.codegen.lower_fx import lower_fx
from zgraph.codegen.shorten_calls import (
    MOST_PART_NUMEL,
    _can_view,  # pyright: ignore[reportPrivateUsage]
    shorten_calls,
)
from zgraph.graph import meta
from zgraph.torch_compat.bindings import FUNCTIONS, flatten_each, interleave

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


class Record(TorchDispatchMode):
    """Notes the operators that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def samples() -> dict[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for each operator that is called by a function of torch."""
    x, y, square = torch.rand(4, 3) + 0.1, torch.rand(4, 3) + 0.1, torch.rand(3, 3)
    batch = torch.rand(2, 3, 3)
    image, kernel = torch.rand(1, 2, 5), torch.rand(3, 2, 3)

    def many() -> list[Tensor]:
        return [torch.rand(3), torch.rand(2, 2)]

    def adam() -> tuple[tuple[Any, ...], dict[str, Any]]:
        steps = [torch.ones(()), torch.ones(())]
        rates = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
        return (many(), many(), many(), many(), [], steps), {"lr": torch.tensor(0.1, dtype=torch.float64), **rates}

    given: dict[Any, tuple[Any, ...]] = {
        aten.mm.default: (x, square),
        aten.addmm.default: (torch.rand(3), x, square),
        aten.bmm.default: (batch, batch),
        aten.baddbmm.default: (batch, batch, batch),
        aten.convolution.default: (image, kernel, None, [1], [0], [1], False, [0], 1),
        aten.embedding.default: (x, torch.tensor([1, 2]), 0, False, False),
        aten.native_layer_norm.default: (x, [3], torch.ones(3), torch.zeros(3), 1e-5),
        aten.native_dropout.default: (x, 0.5, True),
        aten.permute.default: (batch, [2, 0, 1]),
        aten.cat.default: ([x, y], 1),
        aten.stack.default: ([x, y], 1),
        aten.maximum.default: (x, y),
        aten.minimum.default: (x, y),
        aten.amax.default: (x, [0], True),
        aten._softmax.default: (x, 1, False),
        aten._log_softmax.default: (x, 1, False),
        aten.view.default: (x, [3, 4]),
        aten.expand.default: (x[:1], [4, 3]),
        aten.split_with_sizes.default: (x, [1, 3], 0),
        aten.transpose.int: (batch, 0, 2),
        aten.unsqueeze.default: (x, 1),
        aten.squeeze.dim: (x[:1], 0),
        aten.select.int: (x, 0, 1),
        aten.unbind.int: (x, 0),
        aten.add.Tensor: (x, y),
        aten.sub.Tensor: (x, y),
        aten.mul.Tensor: (x, y),
        aten.div.Tensor: (x, y),
        aten.where.self: (x > y, x, y),
        aten.pow.Tensor_Scalar: (x, 3.0),
        aten.sum.dim_IntList: (x, [0], True),
        aten.mean.dim: (x, [0]),
        aten._foreach_sqrt.default: (many(),),
        aten._foreach_neg.default: (many(),),
        aten._foreach_add_.Scalar: (many(), 1),
        aten._foreach_add_.List: (many(), many()),
        aten._foreach_mul_.Scalar: (many(), 0.5),
        aten._foreach_lerp_.Scalar: (many(), many(), 0.1),
    }
    named: dict[Any, dict[str, Any]] = {
        aten.clone.default: {"memory_format": torch.contiguous_format},
        aten.add.Tensor: {"alpha": 2},
        aten.gelu.default: {"approximate": "tanh"},
        aten.zeros_like.default: {"dtype": torch.float64, "pin_memory": False},
    }
    fused = {aten._fused_adam_.tensor_lr: adam(), aten._fused_adamw_.tensor_lr: adam()}
    fused |= {aten.reshape.default: ((x.t(), [12]), {})}
    return {operator: (given.get(operator, (x,)), named.get(operator, {})) for operator in FUNCTIONS} | fused


def test_functions_of_torch_call_just_the_operator() -> None:
    for operator, (args, kwargs) in samples().items():
        calls: list[list[Any]] = []
        for call in (operator, FUNCTIONS[operator]):
            with torch.no_grad(), Record() as record:
                call(*args, **kwargs)
            calls.append(record.seen)
        assert calls[0] == calls[1], operator


def run(gm: fx.GraphModule, *values: Tensor) -> tuple[Any, int]:
    """What a graph returns, and how many lines of its program call something."""
    lowered = lower_fx(gm)
    with torch.no_grad(), Record() as record:
        found = lowered(list(values))
    return found, len(record.seen)


SHAPES = [(4, 3), (2,), (6, 2, 1), (2, 5)]


def test_parts_are_packed_by_one_call() -> None:
    drawing = Drawing()
    inputs = [drawing.input(f"x{number}", *shape) for number, shape in enumerate(SHAPES)]
    values = [torch.rand(shape) for shape in SHAPES]
    flat = [drawing.call(aten.view.default, node, [value.numel()]) for node, value in zip(inputs, values, strict=True)]
    rows = [drawing.call(aten.view.default, node, [2, -1]) for node in inputs]
    gm = drawing.done(drawing.call(aten.cat.default, flat), drawing.call(aten.cat.default, rows, 1))
    expected = gm(*values)
    found, _ = run(gm, *values)
    assert all(map(torch.equal, found, expected))
    shorten_calls(gm.graph)
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [flatten_each, interleave]


def test_parts_of_a_vector_are_viewed_by_one_call() -> None:
    drawing = Drawing()
    buffer = drawing.input("buffer", 40)
    views: list[fx.Node] = []
    start = 1  # a gap before the first and behind the last
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        part = drawing.call(aten.slice.Tensor, buffer, 0, start, start + size)
        views.append(drawing.call(aten.view.default, part, list(shape)))
        start += size
    gm = drawing.done(*views)
    value = torch.rand(40)
    found, calls = run(gm, value)
    for one, other in zip(found, gm(value), strict=True):
        assert torch.equal(one, other)
        assert one.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        assert one.storage_offset() == other.storage_offset()
        assert one.stride() == other.stride()
    assert calls <= 2 * (len(SHAPES) + 2)  # inside of the one call


def test_parts_of_rows_are_copied_once_and_where_they_were() -> None:
    """The copy of the second part stands before the buffer is written to, and its view behind."""
    drawing = Drawing()
    buffer = drawing.input("buffer", 2, 12)
    parts = [drawing.call(aten.slice.Tensor, buffer, 1, 4 * number, 4 * number + 4) for number in range(3)]
    clones = [drawing.call(aten.clone.default, part, memory_format=torch.contiguous_format) for part in parts]
    drawing.call(aten.zero_.default, buffer)
    gm = drawing.done(*[drawing.call(aten.view.default, clone, [4, 2]) for clone in clones])
    value = torch.rand(2, 12)
    expected = gm(value.clone())
    found, _ = run(gm, value)
    assert all(map(torch.equal, found, expected))
    assert not value.any()
    assert len({one.untyped_storage().data_ptr() for one in (value, *found)}) == 4


def copied(drawing: Drawing, buffer: fx.Node, number: int) -> fx.Node:
    """Elements 4n to 4n + 4 of each row, as a matrix."""
    part = drawing.call(aten.slice.Tensor, buffer, 1, 4 * number, 4 * number + 4)
    clone = drawing.call(aten.clone.default, part, memory_format=torch.contiguous_format)
    return drawing.call(aten.view.default, clone, [4, 2])


@pytest.mark.parametrize("written", [False, True])
def test_small_row_parts_share_one_copy_unless_written(written: bool) -> None:
    drawing = Drawing()
    buffer = drawing.input("buffer", 2, 16)
    doubled = drawing.call(aten.mul.Tensor, buffer, 2)
    sums: list[fx.Node] = []
    for number in (2, 0, 3):
        sums.append(drawing.call(aten.exp.default, copied(drawing, doubled, number)))
        if written and not number:
            drawing.call(aten.zero_.default, doubled)
    gm = drawing.done(*sums)
    value = torch.rand(2, 16)
    found, _ = run(gm, value)
    assert all(map(torch.equal, found, gm(value)))
    shorten_calls(gm.graph)
    names = [getattr(node.target, "__name__", "") for node in gm.graph.nodes]
    assert ("rows_as" in names) is not written
    assert names.count("reshape") == (3 if written else 0)


def test_returned_or_large_part_has_its_own_memory() -> None:
    drawing = Drawing()
    small, large = drawing.input("small", 2, 16), drawing.input("large", 2, 3 * MOST_PART_NUMEL)
    returned = [copied(drawing, small, number) for number in range(3)]
    summed: list[fx.Node] = []
    for number in range(3):
        part = drawing.call(aten.slice.Tensor, large, 1, MOST_PART_NUMEL * number, MOST_PART_NUMEL * (number + 1))
        clone = drawing.call(aten.clone.default, part, memory_format=torch.contiguous_format)
        summed.append(drawing.call(aten.sum.default, drawing.call(aten.view.default, clone, [2 * MOST_PART_NUMEL])))
    gm = drawing.done(*returned, *summed)
    shorten_calls(gm.graph)
    assert "rows_as" not in [getattr(node.target, "__name__", "") for node in gm.graph.nodes]


def test_layer_is_one_call_and_sum_needs_no_view() -> None:
    drawing = Drawing()
    bias, x, weight = drawing.input("bias", 5), drawing.input("x", 4, 3), drawing.input("weight", 5, 3)
    layer = drawing.call(aten.addmm.default, bias, x, drawing.call(aten.t.default, weight))
    total = drawing.call(aten.sum.dim_IntList, layer, [0], True)
    gm = drawing.done(layer, drawing.call(aten.exp.default, drawing.call(aten.view.default, total, [5])))
    values = [torch.rand(shape) for shape in ((5,), (4, 3), (5, 3))]
    found, _ = run(gm, *values)
    assert all(map(torch.equal, found, gm(*values)))
    shorten_calls(gm.graph)
    names = [getattr(node.target, "__name__", "") for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["linear", "sum", "exp"]


def test_mutually_inverse_views_are_not_called() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4, 3)
    twice = drawing.call(aten.t.default, drawing.call(aten.t.default, x))
    other = drawing.call(aten.transpose.int, drawing.call(aten.transpose.int, x, 0, 1), 1, 0)
    there = drawing.call(aten.view.default, drawing.call(aten.view.default, x, [12]), [4, 3])
    total = drawing.call(aten.add.Tensor, drawing.call(aten.add.Tensor, twice, there), other)
    gm = drawing.done(total)
    value = torch.rand(4, 3)
    found, calls = run(gm, value)
    assert torch.equal(found[0], gm(value)[0])
    assert calls == 4  # two additions, and transpositions that name their dimensions in another order


def test_a_returned_view_is_another_tensor_than_the_input() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4, 3)
    gm = drawing.done(drawing.call(aten.t.default, drawing.call(aten.t.default, x)))
    value = torch.rand(4, 3)
    (found,), _ = run(gm, value)
    assert found is not value
    assert found.data_ptr() == value.data_ptr()


def test_slices_that_do_not_overlap_are_cut_by_one_call() -> None:
    drawing = Drawing()
    buffer = drawing.input("buffer", 12)
    gm = drawing.done(*[drawing.call(aten.slice.Tensor, buffer, 0, *each) for each in [(9, 12), (1, 4), (4, 8)]])
    value = torch.rand(12)
    expected = gm(value)
    shorten_calls(gm.graph)
    names = [getattr(node.target, "__name__", "") for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["views_of", "getitem", "getitem", "getitem"]
    found, _ = run(gm, value)
    assert all(map(torch.equal, found, expected))
    assert {one.untyped_storage().data_ptr() for one in found} == {value.untyped_storage().data_ptr()}


@pytest.mark.parametrize("bounds", [[(0, 4), (3, 8), (8, 12)], [(0, 4), (4, 8)]], ids=["overlapping", "few"])
def test_other_slices_stay(bounds: list[tuple[int, int]]) -> None:
    drawing = Drawing()
    buffer = drawing.input("buffer", 12)
    gm = drawing.done(*[drawing.call(aten.slice.Tensor, buffer, 0, *each) for each in bounds])
    value = torch.rand(12)
    found, calls = run(gm, value)
    assert calls == len(bounds)
    assert all(map(torch.equal, found, gm(value)))


def test_number_in_place_of_tensor_is_left_to_operator() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4)
    gm = drawing.done(drawing.call(aten.mul.Tensor, x, 2.0), drawing.call(aten.add.Tensor, x, 1))
    value = torch.arange(4.0)
    found, _ = run(gm, value)
    assert all(map(torch.equal, found, (2 * value, value + 1)))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 6), (6, 1)), ((2, 18), (42, 1)), ((4, 1, 6), (12, 99, 1)), ((6, 4), (1, 6)), ((4, 6), (0, 1)), ((), ())],
)
def test_whether_a_view_exists_is_decided_as_by_torch(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    drawing = Drawing()
    node = drawing.input("x")
    value = torch.empty_strided(shape, stride)
    meta.set_value(node, value)
    count = value.numel()
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    for first in divisors:
        for second in [number for number in divisors if count // first % number == 0]:
            wanted = (first, second, count // first // second)
            try:
                value.view(wanted)
                exists = True
            except RuntimeError:
                exists = False
            assert _can_view(node, wanted) == exists, wanted
