"""Put the results of a step's graph where the plain lines would have left them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.sharding.model.sharded_tensor import sharded_like
from zgraph.step.capture.capture import Captured
from zgraph.step.capture.lifted import Lifted, local
from zgraph.torch_compat.modules import note_step, tree_unflatten


def hand_back(lifted: Lifted, captured: Captured, outputs: Sequence[Any]) -> Any:
    """Put new state and gradients in their places, and return the function's return value."""
    parameters = lifted.parameters
    optimizers = [one.optimizer for one in lifted.optimizers]
    states = [one.state for one in optimizers]
    given = iter(outputs)
    likes = iter(captured.likes)
    leaves: list[Any] = []
    for constant in captured.returned:
        if constant is not None:
            leaves.append(constant[0])
            continue
        like, value = next(likes), next(given)
        leaves.append(_wrapped(value, like))
    made = [
        (number, parameters[position].tensor, key, _wrapped(next(given), like))
        for (number, position, key), like in zip(captured.state, captured.layouts, strict=True)
    ]
    for position in captured.grads:
        parameter = parameters[position].tensor
        # torch keeps gradients on the device of their parameters, which may be the host.
        parameter.grad = _wrapped(next(given).to(local(parameter).device), parameter)
    for (attributes, name), like in zip(captured.bindings, captured.bound, strict=True):
        attributes[name] = _wrapped(next(given), like)
    for scaler, optimizer, flags in captured.told:
        scaler.tell_models([(optimizer, [next(given) for _ in range(flags)])])
    flags = dict(zip(captured.skips, given, strict=True))
    # Reading a flag waits for the device: only the first step, which creates state, needs it.
    makers = dict.fromkeys(number for number, *_ in (*captured.state, *captured.constants))
    skipped = {number for number in makers if flags.get(number)}
    for number, parameter, key, value in made:
        if number not in skipped:
            states[number][parameter][key] = value
    for number, position, key, constant in captured.constants:
        if number not in skipped:
            states[number][parameters[position].tensor][key] = constant
    for number in captured.steps:
        note_step(optimizers[number])
    return tree_unflatten(leaves, captured.tree)


def _wrapped(value: Tensor, like: Tensor | None) -> Tensor:
    return sharded_like(value, like) if isinstance(like, DTensor) else value


def check_gradients(captured: Captured, has_gradient: Sequence[bool]) -> None:
    """Refuse gradients from before the step, unless the step clears them before adding to them."""
    if any(has and position not in captured.cleared for position, has in enumerate(has_gradient)):
        raise ZgraphError(
            "zgraph.training_step: parameters have gradients from before the step, to which it would add; call the "
            "model's zero_grad() before the step, or first in it."
        )
