"""Combines several optimizers of one model into one, so that a checkpoint has a single optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer


class Checkpointed(Protocol):
    """Interface of an optimizer that checkpoints use."""

    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class SeveralOptimizers:
    """Several optimizers of different parameters as one optimizer with all their groups.

    Args:
        optimizers: optimizers, in the same order when saving and loading.

    Raises:
        ValueError: two optimizers step the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        owned = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(set(owned)) < len(owned):
            raise ValueError(
                "zgraph: two of the optimizers step the same parameter, and a checkpoint holds one state of each; save "
                "them in directories of their own."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all optimizers as one state dict, with parameters numbered over all groups."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, one in zip(_firsts(self._optimizers), self._optimizers, strict=True):
            saved = one.state_dict()
            state |= {first + index: entries for index, entries in saved["state"].items()}
            for group in saved["param_groups"]:
                groups.append({**group, "params": [first + index for index in group["params"]]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into each optimizer its own part of a state dict."""
        for one, own in parts_of(state_dict, self._optimizers):
            one.load_state_dict(own)


def _firsts(optimizers: Sequence[Optimizer]) -> list[int]:
    """Return the number of each optimizer's first parameter."""
    found = [0]
    for one in optimizers:
        found.append(found[-1] + sum(len(group["params"]) for group in one.param_groups))
    return found[:-1]


def parts_of(
    state_dict: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    """Yield each optimizer with its own part of a state dict of all of them."""
    given = iter(state_dict["param_groups"])
    for first, one in zip(_firsts(optimizers), optimizers, strict=True):
        groups = [next(given) for _ in one.param_groups]
        groups = [{**group, "params": [index - first for index in group["params"]]} for group in groups]
        owned = {index for group in groups for index in group["params"]}
        state = {index - first: entries for index, entries in state_dict["state"].items() if index - first in owned}
        yield one, {"state": state, "param_groups": groups}


def as_one(optimizer: Optimizer | Sequence[Optimizer] | None) -> Checkpointed | None:
    """Combine a list of optimizers into one for checkpoints; return a single optimizer or None unchanged."""
    return optimizer if optimizer is None or isinstance(optimizer, Optimizer) else SeveralOptimizers(optimizer)
