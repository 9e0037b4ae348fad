"""A plan as it is saved: final graphs, and descriptions of them for reports, clocks and lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zgraph.compiler.frame_plan import FramePlan, Variant
from zgraph.compiler.graph_pass import Direction, PassContext
from zgraph.compiler.pass_list import PassRun
from zgraph.reporting.data.frame import FrameData
from zgraph.reporting.metrics.step_clock import CalledGraph
from zgraph.reporting.of_graph import GraphReport
from zgraph.runtime.groups import make_host_groups
from zgraph.scheduling.problem import Limits

Late = tuple[tuple[int, ...], tuple[int | None, ...]]


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """The plan of a frame.

    Attributes:
        variants, runs, limits: attributes of the plan.
        notes, decisions, user_outputs, subgroups: attributes of the plan's context.
        reports, called, data: descriptions of the plan.
        handles: names of the placeholders that are parameter handles.
        late: for a stage of a pipeline, the positions of weight gradients; None for other frames.
    """

    variants: tuple[Variant, ...]
    notes: Sequence[tuple[str, Direction, str]]
    decisions: Sequence[tuple[Direction, str]]
    user_outputs: int | None
    subgroups: Sequence[tuple[str, int]]
    runs: tuple[PassRun, ...]
    limits: Limits | None
    reports: Sequence[GraphReport]
    called: Mapping[str, CalledGraph]
    data: FrameData | None
    handles: tuple[str, ...]
    late: Late | None

    @classmethod
    def of(
        cls,
        plan: FramePlan,
        reports: Sequence[GraphReport],
        called: Mapping[str, CalledGraph],
        data: FrameData | None,
        handles: tuple[str, ...],
        late: Late | None,
    ) -> SavedPlan:
        return cls(
            variants=plan.variants,
            notes=plan.ctx.notes,
            decisions=plan.ctx.decisions,
            user_outputs=plan.ctx.user_outputs,
            subgroups=list(dict.fromkeys(plan.ctx.subgroups)),
            runs=plan.runs,
            limits=plan.limits,
            reports=reports,
            called=called,
            data=data,
            handles=handles,
            late=late,
        )

    def plan(self, ctx: PassContext) -> FramePlan:
        """Return the plan; its passes did not run, and took no time.

        Args:
            ctx: context of the frame.
        """
        ctx = replace(ctx, notes=list(self.notes), decisions=list(self.decisions), user_outputs=self.user_outputs)
        runs = tuple(replace(run, seconds=0.0) for run in self.runs)
        return FramePlan(variants=self.variants, ctx=ctx, runs=runs, limits=self.limits)

    def described(self, frame: str, reason: str) -> tuple[list[GraphReport], dict[str, CalledGraph], FrameData | None]:
        """Return the descriptions of the plan, for the name and the reason of the compile in this process."""
        reports = [replace(report, frame=frame, reason=reason) for report in self.reports]
        called = {name: replace(one, frame=frame) for name, one in self.called.items()}
        data = None
        if self.data is not None:
            data = replace(self.data, frame=frame, reason=reason, seconds=[0.0 for _ in self.runs])
        return reports, called, data

    def make_groups(self) -> None:
        """Make the process groups that passes make while planning; ranks that plan make them in the same order."""
        for group_name, ranks_per_host in self.subgroups:
            make_host_groups(group_name, ranks_per_host)
