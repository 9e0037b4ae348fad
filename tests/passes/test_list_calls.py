"""A merged call gives the bits of the calls that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from zgraph.graph import meta
from zgraph.passes.common.list_calls import ListCall, call_over_lists

aten = torch.ops.aten
NUMBERS = (0.9, 0.37, -0.01)
# Overload, number of tensors, name of a number that follows as an argument ("") or by keyword; None: no number.
CALLS = [
    *[(name, "Tensor", 1, "") for name in ("add", "sub", "mul", "div")],
    *[(name, "Scalar", 1, "") for name in ("add", "sub", "mul", "div")],
    *[(name, "Tensor", 2, "alpha") for name in ("add", "sub")],
    *[(name, "Tensor", 2, None) for name in ("mul", "div")],
    *[(name, "default", 3, "value") for name in ("addcmul", "addcdiv")],
    *[(name, "default", 1, None) for name in ("sqrt", "neg", "abs", "reciprocal")],
    ("lerp", "Scalar", 2, ""),
]


def merged(target: Any, calls: list[tuple[list[Tensor], dict[str, Any], list[float]]]) -> list[Tensor] | None:
    """The results of one call over lists; None if the calls may not be merged."""
    graph, values, found = fx.Graph(), dict[fx.Node, Tensor](), []
    for tensors, options, numbers in calls:
        nodes = [graph.placeholder("x") for _ in tensors]
        for node, tensor in zip(nodes, tensors, strict=True):
            meta.set_value(node, tensor)
            values[node] = tensor.clone()
        found.append(ListCall.of(graph.call_function(target, (*nodes, *numbers), options)))
    known = [call for call in found if call is not None]
    if len(known) < len(calls) or len({call.key for call in known}) > 1:
        return None
    over_lists, args, kwargs = call_over_lists(known)
    results = over_lists(*tree_map_only(fx.Node, values.__getitem__, args), **kwargs)
    return [values[call.tensors[0]] for call in known] if results is None else list(results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ending", ["", "_"], ids=["new", "in place"])
@pytest.mark.parametrize(("name", "overload", "count", "number"), CALLS)
def test_lists_have_the_bits_of_their_members(
    name: str, overload: str, count: int, number: str | None, ending: str, dtype: torch.dtype
) -> None:
    target = getattr(getattr(aten, name + ending), overload)
    torch.manual_seed(0)
    tensors = [[torch.rand(37).to(dtype) + 0.1 for _ in range(count)] for _ in NUMBERS]
    for numbers in (NUMBERS, NUMBERS[:1] * len(NUMBERS)):
        calls = [
            (each, {number: value} if number else {}, [value] if number == "" else [])
            for each, value in zip(tensors, numbers, strict=True)
        ]
        found = merged(target, calls)
        expected = [target(*(one.clone() for one in each), *args, **options) for each, options, args in calls]
        rounds_twice = (name, ending, number) == ("mul", "_", "") and dtype.itemsize < 4
        takes_one = (name == "lerp" or number == "alpha") and numbers is NUMBERS
        assert (found is None) == (rounds_twice or takes_one)
        for one, other in zip(found or [], expected, strict=found is not None):
            assert torch.equal(one, other)
