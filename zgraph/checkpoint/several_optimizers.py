"""Several optimizers of one model combined into one, so that a checkpoint stores them all by parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.optim import Optimizer


class Checkpointed(Protocol):
    """The part of an optimizer's interface that checkpoints use."""

    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class SeveralOptimizers:
    """Combines several optimizers of different parameters into one that has all their groups.

    Args:
        optimizers: optimizers, in the same order when saving and loading.

    Raises:
        ValueError: two of them step the same parameter.
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
        """A state dict like that of a single optimizer, with the parameters numbered group by group."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, one in zip(self._firsts(), self._optimizers, strict=True):
            saved = one.state_dict()
            state |= {first + index: entries for index, entries in saved["state"].items()}
            for group in saved["param_groups"]:
                groups.append({**group, "params": [first + index for index in group["params"]]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its own part of the state."""
        given = iter(state_dict["param_groups"])
        for first, one in zip(self._firsts(), self._optimizers, strict=True):
            groups = [next(given) for _ in one.param_groups]
            groups = [{**group, "params": [index - first for index in group["params"]]} for group in groups]
            owned = {index for group in groups for index in group["params"]}
            state = {index - first: entries for index, entries in state_dict["state"].items() if index - first in owned}
            one.load_state_dict({"state": state, "param_groups": groups})

    def _firsts(self) -> list[int]:
        """The number of each optimizer's first parameter."""
        found = [0]
        for one in self._optimizers:
            found.append(found[-1] + sum(len(group["params"]) for group in one.param_groups))
        return found[:-1]


def as_one(optimizer: Optimizer | Sequence[Optimizer] | None) -> Checkpointed | None:
    """Return the optimizers as a single one, as checkpoints save and load it; None without an optimizer."""
    return optimizer if optimizer is None or isinstance(optimizer, Optimizer) else SeveralOptimizers(optimizer)
