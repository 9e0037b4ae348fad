"""Numbers of fused optimizer kernels, whose schemas take floats that cannot be symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zgraph.torch_compat.aot import newest_node, node_of_number, nodes_after
from zgraph.torch_compat.fake_values import number_hint


class NumbersOfFusedSteps(TorchFunctionMode):
    """Gives fused kernels the numbers' present values, and their nodes the numbers.

    A kernel that takes a `float` would make a constant of a symbolic number, and every new value another graph.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        numbers = {key: value for key, value in kwargs.items() if isinstance(value, torch.SymFloat)}
        if not numbers or not getattr(func, "__name__", "").startswith("_fused_"):
            return func(*args, **kwargs)
        before = newest_node()
        inputs = {key: node_of_number(value) for key, value in numbers.items()}
        present = {key: number_hint(value) for key, value in numbers.items()}
        result = func(*args, **{**kwargs, **present})
        for node in nodes_after(before):
            if str(node.target).startswith("aten._fused_"):
                node.kwargs = {key: inputs.get(key, value) for key, value in node.kwargs.items()}
        return result
