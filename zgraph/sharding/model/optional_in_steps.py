"""Optional parameters in a whole training step: their reductions are operators of its graph.

A rank knows which parameters a backward reaches once it has traced the step. So a graph depends on two facts: what this
rank reaches, and what any rank reaches, which decides what is reduced, clipped and stepped. Graphs that differ only in
the first have equal collectives: these reductions come at the end of each backward, in the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from zgraph.dialect.markers import reduce_grad
from zgraph.errors import ZgraphError
from zgraph.runtime.window_state import ALONE
from zgraph.sharding.model.param_spec import ParamSpec
from zgraph.torch_compat.dtensor import dtensor_like, gradients_of, local_of

# For each backward of a step, in order, whether it reaches each of the optional parameters.
Reached = tuple[tuple[bool, ...], ...]


class Param(Protocol):
    """A `ShardedParam`."""

    name: str
    spec: ParamSpec

    @property
    def sharded(self) -> DTensor: ...


def policy_of(spec: ParamSpec) -> tuple[Any, ...]:
    """Return the arguments that `reduce_grad` needs to reduce an optional parameter's gradient now."""
    layout = spec.layout
    head = (spec.dtype, spec.wire_dtype, spec.mean_dtype, 0, spec.reduction, ALONE)
    return (*head, layout.replica_group, layout.gather_group)


class TracedReductions:
    """Reductions of the optional parameters of one call of `zgraph.shard`, while a step is traced.

    Args:
        params: the parameters, which are stand-ins during the trace.
        handle_of: function that returns the traced tensor of a parameter's handle.
        united: what any rank reaches; None if ranks have not told each other: then what this rank reaches.
    """

    def __init__(
        self, params: Sequence[Param], handle_of: Callable[[Any], Tensor], united: Reached | None = None
    ) -> None:
        self._params, self._handle_of, self._united = params, handle_of, united
        self._ended: list[tuple[bool, ...]] = []
        self._earlier: dict[int, Tensor | None] = {}  # `.grad` from before the running backward, if it is reached

    @property
    def reached(self) -> Reached:
        """What this rank reaches, in the backwards so far."""
        return tuple(self._ended)

    def watch(self) -> list[RemovableHandle]:
        """Register hooks on the stand-ins that see which gradients a backward computes."""
        trained = [(place, param.sharded) for place, param in enumerate(self._params)]
        return [one.register_hook(partial(self._computed, place)) for place, one in trained if one.requires_grad]

    def _computed(self, place: int, grad: Tensor) -> None:
        """Keep a gradient from before this backward apart, just before autograd would add to it."""
        if place not in self._earlier:
            parameter = self._params[place].sharded
            (self._earlier[place],) = gradients_of([parameter])
            parameter.grad = None

    @torch.no_grad()
    def backward_ends(self, position: str) -> None:
        """Reduce the gradients that any rank has.

        Args:
            position: window position of the last forward.

        Raises:
            ZgraphError: the forward was under `no_sync`, or this trace differs from the one that ranks have told of.
        """
        if position != ALONE:
            raise ZgraphError(
                "zgraph.training_step: the model has modules that ranks may skip (zgraph.shard(optional=...)), whose "
                "gradients cannot wait under zgraph.no_sync inside a step. Leave out no_sync, so that each backward "
                'reduces, or compile the model instead: torch.compile(model, backend="zgraph").'
            )
        earlier, self._earlier = self._earlier, {}
        flags = tuple(place in earlier for place in range(len(self._params)))
        every, number = flags, len(self._ended)
        self._ended.append(flags)
        if self._united is not None:
            every = self._united[number] if number < len(self._united) else ()
            if len(every) != len(flags) or any(own and not any_ for own, any_ in zip(flags, every, strict=True)):
                raise ZgraphError(
                    "zgraph.training_step: the step runs other modules each time it is captured; let it decide by its "
                    "arguments which modules it runs."
                )
        # All reductions before any sum, so that they can share a bucket.
        means = [(place, self._mean(place, is_own=place in earlier)) for place, waits in enumerate(every) if waits]
        for place, mean in means:
            parameter = self._params[place].sharded
            before = earlier[place] if place in earlier else gradients_of([parameter])[0]
            total = mean if before is None else local_of(cast(DTensor, before)) + mean
            parameter.grad = dtensor_like(total, parameter)

    def _mean(self, place: int, *, is_own: bool) -> Tensor:
        """Return the reduced gradient of the running backward; without an own one, this rank adds zeros."""
        param, parameter = self._params[place], self._params[place].sharded
        (found,) = gradients_of([parameter])
        own = local_of(cast(DTensor, found)) if is_own else torch.zeros_like(local_of(parameter))
        # In the dtype in which autograd computed it, so nothing is rounded.
        return reduce_grad(own.to(param.spec.compute_dtype), self._handle_of(param), *policy_of(param.spec))
