"""The plan of a pipeline: memory and traffic of its stages and ranks, and a comparison of schedules."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zgraph.errors import BudgetError
from zgraph.planner.schedules.axes import PIPELINE, AxisTraffic
from zgraph.planner.schedules.order import ranks_of, schedules_for, why_not
from zgraph.planner.schedules.pipeline_run import PipelineRun, StageCost, simulate_pipeline


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage of a planned pipeline.

    Attributes:
        cost: cost of the stage's micro-batches.
        parameter_bytes: bytes of one rank's parameters and buffers.
        state_bytes: bytes of one rank's optimizer state.
        traffic: one rank's traffic per step on each axis but the pipeline's.
        activation_bytes: bytes of one micro-batch's activation, sent to the next stage.
        input_gradient_bytes: bytes of one micro-batch's input gradient, sent to the previous stage; 0 for the first.
        stage_3_bytes: gathered bytes of the parameters at ZeRO stage 3, which `zgraph.PipelineStage` may keep gathered
            during a step.
        keep_bytes: how many of the `stage_3_bytes` fit into the budget. None: there is no budget; nothing is kept.
    """

    cost: StageCost
    parameter_bytes: int
    state_bytes: int
    traffic: dict[str, AxisTraffic]
    activation_bytes: int
    input_gradient_bytes: int
    stage_3_bytes: int = 0
    keep_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A planned step of a pipeline.

    Attributes:
        stages: the stages, in the order in which a micro-batch passes them.
        micro_batches: number of micro-batches in a step.
        runs: the step under each schedule that torch can run with these stages and micro-batches.
        schedule: name of the planned schedule.
        unsent: the step under the planned schedule, simulated as if sending took no time.
        budget_bytes: most bytes that each rank may hold, not counting parameters, buffers and optimizer state; None: no
            limit.
        unkept: the step under the planned schedule, simulated as if each micro-batch gathered all parameters at ZeRO
            stage 3. None without a budget.
    """

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    runs: tuple[PipelineRun, ...]
    schedule: str
    unsent: PipelineRun
    budget_bytes: float | None = None
    unkept: PipelineRun | None = None

    @classmethod
    def of(
        cls, stages: Sequence[PlannedStage], ranks: int, micro_batches: int, chosen: str, **budget: Any
    ) -> PipelinePlan:
        """Simulate a step under every schedule that torch can run with these numbers, and return the plan.

        Args:
            stages: all stages; each rank has equally many.
            ranks: number of ranks in the pipeline.
            micro_batches: number of micro-batches in a step.
            chosen: schedule returned by `check_schedule`.
            budget: values of the attributes `budget_bytes` and `unkept`.
        """
        costs = [stage.cost for stage in stages]
        return cls(
            stages=tuple(stages),
            micro_batches=micro_batches,
            runs=tuple(
                simulate_pipeline(name, ranks, costs) for name in schedules_for(ranks, len(stages), micro_batches)
            ),
            schedule=chosen,
            unsent=simulate_pipeline(chosen, ranks, [replace(cost, send_us=0.0) for cost in costs]),
            **budget,
        )

    @property
    def run(self) -> PipelineRun:
        """The simulated step under the planned schedule."""
        return next(run for run in self.runs if run.schedule == self.schedule)

    @property
    def ranks(self) -> int:
        """Number of ranks in the pipeline."""
        return len(self.run.busy_us)

    @property
    def places(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return ranks_of(self.schedule, self.ranks, len(self.stages))

    def fits(self, run: PipelineRun) -> bool:
        """Return whether every rank stays within the budget in the simulated step `run`."""
        return self.budget_bytes is None or self._most_beside_rest(run) <= self.budget_bytes

    def _most_beside_rest(self, run: PipelineRun) -> int:
        """Return the peak bytes of any rank, not counting parameters, buffers and optimizer state."""
        resting = [0] * self.ranks
        for stage, rank in zip(self.stages, ranks_of(run.schedule, self.ranks, len(self.stages)), strict=True):
            resting[rank] += stage.cost.resting_bytes
        return max(map(operator.sub, run.peak_bytes, resting))

    def check_budget(self) -> None:
        """Refuse a step that exceeds the budget.

        Raises:
            BudgetError: the budget is exceeded; the message names a budget that fits, or another schedule.
        """
        if self.fits(self.run):
            return
        others = [run.schedule for run in self.runs if self.fits(run)]
        raise BudgetError(
            "zgraph.plan_pipeline: "
            f"the step of the pipeline does not fit into budget_bytes={self.budget_bytes}: under "
            f"{self.schedule}, with up to {max(self.run.in_flight)} micro-batches in flight, a rank holds at least "
            f"{self._most_beside_rest(self.run)} bytes in addition to parameters and the optimizer's state, for any "
            f"choice of kept parameters. Raise budget_bytes to it{', plan for ' + others[0] if others else ''}; or use "
            "smaller micro-batches, activation checkpointing, zero_stage=3 or more ranks."
        )

    def stages_of(self, rank: int) -> tuple[PlannedStage, ...]:
        """Return the stages of a rank."""
        return tuple(stage for stage, place in zip(self.stages, self.places, strict=True) if place == rank)

    def traffic_of(self, rank: int) -> dict[str, AxisTraffic]:
        """Return a rank's traffic in a step by axis.

        On the pipeline's axis, `exposed_us` is the time by which sending prolongs the step.
        """
        sent, messages_us = 0, 0.0
        places = self.places
        for number, stage in enumerate(self.stages):
            if places[number] != rank:
                continue
            if number + 1 < len(self.stages) and places[number + 1] != rank:
                sent += stage.activation_bytes * self.micro_batches
                messages_us += stage.cost.send_us * self.micro_batches
            if number and places[number - 1] != rank:
                sent += stage.input_gradient_bytes * self.micro_batches
                messages_us += self.stages[number - 1].cost.send_us * self.micro_batches
        exposed_us = min(self.run.step_us - self.unsent.step_us, messages_us)
        found = {PIPELINE: AxisTraffic(sent, exposed_us, messages_us - exposed_us)}
        for stage in self.stages_of(rank):
            found = added(found, stage.traffic)
        return found

    def traffic(self) -> dict[str, AxisTraffic]:
        """Return the traffic in a step by axis; each axis shows the rank that sends the most bytes along the axis."""
        of_ranks = [self.traffic_of(rank) for rank in range(self.ranks)]
        axes = dict.fromkeys(axis for found in of_ranks for axis in found)
        return {
            axis: max((found.get(axis, AxisTraffic()) for found in of_ranks), key=lambda one: one.sent_bytes)
            for axis in axes
        }

    def run_as_json(self, run: PipelineRun) -> dict[str, Any]:
        """Return time and memory of the simulated step `run` as plain values."""
        return {
            "step_us": run.step_us,
            "bubble": run.bubble,
            "peak_bytes": list(run.peak_bytes),
            "in_flight": list(run.in_flight),
            "fits": self.fits(run),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "schedules": {run.schedule: self.run_as_json(run) for run in self.runs},
            "budget_bytes": self.budget_bytes,
            "step_us_unkept": None if self.unkept is None else self.unkept.step_us,
            "stages": [
                {
                    "rank": self.places[number],
                    "forward_us": sum(stage.cost.forward_us) / self.micro_batches,
                    "backward_us": sum(stage.cost.backward_us) / self.micro_batches,
                    "parameter_bytes": stage.parameter_bytes,
                    "activation_bytes": stage.cost.memory.saved_bytes,
                    "stage_3_bytes": stage.stage_3_bytes,
                    "keep_bytes": stage.keep_bytes,
                    "sent_to_next_bytes": stage.activation_bytes if number + 1 < len(self.stages) else 0,
                }
                for number, stage in enumerate(self.stages)
            ],
        }


def check_schedule(schedule: str | None, ranks: int, stages: int, micro_batches: int) -> str:
    """Return the name of the schedule to plan.

    Args:
        schedule: name of the schedule. None: if a rank has several stages, Interleaved1F1B; else 1F1B, or GPipe if
            there are too few micro-batches for 1F1B.
        ranks, stages, micro_batches: numbers of ranks, of stages, and of micro-batches in a step.

    Raises:
        ValueError: torch cannot run the schedule with these numbers.
    """
    usual = ["Interleaved1F1B"] if stages > ranks else ["1F1B", "GPipe"]
    possible = [name for name in usual if not why_not(name, ranks, stages, micro_batches)]
    chosen = schedule or (possible or usual)[0]
    reason = why_not(chosen, ranks, stages, micro_batches)
    if reason:
        raise ValueError(f"zgraph.plan_pipeline: schedule={chosen!r} with {micro_batches} micro-batches: {reason}.")
    return chosen


def added(one: dict[str, AxisTraffic], other: dict[str, AxisTraffic], times: int = 1) -> dict[str, AxisTraffic]:
    """Return the sum of two traffics by axis, with `other` counted `times` times."""
    axes: Iterable[str] = dict.fromkeys((*one, *other))
    return {axis: one.get(axis, AxisTraffic()) + other.get(axis, AxisTraffic()).times(times) for axis in axes}
