"""The list of passes: checks contracts between passes, then runs, verifies and times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from torch import fx

from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext, Phase
from zgraph.compiler.target import Target
from zgraph.compiler.verify import Snapshot, Where, check_values, verify
from zgraph.errors import PreconditionError, check_kind
from zgraph.graph import meta, nodes

Observer = Callable[[GraphPass | None, PassContext, fx.Graph], None]  # no pass: the graph before any pass


@dataclass(frozen=True, kw_only=True)
class PassRun:
    """Record of one run of a pass on one graph."""

    name: str
    direction: Direction
    changed: bool
    seconds: float


@dataclass(frozen=True)
class PassList:
    """An ordered list of passes whose contracts (required, provided and conflicting facts) have been checked.

    All passes of phase "joint" run before the others; otherwise passes run in the order of the list.

    Args:
        passes: list of passes, such as `zgraph.passes.presets.default()`, edited.
        target: hardware and budget to plan for. None: passes plan by rules, and a pass that plans by costs is refused.
        replay_all: replay whole graphs on fake values before the partition and after the last pass. False: replay only
            the nodes that a pass has changed. True finds passes that alter a recorded value in place, but is slower;
            use it in tests of a pass.

    Raises:
        PreconditionError: a pass requires a fact that no earlier pass provides, conflicts with a provided fact, or
            needs a target that the list lacks.
        ValueError: `passes` is not a list, or an entry is not a pass.
    """

    passes: tuple[GraphPass, ...]
    target: Target | None = None
    replay_all: bool = False

    def __init__(self, passes: Iterable[GraphPass], *, target: Target | None = None, replay_all: bool = False) -> None:
        if not isinstance(passes, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph.PassList: {getattr(passes, '__name__', passes)!r} is not a list of passes; write one, "
                "such as [SinkWaits()], or call the preset: zgraph.passes.presets.default()."
            )
        object.__setattr__(self, "passes", tuple(passes))
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "replay_all", replay_all)
        self._check_contracts()

    @classmethod
    def made_of(cls, given: object, where: str, target: Target | None = None) -> PassList:
        """Convert an option's value, a PassList or a plain list of passes, to a PassList.

        A plain list gets `target`.

        Raises:
            ValueError: the value is something else; the message names the option.
        """
        if isinstance(given, PassList):
            return given
        if isinstance(given, list | tuple):
            return cls(cast("Iterable[GraphPass]", given), target=target)
        raise ValueError(
            f"{where} is a {type(given).__name__}; write a list of passes, such as zgraph.passes.presets.default(), or "
            "zgraph.PassList([...], target=zgraph.Target(hardware=...))."
        )

    def of(self, phase: Phase) -> Iterator[GraphPass]:
        """Return the passes of one phase, in order."""
        return (entry for entry in self.passes if entry.phase == phase)

    @property
    def steps(self) -> tuple[int, ...]:
        """Optimizer steps at which at least one pass starts, including step 0."""
        return tuple(sorted({0, *(entry.from_step for entry in self.passes)}))

    def at(self, step: int) -> PassList:
        """Return the list of the passes that have started by optimizer step `step`.

        Raises:
            PreconditionError: one of them requires a pass that starts later.
        """
        return replace(self, passes=[entry for entry in self.passes if entry.from_step <= step])

    def _check_contracts(self) -> None:
        for entry in self.passes:
            if not isinstance(entry, GraphPass):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"zgraph.PassList: {entry!r} is not a pass; list instances of zgraph.GraphPass, such as "
                    "SinkWaits()."
                )
        check_kind("zgraph.PassList: target", self.target, Target | None, "write zgraph.Target(hardware=...)")
        held: dict[str, str] = {}
        for entry in [*self.of("joint"), *self.of("graph")]:
            missing = [fact for fact in sorted(entry.requires) if fact not in held]
            if missing:
                raise PreconditionError(
                    f"{entry.name} requires {', '.join(missing)}, which no earlier pass provides; "
                    f"{_advice(missing[0], self.passes)}."
                )
            for fact in sorted(entry.conflicts):
                if fact in held:
                    raise PreconditionError(
                        f"{entry.name} cannot run after {held[fact]}, which provides {fact}; put {entry.name} "
                        "before it."
                    )
            held |= dict.fromkeys(sorted(entry.provides), entry.name)
        for entry in self.passes if self.target is None else ():
            if entry.needs_target:
                raise PreconditionError(
                    f"{entry.name} plans by costs, and the list of passes has no target; write zgraph.PassList([...], "
                    "target=zgraph.Target(hardware=zgraph.calibrate())), or use passes that go by rules, such as "
                    "those of zgraph.passes.presets.default()."
                )

    def run(
        self, phase: Phase, ctx: PassContext, graphs: dict[Direction, fx.GraphModule], observe: Observer
    ) -> Iterator[PassRun]:
        """Run the passes of a phase, each on all graphs before the next pass runs; verify a graph after each run.

        Args:
            phase: "joint" or "graph".
            ctx: context for the passes, which receive it with all graphs and the direction of the current graph.
            graphs: rewritten in place.
            observe: called after each verified pass, for dumps.

        Raises:
            VerifyError: a pass broke an invariant, or did not say truthfully whether it changed the graph.
        """
        facts: dict[str, None] = {}
        if phase == "graph":
            facts = dict.fromkeys(fact for entry in self.of("joint") for fact in sorted(entry.provides))
        for entry in self.of(phase):
            facts |= dict.fromkeys(sorted(entry.provides))
            for direction, gm in graphs.items():
                here = replace(ctx, direction=direction, graphs=graphs)
                started = time.perf_counter()
                changed = self._run_one(entry, gm, here, facts)
                seconds = time.perf_counter() - started
                observe(entry, here, gm.graph)
                yield PassRun(
                    name=entry.name,
                    direction=direction,
                    changed=changed,
                    seconds=seconds,
                )
        for direction, gm in graphs.items() if self.replay_all else ():
            if phase == "graph" or direction == "joint":  # an unpartitioned graph goes through both phases
                check_values(gm.graph.nodes, Where(pass_name=f"a pass of phase {phase}", direction=direction))

    def _run_one(self, entry: GraphPass, gm: fx.GraphModule, ctx: PassContext, facts: Iterable[str]) -> bool:
        where = Where(pass_name=entry.name, direction=ctx.direction)
        before = Snapshot.of(gm.graph)
        try:
            changed = entry.run(gm, ctx)
        except Exception as error:
            error.add_note(f"zgraph: while {entry.name} ran on the {ctx.direction} graph")
            raise
        if not isinstance(changed, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise where.error(f"run returned {changed!r}; return True if the graph changed, else False.")
        if not changed and not before.same_calls(gm.graph):
            raise where.error("run returned False, but the graph changed; return True.")
        if any(nodes.call_functions(gm.graph, lambda node: meta.value(node) is None)):
            _complete_values(before.changed(gm.graph), where)
        verify(
            gm.graph,
            before,
            facts,
            where,
            user_outputs=ctx.user_outputs if ctx.direction == "forward" else None,
        )
        return changed


def _complete_values(changed: Iterable[fx.Node], where: Where) -> None:
    """Compute the fake values of new nodes that have none; later passes need these values."""
    for node in changed:
        if node.op == "call_function" and meta.value(node) is None:
            try:
                meta.set_value(node, meta.evaluate(node))
            except Exception as error:
                raise where.error(f"{node.name} cannot run on the fake values of its inputs: {error}", node) from error


def _advice(fact: str, passes: Iterable[GraphPass]) -> str:
    later = next((entry.name for entry in passes if fact in entry.provides), None)
    if later is not None:
        return f"move {later}, which does, before it"
    return f"add the pass that provides {fact} before it (zgraph.passes.presets.default() lists them all)"
