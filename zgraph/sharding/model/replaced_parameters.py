"""Parameters that sharding has replaced by DTensors, to detect optimizers that still hold them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import NoReturn, cast

from torch import nn

from zgraph.errors import ZgraphError
from zgraph.torch_compat.autograd import refuse_gradients


class ReplacedParameters:
    """Weak references to replaced parameters, with their names."""

    def __init__(self) -> None:
        self._references: list[tuple[str, weakref.ref[nn.Parameter]]] = []

    def note(self, name: str, parameter: nn.Parameter) -> None:
        """Register a replaced parameter, and refuse any later backward that computes its gradient."""
        refuse_gradients(parameter, partial(_refuse, name))
        self._references.append((name, weakref.ref(parameter)))

    def take_over(self, others: ReplacedParameters) -> None:
        """Move all references of `others` to this instance."""
        self._references += others._references
        others._references = []

    def alive(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters that have not been freed."""
        for name, reference in self._references:
            if (parameter := reference()) is not None:
                yield name, parameter

    def held_by_optimizer(self) -> str | None:
        """Return the name of a replaced parameter that an optimizer still holds, else None.

        If there is none, all references are dropped.
        """
        found = next((name for name, parameter in self.alive() if _is_held_by_optimizer(parameter)), None)
        if found is None:
            self._references = []
        return found


def _refuse(name: str) -> NoReturn:
    raise ZgraphError(
        f"zgraph: a gradient has reached the tensor that {name} was before zgraph.shard, which something still reads: "
        "a closure, a list, or another model. The gradient would train nothing. Read the module's attribute in "
        "forward, and shard models that share parameters in one call."
    )


def _is_held_by_optimizer(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is in the param_groups of any optimizer."""
    for holder in gc.get_referrers(parameter):
        if not isinstance(holder, list):
            continue
        for group in gc.get_referrers(cast("list[object]", holder)):
            if isinstance(group, dict) and "lr" in group and group.get("params") is holder:
                return True
    return False
