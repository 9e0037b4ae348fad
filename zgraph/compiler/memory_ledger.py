"""Memory use of a step: bytes of one rank in each memory space, for stored tensors and during the step."""

from __future__ import annotations

from dataclasses import dataclass

from zgraph.analysis.liveness import MemoryCurve
from zgraph.graph import meta
from zgraph.tiers.tier import DEVICE, HOST, listed


@dataclass(frozen=True, kw_only=True)
class SpaceUse:
    """Bytes of one rank in one memory space: device, host or a disk.

    Attributes:
        space: name of the memory space.
        parameters: bytes of parameters and buffers stored there.
        state: bytes of optimizer state stored there.
        step: maximum bytes that the step allocates there at any moment, without `parameters` and `state`.
        staging: bytes of staging buffers between disk and GPU, included in `step`.
    """

    space: str
    parameters: int = 0
    state: int = 0
    step: int = 0
    staging: int = 0

    @property
    def together(self) -> int:
        return self.parameters + self.state + self.step


def ledger_of(curve: MemoryCurve) -> tuple[SpaceUse, ...]:
    """Return the memory use of a whole training step, one `SpaceUse` for each memory space.

    Arguments of the step do not count. State that the first step creates counts where it will be stored.
    """
    lines: list[SpaceUse] = []
    for space in listed(entry.space for entry in curve.ranges):
        found = [entry for entry in curve.ranges if entry.space == space and (entry.held or space != DEVICE.name)]
        parameters = sum(entry.bytes for entry in found if meta.kept_as(entry.node) == "parameters")
        state = sum(entry.bytes for entry in found if meta.kept_as(entry.node) == "state")
        step = curve.peak_bytes if space == DEVICE.name else curve.peak_in(space) - parameters - state
        staging = curve.staging_bytes if space == HOST.name else 0
        lines.append(SpaceUse(space=space, parameters=parameters, state=state, step=step, staging=staging))
    return tuple(lines)
