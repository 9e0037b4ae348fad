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
from zgraph.scheduling.plan_schedule import Search
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.groups import backend_of, resolve_group

Phase = Literal["joint", "graph"]
Direction = Literal["joint", "forward", "backward", "inference", "step"]


class Fact(StrEnum):
    """What holds of a graph after a pass has run. A pass of your own may use any other string."""

    GATHERS_DEDUPED = "gathers_deduped"
    LIFETIMES_CHOSEN = "lifetimes_chosen"
    ACTIVATIONS_OFFLOADED = "activations_offloaded"
    GATHERS_QUANTIZED = "gathers_quantized"
    GATHERS_LOWERED = "gathers_lowered"
    GRADIENTS_COMPRESSED = "gradients_compressed"
    REDUCTIONS_LOWERED = "reductions_lowered"
    COLLECTIVES_BUCKETED = "collectives_bucketed"
    STARTS_HOISTED = "starts_hoisted"
    WAITS_SUNK = "waits_sunk"
    OVERLAP_SCHEDULED = "overlap_scheduled"
    UPDATES_SPLIT = "updates_split"
    UPDATES_MOVED = "updates_moved"
    STATES_STREAMED = "states_streamed"
    COPIES_SCHEDULED = "copies_scheduled"


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What a pass may know of the frame that is compiled. Passes read it; what they leave in it is for people.

    Attributes:
        direction: of the graph at hand; "joint" before the partition, "step" for a whole training step.
        graphs: the graphs of this frame by direction, so that one plan can cover forward and backward.
        user_outputs: how many outputs of the joint and forward graph are the user's; the others are gradients, or
            saved for backward. None in inference.
        split: how the joint graph will be split into forward and backward, to be tried on a copy. None in inference,
            and for whole steps, which are not split.
        decomposed: whether operators were taken apart for Inductor, so that results are close to eager torch's and not
            the same bits.
        hardware: of each rank, the same on all, by which plans are made; None: the pipeline has no `zgraph.Target`.
        cost_of: what a call costs there, in any graph; the same on all ranks, for plans follow from it. None: unknown.
        sharing: what the lanes of these costs take from one another.
        search: for orders by costs; it knows those that it has found while this frame is compiled.
        plan_bytes: what a step may hold at any moment of what it allocates: the target's budget, or less where graphs
            that were planned for the budget itself hold more. None: no limit.
        host_budget_bytes: what a rank may keep on the host, at rest and in the step, as `zgraph.Offload` says, the same
            on all. None: no limit.
        update: where `zgraph.Offload` says that state on the host is updated. None: as `StreamStates` says.
        machine: the preset that the ranks' GPUs are, the same on all; passes without other hardware look at its links.
            None: unknown.
        planned_backend: what the groups of a planned cluster stand for; a real group knows better.
        notes: what passes had to say, as (pass, direction, text); shown in dumps and reports.
        decisions: those of them that `zgraph.explain` and `zgraph.plan` show as well, as (direction, text).
    """

    direction: Direction = "joint"
    graphs: Mapping[Direction, fx.GraphModule] = field(default_factory=dict[Direction, fx.GraphModule])
    user_outputs: int | None = None
    split: Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]] | None = None
    decomposed: bool = False
    hardware: Hardware | None = None
    cost_of: Callable[[fx.Node], NodeCost] | None = None
    sharing: Sharing = field(default_factory=Sharing)
    search: Search = field(default_factory=Search)
    plan_bytes: int | None = None
    host_budget_bytes: int | None = None
    update: Literal["host", "device"] | None = None
    machine: Hardware | None = None
    planned_backend: str = "gloo"
    notes: list[tuple[str, Direction, str]] = field(default_factory=list[tuple[str, Direction, str]])
    decisions: list[tuple[Direction, str]] = field(default_factory=list[tuple[Direction, str]])

    def note(self, graph_pass: GraphPass, text: str, *, is_decision: bool = False) -> None:
        """Leave a line for the reader of the dump, such as why a pass did nothing; or of `zgraph.explain` as well."""
        self.notes.append((graph_pass.name, self.direction, text))
        if is_decision:
            self.decisions.append((self.direction, text))

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
            forward and the backward graph, or on the one graph of inference. In inference all passes run on that graph,
            as they do on the graph of a whole training step.
        requires: facts that an earlier pass must provide.
        provides: facts that hold afterwards.
        conflicts: facts that must not hold yet.
        from_step: optimizer step from which on it counts: before, the backward runs that was planned without this pass.
            Only passes of phase "graph" that leave forward as it is may have one.
        needs_target: whether it plans by costs, and is refused in a pipeline without a `zgraph.Target`.
    """

    name: ClassVar[str] = "unnamed"
    phase: ClassVar[Phase] = "graph"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    @property
    def from_step(self) -> int:
        return 0

    @property
    def needs_target(self) -> bool:
        return False

    def limits(self, ctx: PassContext) -> Limits | None:
        """Limits within which the pass orders graphs by costs; None: it goes by rules, or does not order them."""
        return None

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        """Rewrite gm.graph in place; say truthfully whether anything changed."""
        raise NotImplementedError(f"{type(self).__name__} has no run(gm, ctx)")
