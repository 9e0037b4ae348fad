"""A pass of your own: wide matmuls run again in backward, so that their results need not be kept until then."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from zgraph import GraphPass, PassContext, PassList, passes
from zgraph.graph import meta


@dataclass(frozen=True, kw_only=True)
class RecomputeWide(GraphPass):
    ratio: float  # of output to input columns, from which on a matmul counts as wide
    name: ClassVar[str] = "recompute_wide"
    phase: ClassVar = "joint"  # forward and backward are still one graph; torch has yet to decide what to keep

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        matmuls = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)  # bias, input, weight
        wide = [node for node in matmuls if meta.value(node).shape[1] >= self.ratio * meta.value(node.args[1]).shape[1]]
        for node in wide:
            meta.tag_recompute(node)
        print(f"{self.name}: {len(wide)} of {len(matmuls)} matmuls run again in backward")
        return bool(wide)


def train_one_step(*own: GraphPass) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))
    options: dict[str, Any] = {"passes": PassList([*passes.presets.default(), *own])}
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        torch.compile(model, backend="zgraph", options=options)(torch.randn(512, 256)).square().mean().backward()
    print(sum(t.nbytes for t in kept.values() if not isinstance(t, nn.Parameter)) / 2**20, "MiB kept for backward")
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


print("same gradients, bit for bit:", torch.equal(train_one_step(), train_one_step(RecomputeWide(ratio=2))))
