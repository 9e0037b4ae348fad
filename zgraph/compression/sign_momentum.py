"""1-bit Adam: ranks send the signs of their momenta, with one scale for each block of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zgraph.compression.methods import SCALE_DTYPE, RngKey, TensorMethod

Look = tuple[float, float]  # sum of the second moments, corrected for its bias, and learning rate
LATEST = 100_000  # steps after which the warm-up of "auto" ends in any case
CHANGE = 0.96  # least ratio of stable sums of second moments, of the smaller to the larger
_BYTE = 8  # signs in a byte
_GATHER_BITS = 0x0102040810204080
_TILE = 2**10  # blocks that are coded at a time, so that temporaries stay in a cache


@dataclass(frozen=True, kw_only=True)
class SignMomentum(TensorMethod):
    """1-bit Adam: after a warm-up, ranks send signs of momenta instead of gradients, and the second moment is frozen.

    Each rank keeps the moving average m of its own gradients g, and its error e. In each step it sends c as one sign
    per element and one scale s per block, the mean magnitude in bf16:

        m = beta1 m + (1 - beta1) g
        c = m / (1 - beta1^t) + e        t: number of messages so far
        e = c - s sign(c)

    The mean over ranks takes the place of AdamW's first moment: `zgraph::momentum_adamw_` updates weights with the
    second moment that the warm-up has left. m and e are fp32: 8 bytes per element of the gradients that a rank
    computes. Padding counts neither in scales nor in errors, a block of zeros is decoded to zeros, and a block with an
    inf or a NaN is decoded to NaN and changes nothing.

    Needs `zgraph.training_step` and torch.optim.AdamW(fused=True), because the update is part of the compressed step.

    Attributes:
        warmup: number of optimizer steps that are plain AdamW, such as 15 % of the run. "auto": until the second moment
            is stable, that is, its sum over all compressed parameters, corrected for its bias, changes by at most 4 %
            within 1 / (1 - beta2) steps, in which the learning rate does not rise; at the latest after 100,000 steps.
        beta1: the optimizer's `betas[0]`.
        group: number of elements of a block.

    Source: Tang et al. 2021, "1-bit Adam", arXiv 2102.02888, algorithm 1 and section 7.1. There, m is the last mean on
    all ranks, which then all need it; the two have the same mean. We differ in blocks, in the correction of biases (of
    the second moment, for the steps of the warm-up), and in the bound of updates, see `zgraph::momentum_adamw_`.
    """

    name: ClassVar[str] = "SignMomentum"
    warmup: int | Literal["auto"]
    beta1: float = 0.9
    group: int = 128

    def __post_init__(self) -> None:
        if self.warmup != "auto" and self.warmup not in range(1, LATEST):
            raise ValueError(
                f"zgraph.passes.SignMomentum: warmup={self.warmup!r}; write a number of steps from 1 to {LATEST - 1}, "
                'or "auto".'
            )
        if not 0 <= self.beta1 < 1:
            raise ValueError(
                f"zgraph.passes.SignMomentum: beta1={self.beta1}; write the optimizer's betas[0], from 0 up to, not "
                "including, 1."
            )
        if self.group < _BYTE or self.group % _BYTE:
            raise ValueError(
                f"zgraph.passes.SignMomentum: group={self.group} does not fill whole bytes; write a multiple of "
                f"{_BYTE}, such as 128."
            )

    @property
    def from_step(self) -> int:
        """First optimizer step that is compressed."""
        return LATEST if self.warmup == "auto" else self.warmup

    @property
    def codec(self) -> SignMomentum:
        """The method as graphs and checkpoints know it: independent of the warm-up."""
        return replace(self, warmup="auto")

    @property
    def without_momentum(self) -> SignMomentum:
        """The same code for what is a momentum already: sums of a second hop, and gathered means."""
        return replace(self, warmup="auto", beta1=0.0)

    def sections(self, numel: int) -> tuple[int, ...]:
        groups = -(-numel // self.group)
        return groups * self.group // _BYTE, groups * SCALE_DTYPE.itemsize

    def state(self, numel: int, chunks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        blocks = (chunks, -(-numel // self.group), self.group)
        momentum = {"momentum": (blocks, torch.float32), "weight": ((1,), torch.float32)} if self.beta1 else {}
        return {"error": (blocks, torch.float32), **momentum}

    def quantize(self, grad: Tensor, state: dict[str, Tensor], draw: RngKey, rank: int) -> Sequence[Tensor]:
        chunks, numel = grad.shape
        groups = -(-numel // self.group)
        padding = groups * self.group - numel
        blocks = (torch.nn.functional.pad(grad, (0, padding)) if padding else grad).view(-1, self.group)
        counts = torch.full((chunks, groups, 1), self.group, device=grad.device)
        counts[:, -1] -= padding
        if self.beta1:
            state["weight"].mul_(self.beta1).add_(1 - self.beta1)  # the sum of the weights of gradients in the momentum
        kept = [state[name].view(-1, self.group).split(_TILE) for name in ("error", "momentum") if name in state]
        found = [
            self._encode(part.float(), count, [*rows], state.get("weight"))
            for part, count, *rows in zip(blocks.split(_TILE), counts.view(-1, 1).split(_TILE), *kept, strict=True)
        ]
        if padding:
            state["error"].flatten(1)[:, numel:] = 0
        codes, scales = (torch.cat(parts).view(chunks, -1) for parts in zip(*found, strict=True))
        return codes, scales

    def _encode(
        self, grad: Tensor, counts: Tensor, kept: Sequence[Tensor], weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Encode some blocks and update their state.

        Args:
            grad: [n, group] fp32.
            counts: [n, 1], number of elements of each block without padding.
            kept: error and, if there is one, momentum: [n, group] fp32 each, updated in place.
            weight: sum of the weights in the momentum, [1].

        Returns:
            Bytes of signs and of scales, uint8.
        """
        sent, news = grad, list[Tensor]()
        if weight is not None:
            news.append(kept[1].lerp(grad, 1 - self.beta1))
            sent = news[0] / weight
        wanted = sent + kept[0]
        scale = (wanted.abs().sum(1, keepdim=True) / counts).to(SCALE_DTYPE)
        news.insert(0, wanted - torch.copysign(scale.float(), wanted))  # an error is never -0, nor is a sum with it
        is_finite = scale.isfinite()  # and so are all elements, of which it is the mean magnitude
        for old, new in zip(kept, news, strict=True):
            torch.where(is_finite, new, old, out=old)
        eight = (wanted >= 0).view(torch.uint8).view(torch.int64)  # the product moves bit 0 of byte i to bit 56 + i
        codes = (eight * _GATHER_BITS >> 56 & 255).to(torch.uint8).view(-1)
        return codes, torch.where(is_finite, scale, math.nan).view(-1).view(torch.uint8)

    def dequantize_sum(self, sections: Sequence[Tensor], numel: int, draw: RngKey) -> Tensor:
        device = sections[0].device
        places = torch.arange(_BYTE, device=device)
        signs = (torch.arange(2**_BYTE, device=device).unsqueeze(1) >> places & 1).float() * 2 - 1
        codes, scales = sections[0].unflatten(1, (-1, self.group // _BYTE)), sections[1].contiguous().view(SCALE_DTYPE)
        total = torch.zeros((codes.shape[1], self.group), device=device)
        for parts in zip(total.split(_TILE), codes.split(_TILE, 1), scales.split(_TILE, 1), strict=True):
            for code, scale in zip(parts[1], parts[2], strict=True):  # in rank order
                parts[0].add_(signs[code.int()].view_as(parts[0]) * scale.float().unsqueeze(1))
        return total.view(-1)[:numel]


def is_stable(last: Look | None, now: Look) -> bool:
    """Return whether the warm-up of "auto" ends.

    Args:
        last: what was found 1 / (1 - beta2) steps ago; None: unknown.
        now: what is found now.
    """
    if last is None or now[1] > last[1]:
        return False
    return 0 < max(last[0], now[0]) * CHANGE <= min(last[0], now[0])
