"""Replaces AdamW's updates by updates with given momenta and frozen second moments, for `SignMomentum`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from zgraph.compression.sign_momentum import SignMomentum
from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.passes.common.updates import lists_of, split_call

aten = torch.ops.aten
_ADAMW = (aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)
_SCALING = (
    *(aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor),
    *(aten.view.default, aten.alias.default, aten.detach.default, aten.clone.default),
)
_OPTIMIZER = "step them by torch.optim.AdamW(..., fused=True)"


def update_by_momentum(graph: fx.Graph, means: Mapping[fx.Node, Sequence[str]], method: SignMomentum) -> None:
    """Replace each AdamW update that reads a mean momentum in place of a gradient.

    Args:
        graph: graph of a whole step.
        means: the mean momentum of each reduction, and the names of its parameters.
        method: the method that has computed the momenta.

    Raises:
        ZgraphError: a mean is used by anything but an update of AdamW, and clipping before it; or the update has
            options that are not supported.
    """
    left = dict(means)
    for node in list(nodes.call_functions(graph, lambda node: node.target in _ADAMW)):
        sources = [_source(grad, means) for grad in cast("Sequence[fx.Node]", node.args[1])]
        if not any(sources):
            continue
        _check(node, [name for source in sources if source is not None for name in means[source]])
        for source in sources:
            left.pop(cast(fx.Node, source), None)
        given = [place for place, source in enumerate(sources) if source is not None]
        others = [place for place, source in enumerate(sources) if source is None]
        for piece in split_call(node, [group for group in (given, others) if group])[:1]:
            _replace(graph, piece, method)
    if left:
        names = sorted(name for found in left.values() for name in found)
        raise ZgraphError(
            f"compress_gradients: the mean momentum of {', '.join(names[:3])} reaches no fused AdamW in this step, or "
            f"not by clipping only, and SignMomentum is part of AdamW's update; {_OPTIMIZER}, or leave them "
            "out with CompressGradients(skip=...), or compress by LoCo()."
        )


def _source(grad: fx.Node, means: Mapping[fx.Node, Sequence[str]]) -> fx.Node | None:
    """Return the mean that a gradient is a copy, a view or a multiple of, as clipping makes it; None if there is none.

    In-place clipping leaves the node of the mean itself.
    """
    node: Any = grad
    while isinstance(node, fx.Node) and node not in means:
        if nodes.is_getitem(node):
            call, place = cast("tuple[fx.Node, int]", node.args)
            node = lists_of(call)[0][place] if str(call.target).startswith("aten._foreach_mul.") else None
        else:
            factors = node.all_input_nodes[1:]
            scales = node.target in _SCALING and all(not meta.tensor_value(one).ndim for one in factors)
            node = node.args[0] if scales else None
    return node


def _check(node: fx.Node, names: Sequence[str]) -> None:
    scaled = [key for key in ("grad_scale", "found_inf") if node.kwargs.get(key) is not None]
    found = "amsgrad=True" if node.kwargs.get("amsgrad") else "a GradScaler" if scaled else None
    if found is not None:
        instead = "leave it out" if found == "amsgrad=True" else "use bfloat16, which needs none"
        raise ZgraphError(
            f"compress_gradients: SignMomentum compresses {', '.join(names[:3])}, which AdamW steps with {found}; "
            f"{instead}, or compress by LoCo()."
        )


def _replace(graph: fx.Graph, node: fx.Node, method: SignMomentum) -> None:
    parameters, means, averages, squares, _, steps = node.args
    options = {key: node.kwargs[key] for key in ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize")}
    packet = torch.ops.zgraph.momentum_adamw_
    target = packet.default if node.target is aten._fused_adamw_.default else packet.tensor_lr
    with graph.inserting_before(node):
        update = graph.create_node(
            "call_function",
            target,
            (parameters, means, averages, squares, steps),
            {**options, "momentum_beta1": method.beta1},
            name=f"momentum_{node.name.strip('_')}",
        )
    update.meta = dict(node.meta)
    meta.set_value(update, None)
    graph.erase_node(node)
