"""Two programs for one backward: without the passes that count only after some optimizer steps, and then with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zgraph.graph import nodes
from zgraph.graph.operator_arguments import LowRankArgs, QuantizeArgs
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import closes_window
from zgraph.torch_compat.aot import boxed


def switch_after(
    steps: int, warm: Callable[[list[Any]], Any], main: Callable[[list[Any]], Any], gm: fx.GraphModule
) -> Callable[[list[Any]], Any]:
    """Run `warm` in the first optimizer steps of the parameters at hand, `main` afterwards.

    Args:
        steps: closing backwards that `warm` runs.
        warm, main: of equal inputs and outputs.
        gm: the graph of `main`, whose compressed reductions say which parameters count.
    """
    quantized = list(nodes.call_functions(gm.graph, nodes.is_quantize))
    rebuilt = [node for node in gm.graph.nodes if node.target is torch.ops.zgraph.low_rank_means.default]
    if not quantized and not rebuilt:
        return main
    handles = [handle for node in quantized for handle in QuantizeArgs.of(node).handles]
    handles += [handle for node in rebuilt for handle in LowRankArgs.of(node).handles]
    placeholders = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    places = [placeholders[handle] for handle in dict.fromkeys(handles)]
    window = QuantizeArgs.of(quantized[0]).window if quantized else str(rebuilt[0].args[-1])

    def run(args: list[Any]) -> Any:
        counted = [state_behind(args[place]) for place in places]
        if counted[0].feedbacks.warmed_steps >= steps:
            return main(args)
        closes = closes_window(args[places[0]], window)
        result = warm(args)
        for state in counted:
            state.feedbacks.warmed_steps += closes
        return result

    return boxed(run)
