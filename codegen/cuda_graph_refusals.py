"""Checks that a step can be recorded as a CUDA graph, so that a replay runs every operator correctly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from zgraph.analysis.liveness import placements
from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.runtime.groups import group_backend
from zgraph.torch_compat.operators import OpOverload, written_arguments

aten, dialect = torch.ops.aten, torch.ops.zgraph
# zgraph's operators that only launch kernels.
_PLAIN = frozenset({dialect.sum_ranks.default, dialect.cast_shards.default, dialect.wait_group.default})
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})


def check_recordable(gm: fx.GraphModule, resident: int) -> None:
    """Raise an error for a step that cannot be recorded as a CUDA graph.

    Args:
        gm: the final graph of the step.
        resident: number of leading inputs that keep their addresses from call to call.

    Raises:
        ZgraphError: the step cannot be recorded; the message names the operator, the reason, and what to do.
    """
    for node, reason in _reasons(gm.graph, resident):
        line = meta.source_line(node)
        raise ZgraphError(
            f"zgraph.training_step: the step cannot be recorded as a CUDA graph: {node.name} ({node.target}"
            f"{', ' if line else ''}{line}) {reason}, or leave out cuda_graph."
        )


def _reasons(graph: fx.Graph, resident: int) -> Iterator[tuple[fx.Node, str]]:
    for node in nodes.call_functions(graph, lambda node: isinstance(node.target, OpOverload)):
        reason = _of_operator(node)
        if reason:
            yield node, reason
    arguments = dict.fromkeys(itertools.islice(graph.find_nodes(op="placeholder"), resident, None))
    found = placements(graph)
    for node in nodes.call_functions(graph, lambda node: bool(written_arguments(node))):
        for written in written_arguments(node):
            storages = [found.storages[number] for number in found.lies_in.get(written, ())]
            if any(storage.first in arguments for storage in storages):
                yield node, "writes to an argument, which would change only the graph's copy; write to your own copy"


def _of_operator(node: fx.Node) -> str:
    """Return why an operator cannot be recorded, and what to do instead; "" if it can be recorded."""
    assert isinstance(node.target, OpOverload)
    if node.target in _READS:
        return "reads a tensor's value on the host in each call; use an optimizer with fused=True"
    if node.target.namespace == "zgraph" and node.target not in _PLAIN:
        return (
            "counts steps, keeps error feedback or copies tables of addresses on the host in each call; leave "
            "compression out of the pipeline"
        )
    if nodes.is_start(node):
        device = next((meta.tensor_value(sent).device for sent in nodes.sent_by(node)), torch.device("cpu"))
        backend = group_backend(nodes.group_of(node), device)
        if nodes.group_of(node) and backend != "nccl":
            return (
                f"communicates over {backend or 'no backend'}, which passes through the host; initialise the group "
                "with the backend nccl"
            )
    on_the_host = next((one for one in (*node.all_input_nodes, node) if _is_on_the_host(one)), None)
    if on_the_host is not None:
        return (
            f"computes with a tensor on the host ({on_the_host.name}), which a replay would skip; keep step "
            "counts on the GPU (fused=True), and put learning rates, arguments and tensors from outside there"
        )
    return ""


def _is_on_the_host(node: fx.Node) -> bool:
    value = meta.value(node)
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(one, Tensor) and one.device.type == "cpu" for one in values)
