"""Tell the passes behind it which machine they plan for, and how much memory they may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph import nodes
from zgraph.cost import CostModel, group_stride
from zgraph.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.hardware import Hardware
from zgraph.nodes import ReduceArgs, UnshardArgs
from zgraph.simulate import Sharing


@dataclass(frozen=True, kw_only=True)
class SetTarget(GraphPass):
    """Put costs, and what lanes share, into the context; no pass has a machine or a budget of its own.

    Groups along one axis of a mesh talk over one link. Where the CPU moves the bytes it takes that time from compute.

    Attributes:
        hardware: of each rank.
        budget_bytes: what a step may hold at any moment of what its graphs allocate; None: no limit. It counts
            activations, those saved for backward included, gathered parameters, buckets, gradients, the outputs, and
            what operators and gloo need while they run (of CPU operators, on one thread), in bytes as requested.
            It does not count parameters, gradients and optimizer state at rest, the inputs, or what an allocator
            rounds up. Of a model with graph breaks each frame may hold as much.
    """

    hardware: Hardware
    budget_bytes: int | None = None

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
        ctx.cost_of = CostModel(self.hardware).cost
        ctx.budget_bytes = self.budget_bytes
        ctx.sharing = sharing_of(gm.graph, self.hardware)
        return False


def sharing_of(graph: fx.Graph, hardware: Hardware) -> Sharing:
    """What the groups of a graph's markers take from one another, and from compute."""
    groups: dict[str, None] = {}
    for node in nodes.call_functions(graph, nodes.is_marker):
        args = UnshardArgs.of(node) if nodes.is_unshard(node) else ReduceArgs.of(node)
        groups |= dict.fromkeys(name for name in (args.group_name, args.replicas) if name)
    strides = {name: group_stride(name) for name in groups}
    link = hardware.inter_node if hardware.ranks_per_node == 1 else hardware.intra_node
    return Sharing(
        links={f"group:{name}": f"axis of stride {stride}" for name, stride in strides.items()},
        compute_share=min(1.0, hardware.cpu_us_per_wire_byte * link.bytes_per_us),
    )
