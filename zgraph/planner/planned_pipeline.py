"""Text, tables and JSON for the plan of a pipeline."""

from __future__ import annotations

from typing import Any

from zgraph.planner.schedules.pipeline_plan import PipelinePlan
from zgraph.planner.schedules.pipeline_run import PipelineRun
from zgraph.reporting.tables import Table, duration, size


def pipeline_lines(plan: PipelinePlan) -> list[str]:
    """Return a plan as lines of text: the step, every other schedule, every rank, and with a budget every stage."""
    run = plan.run
    return [
        f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches, {plan.schedule}: bubble {run.bubble:.1%}",
        *(
            f"with {other.schedule}: {duration(other.step_us)}, bubble {other.bubble:.1%}, "
            f"at most {size(max(other.peak_bytes))} on a rank{'' if plan.fits(other) else ', over the budget'}"
            for other in plan.runs
            if other.schedule != plan.schedule
        ),
        *(f"rank {rank}: {text}" for rank, text in enumerate(map(", ".join, _ranks(plan)))),
        *_kept(plan),
    ]


def _kept(plan: PipelinePlan) -> list[str]:
    """Return lines of text about the gathered parameters that stages keep during a step, within the budget."""
    if plan.unkept is None:
        return []
    if not any(stage.stage_3_bytes for stage in plan.stages):
        return [f"within budget_bytes={plan.budget_bytes}; no parameter is at stage 3"]
    return [
        f"within budget_bytes={plan.budget_bytes}: {duration(plan.run.step_us)}; if each micro-batch gathered all that "
        f"is at stage 3, {duration(plan.unkept.step_us)}",
        *(
            f"stage {number}: gathers {size(stage.keep_bytes or 0)} of {size(stage.stage_3_bytes)} once per step, "
            f"keep_bytes={stage.keep_bytes}"
            for number, stage in enumerate(plan.stages)
        ),
    ]


def _ranks(plan: PipelinePlan) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        forward_us = sum(sum(stage.cost.forward_us) for stage in stages) / plan.micro_batches
        backward_us = sum(sum(stage.cost.backward_us) for stage in stages) / plan.micro_batches
        found.append(
            (
                f"forward {duration(forward_us)}",
                f"backward {duration(backward_us)}",
                f"parameters {size(sum(stage.parameter_bytes for stage in stages))}",
                f"peak {size(plan.run.peak_bytes[rank])} with {plan.run.in_flight[rank]} in flight",
            )
        )
    return found


def _figures(run: PipelineRun) -> tuple[str, str, str]:
    return duration(run.step_us), f"{run.bubble:.1%}", size(max(run.peak_bytes))


def pipeline_tables(plan: PipelinePlan) -> list[Table]:
    """Return tables of a plan's schedules, ranks and stages."""
    micro_batches = plan.micro_batches
    budget = () if plan.budget_bytes is None else (f"within {size(int(plan.budget_bytes))}",)
    return [
        Table(
            f"schedules of {len(plan.stages)} stages and {micro_batches} micro-batches",
            ("schedule", "step", "bubble", "largest peak of a rank", *budget),
            tuple(
                (
                    run.schedule,
                    *_figures(run),
                    *(["yes" if plan.fits(run) else "no"] if budget else []),
                )
                for run in plan.runs
            )
            + (
                ((f"{plan.schedule}, nothing kept", *_figures(plan.unkept), "yes" if plan.fits(plan.unkept) else "no"),)
                if plan.unkept
                else ()
            ),
        ),
        Table(
            f"ranks of the pipeline under {plan.schedule}",
            ("rank", "busy", "peak", "micro-batches in flight"),
            tuple(
                (str(rank), f"{busy_us / plan.run.step_us:.0%}", size(peak), str(in_flight))
                for rank, (busy_us, peak, in_flight) in enumerate(
                    zip(plan.run.busy_us, plan.run.peak_bytes, plan.run.in_flight, strict=True)
                )
            ),
        ),
        Table(
            "stages, for each micro-batch",
            ("stage", "rank", "forward", "backward", "saved for backward", "sent on", "parameters", "kept gathered"),
            tuple(
                (
                    str(number),
                    str(plan.places[number]),
                    duration(sum(stage.cost.forward_us) / micro_batches),
                    duration(sum(stage.cost.backward_us) / micro_batches),
                    size(stage.cost.memory.saved_bytes),
                    size(stage.activation_bytes) if number + 1 < len(plan.stages) else "",
                    size(stage.parameter_bytes),
                    "" if stage.keep_bytes is None else f"{size(stage.keep_bytes)} of {size(stage.stage_3_bytes)}",
                )
                for number, stage in enumerate(plan.stages)
            ),
        ),
    ]


def pipeline_document(plan: PipelinePlan) -> dict[str, Any]:
    """Return the content of `pipeline.json`, without its format key.

    Returns:
        The entries of `PipelinePlan.as_json`, and two more:
        unkept: the step without kept parameters, with the same fields as a schedule; None without a budget.
        actions: a table of the forwards and backwards that take time, with one list per column.
    """
    timed = [one for one in plan.run.actions if one.end_us > one.start_us]
    return {
        **plan.as_json(),
        "unkept": None if plan.unkept is None else plan.run_as_json(plan.unkept),
        "actions": {
            "rank": [one.rank for one in timed],
            "kind": [one.action.kind for one in timed],
            "stage": [one.action.stage for one in timed],
            "micro_batch": [one.action.micro_batch for one in timed],
            "start_us": [one.start_us for one in timed],
            "end_us": [one.end_us for one in timed],
        },
    }
