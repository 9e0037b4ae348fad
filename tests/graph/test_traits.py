"""The table of what operators do says what their kernels do, and its answers agree with one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from tests.support.graphs import Drawing, fake_world
from zgraph.analysis.cost import FREE, CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import memory_curve
from zgraph.analysis.workspace import workspace_bytes
from zgraph.codegen.compressed_kernels import encode
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import NoFeedback
from zgraph.graph import meta, nodes, traits
from zgraph.torch_compat.operators import OpOverload, returns_alias, written_arguments

aten, prims = torch.ops.aten, torch.ops.prims
NUMBERS = torch.arange(12, dtype=torch.float32).view(3, 4)
PLACES = torch.tensor([2, 0])
# Arguments behind the first one, which are numbers of shape [3, 4] where not given.
SAMPLES: dict[OpOverload, tuple[Any, ...]] = {
    aten.view.default: ([2, 6],),
    aten._unsafe_view.default: ([2, 6],),
    aten.reshape.default: ([2, 6],),
    aten.t.default: (),
    aten.transpose.int: (0, 1),
    aten.permute.default: ([1, 0],),
    aten.expand.default: ([2, 3, 4],),
    aten.unsqueeze.default: (0,),
    aten.squeeze.default: (),
    aten.squeeze.dim: (0,),
    aten.slice.Tensor: (0, 1, 2),
    aten.select.int: (0, 1),
    aten.alias.default: (),
    aten.detach.default: (),
    aten.clone.default: (),
    aten._to_copy.default: (),
    prims.convert_element_type.default: (torch.float64,),
    prims.device_put.default: (torch.device("cpu"),),
    aten.split.Tensor: (2,),
    aten.split_with_sizes.default: ([1, 2],),
    aten.contiguous.default: (),
    aten.flatten.using_ints: (),
    aten.ravel.default: (),
    aten.copy_.default: (NUMBERS,),
    aten.copy.default: (NUMBERS,),
    aten.fill_.Scalar: (2.0,),
    aten.zero_.default: (),
    aten.empty_like.default: (),
    aten.new_empty.default: ([3, 4],),
    aten.new_empty_strided.default: ([3, 4], [4, 1]),
    aten.embedding.default: (PLACES,),
    aten.index.Tensor: ([PLACES],),
    aten.index_select.default: (0, PLACES),
    aten.gather.default: (0, torch.tensor([[2, 0, 0, 2]])),
    aten.take.default: (torch.tensor([3, 11]),),
}
VIEWS = [operator for operator in SAMPLES if returns_alias(operator) and not operator._schema.is_mutable]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def marked(trait: str) -> list[OpOverload]:
    return [operator for operator, row in traits.TABLE.items() if getattr(row, trait)]


def names(trait: str) -> Any:
    return pytest.mark.parametrize("operator", marked(trait), ids=str)


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def drawn(operator: OpOverload) -> fx.Node:
    drawing = Drawing()
    numbers = drawing.input("numbers", 3, 4)

    def given(value: Any) -> Any:
        return drawing.input("places", *value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value

    others = tree_map(given, SAMPLES[operator])
    return drawing.call(operator, numbers, *others)


def shares(value: Any, source: Tensor) -> bool:
    return all(one.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() for one in tensors(value))


@names("reshapes")
def test_reshaping_operators_yield_only_their_input_numbers(operator: OpOverload) -> None:
    found = torch.cat([one.flatten().float() for one in tensors(operator(NUMBERS.clone(), *SAMPLES[operator]))])
    assert found.numel() > 0
    assert set(found.tolist()) <= set(NUMBERS.flatten().tolist())


def test_symbolic_reshaping_and_getitem_are_reshapings() -> None:
    drawing = Drawing()
    numbers, other = drawing.input("numbers", 3, 4), drawing.input("other", 3, 4)
    rows = drawing.call(aten.sym_size.int, other, 0)
    assert traits.is_reshaping(drawing.call(aten.view.default, numbers, [rows, 4]))
    parts = drawing.call(aten.unbind.int, numbers)  # which is not listed: its schema tells
    assert traits.is_reshaping(parts)
    assert traits.is_reshaping(drawing.call(nodes.operator.getitem, parts, 0))
    assert not traits.is_reshaping(drawing.call(aten.add.Tensor, numbers, other))
    assert not traits.is_reshaping(drawing.call(aten.relu.default, numbers))


@names("is_view")
def test_a_view_that_no_schema_tells_lies_in_its_argument(operator: OpOverload) -> None:
    given = NUMBERS.clone()
    assert shares(operator(given, *SAMPLES[operator]), given)
    assert not returns_alias(operator)


@pytest.mark.parametrize("operator", [one for one in marked("may_copy") if one in SAMPLES], ids=str)
def test_optionally_copying_operators_copy_only_if_necessary(operator: OpOverload) -> None:
    given, across = NUMBERS.clone(), NUMBERS.clone().t()
    assert returns_alias(operator)
    assert shares(operator(given, *SAMPLES[operator]), given)
    assert not shares(operator(across, *SAMPLES[operator]), across)


def test_a_conversion_copies_only_where_the_dtype_is_another() -> None:
    assert aten.to.dtype in marked("may_copy")
    assert shares(aten.to.dtype(NUMBERS, torch.float32), NUMBERS)
    assert not shares(aten.to.dtype(NUMBERS, torch.float64), NUMBERS)


@pytest.mark.parametrize("operator", [*VIEWS, *marked("is_view")], ids=str)
def test_views_allocate_nothing_and_take_no_time(operator: OpOverload) -> None:
    node = drawn(operator)
    assert traits.is_view(node)
    assert traits.is_free(node)
    assert not traits.is_fusible(node)
    assert CostModel(Hardware.preset("h100")).cost(node) == FREE
    assert workspace_bytes(node) == 0
    node.graph.output((node,))
    assert [entry.node.name for entry in memory_curve(node.graph).ranges if not entry.held] == []


@names("vanishes")
def test_vanishing_operators_count_as_views_but_copy_if_run(operator: OpOverload) -> None:
    drawing = Drawing()
    numbers, other = drawing.input("numbers", 3, 4), drawing.input("other", 2)
    node = drawing.call(operator, numbers, [other])
    assert traits.is_view(node) and traits.is_free(node)
    assert not (traits.is_fusible(node) or traits.is_repeatable(node) or traits.is_reshaping(node))
    assert traits.shared_arguments(node) == (0,)
    assert CostModel(Hardware.preset("h100")).cost(node) == FREE
    assert workspace_bytes(node) == 0
    node.graph.output((node,))
    assert [entry.node.name for entry in memory_curve(node.graph).ranges if not entry.held] == []
    given = NUMBERS.clone()
    found = operator(given, [PLACES])
    assert torch.equal(found, given) and not shares(found, given)
    assert not returns_alias(operator)


def test_in_place_operators_return_an_alias_and_take_time() -> None:
    for operator in (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default):
        node = drawn(operator)
        assert written_arguments(node)
        assert traits.is_view(node)
        assert not traits.is_free(node)
        assert not traits.is_repeatable(node)


@pytest.mark.parametrize("operator", [one for one in marked("makes_no_values") if one in SAMPLES], ids=str)
def test_memory_without_values_is_allocated_and_takes_no_time(operator: OpOverload) -> None:
    node = drawn(operator)
    assert traits.is_free(node)
    assert not traits.is_view(node)
    node.graph.output((node,))
    assert [entry.bytes for entry in memory_curve(node.graph).ranges if not entry.held] == [48]


@names("overwrites")
def test_overwriting_operators_do_not_read_their_first_argument(operator: OpOverload) -> None:
    found = operator(torch.full([3, 4], torch.nan), *SAMPLES[operator])
    assert torch.equal(found, operator(torch.zeros(3, 4), *SAMPLES[operator]))


@pytest.mark.parametrize("operator", [one for one in marked("reads_rows") if one in SAMPLES], ids=str)
def test_row_reading_operators_read_only_returned_rows(operator: OpOverload) -> None:
    given = NUMBERS.clone()
    given[1, :] = torch.nan  # of which no sample asks
    found = operator(given, *SAMPLES[operator])
    assert found.isfinite().all()
    assert found.numel() < given.numel()


def test_lookups_of_codes_read_only_returned_rows() -> None:
    """A table of three rows, each of one group, where the second row's scale is NaN."""
    method = NoFeedback(bits=8, group=8)
    payload = encode(torch.ones(24), [], method, 24, 1, 0, 0)[0]
    scales = payload[24:30].view(torch.bfloat16)
    scales[1] = torch.nan
    lookup = torch.ops.zgraph.lookup_codes.default
    found = lookup(payload, PLACES, to_text(method), 24, 0, 1, 3, 8, torch.float32)
    assert found.isfinite().all()
    assert lookup in marked("reads_rows")


@pytest.mark.parametrize("operator", [one for one in traits.TABLE if one in SAMPLES], ids=str)
def test_randomness_traits_hold_for_two_calls(operator: OpOverload) -> None:
    node = drawn(operator)
    assert not traits.is_random(node)
    assert traits.is_repeatable(node) != bool(written_arguments(node))


def test_random_operators_run_once_and_attention_without_dropout_is_deterministic() -> None:
    drawing = Drawing()
    numbers = drawing.input("numbers", 1, 2, 8, 4)
    drawn_numbers = drawing.call(aten.rand_like.default, numbers)
    assert traits.is_random(drawn_numbers)
    assert not traits.has_zero_dropout(drawn_numbers)
    assert not traits.is_repeatable(drawn_numbers)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    for dropout, expected in ((0.0, True), (0.5, False)):
        node = drawing.graph.create_node("call_function", attention, (numbers, numbers, numbers, dropout))
        assert traits.is_random(node) == (torch.Tag.nondeterministic_seeded in attention.tags)
        assert traits.has_zero_dropout(node) == (expected and traits.is_random(node))


def test_only_stage_0_and_3_gathers_among_foreign_operators_repeat() -> None:
    drawing = Drawing()
    shard = drawing.input("shard", 4)
    start = drawing.start_gather(shard, "weight")
    assert not traits.is_repeatable(start)
    assert not traits.is_repeatable(drawing.wait(start))


def test_parameter_copies_move_and_additions_to_its_sum_stay() -> None:
    drawing = Drawing()
    shard, grad, handle = drawing.input("shard", 4), drawing.input("grad", 4), drawing.input("handle", 1)
    cast = drawing.call(prims.convert_element_type.default, shard, torch.bfloat16, works_for="weight")
    start = drawing.start_gather(cast, "weight")
    assert traits.is_movable(cast)
    assert not traits.is_movable(start)  # nobody waits for it
    wait = drawing.wait(start)
    assert traits.is_movable(start)
    assert traits.is_movable(wait)
    meta.tag_at_use(wait)
    assert not traits.is_movable(wait)
    call = (torch.ops.zgraph.accumulate_grad.default, (grad, handle, torch.float32, 1, "mean"))
    added = drawing.graph.create_node("call_function", *call)
    meta.set_parameters(added, ["weight"], ["handle"])
    assert nodes.is_communication(added)
    assert not traits.is_movable(added)


def test_no_row_contradicts_itself() -> None:
    for operator, row in traits.TABLE.items():
        assert row != traits.NONE_LISTED, operator
        assert not (row.makes_no_values and (row.reshapes or row.is_view)), operator
        assert not (row.is_view and row.may_copy), operator  # which says: not surely
        assert not (row.in_a_library and (row.reshapes or row.overwrites)), operator
        assert not (row.stays and row.reshapes), operator
    assert [trait.name for trait in fields(traits.Traits) if not marked(trait.name)] == []
