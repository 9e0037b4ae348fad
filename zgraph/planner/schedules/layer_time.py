"""Predict the time of a module's forward and backward from a trace on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zgraph.analysis.cost import CostModel
from zgraph.graph import meta, nodes
from zgraph.torch_compat.aot import trace
from zgraph.torch_compat.fake_values import fake_on_cpu


def layer_time(layer: nn.Module, inputs: Sequence[Any], mode: Any, costs: CostModel) -> tuple[float, Tensor | None]:
    """Return the predicted time of a module's forward and backward on one rank, and the result of its forward.

    Args:
        layer: module; its values are not read.
        inputs: inputs of the module's forward, as tensors of `mode`.
        mode: mode of fake tensors.
        costs: cost model of the machine.

    Returns:
        Time in microseconds; and the result as a tensor of `mode`, or None if it is not a single tensor.
    """
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    fakes = [fake_on_cpu(mode, value) for value in named.values()]
    is_tensor = False

    def step(*values: Any) -> list[Tensor]:
        nonlocal is_tensor
        given = dict(zip(named, values, strict=False))
        returned = torch.func.functional_call(layer, given, tuple(values[len(named) :]))
        is_tensor = isinstance(returned, Tensor)
        if not is_tensor:
            return []
        leaves = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        if not (leaves and returned.requires_grad):
            return [returned]
        found: Any = torch.autograd.grad(returned, leaves, torch.ones_like(returned), allow_unused=True)
        return [returned, *(one for one in found if one is not None)]

    with torch.enable_grad():
        traced = trace(step, [*fakes, *inputs], mode, decompose=False)
    us = sum(costs.cost(node).us for node in traced.graph.nodes)
    if not is_tensor:
        return us, None
    output = nodes.returned_by(traced.graph)[0]
    result = fake_on_cpu(mode, meta.tensor_value(output).detach())
    return us, result.requires_grad_(result.is_floating_point())


def likeness(module: nn.Module, inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return a key of a module and its inputs. Modules with equal keys compute the same on equal values.

    Sizes, numbers and names are compared by value, all other attributes by identity.
    """
    parts = tuple(
        (
            name,
            type(part),
            part.training,
            tuple((key, _plain(value)) for key, value in vars(part).items() if key not in _OWN),
        )
        for name, part in module.named_modules()
    )
    values = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {id(value): place for place, (_, value) in reversed(list(enumerate(values)))}
    tensors = tuple((name, first[id(value)], *_layout(value)) for name, value in values)
    return parts, tensors, tuple(_layout(value) if isinstance(value, Tensor) else _plain(value) for value in inputs)


_OWN = frozenset({"_parameters", "_buffers", "_modules", "training"})


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_plain, value))  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict | set) and not value:
        return type(value), ()  # pyright: ignore[reportUnknownVariableType]
    return id(value)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
