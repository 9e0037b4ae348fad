"""Runs a graph node by node on real tensors and times each node, for use in the cost model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import ProcessGroup

from zgraph.graph import nodes
from zgraph.graph.collective_dispatch import dispatcher_of
from zgraph.runtime.groups import group_size
from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.groups import resolve_group


def measure_nodes(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    repeats: int = 5,
    group: ProcessGroup | None = None,
    ranks_per_host: int = 1,
) -> dict[str, float]:
    """Median microseconds of every call of a graph, by node name, for `costs_of(measured=...)`.

    Collectives are measured one at a time, from the moment when all ranks are ready to the result; waits are free.
    Operators run as in eager mode, without fusion. All ranks of the graph's groups must call this together. The graph
    runs once to warm up and then `repeats` times. State of parameters changes as in as many steps, so clear the
    gradients afterwards.

    Args:
        gm: graph with or without lowered collectives.
        inputs: values of its placeholders, in order.
        repeats: number of timed runs.
        group: ranks that get the same times, those of the slowest rank for each node, so that they make the same plan.
        ranks_per_host: of the machine; decides how collectives are dispatched.

    Raises:
        ValueError: repeats is not positive.
    """
    if repeats < 1:
        raise ValueError(f"zgraph.measure_nodes: repeats={repeats} measures nothing; write 1 or more.")
    times: dict[str, list[float]] = {}
    for run in range(repeats + 1):
        timed = _Timed(gm, ranks_per_host)
        with torch.no_grad():
            timed.run(*inputs)
        for name, us in timed.us.items() if run else ():
            times.setdefault(name, []).append(us)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return medians if group is None else _slowest(medians, group)


class _Timed(fx.Interpreter):
    """Attributes: us: microseconds of each call of the last run, by node name."""

    def __init__(self, gm: fx.GraphModule, ranks_per_host: int) -> None:
        super().__init__(gm)
        self.ranks_per_host = ranks_per_host
        self.us: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target = dispatcher_of(n, 0, self.ranks_per_host)  # as lowered graphs run it
        if (nodes.is_collective(n) or nodes.is_marker(n)) and group_size(nodes.group_of(n)) > 1:
            dist.barrier(resolve_group(nodes.group_of(n)))  # otherwise early ranks would measure the delay of late ones
        _settle()
        started = time.perf_counter()
        result = getattr(self, n.op)(target, args, kwargs)
        if nodes.is_start(n):
            for tensor in result if isinstance(result, list | tuple) else (result,):
                wait(tensor)
        _settle()
        self.us[n.name] = 1e6 * (time.perf_counter() - started)
        return result


def _settle() -> None:
    """Wait until everything launched has finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _slowest(own: dict[str, float], group: ProcessGroup) -> dict[str, float]:
    """For each name the longest time of any rank that has it: graphs of ranks may differ by a pad."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    names = dict.fromkeys(name for times in found for name in times)
    return {name: max(times[name] for times in found if name in times) for name in names}
