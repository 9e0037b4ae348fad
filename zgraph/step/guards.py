"""Conditions of a call for which a graph was captured; a call under other conditions needs another graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.step.capture.capture import Captured
from zgraph.step.capture.option_inputs import OptionInputs
from zgraph.step.outside.python_values import PythonValues
from zgraph.step.outside.variables import Outside
from zgraph.tiers.devices import KINDS

_NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Conditions:
    """Conditions of a call for which a graph was captured; compared field by field.

    Attributes:
        arguments: structure of the arguments, layouts of tensors, values of all other arguments.
        modes: class of each module, training or evaluation, and the numbers that it holds, such as a dropout
            probability.
        trainable: `requires_grad` of each parameter.
        hooks: hooks on parameters, as returned by `parameter_hooks.conditions`.
        options: options of the optimizers, except parameters and options that are inputs of the graph.
        state: entries of optimizer state, see `StateLayout.conditions`.
        layouts: shapes and dtypes of parameters and buffers.
        outside: names and layouts of tensors that the function reads from outside.
        variables: numbers that the function reads from outside.
        spaces: memory space of each input of the graph; () if all are on the device.
        ambient: settings of torch, see `ambient`.
    """

    arguments: tuple[Any, ...]
    modes: tuple[Any, ...]
    trainable: tuple[Any, ...]
    hooks: tuple[Any, ...]
    options: tuple[Any, ...]
    state: tuple[Any, ...]
    layouts: tuple[Any, ...]
    outside: tuple[Any, ...]
    variables: tuple[Any, ...]
    spaces: tuple[Any, ...]
    ambient: tuple[Any, ...]

    def closest(self, others: Sequence[Conditions]) -> Conditions | None:
        """Return the element of `others` with the fewest differing fields; of several such elements, the last.

        Returns None if `others` is empty.
        """
        names = [field.name for field in fields(self)]
        counts = [sum(getattr(self, name) != getattr(other, name) for name in names) for other in others]
        return min(zip(reversed(counts), reversed(others), strict=True), key=itemgetter(0))[1] if others else None

    def difference(self, other: Conditions) -> str:
        """Describe the first field in which `other` differs from these conditions; "" if there is none."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
                if not pairs or len(ours) != len(theirs):
                    return f"{field.name}: {len(ours)} entries, before {len(theirs)}"
                return f"{field.name}: {pairs[0][0]}, before {pairs[0][1]}"
        return ""


@dataclass(frozen=True)
class Variant:
    """One compiled graph of a step, with everything that decides for which calls it is valid.

    Attributes:
        conditions: conditions under which the graph was captured.
        captured: the graph before compilation, with its assumptions about options.
        program: the compiled graph, as a callable.
        lowering: lowering that compiled the graph, "inductor" or "fx".
        values: Python values that are constants of the graph.
    """

    conditions: Conditions
    captured: Captured
    program: Callable[[list[Any]], Any]
    lowering: str
    values: PythonValues

    def holds(self, conditions: Conditions, options: OptionInputs, tensors: Sequence[Tensor]) -> bool:
        """Return whether the graph is valid for a call."""
        return (
            self.conditions == conditions
            and self.captured.assumed.hold(options.values, tensors)
            and not self.values.changed()
        )


def why_another(
    others: Sequence[Variant], conditions: Conditions, options: OptionInputs, tensors: Sequence[Tensor]
) -> str:
    """Describe why a call needs another graph: its difference from the closest of `others`; "" if `others` is empty."""
    closest = conditions.closest([one.conditions for one in others])
    if closest is None:
        return ""
    found = conditions.difference(closest)
    if found:
        return found
    variant = next(one for one in reversed(others) if one.conditions is closest)
    broken = variant.captured.assumed.broken(options.values, tensors)
    if broken:
        return f"options: {broken}"
    changed = variant.values.changed()
    return f"values of Python: {changed}" if changed else "optional: ranks run other modules"


def of_arguments(leaves: Sequence[Any], tree: Any) -> tuple[Any, ...]:
    """Return a call's arguments in comparable form: their structure, layouts of tensors, values of all others.

    Raises:
        ZgraphError: an argument can neither be an input of a graph nor be compared.
    """
    return (str(tree), *map(_of_argument, leaves))


def _of_argument(leaf: Any) -> Any:
    if type(leaf) in (Tensor, nn.Parameter):
        if leaf.requires_grad:
            raise ZgraphError(
                f"zgraph.training_step: an argument of shape {list(leaf.shape)} requires a gradient, which the step "
                "would not return; detach it, or make it a parameter of the model."
            )
        return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())
    if isinstance(leaf, _NUMBERS):
        return (type(leaf), leaf)
    raise ZgraphError(
        f"zgraph.training_step: an argument is a {type(leaf).__name__}; pass tensors and numbers, in lists, tuples and "
        "dicts, and let the function read everything else from outside."
    )


class Modules:
    """Reader of the classes of all modules of a model, and of their numbers, such as `training` or a probability."""

    def __init__(self, model: nn.Module) -> None:
        self.readers: list[tuple[nn.Module, Callable[[Any], Any]]] = []
        for part in model.modules():
            names = [name for name, value in part.__dict__.items() if isinstance(value, _NUMBERS)]
            self.readers.append((part, itemgetter(*names)))  # "training" is one of them

    def conditions(self) -> tuple[Any, ...]:
        return tuple((part.__class__, read(part.__dict__)) for part, read in self.readers)


def of_variables(outside: Outside) -> tuple[Any, ...]:
    """Return names, types and values of the numbers that a function reads from outside, and settings of GradScalers.

    Numbers in the model's modules are not included, see `Modules`.
    """
    numbers = [(name, type(value), value) for name, value in outside.variables if isinstance(value, _NUMBERS)]
    factors = [
        (one.get_growth_factor(), one.get_backoff_factor(), one.get_growth_interval()) for one in outside.scalers
    ]
    return (*numbers, *factors)


def of_tensors(outside: Outside) -> tuple[Any, ...]:
    """Return names and layouts of the tensors that a function reads from outside."""
    return tuple(
        (name, type(one), tuple(one.shape), one.dtype, one.device, one.stride(), one.requires_grad)
        for name, one in outside.tensors.items()
    )


def ambient() -> tuple[Any, ...]:
    """Return torch's settings that affect a trace: grad mode, inference mode, default dtype, autocast."""
    autocast = [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in KINDS]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast)
