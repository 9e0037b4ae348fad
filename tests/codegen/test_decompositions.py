"""Decompositions of zgraph's own, against those of Inductor that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from zgraph.torch_compat.inductor import inductor_decompositions

aten = torch.ops.aten
IGNORED = 3


def gradient(scores: Tensor, target: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """Return the gradient of the loss with respect to the scores, multiplied by `grad`."""
    scores = scores.detach().requires_grad_()
    (found,) = torch.autograd.grad(F.cross_entropy(scores, target, **options), scores, grad)
    return found


@pytest.mark.parametrize(
    "shape, options",
    [
        ((6, 5), {}),
        ((6, 5), {"reduction": "none"}),
        ((6, 5), {"reduction": "sum", "weight": torch.arange(1.0, 6.0)}),
        ((2, 5, 3), {"ignore_index": IGNORED}),
        ((2, 5, 2, 3), {"ignore_index": IGNORED, "weight": torch.arange(1.0, 6.0)}),
        ((2, 5, 2, 3), {"reduction": "none", "ignore_index": IGNORED}),
        ((5,), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_loss_over_classes_has_the_same_bits_without_a_scatter(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(shape).to(dtype)
    target = torch.randint(5, (shape[0], *shape[2:]) if len(shape) > 1 else ())
    options = {name: each.to(dtype) if isinstance(each, Tensor) else each for name, each in options.items()}
    grad = torch.randn_like(F.cross_entropy(scores, target, **options))

    def traced(table: dict[Any, Any]) -> torch.fx.GraphModule:
        return make_fx(lambda *given: gradient(*given, **options), decomposition_table=table)(scores, target, grad)

    graph, expected = traced(inductor_decompositions()), traced(select_decomp_table())
    found, by_torch = graph(scores, target, grad), expected(scores, target, grad)
    assert torch.equal(found.view(torch.uint8), by_torch.view(torch.uint8))
    scatters = [node for node in graph.graph.nodes if node.target is aten.scatter.value]
    assert not scatters or len(shape) == 1
