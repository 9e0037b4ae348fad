"""Variants of a compiled backward.

- By optimizer step: for example, a backward without gradient compression during warm-up.
- In two halves, for pipeline schedules that need the gradients of a stage's inputs first: the first half computes
  these, the second half runs later and computes the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.graph import nodes
from zgraph.graph.operator_arguments import LowRankArgs, QuantizeArgs
from zgraph.graph.split_graph import Halves
from zgraph.runtime.window_state import Gradients, ParameterState, state_behind
from zgraph.sharding.scope import closes_window, scope_behind
from zgraph.torch_compat.aot import boxed

Program = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class WeightGradients:
    """The outputs of a backward that are gradients of weights.

    Attributes:
        handle: index of the input that is a parameter's handle; the model's state is found through this handle.
        late: indices of the outputs that are gradients of weights.
        tensors: each output is the gradient of one input of the compiled function; these are the indices of the inputs,
            with None for an input that is a number.
    """

    handle: int
    late: tuple[int, ...]
    tensors: tuple[int | None, ...]

    def in_order(self, outputs: Sequence[Any]) -> Gradients:
        """Return the gradients of tensors among `outputs`, in order, without the gradients of numbers."""
        return [value for place, value in zip(self.tensors, outputs, strict=False) if place is not None]


def saying_that_it_splits(forward: Program, handle: int) -> Program:
    """Wrap `forward` so that each call records that the following backward can run in two halves.

    Args:
        forward: the lowered forward.
        handle: position among the inputs at which a parameter's handle is given; the model's state is found through it.
    """

    def run(args: list[Any]) -> Any:
        scope = scope_behind(args[handle])
        assert scope is not None
        scope.splitting_forwards += 1
        return forward(args)

    return boxed(run)


def in_halves(
    whole: Program, weights: WeightGradients, halves: Halves, lower: Callable[[fx.GraphModule], Program]
) -> Program:
    """Return a backward that computes all gradients, or runs in two halves if the schedule defers gradients of weights.

    Args:
        whole: the lowered backward.
        weights: the outputs of `whole` that are gradients of weights.
        halves: graphs of both halves of the backward, not lowered.
        lower: lowers each half when it is first needed.
    """
    programs: list[Program] = []

    def run(args: list[Any]) -> Any:
        defer = state_behind(args[weights.handle]).defer
        if defer is None:
            return whole(args)
        if not programs:
            programs.extend(map(lower, (halves.first, halves.second)))
        first, second = programs
        kept = [args[place] for place in halves.second_inputs]
        given = [args[place] for place in halves.first_inputs]
        args.clear()
        early = list(first(given))
        kept += early[len(halves.early) :]
        outputs = _placed(halves.outputs, halves.early, early)
        del early

        def later() -> Gradients:
            return weights.in_order(_placed(halves.outputs, halves.late, second(kept)))

        defer(weights.in_order(outputs), later)
        return outputs

    return boxed(run)


def _placed(count: int, places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return a list of length `count` with `values` at `places` and None elsewhere."""
    placed: list[Any] = [None] * count
    for place, value in zip(places, values, strict=False):
        placed[place] = value
    return placed


def switch_by_step(
    programs: Sequence[tuple[int, Program]],
    gm: fx.GraphModule,
    weights: WeightGradients | None = None,
    watch: Callable[[Sequence[Any], Sequence[ParameterState]], Callable[[], None]] | None = None,
) -> Program:
    """Return a program that runs, in each optimizer step, the variant planned for that step.

    Args:
        programs: two or more pairs (first optimizer step, program) in order, from step 0 on, with equal inputs and
            outputs.
        gm: graph of the last program; steps are counted for the parameters whose gradients it compresses.
        weights: outputs that are gradients of weights, for programs that may run in halves: a step then counts after
            the second half. None: programs run whole.
        watch: called before each step of the warm-up with the inputs and the states of the counted parameters; returns
            a function to call after the step, which may end the warm-up. None: it ends after a number of steps.
    """
    (*earlier, (last_step, last)) = programs
    quantized = list(nodes.call_functions(gm.graph, nodes.is_quantize))
    rebuilt = [node for node in gm.graph.nodes if node.target is torch.ops.zgraph.low_rank_means.default]
    if not (quantized or rebuilt):
        return last
    handles = [handle for node in quantized for handle in QuantizeArgs.of(node).handles]
    handles += [handle for node in rebuilt for handle in LowRankArgs.of(node).handles]
    placeholders = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    places = [placeholders[handle] for handle in dict.fromkeys(handles)]
    window = QuantizeArgs.of(quantized[0]).window if quantized else str(rebuilt[0].args[-1])

    def run(args: list[Any]) -> Any:
        counted = [state_behind(args[place]) for place in places]
        step = counted[0].feedbacks.warmed_steps
        if step >= last_step:
            return last(args)
        program = next(program for begins, program in reversed(earlier) if begins <= step)
        handle = args[places[0]]
        asked = None if weights is None else state_behind(args[weights.handle])
        defer = None if asked is None else asked.defer

        def count() -> None:
            closes = closes_window(handle, window)
            for state in counted:
                state.feedbacks.warmed_steps += closes

        if asked is None or defer is None:
            check = None if watch is None else watch(args, counted)
            result = program(args)
            count()
            if check is not None:
                check()
            return result

        def defer_with_count(early: Gradients, later: Callable[[], Gradients]) -> None:
            def run_and_count() -> Gradients:
                late = later()
                count()
                return late

            defer(early, run_and_count)

        asked.defer = defer_with_count
        try:
            return program(args)
        finally:
            asked.defer = defer

    return boxed(run)
