"""Accumulating loops as users write them: layer by layer or left in turn, but never with other results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.micro_batches import Case, Loop, Stack, differences
from tests.support.ranks import Ranks, worlds


class Penalized(Loop):
    """Each loss has a penalty on weights, which are read whole outside of forward."""

    def loss(self, logits: Tensor, batch: Tensor) -> Tensor:
        penalty = sum(one.full_tensor().square().sum() for one in list(self.model.parameters())[:3])
        return super().loss(logits, batch) + 1e-3 * penalty


class Evaluated(Loop):
    """Each micro-batch is evaluated first."""

    def run(self, number: int, batch: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.loss(self.logits(batch), batch)
        return super().run(number, batch) + before


class Masked(Loop):
    """Hooks mask gradients."""

    def __init__(self, case: Case, stage: int, *, no_sync: bool) -> None:
        super().__init__(case, stage, no_sync=no_sync)
        for parameter in self.model.blocks[0].parameters():
            parameter.register_hook(lambda grad: grad * 0.5)


class OneBackward(Loop):
    """The sum of all losses has one backward."""

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        total = sum((self.loss(self.logits(batch), batch) for batch in batches), torch.zeros(())) / len(batches)
        total.backward()
        return total.detach()


class Weighted(Loop):
    """Weights of the losses are known after all forwards."""

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        losses = [self.loss(self.logits(batch), batch) for batch in batches]
        weights = torch.stack([loss.detach() for loss in losses]).softmax(0)
        for loss, weight in zip(losses, weights, strict=True):
            (loss * weight).backward()
        return weights


class Lengths(Loop):
    """Micro-batches differ in length."""

    def run(self, number: int, batch: Tensor) -> Tensor:
        return super().run(number, batch[:, : batch.shape[1] - number])


class Skipped(Loop):
    """One micro-batch has no backward."""

    def run(self, number: int, batch: Tensor) -> Tensor:
        if number == 2:
            return self.loss(self.logits(batch), batch).detach()
        return super().run(number, batch)


class Parts(Loop):
    """Parts of the model are called one by one."""

    def logits(self, batch: Tensor) -> Tensor:
        x = self.model.embed(batch)
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x)).float()


class Frozen(Stack):
    """Its embeddings and first block are not trained."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class Recurring(Stack):
    """Every block runs twice in a row, and the whole stack a second time."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(block(x))
        return self.head(self.norm(x))


LOOPS = {
    "a penalty on weights": Case(loop=Penalized),
    "an evaluation before": Case(loop=Evaluated),
    "masks of gradients": Case(loop=Masked),
    "one backward for all": Case(loop=OneBackward),
    "weights known after all forwards": Case(loop=Weighted),
    "lengths that differ": Case(loop=Lengths),
    "a skipped backward": Case(loop=Skipped),
    "parts called one by one": Case(loop=Parts),
    "frozen layers": Case(build=Frozen),
    "blocks that run several times": Case(build=Recurring),
}


@worlds(2)
@pytest.mark.parametrize("name", LOOPS)
def test_results_are_those_of_the_plain_lines(ranks: Ranks, name: str) -> None:
    case = replace(LOOPS[name], no_sync=False, sgd=True)
    for found, _ in ranks.run(differences, case, 3, False):
        assert all(difference < 5e-7 for difference in found.values()), found
