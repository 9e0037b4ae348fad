"""Tell the passes behind it which machine they plan for, and how much memory they may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.timed_costs import TimedCosts
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.graph import nodes
from zgraph.graph.operator_arguments import ReduceArgs, UnshardArgs
from zgraph.runtime.groups import group_stride, reduction_group
from zgraph.scheduling.timeline import Sharing


@dataclass(frozen=True, kw_only=True)
class SetTarget(GraphPass):
    """Put costs, and what lanes share, into the context; no pass has a machine or a budget of its own.

    Groups along one axis of a mesh, those of gathers and of reductions, talk over one link. Where the CPU moves the
    bytes it takes that time from compute.

    Attributes:
        hardware: of each rank.
        budget_bytes: what a step may hold at any moment of what its graphs allocate; None: no limit. It counts
            activations, those saved for backward included, gathered parameters, buckets, gradients, the outputs, and
            what operators and gloo need while they run (of CPU operators, on one thread), in bytes as requested.
            It does not count parameters, gradients and optimizer state at rest, the inputs, or what an allocator
            rounds up. Of a model with graph breaks each frame may hold as much.
        time_kernels: run every kernel once while compiling, on this machine, instead of estimating what it takes.
    """

    hardware: Hardware
    budget_bytes: int | None = None
    time_kernels: bool = False

    name: ClassVar[str] = "set_target"
    phase: ClassVar[Phase] = "joint"
    provides: ClassVar[frozenset[str]] = frozenset({Fact.TARGET_SET})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED})

    def __post_init__(self) -> None:
        if not isinstance(self.hardware, Hardware):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"set_target: hardware is a {type(self.hardware).__name__}; write zgraph.calibrate(), or "
                'zgraph.Hardware.preset("h100").'
            )
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ValueError(
                f"set_target: budget_bytes={self.budget_bytes} holds nothing; write a positive number of bytes, or "
                "None for no limit."
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        ctx.hardware = self.hardware
        ctx.cost_of = (TimedCosts(self.hardware) if self.time_kernels else CostModel(self.hardware)).cost
        ctx.budget_bytes = self.budget_bytes
        ctx.sharing = sharing_of(gm.graph, self.hardware)
        return False


def sharing_of(graph: fx.Graph, hardware: Hardware) -> Sharing:
    """What the groups of a graph's markers take from one another, and from compute."""
    groups: dict[str, None] = {}
    for node in nodes.call_functions(graph, nodes.is_marker):
        args = UnshardArgs.of(node) if nodes.is_unshard(node) else ReduceArgs.of(node)
        names = (args.group_name, reduction_group(args.group_name), args.replicas)
        groups |= dict.fromkeys(name for name in names if name)
    link_of = {name: hardware.link_along(group_stride(name)) for name in groups}
    axis_of = {name: f"axis of stride {group_stride(name)}" for name in groups}
    fastest = max((link.bytes_per_us for link in link_of.values()), default=0.0)
    return Sharing(
        links={f"group:{name}": axis for name, axis in axis_of.items()},
        at_once=hardware.collectives_at_once,
        gains={axis_of[name]: link.gain_at_once for name, link in link_of.items()},
        issue_us=hardware.cpu_us_per_collective,
        compute_share=min(1.0, hardware.cpu_us_per_wire_byte * fastest),
    )
