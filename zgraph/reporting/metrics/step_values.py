"""The metrics of one training step, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from zgraph.reporting.tables import duration, size


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """Metrics of one step on this rank; None stands for an unknown value.

    Attributes:
        step: number of the step; the first is 1.
        tokens_per_s: tokens passed to `Metrics.step`, divided by the step's seconds.
        step_ms: time since the end of the previous step, without code inside `Metrics.pause`.
        exposed_ms: time for which compute was blocked in waits of compiled graphs; None: no compiled graph ran.
        compile_ms: time spent compiling, as counted by `zgraph.summary`; 0 if nothing was compiled.
        sent_bytes: bytes that this rank's compiled graphs have sent; None: no compiled graph ran.
        site_bytes: bytes that `zgraph.OuterSteps` has sent to other sites; None: there was no outer step.
        site_wait_ms: time for which outer steps have waited for other sites; None: there was no outer step.
        peak_bytes: peak of PyTorch's CUDA allocator; None on other devices, and under `zgraph.measure`.
        graph_peak_bytes: highest peak memory of a called graph, as measured by `zgraph.measure` or else as predicted;
            without memory of the model and the optimizer.
        budget_share: highest peak memory of a step divided by `budget_bytes`; above 1 the budget is exceeded. None: no
            budget.
        grad_norm: value passed to `Metrics.step`.
        error_norm: norm of this rank's compression errors. Known only in every `error_norm_every`-th step, and only if
            there is error feedback.
        own: further values passed to `Metrics.step`, by name.
    """

    step: int
    tokens_per_s: float | None = None
    step_ms: float
    exposed_ms: float | None = None
    compile_ms: float | None = None
    sent_bytes: int | None = None
    site_bytes: int | None = None
    site_wait_ms: float | None = None
    peak_bytes: int | None = None
    graph_peak_bytes: int | None = None
    budget_share: float | None = None
    grad_norm: float | None = None
    error_norm: float | None = None
    own: Mapping[str, float] = field(default_factory=dict[str, float])

    def as_dict(self) -> dict[str, float | None]:
        """Return all values by name, with the values in `own` last."""
        return {name: getattr(self, name) for name in NAMES} | dict(self.own)

    def __str__(self) -> str:
        facts = [f"step {self.step}: {self.step_ms:.1f} ms"]
        if self.tokens_per_s is not None:
            facts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.exposed_ms is not None:
            facts.append(f"{duration(1e3 * self.exposed_ms)} exposed")
        if self.site_wait_ms is not None:
            facts.append(f"{duration(1e3 * self.site_wait_ms)} waiting for sites")
        if self.compile_ms:
            facts.append(f"{duration(1e3 * self.compile_ms)} compiling")
        facts += [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {size(count)}"
            for name in ("sent_bytes", "site_bytes", "peak_bytes", "graph_peak_bytes")
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
