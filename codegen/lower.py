"""Turn a final graph into a callable that runs it node by node, in the order the passes chose."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from zgraph import meta, nodes
from zgraph.handle import name_of
from zgraph.ops import collective_error
from zgraph.torch_compat import BoxedCodeGen, boxed, start_all_gather, start_grouped_gather


def lower_fx(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Generated Python, one line a node: no fusion, no reordering, each value dropped at its last use.

    Args:
        gm: the final forward, backward or inference graph.

    Returns:
        A function of one list, which it empties (AOTAutograd's boxed convention). A collective that fails raises
        CollectiveError with the parameters it was working for.
    """
    # A module of its own: AOTAutograd's is generated anew, through three calls, each time it runs.
    gm = fx.GraphModule(gm, gm.graph)
    guarded = _guarded_lines(gm)
    for gather in list(nodes.call_functions(gm.graph, nodes.is_gather)):
        if not nodes.is_kept_gather(gather):  # the same result, and safe with several in flight
            gather.target = start_all_gather if nodes.is_all_gather(gather) else start_grouped_gather
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()
    # The class forward, not the module's __call__: that one would print its own account of a failing line.
    forward = cast("Callable[..., Any]", type(gm).forward)
    if not guarded:
        return boxed(lambda args: forward(gm, args))
    handle_positions = {
        node.name: position
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if any(node.name in handles for _, _, handles, _ in guarded.values())
    }

    def run(args: list[Any]) -> Any:
        handles = {name: args[position] for name, position in handle_positions.items()}
        try:
            return forward(gm, args)
        except torch.OutOfMemoryError:
            raise  # here as anywhere: no peer is to blame
        except RuntimeError as error:
            failed = guarded.get(_failed_line(error, forward))
            if failed is None:
                raise
            kind, group_name, handle_names, parameters = failed
            # Equal blocks share this graph: who called it is known only by the handles of this call.
            found = [name_of(handles.get(handle)) for handle in handle_names]
            names = [name if name != "?" else known for name, known in zip(found, parameters, strict=True)]
            raise collective_error(kind, names, group_name, error) from error

    return boxed(run)


Guarded = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _guarded_lines(gm: fx.GraphModule) -> dict[str, Guarded]:
    """(kind, group, handles, parameters) of every collective, by the name its line assigns to."""
    guarded: dict[str, Guarded] = {}
    for start in nodes.call_functions(gm.graph, nodes.is_start):
        about = (str(start.target).split(".")[1], nodes.group_of(start), meta.handles(start), meta.parameters(start))
        guarded[start.name] = about
        guarded |= {wait.name: about for wait in nodes.waits_of(start)}
    return guarded


def _failed_line(error: BaseException, forward: Callable[..., Any]) -> str:
    """The name that the failing line of the generated code was about to assign, "" if it failed elsewhere."""
    code = forward.__code__
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return linecache.getline(code.co_filename, trace.tb_lineno).split("=")[0].split(":")[0].strip()
        trace = trace.tb_next
    return ""
