"""The tensors in what a unit's forward returns, and the same result with other tensors in their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from zgraph.torch_compat.dynamo import no_frames_inside
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten

Rebuild = Callable[[Iterator[Any]], Any]


@no_frames_inside
def flatten_outputs(result: Any) -> tuple[list[Any], Rebuild]:
    """The leaves of a result, and what puts others in their places.

    Beside what pytree knows, dataclasses are taken apart by their fields; where that finds no tensor, any object by its
    attributes. What is taken apart is copied, since it may be kept elsewhere; all else stays what it is.
    """
    leaves, rebuild = _flatten(result, dataclasses.is_dataclass)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, rebuild
    return _flatten(result, _has_attributes)


@no_frames_inside
def _flatten(result: Any, opens: Callable[[Any], bool], inside: tuple[Any, ...] = ()) -> tuple[list[Any], Rebuild]:
    """As `flatten_outputs`; `inside` are the objects around the result, which may refer back to them."""
    found, spec = tree_flatten(result)
    leaves: list[Any] = []
    parts: list[Rebuild | None] = []
    for leaf in found:
        is_part = not isinstance(leaf, Tensor | type | nn.Module) and opens(leaf)
        if is_part and not any(leaf is one for one in inside):
            below, rebuild = _flatten_object(leaf, opens, (*inside, leaf))
            leaves.extend(below)
            parts.append(rebuild)
        else:
            leaves.append(leaf)
            parts.append(None)

    def rebuilt(given: Iterator[Any]) -> Any:
        return tree_unflatten([next(given) if part is None else part(given) for part in parts], spec)

    return leaves, rebuilt


@no_frames_inside
def _flatten_object(value: Any, opens: Callable[[Any], bool], inside: tuple[Any, ...]) -> tuple[list[Any], Rebuild]:
    attributes = _attributes(value)
    leaves, rebuild = _flatten(list(attributes.values()), opens, inside)

    def rebuilt(given: Iterator[Any]) -> Any:
        copied = object.__new__(type(value))
        for name, attribute in zip(attributes, rebuild(given), strict=True):
            object.__setattr__(copied, name, attribute)  # also where the class is frozen
        return copied

    return leaves, rebuilt


@no_frames_inside
def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):  # may have slots
        found |= {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)}
    return found


@no_frames_inside
def _has_attributes(value: Any) -> bool:
    """Whether a copy of the object is made of its attributes alone; not so for a list with attributes, for instance."""
    return dataclasses.is_dataclass(value) or (
        hasattr(value, "__dict__") and type(value).__new__ is object.__new__ and not callable(value)
    )
