"""Warn of modules of a compiled model whose parameters are gathered outside of its graphs."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from zgraph.errors import ZgraphWarning
from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.dynamo import constant_in_graphs, graph_break_reasons, no_frames_inside
from zgraph.torch_compat.modules import tree_flatten

_AT_LIMIT = (
    "Dynamo has reached its limit of recompiles, so this model now runs uncompiled for inputs that have no graph, and "
    "gathers its parameters one by one; ranks that still run graphs raise an AgreementError. zgraph.summary(model) "
    "lists why the model was compiled again. If shapes vary, leave out dynamic=False, or pad to fewer shapes; or raise "
    "the limit on all ranks, before the first step: torch.compiler.config.recompile_limit = 64"
)
_SHOWN = 6  # modules, and reasons, that the warning names


class Uncompiled:
    """Modules of a compiled model that gather outside of its graphs, and the warning about them.

    Attributes:
        modules: names of the modules; a block's name stands for all modules inside the block.
        has_warned: whether the user has been warned.
        is_skipped: whether the running forward belongs to a compiled model, but Dynamo does not compile it.
    """

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.has_warned = self.is_skipped = False
        self._gathered: dict[str, None] = {}
        self._surprises = self._is_watching = False
        self._before: dict[str, int] | None = None
        self._known = ""  # a reason that zgraph knows and Dynamo does not

    # Run, not traced: it reads Dynamo's counters.
    @constant_in_graphs
    def begin_traced(self) -> None:
        """Begin counting graph breaks, when the model's first frame is traced."""
        if self._before is None:
            self._before = graph_break_reasons()

    @no_frames_inside
    def begin(self, *, is_compiled: bool) -> None:
        """Begin a forward that is not traced.

        Args:
            is_compiled: whether the model is compiled; Dynamo has then skipped the frame.
        """
        self.warn()
        self.is_skipped = is_compiled and not is_in_backward()

    @no_frames_inside
    def give_up(self) -> None:
        """Begin a unit that runs uncompiled because Dynamo is at its limit of recompiles.

        Raises:
            ZgraphWarning: at once, before a gather: ranks that still run their graphs do not take part in it.
        """
        self.is_skipped = not is_in_backward()
        if self._known != _AT_LIMIT:
            self._known, self.has_warned = _AT_LIMIT, True
            warnings.warn(f"zgraph: {_AT_LIMIT}.", ZgraphWarning, stacklevel=2)

    @no_frames_inside
    def note(self, parameter: str, is_named: bool) -> None:
        """Record that a unit gathers outside of graphs; warn if the unit was already recorded.

        Args:
            parameter: name of the unit's first parameter.
            is_named: whether the user named the unit in `units`; named units alone cause no warning.
        """
        if parameter in self._gathered:
            self.warn()
        self._gathered[parameter] = None
        self._surprises = self._surprises or not is_named
        self.modules[_block_of(parameter)] = None

    def leave(self, parameter: str, reason: str) -> None:
        """Record that the unit with `parameter` will gather outside of graphs, for the given reason."""
        self._surprises = True
        self._known = reason
        self.modules[_block_of(parameter)] = None

    @no_frames_inside
    def watch_backward(self, result: Any) -> None:
        """Warn when the backward reaches `result`, the output of a unit that gathered outside of graphs."""
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and not self._is_watching and not self.has_warned:
            self._is_watching = True
            outputs[0].register_hook(self._backward_begins)

    def _backward_begins(self, grad: Tensor) -> None:
        self.warn()

    @property
    def reasons(self) -> dict[str, int]:
        """Number of Dynamo's graph breaks by reason, in all models, since the model's first frame was traced."""
        if self._before is None:
            return {}
        found = {text: count - self._before.get(text, 0) for text, count in graph_break_reasons().items()}
        return {text: count for text, count in found.items() if count > 0}

    def warn(self) -> None:
        """Warn of the recorded modules, at most once.

        Raises:
            ZgraphWarning: modules gather outside of graphs; the warning names them and the reasons.
        """
        if self.has_warned or not self._surprises:
            return
        self.has_warned = True
        warnings.warn(
            f"zgraph: the model is compiled, but outside its graphs, where collectives are neither bucketed nor "
            f"overlapped, parameters are gathered for {self}. Find the lines with TORCH_LOGS=graph_breaks,recompiles "
            "or torch.compile(model, fullgraph=True), and let Dynamo trace them; zgraph.summary(model) repeats this.",
            ZgraphWarning,
            stacklevel=2,
        )

    def __str__(self) -> str:
        inside = [name for name in self.modules if any(name.startswith(f"{other}.") for other in self.modules)]
        named = _listed([name for name in self.modules if name not in inside])
        if self._known:
            return f"{named}: {self._known}"
        reasons = [f"{text} ({count} x)" for text, count in self.reasons.items()]
        why = f"Dynamo's graph breaks are: {_listed(reasons)}" if reasons else "Dynamo has counted no graph break"
        return f"{named}. {why}"


def _block_of(parameter: str) -> str:
    """Return the name of the block (item of a module list) around a parameter, or of the parameter's module."""
    parts = parameter.split(".")[:-1]
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: place + 1]) or "the model itself"


def _listed(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join([*texts[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
