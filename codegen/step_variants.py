"""Variants of a backward by optimizer step, such as one without compression for warm-up and one with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zgraph.graph import nodes
from zgraph.graph.operator_arguments import LowRankArgs, QuantizeArgs
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import closes_window
from zgraph.torch_compat.aot import boxed

Program = Callable[[list[Any]], Any]


def switch_by_step(programs: Sequence[tuple[int, Program]], gm: fx.GraphModule) -> Program:
    """Run, in each optimizer step, the latest program whose first step has been reached.

    Args:
        programs: programs with equal inputs and outputs, each with its first optimizer step; the first one begins at 0.
        gm: graph of the last program; the steps of the parameters of its compressed reductions are counted.
    """
    (*earlier, (last_step, last)) = programs
    quantized = list(nodes.call_functions(gm.graph, nodes.is_quantize))
    rebuilt = [node for node in gm.graph.nodes if node.target is torch.ops.zgraph.low_rank_means.default]
    if not earlier or not (quantized or rebuilt):
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
        closes = closes_window(args[places[0]], window)
        program = next(program for begins, program in reversed(earlier) if begins <= step)
        result = program(args)
        for state in counted:
            state.feedbacks.warmed_steps += closes
        return result

    return boxed(run)
