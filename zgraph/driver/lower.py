"""Lowering: turns the final graphs of a plan into callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from zgraph.codegen.backward_variants import WeightGradients, in_halves, saying_that_it_splits, switch_by_step
from zgraph.codegen.cuda_graph import RecordedSteps
from zgraph.codegen.inductor import InductorLowering
from zgraph.codegen.lower_fx import lower_fx
from zgraph.compiler.frame_plan import FramePlan, Variant
from zgraph.compiler.graph_pass import Direction
from zgraph.compression.sign_momentum import LATEST
from zgraph.driver.observe import Observation
from zgraph.driver.warm_up import SecondMoments
from zgraph.graph.split_graph import Halves, split_graph
from zgraph.reporting.collective_numbers import with_numbers
from zgraph.reporting.metrics.called_graph import called_in_warm_up
from zgraph.reporting.metrics.step_clock import CalledGraph, GraphWatch
from zgraph.runtime.groups import rank_and_world

Program = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The parts of a plan that lowering needs in addition to the graphs, which torch passes in one by one.

    Attributes:
        variants: variants of the plan.
        called: descriptions of the graphs for clocks and profilers, by direction.
        handles: names of the placeholders that are parameter handles (through which a parameter's state is found).
        weights: outputs of backward that are gradients of weights, if backward may run in halves; None: it runs whole.
        halves: the backward of each variant, split in halves; empty if backward cannot run in halves.
    """

    variants: tuple[Variant, ...]
    called: Mapping[str, CalledGraph]
    handles: tuple[str, ...]
    weights: WeightGradients | None
    halves: tuple[Halves, ...]

    @classmethod
    def of(
        cls,
        plan: FramePlan,
        called: Mapping[str, CalledGraph],
        handles: tuple[str, ...],
        late: tuple[tuple[int, ...], tuple[int | None, ...]] | None,
    ) -> Decided:
        """Extract from a plan what lowering needs; for a stage of a pipeline, also split each backward in halves.

        Args:
            plan: plan of the frame.
            called: descriptions of the graphs for clocks and profilers, by direction.
            handles: names of the placeholders that are parameter handles.
            late: for a stage, the positions of weight gradients, as `weight_gradients` returns them; None: no stage.
        """
        halves: tuple[Halves, ...] = ()
        weights: WeightGradients | None = None
        if late is not None:
            found = [split_graph(variant.graphs["backward"], late[0]) for variant in plan.variants]
            halves = tuple(one for one in found if one is not None)
            if len(halves) == len(found):
                weights = WeightGradients(_handle_in(plan.graphs["backward"].graph, handles), *late)
        return cls(variants=plan.variants, called=called, handles=handles, weights=weights, halves=halves)


class Lowering:
    """Lowers the graphs of one frame.

    Attributes:
        inductor: compiles islands (runs of compute between collectives); None: graphs run node by node.
        decided: the plan that the graphs are part of; set before torch lowers the first of them.
    """

    decided: Decided

    def __init__(
        self, observation: Observation, lowering: str, ranks_per_host: int, compile_helpers: int | None = 0
    ) -> None:
        self.observation, self.ranks_per_host = observation, ranks_per_host
        self.inductor = InductorLowering(*rank_and_world(), compile_helpers) if lowering == "inductor" else None

    def lower_ahead(self) -> None:
        """Have helper processes compile the graphs of the plan before torch lowers them."""
        if self.inductor is not None:
            with self.observation.report.phase("lowering"):
                self.inductor.compile_ahead([gm for one in self.decided.variants for gm in one.graphs.values()])

    def lower(self, direction: Direction, gm: fx.GraphModule, recorded: RecordedSteps | None = None) -> Program:
        """Return a final graph as a callable.

        Args:
            direction: direction of the graph.
            gm: the graph; it may be changed.
            recorded: records and replays a whole step as a CUDA graph; None: each call runs node by node.
        """
        observation, decided = self.observation, self.decided
        with observation.report.phase("lowering"):
            profiler_of = partial(observation.report.profiler_of, observation.frame, direction)
            watch = GraphWatch(decided.called[direction], observation.clocks, profiler_of)
            title = f"{observation.frame} {direction}"
            main = with_numbers(self._lowered(gm, watch, title, recorded), gm.graph, title, observation.rank)
            if direction == "forward" and decided.weights is not None:
                return saying_that_it_splits(main, _handle_in(gm.graph, decided.handles))
            if direction not in ("backward", "step"):
                return main
            programs = [
                (variant.from_step, self._lowered_warm_up(place, direction, title))
                for place, variant in enumerate(decided.variants[:-1])
            ]
            last = self._in_halves(main, len(decided.variants) - 1, title)
            if not programs:
                return last
            last_step = decided.variants[-1].from_step
            moments = SecondMoments.of(gm.graph) if last_step == LATEST else None
            watch = None if moments is None else moments.watch
            return switch_by_step([*programs, (last_step, last)], gm, decided.weights, watch)

    def _lowered_warm_up(self, place: int, direction: Direction, title: str) -> Program:
        gm, title = self.decided.variants[place].graphs[direction], f"{title} of warm-up"
        return self._in_halves(self._lowered(gm, self._warm_up_watch(gm, direction), title), place, title)

    def _in_halves(self, whole: Program, place: int, title: str) -> Program:
        """Wrap a backward so that it can also run in two halves, each lowered when first called.

        Returns `whole` unchanged if the plan has no halves.
        """
        if self.decided.weights is None:
            return whole

        def lower(half: fx.GraphModule) -> Program:
            name = f"{title}, in halves"
            with self.observation.report.phase("lowering"):
                lowered = self._lowered(half, self._warm_up_watch(half, "backward"), name)
                return with_numbers(lowered, half.graph, name, self.observation.rank)

        return in_halves(whole, self.decided.weights, self.decided.halves[place], lower)

    def _warm_up_watch(self, gm: fx.GraphModule, direction: Direction) -> GraphWatch:
        return GraphWatch(called_in_warm_up(gm.graph, self.decided.called[direction]), self.observation.clocks)

    def _lowered(
        self, gm: fx.GraphModule, watch: GraphWatch, title: str, recorded: RecordedSteps | None = None
    ) -> Program:
        if self.inductor is None:
            return lower_fx(gm, watch, self.ranks_per_host, recorded)
        islands, distinct, cached = self.inductor.islands, len(self.inductor.compiled), self.inductor.cached
        helped = self.inductor.helped
        lowered = self.inductor.lower(gm, watch, self.ranks_per_host, f"frame {title}", recorded)
        self.observation.report.islands += self.inductor.islands - islands
        self.observation.report.distinct_islands += len(self.inductor.compiled) - distinct
        self.observation.report.cached_islands += self.inductor.cached - cached
        self.observation.report.helped_islands += self.inductor.helped - helped
        return lowered


def _handle_in(graph: fx.Graph, handles: Sequence[str]) -> int:
    """Return the index, among a graph's inputs, of the first of `handles` that is an input."""
    places = {node.name: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    return next(places[name] for name in handles if name in places)
