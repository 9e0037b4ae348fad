"""Errors that are kept on the host: when copies start and who waits for them, on a device where both come late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.compressing import compressing, feedback_of
from zgraph.codegen import compressed_kernels
from zgraph.compression.methods import LoCo
from zgraph.runtime.error_feedback import Feedback


@dataclass(eq=False)
class Stored:
    """What is on its way to the host; arrives when somebody waits."""

    late: Late
    number: int
    computed: list[Tensor]
    kept: Sequence[Tensor]

    def synchronize(self) -> None:
        self.late.calls.append(f"host waits for {self.number}")
        self.arrive()

    def arrive(self) -> None:
        for source, target in zip(self.computed, self.kept, strict=True):
            target.copy_(source)


@dataclass(eq=False)
class Fetched:
    """What is on its way to the device; arrives when compute waits."""

    number: int
    kept: Sequence[Tensor]
    fetched: list[Tensor]

    def synchronize(self) -> None:
        raise AssertionError("the host never waits for a fetch")


@dataclass(eq=False)
class Late:
    """Copies that are made as late as the events around them allow; NaN or garbage until then."""

    calls: list[str] = field(default_factory=list[str])
    numbers: dict[int, int] = field(default_factory=dict[int, int])

    def number(self, kept: Sequence[Tensor]) -> int:
        """Number of a parameter, by its memory."""
        return self.numbers.setdefault(kept[0].data_ptr(), len(self.numbers))

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, kept: Sequence[Tensor], stored: Any) -> tuple[list[Tensor], Fetched]:
        number = self.number(kept)
        self.calls.append(f"fetch {number}")
        if stored is not None:
            stored.arrive()
        fetched = [torch.full_like(tensor, 77) for tensor in kept]
        return fetched, Fetched(number, kept, fetched)

    def wait(self, fetched: Any) -> None:
        self.calls.append(f"wait {fetched.number}")
        for source, target in zip(fetched.kept, fetched.fetched, strict=True):
            target.copy_(source)

    def store(self, computed: Sequence[Tensor], kept: Sequence[Tensor]) -> Stored:
        number = self.number(kept)
        self.calls.append(f"store {number}")
        return Stored(self, number, [tensor.clone() for tensor in computed], kept)


STEPS = 3


def trained(error_device: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of some steps, and what is kept behind them, of three matrices."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with loopback(4, Wire()):
        model = zgraph.shard(nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)]))
        compiled = compressing(model, LoCo(group=32, hops=1, error_device=error_device))
        grads: list[Tensor] = []
        for _ in range(STEPS):
            compiled(torch.randn(4, 32)).square().mean().backward()
            grads += [parameter.grad.to_local().clone() for parameter in model.parameters()]
            model.zero_grad()
        kept = {
            f"{name} {key}": tensor.clone()
            for name, slots in feedback_of(model).items()
            for feedback in slots.values()
            for key, tensor in feedback.tensors.items()
        }
    return grads, kept


def test_readers_wait_but_the_host_never_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise as if errors were kept beside their gradients. Two compiles: three seconds."""
    expected, expected_kept = trained(None)
    late = Late()
    monkeypatch.setattr(compressed_kernels, "copies_of", lambda device: late)
    found, kept = trained("cpu")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert kept.keys() == expected_kept.keys()
    assert all(torch.equal(kept[name], expected_kept[name]) for name in kept)
    for number in range(3):  # of each parameter, in every step
        own = [call.removesuffix(f" {number}") for call in late.calls if call.endswith(f" {number}")]
        assert own == [*STEPS * ["fetch", "wait", "store"], "host waits for"]
    for number in range(2):  # and the next one is on its way before this one is waited for
        waits, fetches = (
            [place for place, call in enumerate(late.calls) if call == name]
            for name in (f"wait {number}", f"fetch {number + 1}")
        )
        assert all(fetch < wait for fetch, wait in zip(fetches, waits, strict=True))


def test_whoever_looks_from_the_host_waits_once() -> None:
    late = Late()
    feedback = Feedback("method", 2, 1, {"error": torch.zeros(2)})
    feedback.store(late, {"error": torch.ones(2)})
    assert feedback.fits({"error": ((2,), torch.float32)}) and feedback.kept_bytes == 8
    assert late.calls == ["store 0"], "neither has to know values"
    feedback.begin(reset_interval=0, keep_before=True)
    assert feedback.before is not None and feedback.before["error"].eq(1).all()
    feedback.scale(2.0)
    assert feedback.tensors["error"].eq(2).all()
    assert late.calls == ["store 0", "host waits for 0"]
