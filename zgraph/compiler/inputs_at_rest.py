"""Lets compiled forward and backward graphs read parameters that are stored on the host of a GPU.

A module that reads such a parameter copies it to the GPU, and autograd copies the gradient back:

    shard (cpu) -> copy (cuda) -> unshard -> ...      reduce_grad (cuda) -> copy (cpu) -> returned

These copies are removed, so that the graph reads the input as if it were on the device; the pass `StreamStates` later
inserts a copy before each use. Copies of results to the host run at the end, concurrently with compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import fx

from zgraph.dialect.copies import offload_op, wait_copy_op
from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.tiers.devices import is_gpu
from zgraph.tiers.tier import HOST

_MOVES = (torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default)


def take_to_device(graph: fx.Graph) -> bool:
    """Let readers of an input's copy on the GPU read the input itself, and copy gradients to the host asynchronously.

    Args:
        graph: the graph as captured, with the memory spaces of its inputs.

    Returns:
        Whether the graph copied any input.
    """
    found = False
    for resting in graph.find_nodes(op="placeholder"):
        if meta.space(resting) is None:
            continue
        copies = [user for user in resting.users if _moves_to(user, gpu=True)]
        for copy in copies:
            meta.set_value(resting, meta.value(copy))
            copy.replace_all_uses_with(resting)
            graph.erase_node(copy)
        if copies:
            meta.set_kept(resting, "parameters")
            found = True
    if found:
        _return_beside_compute(graph)
    return found


def check_only_copied(graph: fx.Graph) -> None:
    """Check that copies and updates in place are the only uses of inputs that are stored on the host of a GPU.

    Raises:
        ZgraphError: names the operator that would receive a tensor on the host, and the remedy.
    """
    given = [node for node in graph.find_nodes(op="placeholder") if isinstance(meta.value(node), torch.Tensor)]
    if all(meta.tensor_value(node).device.type == "cpu" for node in given):
        return
    for resting in given:
        if meta.space(resting) is None:
            continue
        for user in resting.users:
            if not nodes.is_copy_start(user) and meta.beside(user) is None and user.op != "output":
                raise ZgraphError(
                    f"zgraph: {user.name} ({user.target}) reads {resting.name}, which is stored on the "
                    f"{meta.space(resting)}, on the device; put stream_states at the end of the pipeline, or after "
                    "the pass that made this operator."
                )


def _return_beside_compute(graph: fx.Graph) -> None:
    """Move copies of results to the host to the end of the graph: first all their starts, then all their waits."""
    output = nodes.output_of(graph)
    returned = [node for node in dict.fromkeys(output.all_input_nodes) if _moves_to(node, gpu=False)]
    starts: list[fx.Node] = []
    for copy in returned:
        source = cast(fx.Node, copy.args[0])
        with graph.inserting_before(output):
            start = meta.create(graph, offload_op(), (source,), like=copy, name=f"offload_{source.name}")
        meta.set_transit(start, HOST, to_device=False)
        meta.set_space(start, HOST)
        meta.set_kept(start, "state")
        starts.append(start)
    for copy, start in zip(returned, starts, strict=True):
        with graph.inserting_before(output):
            kept = meta.create(graph, wait_copy_op(), (start,), like=copy, name=f"kept_{start.name}")
        meta.set_space(kept, HOST)
        copy.replace_all_uses_with(kept)
    _erase(graph, returned)


def _erase(graph: fx.Graph, unused: Iterable[fx.Node]) -> None:
    for node in unused:
        graph.erase_node(node)


def _moves_to(node: fx.Node, *, gpu: bool) -> bool:
    """Return whether a node copies a tensor without a cast: from host to GPU if `gpu`, else from GPU to host."""
    if node.op != "call_function" or node.target not in _MOVES:
        return False
    source, result = meta.tensor_value(cast(fx.Node, node.args[0])), meta.tensor_value(node)
    return is_gpu(source.device) != gpu and is_gpu(result.device) == gpu and source.dtype == result.dtype
