"""Finds the reductions of replicated gradients: ranks exchange and sum chunks, then gather the averaged chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from zgraph.graph import meta, nodes, traits

aten = torch.ops.aten


@dataclass(frozen=True)
class ReplicatedReduction:
    """The nodes that reduce one flat replicated gradient.

    Attributes:
        steps: chain of nodes, each of which reads only the previous one: exchange, wait, sum and division, gather of
            the averaged chunks, wait for the gather, and a cast if the gather's dtype is narrower than the result's.
        numel: number of elements of the gradient, without padding.
        mean: node of the complete averaged gradient [numel].
    """

    steps: tuple[fx.Node, ...]
    numel: int
    mean: fx.Node

    @classmethod
    def of(cls, start: fx.Node) -> ReplicatedReduction | None:
        """Return the reduction that begins with `start`; None if averages are not gathered over the start's group.

        Returns None also for compressed gradients, and for hybrid sharding.
        """
        chunks, steps = meta.chunks(start), _steps_from(start)
        gather = _gather_of(steps)
        if len(chunks) != 1 or len(chunks[0].group_names) > 1 or gather is None or gather is steps[-1]:
            return None
        if nodes.group_of(gather) != nodes.group_of(start):
            return None
        numel, mean = chunks[0].rows * chunks[0].row_numel, steps[-1]
        if meta.tensor_value(mean).shape != (numel,):
            users = list(mean.users)
            if len(users) != 1 or users[0].target is not aten.slice.Tensor or users[0].args[1:] != (0, 0, numel):
                return None
            mean = users[0]
        return cls(tuple(steps), numel, mean)

    @property
    def gather(self) -> fx.Node:
        return cast(fx.Node, _gather_of(self.steps))

    @property
    def carried_bytes(self) -> int:
        """Bytes of the whole gradient in the wider dtype of its two collectives, exchange and gather."""
        return self.numel * max(meta.tensor_value(start).dtype.itemsize for start in (self.steps[0], self.gather))

    @property
    def policy(self) -> list[Any]:
        """Key that is equal for reductions with the same steps after the exchange.

        Reductions with different keys cannot be merged.
        """
        return [(step.target, step.args[1:], step.kwargs) for step in self.steps[1:]]

    def flat(self, graph: fx.Graph) -> fx.Node:
        """Return the flat gradient [numel] in the dtype in which it is sent, without padding."""
        sent = self.steps[0].all_input_nodes[0]
        if meta.tensor_value(sent).shape == (self.numel,):
            return sent
        if sent.target is aten.constant_pad_nd.default:
            unpadded = cast(fx.Node, sent.args[0])
            if meta.tensor_value(unpadded).shape == (self.numel,):
                return unpadded
        return meta.create(graph, aten.slice.Tensor, (sent, 0, 0, self.numel), like=self.steps[0])


def _steps_from(start: fx.Node) -> list[fx.Node]:
    """Return the chain of nodes that begins with `start`; each node is the only reader of the previous one."""
    steps = [start]
    while len(steps[-1].users) == 1:
        (step,) = steps[-1].users
        arrived = nodes.is_wait(steps[-1]) and _gather_of(steps) is not None
        if not (
            traits.cast_dtype(step)
            if arrived
            else nodes.is_sum_ranks(step) or nodes.is_wait(step) or _is_gather(step, steps)
        ):
            break
        steps.append(step)
        if arrived:
            break
    return steps


def _gather_of(steps: Sequence[fx.Node]) -> fx.Node | None:
    return next(filter(nodes.is_all_gather, steps), None)


def _is_gather(step: fx.Node, steps: Sequence[fx.Node]) -> bool:
    return nodes.is_all_gather(step) and _gather_of(steps) is None
