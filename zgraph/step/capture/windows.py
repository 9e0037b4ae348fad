"""Accumulation windows inside one graph: gradients are summed in the graph, and reduced once."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from zgraph.errors import ZgraphError
from zgraph.graph import edits, meta, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.runtime.shard_layout import ShardLayout
from zgraph.runtime.window_state import ALONE, OPEN

aten = torch.ops.aten


def resolve_windows(graph: fx.Graph, optional: Container[fx.Node] = ()) -> None:
    """Sum the gradients of each `zgraph.no_sync` window inside the graph, so that no state is needed between calls.

    Afterwards every marker has the window position ALONE. The sum has the order and the dtypes of
    `zgraph.runtime.window_state`. Each parameter has its own window.

    Args:
        graph: graph to change.
        optional: handles of optional parameters, whose gradients the step itself reduces when a backward ends.

    Raises:
        ZgraphError: gradients are read, or the step ends, before they are reduced over the ranks.
    """
    for marker in nodes.call_functions(graph, nodes.is_unshard):
        _stand_alone(marker)
    sums: dict[fx.Node, fx.Node] = {}  # by handle
    waiting: dict[fx.Node, None] = {}
    for marker in nodes.call_functions(graph, nodes.is_reduce_grad):
        args = ReduceArgs.of(marker)
        if args.handle in optional:
            if args.window == OPEN:
                _leave_own(graph, marker, args)
                continue
            meta.tag_skipped(marker)
        layout: ShardLayout = args.layout
        if layout.is_reduced and layout.gradients_wait(args.window):
            with graph.inserting_before(marker):
                known = sums.pop(args.handle, None)
                if known is None:
                    total = meta.create_cast(graph, args.grad, args.dtype)
                else:
                    total = meta.create(graph, aten.add.Tensor, (known, args.grad))
            if args.window == OPEN:
                sums[args.handle] = total
                waiting[marker] = None
            else:
                marker.args = (total, *marker.args[1:])
        if args.window != OPEN:  # an OPEN one that reduces anyway tells error feedback that no step follows
            _stand_alone(marker)
    for handle in sums:
        raise ZgraphError(
            "zgraph.training_step: the step ends while gradients from forwards under zgraph.no_sync are not reduced: "
            f"no backward of a forward outside no_sync reaches the parameter of {handle.name} afterwards. Run the last "
            "micro-batch outside no_sync, through all parts that the others go through, or leave out no_sync."
        )
    _drop_placeholders(graph, waiting)


def _leave_own(graph: fx.Graph, marker: fx.Node, args: ReduceArgs) -> None:
    """Replace the marker of an optional parameter by this rank's own gradient, which another marker reduces.

    Raises:
        ZgraphError: another node reads the gradient first.
    """
    pending = [marker]
    for value in pending:
        for user in value.users:
            if traits.is_reshaping(user) or user.target in (aten.add.Tensor, aten.add_.Tensor):
                pending.append(user)
            elif not nodes.is_reduce_grad(user) or ReduceArgs.of(user).handle is not args.handle:
                raise ZgraphError(
                    f"zgraph.training_step: {user.name} ({user.target}) reads a gradient of {args.handle.name}, which "
                    "is optional and reduced when backward() has ended. Call backward(), and read .grad afterwards."
                )
    with graph.inserting_before(marker):
        own = meta.create_cast(graph, args.grad, args.dtype)
    marker.replace_all_uses_with(own)
    graph.erase_node(marker)


def _stand_alone(marker: fx.Node) -> None:
    # Both markers end in their window and the names of two groups.
    *others, _, replica_group, gather_group = marker.args
    marker.args = (*others, ALONE, replica_group, gather_group)


def _drop_placeholders(graph: fx.Graph, waiting: dict[fx.Node, None]) -> None:
    """Remove placeholder gradients of open windows, and the additions of mean gradients to placeholders.

    Raises:
        ZgraphError: another node reads a placeholder.
    """
    dropped = dict(waiting)
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor and node.target is not aten.add_.Tensor:
            continue
        left, right = node.args[0], node.args[1]
        if left in dropped and right in dropped:
            dropped[node] = None
        elif left in dropped or right in dropped:
            mean = right if left in dropped else left
            assert isinstance(mean, fx.Node)
            node.replace_all_uses_with(mean)
            dropped[node] = None
    for node in reversed(list(dropped)):
        readers = [user for user in node.users if user not in dropped]
        if readers:
            raise ZgraphError(
                f"zgraph.training_step: {readers[0].name} ({readers[0].target}) reads a gradient while the window of "
                "zgraph.no_sync is open, when it is this rank's own; clip and step after the last backward."
            )
    edits.erase_dead(graph, dropped)
