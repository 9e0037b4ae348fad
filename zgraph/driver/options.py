"""Options of `torch.compile(model, backend="zgraph", options=...)`, checked on construction."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zgraph.compiler.pass_list import PassList
from zgraph.errors import check_kind, renamed
from zgraph.reporting.summary import Report
from zgraph.torch_compat.inductor import caches_graphs, portable_settings

LOWERINGS = ("inductor", "fx")
OF_STEPS = ("cuda_graph", "check", "embeddings_by_muon")  # options of `zgraph.training_step`


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of the backend.

    Attributes:
        passes: passes to run, a list or a `zgraph.PassList`; None: `zgraph.passes.presets.default()`.
        lowering: "inductor" compiles the compute of the final graph, in the order the passes chose; "fx" runs it node
            by node, bitwise equal to eager, and compiles in a tenth of the time.
        dump: directory for the graphs after every pass; None: no dump.
        report: report to fill while compiling.
        agreement_timeout_s: seconds that a rank waits for its peers to compile the same communication.
        cuda_graph: launch the whole step with one host call; only for `zgraph.training_step`, on GPUs.
        check: only for `zgraph.training_step`: in the first two calls, also run the step uncompiled and compare
            bitwise. A number k: in every k-th call as well. 0 or False: never.
        embeddings_by_muon: only for `zgraph.training_step`: let `torch.optim.Muon` step embeddings and output heads
            too, which are otherwise refused.
        compile_helpers: number of processes that compile islands into Inductor's cache before this rank needs them;
            None: the number of spare cores, at most 4, and 0 on GPUs. Inductor only.
    """

    passes: PassList | None = None
    lowering: str = "inductor"
    dump: Path | None = None
    report: Report | None = None
    agreement_timeout_s: float = 120.0
    cuda_graph: bool = False
    check: bool | int = False
    embeddings_by_muon: bool = False
    compile_helpers: int | None = None

    def __post_init__(self) -> None:
        if self.lowering not in LOWERINGS:
            raise ValueError(
                f'zgraph: lowering={self.lowering!r} is not available; write {{"lowering": "inductor"}} or '
                '{"lowering": "fx"}.'
            )
        instead = "pass a zgraph.Report() and print it later"
        check_kind('zgraph: options["report"]', self.report, Report | None, instead)
        timeout, instead = self.agreement_timeout_s, "a positive number of seconds"
        check_kind(f"zgraph: agreement_timeout_s={timeout!r}", timeout, int | float, f"write {instead}")
        if not self.agreement_timeout_s > 0:
            raise ValueError(
                f"zgraph: agreement_timeout_s={self.agreement_timeout_s} leaves no time; write a positive number "
                "of seconds."
            )
        for name in ("cuda_graph", "embeddings_by_muon"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"zgraph: {name} must be True or False, not {getattr(self, name)!r}.")
        if not isinstance(self.check, int) or self.check < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph: check={self.check!r} is neither a bool nor a number of calls; write True, or 100 for every "
                "hundredth call as well."
            )

        self._check_helpers()

    def _check_helpers(self) -> None:
        count = self.compile_helpers
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):  # pyright: ignore
            raise ValueError(f"zgraph: compile_helpers={count!r} is no number of processes; write 0, 1 or more.")
        if not count:
            return
        if self.lowering != "inductor":
            found = f"lowering={self.lowering!r} compiles nothing"
        elif sys.platform == "win32":
            found = "Windows has no process groups to end them by"
        elif not caches_graphs():
            found = "Inductor's cache, through which they hand over their work, is off"
        elif portable_settings() is None:
            found = "Inductor's options hold functions of yours, which other processes do not have"
        else:
            return
        raise ValueError(f"zgraph: compile_helpers={count}: {found}; leave compile_helpers out, or write 0.")

    def is_checked(self, call: int, first: int) -> bool:
        """Return whether to compare call number `call` with the uncompiled step.

        Compared are the first `first` calls and, if `check` is a number, every `check`-th call.
        """
        every = 0 if isinstance(self.check, bool) else self.check
        return bool(self.check) and (call < first or (every > 0 and call % every == 0))

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Return the options given to torch.compile as a dict.

        Raises:
            ValueError: an option is unknown or unusable; the message says what to write instead.
        """
        if not isinstance(options, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f'zgraph: options is {options!r}; write a dict, such as options={{"lowering": "fx"}}.')
        given = dict(options or {})
        if "pipeline" in given:
            renamed('options["pipeline"]', 'options["passes"]')
            if given.get("passes") is not None:
                raise ValueError('zgraph: options["pipeline"] is the former name of options["passes"]; write one.')
            given["passes"] = given.pop("pipeline")
        if given.get("passes") is not None:
            given["passes"] = PassList.made_of(given["passes"], 'zgraph: options["passes"]')
        known = [entry.name for entry in fields(cls)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(known)}."
                raise ValueError(f"zgraph: unknown option {name!r}; {hint}")
        if given.get("dump") is not None:
            if not isinstance(given["dump"], str | os.PathLike) or not os.fspath(given["dump"]):
                raise ValueError(f'zgraph: options["dump"] is {given["dump"]!r}; write the path of a directory.')
            given["dump"] = Path(given["dump"])
        return cls(**given)
