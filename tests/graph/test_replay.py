"""Fake values of new nodes: computed by kernels for meta tensors, and equal to the ones of the fake mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, wait_op
from zgraph.torch_compat.fake_values import fake_mode, fake_storage_key, replay, replaying

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

CALLS: dict[str, Callable[[Tensor], Call]] = {
    "view": lambda x: (aten.view.default, (x, [6, 2]), {}),
    "slice": lambda x: (aten.slice.Tensor, (x, 1, 1, 3), {}),
    "t": lambda x: (aten.t.default, (x,), {}),
    "as_strided": lambda x: (aten.as_strided.default, (x, [2], [3], 1), {}),
    "clone": lambda x: (aten.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}),
    "cat": lambda x: (aten.cat.default, ([x, x],), {}),
    "all_gather": lambda x: (all_gather_op(), (x, 2, "group"), {}),
    "all_to_all": lambda x: (all_to_all_op(), (x, [2, 1], [2, 1], "group"), {}),
    "wait": lambda x: (wait_op(), (x,), {}),
    "several outputs": lambda x: (aten.split.Tensor, (x, 2, 1), {}),
    "another device": lambda x: (aten.to.dtype_layout, (x,), {"device": torch.device("meta")}),
    "itself": lambda x: (aten.lift_fresh.default, (x,), {}),
    "arithmetic": lambda x: (aten.mul.Tensor, (x, 2.0), {}),
}


def facts(value: Any, given: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return [facts(one, given) for one in value]
    shares = fake_storage_key(value) == fake_storage_key(given)
    place = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
    return place, value.requires_grad, shares, type(value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_mode(name: str, dtype: torch.dtype) -> None:
    mode = fake_mode()
    with mode:
        x = torch.empty(3, 4, dtype=dtype)
    with replaying(mode):
        target, args, kwargs = CALLS[name](x)
        expected = target(*args, **kwargs)
    found = replay(mode, target, args, kwargs)
    assert facts(found, x) == facts(expected, x)
    with mode:  # the mode is as it was
        assert facts(x + 1, x)[0][:2] == ((3, 4), (4, 1))
