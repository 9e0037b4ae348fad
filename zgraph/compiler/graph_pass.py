"""What a pass is: a frozen dataclass with a name, a phase, contracts, and `run(gm, ctx)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.hardware import Hardware
from zgraph.runtime.groups import group_stride, make_host_groups
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.groups import backend_of, resolve_group

Phase = Literal["joint", "graph"]
Direction = Literal["joint", "forward", "backward", "inference"]


class Fact(StrEnum):
    """What holds of a graph after a pass has run. A pass of your own may use any other string."""

    TARGET_SET = "target_set"
    GATHERS_DEDUPED = "gathers_deduped"
    LIFETIMES_CHOSEN = "lifetimes_chosen"
    GATHERS_QUANTIZED = "gathers_quantized"
    GATHERS_LOWERED = "gathers_lowered"
    GRADIENTS_COMPRESSED = "gradients_compressed"
    REDUCTIONS_LOWERED = "reductions_lowered"
    COLLECTIVES_BUCKETED = "collectives_bucketed"
    STARTS_HOISTED = "starts_hoisted"
    WAITS_SUNK = "waits_sunk"
    OVERLAP_SCHEDULED = "overlap_scheduled"


@dataclass(kw_only=True)
class PassContext:
    """What a pass may know and leave behind; one for each compiled frame, shared by all its passes.

    Attributes:
        direction: of the graph at hand; "joint" before the partition.
        graphs: the graphs of this frame by direction, so that one plan can cover forward and backward.
        parameters: name of the parameter behind each marker's handle, by placeholder name of the joint graph.
        user_outputs: how many outputs of the joint and forward graph are the user's; the others are gradients, or
            saved for backward. None in inference.
        budget_bytes: what a step may hold at any moment of what it allocates; see `zgraph.passes.SetTarget`. None: no
            limit.
        target_bytes: what to plan for instead, where graphs that were planned for the budget itself hold more.
        split: how the joint graph will be split into forward and backward, to be tried on a copy. None in inference.
        decomposed: whether operators were taken apart for Inductor, so that results are close to eager torch's and not
            the same bits.
        cost_of: what a call costs, in any graph; the same on all ranks, for plans follow from it. None: unknown, and a
            pass that plans by it is refused.
        hardware: of each rank, the same on all, by which plans are made; None: unknown.
        machine: the preset that the ranks' GPUs are, the same on all; passes without other hardware look at its links.
            None: unknown.
        sharing: what the lanes of these costs take from one another.
        limits: that the order of the final graphs keeps to; None: it was made by rules, which know no costs.
        planned_backend: what the groups of a planned cluster stand for; a real group knows better.
        notes: what passes had to say, as (pass, direction, text); shown in dumps and reports.
    """

    direction: Direction = "joint"
    graphs: dict[Direction, fx.GraphModule] = field(default_factory=dict[Direction, fx.GraphModule])
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    user_outputs: int | None = None
    budget_bytes: int | None = None
    target_bytes: int | None = None
    split: Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]] | None = None
    decomposed: bool = False
    cost_of: Callable[[fx.Node], NodeCost] | None = None
    hardware: Hardware | None = None
    machine: Hardware | None = None
    sharing: Sharing = field(default_factory=Sharing)
    limits: Limits | None = None
    planned_backend: str = "gloo"
    notes: list[tuple[str, Direction, str]] = field(default_factory=list[tuple[str, Direction, str]])

    @property
    def plan_bytes(self) -> int | None:
        """What passes plan for."""
        return self.budget_bytes if self.target_bytes is None else self.target_bytes

    def note(self, graph_pass: GraphPass, text: str) -> None:
        """Leave a line for the reader of the dump, such as why a pass did nothing."""
        self.notes.append((graph_pass.name, self.direction, text))

    def group_size(self, group_name: str) -> int:
        """Ranks of a group; the group "" is this rank alone."""
        return dist.get_world_size(resolve_group(group_name)) if group_name else 1

    def group_rank(self, group_name: str) -> int:
        return dist.get_rank(resolve_group(group_name))

    def host_groups(self, group_name: str, ranks_per_host: int) -> tuple[str, str]:
        """Names of the groups of this rank's host, and of the ranks that have its place in theirs.

        Made where there are none yet; all ranks of the group ask. Neighbouring ranks share a host.
        """
        return make_host_groups(group_name, ranks_per_host)

    def collective_us(self, kind: str, sent_bytes: int, group_name: str) -> float:
        """Microseconds of a collective of a kind, such as "all_gather_into_tensor", of which each rank sends so much.

        Raises:
            AssertionError: the hardware is unknown.
        """
        assert self.hardware is not None, "ask only where there is hardware"
        return self.hardware.collective_us(kind, sent_bytes, self.group_size(group_name), group_stride(group_name))

    def group_backend(self, group_name: str, device: torch.device) -> str:
        """What moves a group's tensors of a device: "gloo", "nccl", ..."""
        found = backend_of(resolve_group(group_name), device)
        return self.planned_backend if found == "fake" else found


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """Base class of passes; subclass it as a frozen dataclass whose fields are the options.

    Attributes:
        name: in errors and dumps.
        phase: "joint" passes see forward and backward in one graph before the partition; "graph" passes run on the
            forward and the backward graph, or on the one graph of inference. In inference all passes run on that graph.
        requires: facts that an earlier pass must provide.
        provides: facts that hold afterwards.
        conflicts: facts that must not hold yet.
        counts_after: optimizer steps: until then the backward runs that was planned without this pass. Only for passes
            of phase "graph" that change nothing but the backward graph.
    """

    name: ClassVar[str] = "unnamed"
    phase: ClassVar[Phase] = "graph"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    @property
    def counts_after(self) -> int:
        return 0

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        """Rewrite gm.graph in place; say truthfully whether anything changed."""
        raise NotImplementedError(f"{type(self).__name__} has no run(gm, ctx)")
