"""Conversion of compression methods to text, for graphs and checkpoints, and back.

The text has the class's `name` attribute and its fields, but no module or class names: these may change, and reading
a text never causes an import. The class is found by its `name` among the subclasses defined in the process.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import torch

from zgraph.compression.low_rank import LowRank
from zgraph.compression.methods import CompressionMethod

Kind = type[CompressionMethod] | type[LowRank]


def to_text(method: CompressionMethod) -> str:
    """Convert a compression method to text that `from_text` can read.

    Raises:
        ValueError: the method's class defines no `name`, or another class has the same name; or a field cannot be
            written.
    """
    kind = type(method)
    name = vars(kind).get("name")
    if not isinstance(name, str):
        raise ValueError(
            f"zgraph: the compression method {_place(kind)} has no name, which graphs and checkpoints need; "
            f'write name: ClassVar[str] = "..." in the class itself, and keep it when the class is renamed or moved.'
        )
    if _named(name) is not kind:
        raise ValueError(
            f"zgraph: {_place(kind)}, named {name!r}, was defined again since this method was made; make the method "
            "anew, of the class as it is now."
        )
    fields = {
        field.name: _written(kind, field.name, getattr(method, field.name)) for field in dataclasses.fields(method)
    }
    return json.dumps([name, fields])


@functools.cache
def from_text(text: str) -> CompressionMethod:
    """Convert the text of `to_text` to a compression method.

    Raises:
        ValueError: this process defines no class with the name in the text, or several.
    """
    name, fields = json.loads(text)
    kind = _named(name)
    if kind is None or not issubclass(kind, CompressionMethod):
        known = ", ".join(sorted({kind.name for kind in _kinds()}))
        raise ValueError(
            f"zgraph: no compression method is named {name!r} here, only {known}; import the module that defines it."
        )
    return kind(**{key: _read(value) for key, value in fields.items()})


def kind_of(text: str) -> Kind | None:
    """Return the class of the method in a text; None if this process does not define it or the text is damaged."""
    try:
        name, _ = json.loads(text)
    except (ValueError, TypeError):  # damaged
        return None
    return _named(name)


def _named(name: str) -> Kind | None:
    """Return the compression class with this `name`, or None; a class redefined in a notebook replaces the old one."""
    found = {_place(kind): kind for kind in _kinds() if kind.name == name}
    if len(found) > 1:
        raise ValueError(
            f"zgraph: the compression methods {' and '.join(found)} are both named {name!r}, and a graph or checkpoint "
            "cannot tell which it means; give one of them another name."
        )
    return next(iter(found.values()), None)


def _kinds() -> Iterator[Kind]:
    """Yield all compression classes that define a `name`, `LowRank` first."""
    yield LowRank
    for kind in _subclasses(CompressionMethod):
        if "name" in vars(kind):
            yield kind


def _subclasses(kind: type[CompressionMethod]) -> Iterator[type[CompressionMethod]]:
    for found in kind.__subclasses__():
        yield found
        yield from _subclasses(found)


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _written(kind: type, name: str, value: object) -> object:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, int | float | str):
        return value
    raise ValueError(
        f"zgraph: {kind.__name__}.{name} is a {type(value).__name__}, which a compiled graph cannot hold; a "
        "compression method has fields that are numbers, strings, bools or dtypes."
    )


def _read(value: Any) -> Any:
    return getattr(torch, value["dtype"]) if isinstance(value, dict) else value
