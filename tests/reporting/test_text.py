"""Graphs as text."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from zgraph.graph import meta
from zgraph.graph.text import dtype_text, graph_text, neighbourhood, value_text


def _chain(length: int) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    made = [graph.placeholder("x")]
    for _ in range(length):
        made.append(graph.call_function(torch.ops.aten.neg.default, (made[-1],)))
    graph.output(made[-1])
    return graph, made


def test_dtypes_are_short() -> None:
    found = {
        dtype: dtype_text(dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool)
    }
    assert list(found.values()) == ["f32", "bf16", "u8", "i64", "bool"]


def test_strides_are_shown_where_they_are_unusual() -> None:
    assert value_text(torch.ones(2, 3)) == "f32[2, 3]"
    assert value_text(torch.ones(2, 3).t()) == "f32[3, 2] strides (1, 3)"
    assert value_text(torch.ones(2, 3, device="meta")) == "f32[2, 3] meta"
    assert value_text((torch.ones(1), None, 3)) == "(f32[1], ?, int)"


def test_a_line_names_the_parameters_a_node_works_for() -> None:
    graph, (x, neg) = _chain(1)
    meta.set_value(x, torch.ones(2))
    meta.set_value(neg, torch.ones(2))
    meta.set_parameters(neg, ["h.0.weight", "h.0.bias"], ["a", "b"])
    assert graph_text(graph).splitlines() == [
        "x: f32[2] = input",
        "neg_default: f32[2] = aten.neg(x)  # h.0.weight, h.0.bias",
        "return neg_default",
    ]


def test_an_error_shows_ten_nodes_on_either_side() -> None:
    _, made = _chain(40)
    lines = neighbourhood(made[20]).splitlines()
    assert len(lines) == 21
    assert [line for line in lines if line.startswith("--> ")] == [lines[10]]
    assert made[20].name in lines[10]


@pytest.mark.parametrize(("position", "shown"), [(0, 11), (1, 12), (30, 12), (31, 11)])
def test_a_neighbourhood_ends_where_the_graph_ends(position: int, shown: int) -> None:
    graph, _ = _chain(30)
    node = list(graph.nodes)[position]
    lines = neighbourhood(node).splitlines()
    assert len(lines) == shown
    (marked,) = [line for line in lines if line.startswith("--> ")]
    assert marked.startswith("--> return" if node.op == "output" else f"--> {node.name}: ")


def test_an_erased_node_is_shown_alone() -> None:
    graph, _ = _chain(2)
    loose = graph.call_function(torch.ops.aten.abs.default, (next(iter(graph.nodes)),))
    graph.erase_node(loose)
    assert neighbourhood(loose) == "    abs_default: ? = aten.abs(None)  (erased)"  # FX has taken its inputs


def test_arguments_read_as_they_were_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(
        torch.ops.aten.sum.dim_IntList,
        ((x, None), [1, 2.5]),
        {"keepdim": True, "dtype": torch.bfloat16, "of": {"a": x}},
    )
    graph.output({"loss": call, "kind": "text"})
    assert graph_text(graph).splitlines()[1:] == [
        "sum_dim_int_list: ? = aten.sum.dim_IntList((x, None), [1, 2.5], keepdim=True, dtype=torch.bfloat16, "
        "of={'a': x})",
        "return {'loss': sum_dim_int_list, 'kind': 'text'}",
    ]
