"""Optimizer state during a trace: lines of the step may set entries, and read only entries that they have set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor

from zgraph.step.lines.refusals import refusal


class _Guarded:
    """A mapping that refuses all but reading and setting single entries."""

    def __init__(self, of: str) -> None:
        self.of = of

    def refuse(self) -> NoReturn:
        raise refusal(
            f"reads or changes the state of {self.of}, which is neither an argument of the step nor kept by its lines",
            "do it outside, after the first step has made the state",
        )

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse()

    def __delitem__(self, key: object) -> NoReturn:
        self.refuse()

    def __contains__(self, key: object) -> bool:
        self.refuse()

    def __iter__(self) -> Iterator[Any]:
        self.refuse()

    def __len__(self) -> int:
        self.refuse()


class StateInLines(_Guarded):
    """Takes the place of `optimizer.state` during a trace.

    Args:
        of: class of the optimizer, for messages.
        positions: positions of the optimizer's parameters, by the ids of the parameters and of their stand-ins.
        keep: called with the position, key and value of each entry that lines set.
    """

    def __init__(self, of: str, positions: Mapping[int, int], keep: Callable[[int, str, Any], None]) -> None:
        super().__init__(of)
        self._positions, self._keep = positions, keep
        self._entries: dict[int, _Entries] = {}

    def __getitem__(self, parameter: Tensor) -> _Entries:
        position = self._positions.get(id(parameter))
        if position is None:
            self.refuse()
        return self._entries.setdefault(position, _Entries(self.of, position, self._keep))

    def __setitem__(self, parameter: Tensor, entries: object) -> NoReturn:
        self.refuse()


class _Entries(_Guarded):
    """The state of one parameter; only entries that the traced step's lines have set can be read."""

    def __init__(self, of: str, position: int, keep: Callable[[int, str, Any], None]) -> None:
        super().__init__(of)
        self._position, self._keep = position, keep
        self._set: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._set:
            self.refuse()
        return self._set[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._keep(self._position, key, value)
        self._set[key] = value
