"""Find the best order of a small graph by exhaustive search (OR-tools CP-SAT).

The machine is that of `zgraph.scheduling.simulate`.

A judge of the scheduler that shares none of its code: every node has a place, any two have an order, and what the
machine does follows from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

from ortools.sat.python import cp_model
from torch import fx

from tests.support.random_steps import Step
from zgraph.analysis.storages import Storage
from zgraph.graph import nodes
from zgraph.tiers.lanes import COMPUTE, Lane


class Model:
    """Places of all calls of a graph, and when the machine comes to them.

    Compute keeps its order, and so do the gathers and the reductions of one lane among themselves.
    """

    def __init__(self, step: Step, storages: Sequence[Storage], budget_bytes: int) -> None:
        self.step = step
        self.calls = [node for node in step.order if node.op != "placeholder"]
        self.model = cp_model.CpModel()
        horizon = int(sum(cost.us for cost in step.costs.values())) + 1
        self.place = {node: self.model.new_int_var(0, len(self.calls) - 1, node.name) for node in self.calls}
        self.issued = {node: self.model.new_int_var(0, horizon, "") for node in self.calls}  # the program goes on
        self.done = {node: self.model.new_int_var(0, horizon, "") for node in self.calls}
        self.follows = self._closure()
        self.before: dict[tuple[fx.Node, fx.Node], Any] = {(node, node): True for node in self.calls}
        for left, right in combinations(self.calls, 2):
            self._order(left, right)
        for node in self.calls:
            self._run(node)
        for node in dict.fromkeys(storage.first for storage in storages):  # only there can a peak be
            alive = [storage.nbytes * self._is_alive(storage, node) for storage in storages]
            self.model.add(sum(alive) <= budget_bytes)
        self.step_us = self.model.new_int_var(0, horizon, "step")
        self.model.add_max_equality(self.step_us, list(self.done.values()))
        self.model.minimize(self.step_us)

    def solve(self, seconds: float) -> tuple[int, list[fx.Node]] | None:
        """Microseconds and order of the optimum; None where there is none, or it was not proved in time."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = seconds
        if solver.solve(self.model) != cp_model.OPTIMAL:
            return None
        given = [node for node in self.step.order if node.op == "placeholder"]
        return solver.value(self.step_us), given + sorted(self.calls, key=lambda node: solver.value(self.place[node]))

    def _closure(self) -> dict[fx.Node, set[fx.Node]]:
        """For each node those that must come before it."""
        needs = {node: {source for source in node.all_input_nodes if source in self.place} for node in self.calls}
        chains: dict[object, list[fx.Node]] = {}
        for node in self.calls:
            if not nodes.is_communication(node):
                chains.setdefault(COMPUTE, []).append(node)
            elif nodes.is_start(node):
                chains.setdefault((self.step.costs[node].lane, nodes.is_gather(node)), []).append(node)
        for chain in chains.values():
            for left, right in pairwise(chain):
                needs[right].add(left)
        for node in self.calls:  # in an order that keeps all of this
            for source in list(needs[node]):
                needs[node] |= needs[source]
        return needs

    def _order(self, left: fx.Node, right: fx.Node) -> None:
        if left in self.follows[right]:
            self.before[left, right], self.before[right, left] = True, False
            self.model.add(self.place[left] < self.place[right])
            return
        first = self.model.new_bool_var("")
        self.before[left, right], self.before[right, left] = first, first.negated()
        self.model.add(self.place[left] < self.place[right]).only_enforce_if(first)
        self.model.add(self.place[right] < self.place[left]).only_enforce_if(first.negated())

    def _run(self, node: fx.Node) -> None:
        """When the program has passed the node, and when its result is there, behind all that comes before."""
        lane, us = self._lane(node), self._us(node)
        own = us if lane == COMPUTE else 0
        self.model.add(self.issued[node] >= own)
        self.model.add(self.done[node] >= self.issued[node] + us - own)
        if nodes.is_wait(node):
            self.model.add(self.issued[node] >= self.done[node.all_input_nodes[0]])
        for other in self.calls:
            if other is not node and self.before[other, node] is not False:
                behind = [self.issued[node] >= self.issued[other] + own]
                if lane is not None and lane.is_group and self._lane(other) == lane:
                    behind.append(self.done[node] >= self.done[other] + us)
                for constraint in behind:
                    self.model.add(constraint).only_enforce_if(self.before[other, node])

    def _is_alive(self, storage: Storage, node: fx.Node) -> cp_model.IntVar:
        alive = self.model.new_bool_var("")
        begun = self.before[storage.first, node]
        for reader in storage.readers:
            self.model.add(alive >= begun + self.before[node, reader] - 1)
        if storage.outlives or storage.first is node:
            self.model.add(alive >= begun)
        return alive

    def _lane(self, node: fx.Node) -> Lane | None:
        return self.step.costs[node].lane if node in self.step.costs else None

    def _us(self, node: fx.Node) -> int:
        return int(self.step.costs[node].us) if node in self.step.costs else 0
