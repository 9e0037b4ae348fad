"""The interface of passes: frozen dataclasses with a name, a phase, contracts, and `run(gm, ctx)`."""

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
from zgraph.compiler.partition import JointSplit
from zgraph.runtime.groups import group_stride, make_host_groups
from zgraph.scheduling.plan_schedule import Search
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.devices import kind_of_backend
from zgraph.torch_compat.groups import backend_of, resolve_group

Phase = Literal["joint", "graph"]
Direction = Literal["joint", "forward", "backward", "inference", "step"]


class Fact(StrEnum):
    """A property of a graph that holds after a pass has run. User-defined passes may define others as strings."""

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
    """What passes know about the frame being compiled. They read it, and only add notes and decisions for the user.

    Attributes:
        direction: direction of the current graph; "joint" before the partition, "step" for a whole training step.
        graphs: the graphs of this frame by direction, so that one plan can cover forward and backward.
        user_outputs: number of outputs of the joint and forward graph that the user receives. All other outputs are
            gradients, or saved for backward. None in inference.
        split: splits a joint graph into forward and backward. Passes may try it on a copy of the graph. None in
            inference, and for whole steps, which are not split.
        decomposed: whether operators were decomposed for Inductor. Results are then close to eager torch's, but not
            bitwise equal.
        hardware: hardware to plan for, the same for all ranks; None: the pipeline has no `zgraph.Target`.
        cost_of: returns the cost of a node, equal on all ranks; None: costs are unknown.
        sharing: how concurrent collectives and compute slow each other down.
        search: search for orders by costs; it caches the orders found while this frame is compiled.
        plan_bytes: maximum bytes that a step may allocate at any moment: the target's budget, or less if an earlier
            plan exceeded it. None: no limit.
        host_budget_bytes: maximum bytes that a rank may keep in host memory, between and during steps. Set by
            `zgraph.Offload`, and the same on all ranks. None: no limit.
        update: where to update state that is kept on the host, set by `zgraph.Offload`. None: `StreamStates` decides.
        machine: preset of the ranks' GPUs, the same on all ranks; None: unknown. Passes use its links if `hardware` is
            None.
        planned_backend: backend of the groups of a planned cluster; real groups have their own.
        notes: notes of passes, as (pass, direction, text); shown in dumps and reports.
        decisions: notes that `zgraph.explain` and `zgraph.plan` show as well, as (direction, text).
        subgroups: arguments of the calls of `host_groups`, in order: all ranks must make these groups.
    """

    direction: Direction = "joint"
    graphs: Mapping[Direction, fx.GraphModule] = field(default_factory=dict[Direction, fx.GraphModule])
    user_outputs: int | None = None
    split: JointSplit | None = None
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
    subgroups: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def note(self, graph_pass: GraphPass, text: str, *, is_decision: bool = False) -> None:
        """Add a note for dumps, such as why a pass did nothing; decisions are also shown by `zgraph.explain`."""
        self.notes.append((graph_pass.name, self.direction, text))
        if is_decision:
            self.decisions.append((self.direction, text))

    @property
    def planned_device(self) -> str | None:
        """Type of the GPU that is planned for, even though a plan's fake tensors are on the CPU; None for CPUs."""
        kind = kind_of_backend(self.planned_backend)
        return kind.type if kind.is_gpu else None

    def group_size(self, group_name: str) -> int:
        """Return the number of ranks in a group; 1 for the empty name."""
        return dist.get_world_size(resolve_group(group_name)) if group_name else 1

    def group_rank(self, group_name: str) -> int:
        return dist.get_rank(resolve_group(group_name))

    def host_groups(self, group_name: str, ranks_per_host: int) -> tuple[str, str]:
        """Return the names of two subgroups: this host's ranks, and each host's rank at this rank's position.

        Consecutive ranks share a host. Missing subgroups are created, so all ranks of the group must call this
        together.
        """
        self.subgroups.append((group_name, ranks_per_host))
        return make_host_groups(group_name, ranks_per_host)

    def collective_us(self, kind: str, sent_bytes: int, group_name: str) -> float:
        """Return the predicted microseconds of a collective in which each rank sends `sent_bytes`.

        Args:
            kind: name of the op, such as "all_gather_into_tensor".
            sent_bytes: total bytes that one rank sends.
            group_name: name of the process group.

        Raises:
            AssertionError: the hardware is unknown.
        """
        assert self.hardware is not None, "ask only where there is hardware"
        return self.hardware.collective_us(kind, sent_bytes, self.group_size(group_name), group_stride(group_name))

    def group_backend(self, group_name: str, device: torch.device) -> str:
        """Return the backend that a group uses for tensors of a device: "gloo", "nccl", ..."""
        found = backend_of(resolve_group(group_name), device)
        return self.planned_backend if found == "fake" else found


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """Base class of passes; subclass it as a frozen dataclass whose fields are the pass's options.

    Attributes:
        name: name in errors and dumps.
        phase: "joint" passes see forward and backward in one graph, before the partition; "graph" passes run on the
            forward graph and on the backward graph. In inference and for a whole training step there is only one
            graph, on which all passes run.
        requires: facts that an earlier pass must provide.
        provides: facts that hold after the pass.
        conflicts: facts that must not hold before the pass.
        from_step: first optimizer step that uses this pass; earlier steps run a backward planned without it. Only
            passes of phase "graph" that do not change forward may start later than step 0.
        needs_target: whether the pass plans by costs; a pipeline without a `zgraph.Target` then refuses it.
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
        """Return the memory limits within which the pass orders graphs by costs; None if it does not use costs."""
        return None

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        """Rewrite `gm.graph` in place; return whether anything changed, which the pass list verifies."""
        raise NotImplementedError(f"{type(self).__name__} has no run(gm, ctx)")
