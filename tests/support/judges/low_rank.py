"""Low-rank training on paper: what every rank of a run should hold, from the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from examples.benchmarks.low_rank_twin import low_rank_mean
from zgraph.codegen.low_rank_kernels import first_right
from zgraph.compression.low_rank import LowRank, matrix_shape
from zgraph.passes import CompressGradients, presets


@dataclass
class Paper:
    """The mean gradients of a model's parameters, one after the other, each by the plain twin.

    Attributes:
        method: whose factors travel.
        ranks: N.
        zero_stage: of all parameters.
        itemsize: of a gradient's element as it travels when it is not compressed.
        min_numel: of a gradient that is compressed.
        errors, rights: of each parameter that is compressed.
    """

    method: LowRank
    ranks: int
    zero_stage: int = 0
    itemsize: int = 4
    min_numel: int = 1
    errors: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    rights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def covers(self, shape: Sequence[int]) -> bool:
        numel = torch.Size(shape).numel()
        sent = numel * self.itemsize
        return numel >= self.min_numel and self.method.pays(shape, sent if self.zero_stage else 2 * sent)

    def mean(self, name: str, grads: Sequence[Tensor]) -> Tensor:
        """The mean of the ranks' gradients, fp32."""
        shape = grads[0].shape
        if not self.covers(shape):
            total = grads[0].float()
            for grad in grads[1:]:
                total = total + grad.float()
            return total / self.ranks
        size = matrix_shape(shape)
        if name not in self.errors:
            self.errors[name] = [torch.zeros(size) for _ in grads]
            self.rights[name] = first_right(name, torch.empty(self.method.rank, size[1]))
        matrices = [grad.reshape(size) for grad in grads]
        found, self.errors[name], self.rights[name] = low_rank_mean(
            matrices, self.errors[name], self.rights[name], self.ranks
        )
        return found.view(shape)


def compile_low_rank(
    model: nn.Module,
    method: LowRank,
    *,
    lowering: str = "fx",
    warmup_steps: int = 0,
    report: Any = None,
    target: zgraph.Target | None = None,
) -> Any:
    """By the preset's passes; every matrix for which factors pay is compressed, however small."""
    preset = presets.default if target is None else presets.planned
    passes = [
        replace(each, min_numel=1, warmup_steps=warmup_steps) if isinstance(each, CompressGradients) else each
        for each in preset(compression=method)
    ]
    chosen = {"lowering": lowering, "passes": zgraph.PassList(passes, target=target, replay_all=dist.get_rank() == 0)}
    return torch.compile(model, backend="zgraph", options=chosen if report is None else chosen | {"report": report})
