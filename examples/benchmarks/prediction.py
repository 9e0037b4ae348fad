"""What zgraph expects of the graphs it has planned, to be held against what happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph import GraphPass, PassContext
from zgraph.graph import nodes
from zgraph.scheduling.simulate import simulate
from zgraph.tiers.lanes import COMPUTE


@dataclass(frozen=True)
class Prediction:
    """Of one graph.

    Attributes:
        step_ms: until its last result is there.
        compute_ms: of that, the model's own arithmetic.
    """

    direction: str
    step_ms: float
    compute_ms: float


@dataclass(frozen=True, kw_only=True)
class Predict(GraphPass):
    """Changes nothing; to stand last."""

    into: list[Prediction]

    name: ClassVar[str] = "predict"

    @property
    def needs_target(self) -> bool:
        return True

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        order = list(gm.graph.nodes)
        assert ctx.cost_of is not None
        costs = {node: ctx.cost_of(node) for node in order}
        timeline = simulate(order, costs, ctx.sharing)
        own = [node for node in order if costs[node].lane == COMPUTE and not nodes.is_communication(node)]
        compute_us = sum(costs[node].us for node in own)
        self.into.append(Prediction(ctx.direction, 1e-3 * timeline.step_us, 1e-3 * compute_us))
        return False
