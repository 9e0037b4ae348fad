"""What a pipeline plans for: the machine of each rank, what a step may hold there, and how kernels are timed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.timed_costs import TimedCosts
from zgraph.compiler.graph_pass import PassContext
from zgraph.graph import nodes
from zgraph.graph.operator_arguments import layout_of
from zgraph.runtime.groups import group_stride
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import Lane


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the passes of a pipeline plan for; no pass has a machine or a budget of its own.

    Attributes:
        hardware: of each rank: `zgraph.calibrate()`, or `zgraph.Hardware.preset(...)`.
        budget_bytes: what a step may hold at any moment of what its graphs allocate; None: no limit. It counts
            activations, those saved for backward included, gathered parameters, buckets, gradients, the outputs, and
            what operators and gloo need while they run (of CPU operators, on one thread), in bytes as requested.
            It does not count parameters, gradients and optimizer state at rest, the inputs, or what an allocator
            rounds up. Of a model with graph breaks each frame may hold as much. Of a pipeline, graphs are those of one
            micro-batch, and `zgraph.plan` looks at all that are in flight. A budget that is too small is an error
            of the compile, which says what would do.
        time_kernels: run every kernel once while compiling, which takes seconds, instead of estimating what it takes;
            for the `hardware` of this machine.

    Raises:
        ValueError: hardware is not a `zgraph.Hardware`, or the budget holds nothing.
    """

    hardware: Hardware
    budget_bytes: int | None = None
    time_kernels: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.hardware, Hardware):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph.Target: hardware is a {type(self.hardware).__name__}; write zgraph.calibrate(), or "
                'zgraph.Hardware.preset("h100").'
            )
        if self.budget_bytes is None:
            return
        if isinstance(self.budget_bytes, bool) or not isinstance(self.budget_bytes, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph.Target: budget_bytes={self.budget_bytes!r} is a {type(self.budget_bytes).__name__}; write a "
                "number of bytes, such as 2 * 2**30."
            )
        if self.budget_bytes < 1:
            raise ValueError(
                f"zgraph.Target: budget_bytes={self.budget_bytes} holds nothing; write a positive number of bytes, or "
                "None for no limit."
            )

    def known_to(self, ctx: PassContext, captured: fx.Graph) -> PassContext:
        """A context with costs, what lanes share, and the budget to plan for.

        Args:
            ctx: of the frame.
            captured: its graph before any pass, whose markers say which groups there are.
        """
        costs = TimedCosts(self.hardware) if self.time_kernels else CostModel(self.hardware)
        return replace(
            ctx,
            hardware=self.hardware,
            cost_of=costs.cost,
            sharing=sharing_of(captured, self.hardware),
            plan_bytes=self.budget_bytes,
        )


def sharing_of(graph: fx.Graph, hardware: Hardware) -> Sharing:
    """What the groups of a graph's markers take from one another, and from compute.

    Groups along one axis of a mesh, those of gathers and of reductions, talk over one link. Where the CPU moves the
    bytes it takes that time from compute.
    """
    groups: dict[str, None] = {}
    for node in nodes.call_functions(graph, nodes.is_marker):
        layout = layout_of(node)
        names = (layout.gather_group, layout.reduce_group, layout.replica_group)
        groups |= dict.fromkeys(name for name in names if name)
    link_of = {name: hardware.link_along(group_stride(name)) for name in groups}
    axis_of = {name: f"axis of stride {group_stride(name)}" for name in groups}
    fastest = max((link.bytes_per_us for link in link_of.values()), default=0.0)
    return Sharing(
        links={Lane.of_group(name): axis for name, axis in axis_of.items()},
        at_once=hardware.collectives_at_once,
        gains={axis_of[name]: link.gain_at_once for name, link in link_of.items()},
        issue_us=hardware.cpu_us_per_collective,
        compute_share=min(1.0, hardware.cpu_us_per_wire_byte * fastest),
    )
