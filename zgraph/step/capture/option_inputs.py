"""Options of optimizers that are inputs of a step's graph, and the graph's assumptions about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, optim

from zgraph.torch_compat.fake_values import NumberGuards


@dataclass(frozen=True)
class OptionInputs:
    """Options in the optimizers' parameter groups at one call.

    Attributes:
        values: options that are inputs of the graph: tensors and floats, including floats in tuples such as `betas`.
            They are listed group by group, one optimizer after another.
        conditions: all other options; a graph is valid only for their present values.
    """

    values: tuple[float | Tensor, ...]
    conditions: tuple[Any, ...]

    @classmethod
    def of(cls, optimizers: Sequence[optim.Optimizer]) -> OptionInputs:
        """Read the current options."""
        values: list[float | Tensor] = []
        conditions: list[Any] = []
        for group in _groups(optimizers):
            for key, value in group.items():
                if key == "params":
                    continue
                if type(value) is float:
                    values.append(value)
                    conditions.append((key, float))
                elif isinstance(value, Tensor):
                    values.append(value)
                    conditions.append((key, tuple(value.shape), value.dtype, value.device))
                elif type(value) is tuple and any(type(entry) is float for entry in value):
                    values.extend(entry for entry in value if type(entry) is float)
                    conditions.append((key, *(float if type(entry) is float else entry for entry in value)))
                elif key == "lr":
                    values.append(float(cast(Any, value)))
                    conditions.append((key, type(value)))
                else:
                    conditions.append((key, value))
        own = [entry for optimizer in optimizers for entry in optimizer.__dict__.items()]
        conditions += [(key, value) for key, value in own if isinstance(value, int | float | str) and key[0] != "_"]
        return cls(tuple(values), tuple(conditions))


def names_of(optimizers: Sequence[optim.Optimizer]) -> list[str]:
    """Return readable names of `OptionInputs.values`, such as "lr_0" for the first group's learning rate."""
    found: list[str] = []
    for number, group in enumerate(_groups(optimizers)):
        for key, value in group.items():
            entries: tuple[Any, ...] = value if type(value) is tuple else (value,)
            places = [place for place, entry in enumerate(entries) if _is_input(key, entry)]
            found += [f"{key}_{number}" if entries is not value else f"{key}{place}_{number}" for place in places]
    return found


def _groups(optimizers: Sequence[optim.Optimizer]) -> Iterator[dict[str, Any]]:
    return (group for optimizer in optimizers for group in optimizer.param_groups)


def with_inputs(group: dict[str, Any], inputs: Iterator[Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's parameter group, with the graph's inputs in place of tensors and floats."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if type(value) is tuple:
            found[key] = tuple(next(inputs) if _is_input(key, entry) else entry for entry in value)
        else:
            found[key] = next(inputs) if _is_input(key, value) else value
    return found


def _is_input(key: str, value: Any) -> bool:
    if key == "params":
        return False
    return type(value) is float or isinstance(value, Tensor) or (key == "lr" and isinstance(value, int))


class Assumed:
    """Assumptions of a graph about numbers on which Python branched during the trace.

    Args:
        guards: comparisons that the trace made, with their outcomes.
        names: names of the graph's inputs that are optimizer options.
        values: values of these options during the trace.
        read: numbers that the trace read from input tensors: by name, (index of the tensor, constant to add to the
            tensor's value).
    """

    def __init__(
        self,
        guards: NumberGuards,
        names: Sequence[str],
        values: Sequence[float | Tensor],
        read: Mapping[str, tuple[int, float]],
    ) -> None:
        self._guards, self._names, self._read = guards, tuple(names), read
        self._held, self._count = tuple(values), guards.current()  # the last values that held, and the number of guards

    def hold(self, values: tuple[float | Tensor, ...], tensors: Sequence[Tensor]) -> bool:
        """Return whether the assumptions hold for these option values and input tensors."""
        count = self._guards.current()
        if count == self._count and (not count or (not self._read and all(map(_is_same, values, self._held)))):
            return True
        if self.broken(values, tensors):
            return False
        self._held, self._count = values, count
        return True

    def broken(self, values: Sequence[float | Tensor], tensors: Sequence[Tensor]) -> str:
        """Describe the first comparison that has another outcome for these values; "" if there is none."""
        numbers = {name: value for name, value in zip(self._names, values, strict=True) if isinstance(value, float)}
        numbers |= {name: float(tensors[place]) + added for name, (place, added) in self._read.items()}
        return self._guards.broken(numbers)


def _is_same(value: float | Tensor, other: float | Tensor) -> bool:
    return value is other or (isinstance(value, float) and isinstance(other, float) and value == other)
