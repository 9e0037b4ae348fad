"""What one training step took, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from zgraph.reporting.tables import duration, size


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """What one step took on this rank; None: it cannot be known.

    Attributes:
        step: its number; the first is 1.
        tokens_per_s: of the tokens that `Metrics.step` was told of.
        step_ms: from the end of the step before, without what ran in `Metrics.pause`.
        exposed_ms: for which compute was blocked in waits of compiled graphs; None: no compiled graph ran.
        compile_ms: spent compiling, as `zgraph.summary` counts it; 0 where nothing was compiled.
        sent_bytes: by compiled graphs, each counted as often as it ran; None: none ran.
        peak_bytes: most that PyTorch's allocator held on a CUDA device; None elsewhere, and under `zgraph.measure`.
        graph_peak_bytes: highest peak of a compiled graph that ran, beside what the model and the optimizer hold:
            measured if `zgraph.measure` has measured it, else predicted.
        budget_share: that peak divided by the pipeline's `budget_bytes`: above 1 it does not keep the budget. Where it
            is predicted, as the compile has counted it. None: no budget.
        grad_norm: as `Metrics.step` was told.
        error_norm: norm of this rank's error-feedback state, in every `error_norm_every`-th step; None in others, and
            where nothing is compressed with error feedback.
        own: further values that `Metrics.step` was told, by name.
    """

    step: int
    tokens_per_s: float | None = None
    step_ms: float
    exposed_ms: float | None = None
    compile_ms: float | None = None
    sent_bytes: int | None = None
    peak_bytes: int | None = None
    graph_peak_bytes: int | None = None
    budget_share: float | None = None
    grad_norm: float | None = None
    error_norm: float | None = None
    own: Mapping[str, float] = field(default_factory=dict[str, float])

    def as_dict(self) -> dict[str, float | None]:
        """All values by name, those of `own` last."""
        return {name: getattr(self, name) for name in NAMES} | dict(self.own)

    def __str__(self) -> str:
        facts = [f"step {self.step}: {self.step_ms:.1f} ms"]
        if self.tokens_per_s is not None:
            facts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.exposed_ms is not None:
            facts.append(f"{duration(1e3 * self.exposed_ms)} exposed")
        if self.compile_ms:
            facts.append(f"{duration(1e3 * self.compile_ms)} compiling")
        facts += [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {size(count)}"
            for name in ("sent_bytes", "peak_bytes", "graph_peak_bytes")
            if (count := getattr(self, name)) is not None
        ]
        if self.budget_share is not None:
            facts.append(f"{self.budget_share:.0%} of the budget")
        facts += [
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in [("grad_norm", self.grad_norm), ("error_norm", self.error_norm), *self.own.items()]
            if value is not None
        ]
        return ", ".join(facts)


NAMES = tuple(each.name for each in fields(StepValues) if each.name != "own")
