"""Run a backward in two halves: first for the gradients of a stage's inputs, later for those of its weights.

A compiled backward is a single autograd node. In the first half, this node computes only the gradients of inputs, and
returns a function that computes the gradients of weights. The second half calls the function, and passes its results to
the parameters through autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zgraph.runtime.window_state import Gradients
from zgraph.torch_compat.autograd import current_node, drop_graph, is_compiled, is_leaf


@dataclass(frozen=True)
class Way:
    """Part of autograd's graph: all nodes between a stage's outputs and its inputs.

    Attributes:
        nodes: all nodes of this part.
        readers: the nodes that are compiled functions and also return gradients of parameters.
        begins: edges of the outputs, which keep all nodes alive. Without them, torch 2.11 and 2.12 free the node of a
            Python function with the nodes that lead to it, even if Python still refers to the node.
    """

    nodes: set[Node]
    readers: set[Node]
    begins: tuple[GradientEdge, ...] = ()


class WeightBackwards:
    """The second half of one micro-batch's backward, which computes the gradients of weights.

    Args:
        way: result of `way_through`.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self._unheard = set(way.readers)
        self._waiting: list[tuple[Sequence[tuple[Node | None, int]], Gradients, Callable[[], Gradients]]] = []

    def add(self, early: Gradients, later: Callable[[], Gradients]) -> None:
        """Defer a part of the compiled backward that is running.

        Args:
            early: gradients computed so far, in the order of the compiled function's input tensors; None for a gradient
                that is not needed or not computed yet.
            later: function that computes the other gradients, in the same order.
        """
        node = current_node()
        self._waiting.append((node.next_functions, early, later))
        self._unheard.discard(node)

    @property
    def is_complete(self) -> bool:
        """Whether every compiled backward that returns gradients of parameters has deferred them."""
        return not self._unheard

    def run(self, device_type: str) -> None:
        """Compute the deferred gradients, and add them to the parameters' `.grad`."""
        waiting, self._waiting = self._waiting, []
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        for following, early, later in waiting:
            # The modes in which a compiled backward runs, whatever the caller's.
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                late = later()
            for (node, place), *found in zip(following, early, late, strict=True):
                grad = next((one for one in found if one is not None), None)
                if node is not None and grad is not None and node not in self._way.nodes:
                    edges.append(GradientEdge(node, place))
                    grads.append(grad)
        if edges:
            torch.autograd.backward(edges, grads)


def input_gradients(
    outputs: Iterable[Any], output_grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a stage's inputs, add each to its input's `.grad`, and return them.

    Args:
        outputs: outputs of the stage, or their autograd edges, or the loss; tensors are detached afterwards.
        output_grads: gradient of each output; None: ones.
        inputs: inputs of the stage.

    Returns:
        A gradient for each input; None for inputs that require none.
    """
    outputs = list(outputs)
    found = [
        (value, torch.ones_like(cast(Tensor, value)) if output_grads is None else output_grads[place])
        for place, value in enumerate(outputs)
        if isinstance(value, GradientEdge) or (isinstance(value, Tensor) and value.requires_grad)
    ]
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    sources: Any = [value for value, _ in found]  # torch accepts edges and tensors mixed, but its types do not say so
    grads = iter(torch.autograd.grad(sources, wanted, [grad for _, grad in found], allow_unused=True))
    result = [next(grads) if isinstance(value, Tensor) and value.requires_grad else None for value in inputs]
    for value, grad in zip(inputs, result, strict=True):
        if grad is not None:
            value.grad = grad if value.grad is None else value.grad + grad
    for value in outputs:
        if isinstance(value, Tensor):
            drop_graph(value)
    return tuple(result)


def edges_of(outputs: Iterable[Any]) -> list[GradientEdge]:
    """Return the autograd edges of a stage's outputs, which are tensors or edges."""
    return [
        one if isinstance(one, GradientEdge) else get_gradient_edge(one)
        for one in outputs
        if isinstance(one, GradientEdge) or (isinstance(one, Tensor) and one.grad_fn is not None)
    ]


def way_through(outputs: Iterable[Any], inputs: Iterable[Any]) -> Way | None:
    """Return the part of autograd's graph between a stage's outputs and its inputs.

    Returns:
        The part; None if it has no compiled function, or if gradients of parameters also come from uncompiled
        functions or from outside the part.
    """
    ends = {get_gradient_edge(value).node for value in inputs if isinstance(value, Tensor) and value.requires_grad}
    edges = edges_of(outputs)
    begins = [edge.node for edge in edges]
    leads: dict[Node, bool] = {}  # whether a node leads to an input
    parameters: dict[Node, bool] = {}  # whether it leads to a leaf that is not an input
    waiting = list(begins)
    while waiting:
        node = waiting[-1]
        following = [one for one, _ in node.next_functions if one is not None]
        if node not in ends and (new := [one for one in following if one not in leads]):
            waiting += new
            continue
        waiting.pop()
        if node in ends:
            leads[node], parameters[node] = True, False
            continue
        leads[node] = any(leads[one] for one in following)
        parameters[node] = is_leaf(node) or any(parameters[one] for one in following)
    way = {node for node, found in leads.items() if found}
    if not any(is_compiled(node) for node in way):
        return None
    if any(parameters[node] and node not in way for node in begins):
        return None
    readers = {
        node
        for node in way - ends
        if any(parameters[one] for one, _ in node.next_functions if one is not None and one not in way)
    }
    return Way(way, readers, tuple(edges)) if all(map(is_compiled, readers)) else None
