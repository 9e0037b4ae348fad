"""The target of a pipeline: each rank's machine, a step's memory budget, and whether to time kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.timed_costs import TimedCosts
from zgraph.compiler.graph_pass import PassContext
from zgraph.errors import check_bytes, check_kind
from zgraph.graph import nodes
from zgraph.graph.operator_arguments import layout_of
from zgraph.runtime.groups import group_stride
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, Lane


@dataclass(frozen=True, kw_only=True)
class Target:
    """The hardware and budget that the passes of a pipeline plan for.

    Attributes:
        hardware: hardware of each rank: `zgraph.calibrate()`, or `zgraph.Hardware.preset(...)`.
        budget_bytes: maximum bytes that a step's graphs may allocate at any moment; None: no limit. Includes
            activations, gathered parameters, buckets, gradients, outputs, and workspace of operators and gloo (for CPU
            operators, of one thread). Excludes inputs, stored parameters, optimizer state and gradients, and rounding
            by the allocator. If a model has graph breaks, each frame may use the whole budget. In pipeline
            parallelism the budget is for the graphs of one micro-batch; `zgraph.plan` considers all micro-batches that
            are in flight. If the budget is too small, compilation raises an error that names a sufficient one.
        time_kernels: measure the time of every kernel by running it while compiling, which takes seconds. False:
            estimate times. Set it only if `hardware` describes this machine.

    Raises:
        ValueError: `hardware` is not a `zgraph.Hardware`, or the budget is less than one byte.
    """

    hardware: Hardware
    budget_bytes: int | None = None
    time_kernels: bool = False

    def __post_init__(self) -> None:
        instead = 'write zgraph.calibrate(), or zgraph.Hardware.preset("h100")'
        check_kind("zgraph.Target: hardware", self.hardware, Hardware, instead)
        if self.budget_bytes is None:
            return
        instead = "write a number of bytes, such as 2 * 2**30"
        check_kind(f"zgraph.Target: budget_bytes={self.budget_bytes!r}", self.budget_bytes, int | float, instead)
        check_bytes("zgraph.Target", ", or None for no limit", budget_bytes=self.budget_bytes)

    def known_to(self, ctx: PassContext, captured: fx.Graph) -> PassContext:
        """Return the frame's context with this target's hardware, costs, sharing of links, and budget.

        Args:
            ctx: context of the frame.
            captured: the frame's graph before any pass, whose markers (unshard and reduce_grad) name the groups.
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
    """Return how copies and the collectives of a graph's groups slow down one another and compute.

    All groups along one mesh axis share one link, as do copies to the device and to the host. If the CPU copies sent
    bytes, compute is slowed down by these copies.
    """
    groups: dict[str, None] = {}
    for node in nodes.call_functions(graph, nodes.is_marker):
        layout = layout_of(node)
        names = (layout.gather_group, layout.reduce_group, layout.replica_group)
        groups |= dict.fromkeys(name for name in names if name)
    link_of = {name: hardware.link_along(group_stride(name)) for name in groups}
    axis_of = {name: f"axis of stride {group_stride(name)}" for name in groups}
    links = {Lane.of_group(name): axis for name, axis in axis_of.items()}
    gains = {axis_of[name]: link.gain_at_once for name, link in link_of.items()}
    if hardware.host_gain_both_ways < 2:
        links |= dict.fromkeys((HOST_TO_DEVICE, DEVICE_TO_HOST), "host")
        gains["host"] = hardware.host_gain_both_ways
    fastest = max((link.bytes_per_us for link in link_of.values()), default=0.0)
    return Sharing(
        links=links,
        at_once=hardware.collectives_at_once,
        gains=gains,
        issue_us=hardware.cpu_us_per_collective,
        compute_share=min(1.0, hardware.cpu_us_per_wire_byte * fastest),
    )
