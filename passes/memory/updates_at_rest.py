"""Updates where their state rests: beside what they run, and which of them are faster on the device."""

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
from zgraph.tiers.devices import kind_of_backend
from zgraph.tiers.lanes import COMPUTE
from zgraph.tiers.tier import HOST
from zgraph.torch_compat.operators import written_arguments

PARTS = 8  # of a step's updates, of which a mixture runs some on the host


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is predicted of a step whose first updates run on the host, and the others on the device.

    Attributes:
        on_host: how many run there.
        excess_bytes: above the budgets of device and host together; 0: within both.
        step_us: time of the step.
        compute_us: what the device computes of it, which no copy shortens.
    """

    on_host: int
    excess_bytes: int
    step_us: float
    compute_us: float

    def is_better(self, other: Outcome) -> bool:
        """Whether it exceeds the budgets by less, or by as much and is faster by more than predictions are off."""
        if self.excess_bytes != other.excess_bytes:
            return self.excess_bytes < other.excess_bytes
        return self.step_us < other.step_us * (1 - SAME)

    def text(self, where: str) -> str:
        """Its time, for a note."""
        excess = f", {self.excess_bytes} bytes above the budgets" if self.excess_bytes else ""
        return f"{self.step_us:.0f} us{where}{excess}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where the updates of a step run.

    Attributes:
        best: what was chosen.
        host, device: if all of them ran there.
        count: how many there are.
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
    """How many of a step's updates should run on the host: all, none, or the first ones.

    Of mixtures, by eighths of the updates, the one that is best where rules place copies is compared with both. All on
    the host is kept where nothing is better.

    Args:
        count: of updates that can.
        by_rules: predicts a step of which so many run on the host, whose copies stand where `StreamStates` puts them;
            equal for equal arguments.
        by_costs: the same behind `ScheduleCopies`, which takes longer.
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
    """What all ranks predict of a step with so many updates on the host.

    Args:
        graph: of the step, whose copies stand where rules place them; put into the order that `ScheduleCopies` finds if
        by_costs.
        ctx: with costs.
        on_host: how many.
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
        planned = kind_of_backend(ctx.planned_backend)
        device_type = planned.type if planned.is_gpu else None
        curve = memory_curve(graph, device_type=device_type, agreed=True)
        excess += max(0, curve.peak_in(HOST.name) - ctx.host_budget_bytes)
    compute_us = sum(cost.us for cost in costs.values() if cost.lane == COMPUTE)
    return Outcome(on_host=on_host, excess_bytes=excess, step_us=timeline.step_us, compute_us=compute_us)


def may_run_beside(update: fx.Node) -> bool:
    """Whether a call updates in place, takes long enough to be worth a thread, and yields nothing."""
    return not update.users and is_fused(update) and meta.beside(update) is None


def update_beside(graph: fx.Graph, updates: Sequence[fx.Node], in_flight: int, unlimited: Container[fx.Node]) -> int:
    """Let updates run beside compute until something else touches their tensors, or later ones have started.

    Args:
        in_flight: how many later ones may have; of
        unlimited: any number.
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
