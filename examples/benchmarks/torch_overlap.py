"""PyTorch's own overlap scheduler as a pass: the peer that zgraph's `ScheduleOverlap` is held against.

Written for graphs of SimpleFSDP (torchtitan): one all_gather for each parameter, one reduce_scatter for each gradient,
in the order in which autograd made them. It runs on zgraph's lowered graph, so that nothing but the schedule differs.
"""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

from torch import fx
from torch._inductor.fx_passes import overlap_scheduling

from zgraph import Fact, GraphPass, PassContext


@dataclass(frozen=True, kw_only=True)
class TorchOverlap(GraphPass):
    """`torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing`, with buckets, as Inductor calls it.

    Its own estimates are for GPUs and NCCL; here it is given the costs of the context, which are zgraph's. Keywords
    that an installed torch does not know are left out.
    """

    name: ClassVar[str] = "torch_overlap"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.OVERLAP_SCHEDULED})

    @property
    def needs_target(self) -> bool:
        return True

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        cost_of = ctx.cost_of
        assert cost_of is not None

        def milliseconds(node: fx.Node, override_size: int | None = None) -> float | None:
            if node.op != "call_function" or override_size == 0:
                return 0.0
            cost = cost_of(node)
            scale = 1.0 if not override_size or not cost.moved_bytes else override_size / cost.moved_bytes
            return 1e-3 * cost.us * scale

        wanted: dict[str, Any] = {
            "collective_bucketing": True,
            "custom_runtime_estimation": milliseconds,
            "collective_estimator": "analytical",
            "compute_estimator": "analytical",
            "insert_overlap_deps": False,
        }
        known = inspect.signature(overlap_scheduling.schedule_overlap_bucketing).parameters
        before = list(gm.graph.nodes)
        # It asks a GPU for its bandwidth even where all estimates are given; what that yields is then not used.
        with mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0):
            overlap_scheduling.schedule_overlap_bucketing(
                gm, **{name: value for name, value in wanted.items() if name in known}
            )
        return list(gm.graph.nodes) != before
