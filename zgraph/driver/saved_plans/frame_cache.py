"""Finds the saved plan of one frame, or saves its new plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zgraph.driver.saved_plans.folder import PlanFolder
from zgraph.driver.saved_plans.key import NotKeyed, key_of
from zgraph.driver.saved_plans.saved_plan import SavedPlan
from zgraph.driver.saved_plans.stand_in import Layout, stand_in
from zgraph.graph.pickled import dumps, loads
from zgraph.torch_compat.aot import Findings, findings_on_frame
from zgraph.torch_compat.fake_values import fake_mode_of

_LOG = logging.getLogger(__name__)


class StalePlanError(Exception):
    """AOTAutograd has other findings on a frame than it had when the frame's plan was saved."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Content of a file.

    Attributes:
        findings: AOTAutograd's findings on the frame; None for a whole step.
        outputs: layouts of the frame's new outputs, and indices of inputs that it returns; () for a whole step.
        saved: the plan, pickled.
    """

    findings: Findings | None
    outputs: tuple[Layout | int, ...]
    saved: bytes


class FrameCache:
    """The cache, as one frame uses it.

    Args:
        folder: folder of saved plans; None: nothing is saved or found.

    Attributes:
        found: the saved plan of the frame, while it is compiled; None: there is none.
        reason: why the frame's plan cannot be saved; "" if it can be, or was found.
    """

    def __init__(self, folder: PlanFolder | None) -> None:
        self.folder = folder
        self.found: SavedPlan | None = None
        self.reason = ""
        self._entry: Entry | None = None
        self._key: str | None = None
        self._outputs: tuple[Any, ...] = ()
        self._pickled = b""
        self._inputs = 0

    def find(self, gm: fx.GraphModule, inputs: Sequence[Any], facts: Mapping[str, object]) -> SavedPlan | None:
        """Look for the plan of a frame; see `key_of` for the arguments."""
        if self.folder is None:
            return None
        try:
            self._key = key_of(gm, inputs, facts)
        except NotKeyed as error:
            self.reason = str(error)
            return None
        self._inputs = len(inputs)
        content = self.folder.read(self._key)
        if content is None:
            return None
        mode = fake_mode_of(inputs)
        try:
            entry = loads(content, mode)
            assert isinstance(entry, Entry)
            saved = loads(entry.saved, mode)
            assert isinstance(saved, SavedPlan)
        except Exception as error:  # unpickling raises anything; the frame is then compiled
            _LOG.info("the saved plan %s cannot be read: %s", self._key, error)
            return None
        self._entry, self.found = entry, saved
        return saved

    def stand_in(self, inputs: int) -> fx.GraphModule:
        """Return the graph that AOTAutograd traces in place of the frame's."""
        assert self._entry is not None and self._entry.findings is not None
        return stand_in(self._entry.outputs, self._entry.findings.written, inputs)

    def check(self) -> None:
        """Check a plan that was found, once AOTAutograd has traced the stand-in.

        Raises:
            StalePlanError: its findings differ from the saved ones.
        """
        assert self._entry is not None
        if findings_on_frame() != self._entry.findings:
            raise StalePlanError

    def forget(self) -> None:
        """Drop the plan that was found."""
        self.found = self._entry = None

    def refuse(self, error: Exception) -> None:
        """Drop a plan with which the frame could not be compiled."""
        self.forget()
        self.reason = "a saved plan that no longer fitted, and was replaced"
        _LOG.info("the saved plan %s does not fit: %s: %s", self._key, type(error).__name__, error)

    def keep(self, saved: SavedPlan, outputs: Sequence[Any]) -> None:
        """Pickle a new plan before lowering changes its graphs.

        Args:
            saved: the plan.
            outputs: fake values of what the frame returns; values of written inputs may come first.
        """
        if self._key is None:
            return
        try:
            self._pickled, self._outputs = dumps(saved), tuple(outputs)
        except Exception as error:  # of whatever a plan may contain
            self.reason = f"its plan cannot be pickled ({error})"

    def write(self, *, is_step: bool = False) -> None:
        """Write the plan that `keep` has pickled, unless AOTAutograd's findings forbid it."""
        pickled, self._pickled = self._pickled, b""
        if self._key is None or self.folder is None or not pickled:
            return
        findings = None if is_step else findings_on_frame()
        outputs: tuple[Layout | int, ...] = ()
        if not is_step:
            if findings is None:
                self.reason = "views or objects that it returns, or gradients that it writes"
                return
            if findings.inputs_found != self._inputs:
                self.reason = "written inputs that share memory"
                return
            returned = self._outputs[len(self._outputs) - len(findings.requires_grad) :]
            found = zip(returned, findings.requires_grad, findings.inputs, strict=True)
            outputs = tuple(Layout.of(value, needs) if place is None else place for value, needs, place in found)
        entry = Entry(findings=findings, outputs=outputs, saved=pickled)
        try:
            self.folder.write(self._key, dumps(entry))
        except OSError as error:
            self.reason = f"{self.folder.path}: {error.strerror}"
