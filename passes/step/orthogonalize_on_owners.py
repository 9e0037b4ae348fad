"""Let each matrix of Muon be orthogonalized by one rank, instead of by all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_bytes
from zgraph.graph import edits, meta, nodes
from zgraph.graph.operator_arguments import OrthogonalizeArgs
from zgraph.passes.common.updates import Updates
from zgraph.runtime.chunks import MIB
from zgraph.runtime.owned_matrices import Bucket, plan_buckets
from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, wait_op

aten, dialect = torch.ops.aten, torch.ops.zgraph


@dataclass(frozen=True, kw_only=True)
class OrthogonalizeOnOwners(GraphPass):
    """Assign each matrix that Muon orthogonalizes to an owner, which receives its rows and returns the result's.

    Every `zgraph::orthogonalize` gathers a matrix on all ranks, and each computes all of it. With owners, N ranks share
    the work: a rank computes about 1/N of the flops, sends (N-1)/N of its rows to their owners in bf16, and returns
    equally many rows of results. Matrices whose gradients arrive one after another form a bucket with one exchange each
    way. A bucket is computed once the rows of the next one are on their way, and its results are awaited one bucket
    later, so that backward and the exchanges overlap. If every rank has whole matrices (stage 0), only results travel.
    With replicas of shards (hybrid sharding), each replica computes all matrices. Results are bitwise equal.
    Does not change matrices on a single rank, nor forward and backward.

    Attributes:
        bucket_bytes: least bytes of the matrices of a bucket, in bf16. A bucket ends once it also has work for each
            rank, in parts of nearly equal size.
    """

    bucket_bytes: int = 4 * MIB

    name: ClassVar[str] = "orthogonalize_on_owners"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.REDUCTIONS_LOWERED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.UPDATES_SPLIT, Fact.WAITS_SUNK, Fact.OVERLAP_SCHEDULED})

    def __post_init__(self) -> None:
        check_bytes("orthogonalize_on_owners", bucket_bytes=self.bucket_bytes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        found = [one for one in _markers(gm.graph) if one.marker.users and ctx.group_size(one.group_name) > 1]
        if not found:
            ctx.note(self, "no matrix on several ranks is orthogonalized here")
            return False
        arrival = Updates.of(list(gm.graph.nodes)).arrival
        for run in _runs(gm.graph, found):
            arriving = sorted(run, key=lambda one: arrival.get(one.marker, -1))
            alike: dict[Hashable, list[OrthogonalizeArgs]] = {}
            for one in arriving:
                alike.setdefault(one.kind, []).append(one)
            for members in alike.values():
                first = members[0]
                world = ctx.group_size(first.group_name)
                buckets = plan_buckets(
                    [one.shape for one in members],
                    world,
                    is_sharded=first.is_sharded,
                    least_numel=self.bucket_bytes // 2,
                    steps=first.steps,
                )
                ctx.note(self, f"{len(members)} matrices in {len(buckets)} buckets on {world} ranks")
                _lower(gm.graph, ctx, members, buckets)
        return True


def _markers(graph: fx.Graph) -> list[OrthogonalizeArgs]:
    return [OrthogonalizeArgs.of(node) for node in nodes.call_functions(graph, nodes.is_orthogonalize)]


def _runs(graph: fx.Graph, found: Sequence[OrthogonalizeArgs]) -> list[list[OrthogonalizeArgs]]:
    """Split markers, in program order, where a result is used before the next marker: by steps of optimizers."""
    order = nodes.order_of(graph)
    runs: list[list[OrthogonalizeArgs]] = []
    used = -1.0
    for one in found:
        if order[one.marker] > used:
            runs.append([])
            used = float("inf")
        runs[-1].append(one)
        used = min([used, *(float(order[user]) for user in one.marker.users)])
    return runs


def _lower(graph: fx.Graph, ctx: PassContext, found: Sequence[OrthogonalizeArgs], buckets: Sequence[Bucket]) -> None:
    """Replace markers by exchanges: each bucket is computed after the next one's start, and awaited one later."""
    order = nodes.order_of(graph)
    anchor = min((user for one in found for user in one.marker.users), key=order.__getitem__)
    with graph.inserting_before(anchor):
        exchanges = [
            _Exchange(graph, [found[place] for place in bucket.members], bucket, ctx, number)
            for number, bucket in enumerate(buckets)
        ]
        for turn in range(len(exchanges) + 2):
            for late, stage in enumerate((_Exchange.send, _Exchange.compute, _Exchange.receive)):
                if 0 <= turn - late < len(exchanges):
                    stage(exchanges[turn - late])
    edits.erase_dead(graph, [one.marker for one in found])


class _Exchange:
    """The nodes for one bucket: rows to the owners, the owners' work, and rows back."""

    def __init__(
        self, graph: fx.Graph, members: Sequence[OrthogonalizeArgs], bucket: Bucket, ctx: PassContext, number: int
    ) -> None:
        self.graph, self.members, self.layout, self.number = graph, members, bucket.layout, number
        self.group_name, self.rank = members[0].group_name, ctx.group_rank(members[0].group_name)
        self.started: fx.Node | None = None

    def send(self) -> None:
        layout = self.layout
        if layout.is_sharded:
            updates = [one.update for one in self.members]
            packed = self._node(dialect.send_to_owners.default, updates, layout.rows, layout.owners, layout.world)
            self.started = self._exchange(packed, f"momenta_{self.number}")

    def compute(self) -> None:
        layout, options, name = self.layout, self.members[0].options, f"orthogonalize_{self.number}"
        if self.started is not None:
            received = self._node(wait_op(), self.started, name=f"wait_momenta_{self.number}")
            arguments = (received, layout.rows, layout.columns, layout.owners, self.group_name, *options)
            computed = self._node(dialect.orthogonalize_owned.default, *arguments, name=name)
            self.started = self._exchange(computed, f"updates_{self.number}")
        else:
            updates = [one.update for one in self.members]
            arguments = (updates, layout.owners, self.group_name, *options)
            part = self._node(dialect.orthogonalize_whole.default, *arguments, name=name)
            gather = f"all_gather_updates_{self.number}"
            self.started = self._node(all_gather_op(), part, layout.world, self.group_name, name=gather)

    def receive(self) -> None:
        layout = self.layout
        received = self._node(wait_op(), self.started, name=f"wait_updates_{self.number}")
        for number, one in enumerate(self.members):
            begin, rows = layout.own_begin(number), layout.local_rows(number, self.rank)
            columns = layout.columns[number]
            flat = self._node(aten.slice.Tensor, received, 0, begin, begin + rows * columns)
            one.marker.replace_all_uses_with(self._node(aten.view.default, flat, [rows, columns]))

    def _exchange(self, parts: fx.Node, name: str) -> fx.Node:
        splits = [self.layout.part_numel] * self.layout.world
        return self._node(all_to_all_op(), parts, splits, splits, self.group_name, name=f"all_to_all_{name}")

    def _node(self, target: object, *args: object, name: str | None = None) -> fx.Node:
        given = [list(one) if isinstance(one, tuple) else one for one in args]
        return meta.create(self.graph, target, cast("list[object]", given), like=self.members[0].marker, name=name)
