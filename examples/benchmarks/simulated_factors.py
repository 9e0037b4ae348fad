"""Data-parallel ranks in one process whose gradients travel as low-rank factors: zgraph's, and PyTorch's hook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from low_rank_twin import low_rank_mean
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from zgraph.codegen.low_rank_kernels import first_right
from zgraph.compression.low_rank import LowRank, matrix_shape, state_of_matrix


@dataclass
class LowRankMean:
    """The mean of N ranks' gradients, as zgraph's operators compute it.

    Attributes:
        method: whose rank counts.
        world: N.
        errors: of each gradient and rank.
        rights: of each gradient, the right factor of the last step.
    """

    method: LowRank
    world: int
    errors: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    rights: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __call__(self, grads: Sequence[Sequence[Tensor]], step: int) -> list[Tensor]:
        """The mean of each gradient, fp32 in its shape, from each rank's gradients; `step` plays no part."""
        return [self._mean(place, parts) for place, parts in enumerate(zip(*grads, strict=True))]

    def _mean(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        shape = parts[0].shape
        sent_bytes = 2 * parts[0].nbytes
        if not self.method.pays(shape, sent_bytes):
            return torch.stack(list(parts)).mean(0)
        size = matrix_shape(shape)
        if place not in self.errors:
            self.errors[place] = [torch.zeros(size) for _ in parts]
            kept, dtype = state_of_matrix(*size, self.method.rank)["right"]
            self.rights[place] = first_right(f"parameter {place}", torch.empty(kept, dtype=dtype))
        matrices = [part.view(size) for part in parts]
        mean, self.errors[place], self.rights[place] = low_rank_mean(
            matrices, self.errors[place], self.rights[place], self.world
        )
        return mean.view(shape)


@dataclass
class HookMean:
    """The mean of N ranks' gradients by `powerSGD_hook` of torch 2.13, with a warm start and error feedback.

    Its lines, for ranks that lie side by side instead of in processes, with its own orthogonalization.

    Attributes:
        rank: `matrix_approximation_rank`.
        world: N.
        start: `start_powerSGD_iter`: steps in which gradients travel as they are.
        errors: of each gradient and rank.
        rights: of each gradient, [1, columns, rank].
    """

    rank: int
    world: int
    start: int = 2
    errors: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    rights: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __call__(self, grads: Sequence[Sequence[Tensor]], step: int) -> list[Tensor]:
        """As `LowRankMean`; `step` counts from 0."""
        return [self._mean(place, parts, step) for place, parts in enumerate(zip(*grads, strict=True))]

    def _mean(self, place: int, parts: Sequence[Tensor], step: int) -> Tensor:
        matrices = [part.reshape(1, part.shape[0], -1) for part in parts]
        _, rows, columns = matrices[0].shape
        if step < self.start or 2 * (rows + columns) * self.rank >= rows * columns:
            return torch.stack(list(parts)).mean(0)
        if place not in self.errors:
            self.errors[place] = [torch.zeros_like(matrix) for matrix in matrices]
            random = torch.Generator().manual_seed(place)
            self.rights[place] = torch.randn(1, columns, self.rank, generator=random)
        right = self.rights[place]
        powerSGD_hook._orthogonalize(right)  # pyright: ignore[reportPrivateUsage]
        deltas = [matrix + error for matrix, error in zip(matrices, self.errors[place], strict=True)]
        left = torch.stack([delta @ right for delta in deltas]).sum(0)
        powerSGD_hook._orthogonalize(left)  # pyright: ignore[reportPrivateUsage]
        self.rights[place] = torch.stack([delta.transpose(1, 2) @ left for delta in deltas]).sum(0) / self.world
        mean = left @ self.rights[place].transpose(1, 2)
        self.errors[place] = [delta - mean for delta in deltas]
        return mean.view(parts[0].shape)
