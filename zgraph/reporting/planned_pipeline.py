"""The plan of a pipeline as text and as tables."""

from __future__ import annotations

from zgraph.reporting.tables import Table, duration, size
from zgraph.scheduling.cluster.pipeline_plan import PipelinePlan


def pipeline_lines(plan: PipelinePlan) -> list[str]:
    """One line for the step, one for each schedule, one for each rank."""
    run = plan.run
    return [
        f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches, {plan.schedule}: bubble {run.bubble:.1%}",
        *(
            f"with {other.schedule}: {duration(other.step_us)}, bubble {other.bubble:.1%}, "
            f"at most {size(max(other.peak_bytes))} on a rank"
            for other in plan.runs
            if other.schedule != plan.schedule
        ),
        *(f"rank {rank}: {text}" for rank, text in enumerate(map(", ".join, _ranks(plan)))),
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


def pipeline_tables(plan: PipelinePlan) -> list[Table]:
    """Schedules, ranks and stages."""
    micro_batches = plan.micro_batches
    return [
        Table(
            f"schedules of {len(plan.stages)} stages and {micro_batches} micro-batches",
            ("schedule", "step", "bubble", "largest peak of a rank"),
            tuple(
                (run.schedule, duration(run.step_us), f"{run.bubble:.1%}", size(max(run.peak_bytes)))
                for run in plan.runs
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
            ("stage", "rank", "forward", "backward", "saved for backward", "sent on", "parameters"),
            tuple(
                (
                    str(number),
                    str(plan.places[number]),
                    duration(sum(stage.cost.forward_us) / micro_batches),
                    duration(sum(stage.cost.backward_us) / micro_batches),
                    size(stage.cost.saved_bytes),
                    size(stage.activation_bytes) if number + 1 < len(plan.stages) else "",
                    size(stage.parameter_bytes),
                )
                for number, stage in enumerate(plan.stages)
            ),
        ),
    ]
