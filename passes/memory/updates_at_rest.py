"""Optimizer updates on the host, where their state is kept: which updates run there, and their overlap with compute."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from zgraph.analysis.cost import FREE
from zgraph.analysis.hazards import hazards
from zgraph.analysis.liveness import memory_curve
from zgraph.analysis.storages import rows_of_its_own, storages_of
from zgraph.compiler.graph_pass import PassContext
from zgraph.dialect.copies import wait_update_op
from zgraph.graph import edits, meta, nodes
from zgraph.passes.common.visits import is_fused
from zgraph.passes.memory.schedule_copies import plan_copies
from zgraph.scheduling.problem import SAME
from zgraph.scheduling.simulate import simulate
from zgraph.tiers.lanes import COMPUTE
from zgraph.tiers.tier import HOST
from zgraph.torch_compat.operators import written_arguments

PARTS = 8  # mixtures run a multiple of one eighth of a step's updates on the host


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Predicted step in which the first `on_host` updates run on the host and the others on the device.

    Attributes:
        on_host: number of updates that run on the host.
        excess_bytes: bytes above the device's budget plus bytes above the host's; 0: within both.
        step_us: time of the step in microseconds.
        compute_us: total time of compute on the device in microseconds, a lower bound for `step_us`.
    """

    on_host: int
    excess_bytes: int
    step_us: float
    compute_us: float

    def is_better(self, other: Outcome) -> bool:
        """Return whether this step is better: fewer bytes above the budgets or, if equal, faster by more than 1 %."""
        if self.excess_bytes != other.excess_bytes:
            return self.excess_bytes < other.excess_bytes
        return self.step_us < other.step_us * (1 - SAME)

    def text(self, where: str) -> str:
        """Format the predicted time, and bytes above the budgets, for a note."""
        excess = f", {self.excess_bytes} bytes above the budgets" if self.excess_bytes else ""
        return f"{self.step_us:.0f} us{where}{excess}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Decision where the updates of a step run.

    Attributes:
        best: predicted step of the decision.
        host, device: predicted steps with all updates on the host, and with all on the device.
        count: number of updates.
    """

    best: Outcome
    host: Outcome
    device: Outcome
    count: int

    def __str__(self) -> str:
        if self.best is self.host:
            return f"updates on the host: {self.host.text(' predicted')}, {self.device.text(' on the device')}"
        if self.best is self.device:
            return f"updates on the device: {self.device.text(' predicted')}, {self.host.text(' on the host')}"
        return (
            f"{self.best.on_host} of {self.count} updates on the host, the later ones on the device: "
            f"{self.best.text(' predicted')}, {self.host.text(' with all on the host')}, "
            f"{self.device.text(' with all on the device')}"
        )


def choose_updates(count: int, by_rules: Callable[[int], Outcome], by_costs: Callable[[int], Outcome]) -> Choice:
    """Choose how many of a step's updates run on the host: all, none, or the first ones.

    Mixtures put multiples of one eighth of the updates on the host. The best mixture according to `by_rules` is
    compared with "all" and "none" according to `by_costs`. All updates run on the host unless another choice is better.

    Args:
        count: number of updates that can run on the host.
        by_rules: predicts a step with the given number of updates on the host and copies placed by `StreamStates`;
            equal for equal arguments.
        by_costs: the same prediction after `ScheduleCopies`; slower to compute.
    """
    host, device = by_costs(count), by_costs(0)
    best = device if device.is_better(host) else host
    mixtures = dict.fromkeys(count * part // PARTS for part in reversed(range(1, PARTS)))
    if best.excess_bytes or best.step_us * (1 - SAME) > best.compute_us:
        tried = [by_rules(on_host) for on_host in mixtures if on_host]
        for one in sorted(tried, key=lambda one: (one.excess_bytes, one.step_us))[:1]:
            mixture = by_costs(one.on_host)
            best = mixture if mixture.is_better(best) else best
    return Choice(best=best, host=host, device=device, count=count)


def predicted(graph: fx.Graph, ctx: PassContext, on_host: int, *, by_costs: bool) -> Outcome:
    """Predict a step with `on_host` updates on the host; the result is equal on all ranks.

    Args:
        graph: graph of the step, with copies placed by fixed rules; reordered if by_costs.
        ctx: context with costs.
        on_host: number of updates on the host.
        by_costs: put the graph into the order that `ScheduleCopies` finds.
    """
    assert ctx.cost_of is not None  # there is a target
    order = list(graph.nodes)
    if by_costs:
        order = plan_copies(order, ctx).order
        edits.relink(order)
    costs = {node: ctx.cost_of(node) for node in order if node.op == "call_function"}
    costs |= dict.fromkeys(rows_of_its_own(order), FREE)
    timeline = simulate(order, costs, ctx.sharing, storages_of(order, agreed=True))
    excess = 0 if ctx.plan_bytes is None else max(0, timeline.memory.peak_bytes - ctx.plan_bytes)
    if ctx.host_budget_bytes is not None:
        curve = memory_curve(graph, device_type=ctx.planned_device, agreed=True)
        excess += max(0, curve.peak_in(HOST.name) - ctx.host_budget_bytes)
    compute_us = sum(cost.us for cost in costs.values() if cost.lane == COMPUTE)
    return Outcome(on_host=on_host, excess_bytes=excess, step_us=timeline.step_us, compute_us=compute_us)


def may_run_beside(update: fx.Node) -> bool:
    """Return whether a call can run in a thread, concurrently with compute: a fused update whose results are unused."""
    return not update.users and is_fused(update) and meta.beside(update) is None


def update_beside(graph: fx.Graph, updates: Sequence[fx.Node], in_flight: int, unlimited: Container[fx.Node]) -> int:
    """Run `updates` concurrently with compute, each awaited before its tensors are used; return their number.

    Args:
        graph, updates: the graph and the updates in it.
        in_flight: number of later updates that may start before an update is awaited.
        unlimited: updates to which `in_flight` does not apply.
    """
    followers: dict[fx.Node, list[fx.Node]] = {update: [] for update in updates}
    for node, earlier in hazards(list(graph.nodes)).items():
        for one in earlier:
            if one in followers:
                followers[one].append(node)
    later = sorted(updates)
    for number, update in enumerate(later):
        limit = later[number + in_flight] if number + in_flight < len(later) else nodes.output_of(graph)
        if update in unlimited:
            limit = nodes.output_of(graph)
        written = list(dict.fromkeys(written_arguments(update)))
        read = [node for node in update.all_input_nodes if node not in written and _is_tensor(node)]
        meta.set_beside(update, number)
        with graph.inserting_before(min([limit, *followers[update]])):
            wait = meta.create(graph, wait_update_op(), (written, read), like=update, name=f"wait_{update.name}")
        meta.set_beside(wait, number)
    return len(later)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(meta.value(node), Tensor)
