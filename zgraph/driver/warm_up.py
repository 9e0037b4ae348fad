"""Decides when the warm-up of `SignMomentum(warmup="auto")` ends: once the second moments of AdamW are stable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx

from zgraph.compression.sign_momentum import LATEST, is_stable
from zgraph.errors import ZgraphError
from zgraph.runtime.window_state import ParameterState
from zgraph.sharding.scope import state_of
from zgraph.torch_compat.groups import resolve_group

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SecondMoments:
    """Inputs of a step: the second moments that its compressed variant freezes.

    Attributes:
        squares: places of the second moments.
        step: place of their number of updates.
        beta2: place of the decay, or the decay.
        lr: place of the learning rate, or the rate; of several groups, that of the first.
    """

    squares: tuple[int, ...]
    step: int
    beta2: int | float
    lr: int | float

    @classmethod
    def of(cls, graph: fx.Graph) -> SecondMoments | None:
        """Find the second moments of all updates by momenta; None if there are none.

        Raises:
            ZgraphError: they are not inputs of the graph, because they rest elsewhere between steps.
        """
        places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        updates = [node for node in graph.nodes if str(node.target).startswith("zgraph.momentum_adamw_.")]
        if not updates:
            return None
        read = [cast("Sequence[fx.Node]", node.args[3]) for node in updates]
        steps = cast("Sequence[fx.Node]", updates[0].args[4])
        if not all(node in places for node in (*(one for nodes in read for one in nodes), steps[0])):
            raise ZgraphError(
                'compress_gradients: SignMomentum(warmup="auto") reads second moments between steps, and with '
                "zgraph.Offload they are not on the device; write a number of steps, such as warmup=1000."
            )
        squares = tuple(places[one] for nodes in read for one in nodes)
        beta2, lr = (
            places[given] if isinstance(given, fx.Node) else float(cast(float, given))
            for given in (updates[0].kwargs[name] for name in ("beta2", "lr"))
        )
        return cls(squares, places[steps[0]], beta2, lr)

    def watch(self, args: Sequence[Any], counted: Sequence[ParameterState]) -> Callable[[], None]:
        """Return a function to call after the step, on all ranks, which ends the warm-up if second moments are stable.

        Args:
            args: inputs of the step; the program will clear the list.
            counted: state of the parameters that are compressed after the warm-up.
        """
        beta2, lr = (args[given] if isinstance(given, int) else given for given in (self.beta2, self.lr))
        squares, step = [args[place] for place in self.squares], args[self.step]
        return lambda: _end_if_stable(squares, step, beta2, lr, counted)


def _end_if_stable(
    squares: Sequence[Tensor], step: Tensor, beta2: float, lr: float | Tensor, counted: Sequence[ParameterState]
) -> None:
    """Compare sums every 1 / (1 - beta2) steps of the warm-up, and end it if they are close.

    The ranks gather the sums and add them in one order, so that all decide alike.
    """
    feedbacks = [state.feedbacks for state in counted]
    if feedbacks[0].warmed_steps % max(1, round(1 / (1 - beta2))):
        return
    total = torch.stack([square.double().sum() for square in squares]).sum()
    for name in _groups(counted):
        group = resolve_group(name)
        sums = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sums, total, group=group)
        total = torch.stack(sums).sum()
    last, now = feedbacks[0].second_moment, (total.item() / (1 - beta2 ** step.item()), float(lr))
    ends = is_stable(last, now)
    if ends:
        _log.info("zgraph: SignMomentum: the warm-up ends after %d steps", feedbacks[0].warmed_steps)
    for one in feedbacks:
        one.second_moment = now
        one.warmed_steps = LATEST if ends else one.warmed_steps


def _groups(counted: Sequence[ParameterState]) -> list[str]:
    """Return the names of all groups that share the parameters, each once.

    A sum over one after the other is equal on all their ranks. It may count a parameter several times, which does
    not change ratios.
    """
    found: dict[str, None] = {}
    for one in counted:
        state = state_of(one.owner)
        assert state is not None
        layout = state.by_attribute[one.attribute].spec.layout
        found |= dict.fromkeys(name for name in (layout.reduce_group, layout.replica_group) if name)
    return list(found)
