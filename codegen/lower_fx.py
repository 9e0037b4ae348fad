"""Turns a final graph into a callable that runs it node by node, in the order that the passes chose."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.codegen.cuda_graph import RecordedSteps
from zgraph.codegen.shorten_calls import shorten_calls
from zgraph.dialect.grouped_gathers import cast_each
from zgraph.dialect.sum_ranks import divide_in_place
from zgraph.errors import ZgraphError
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.collective_dispatch import dispatcher_of, sends_bucket
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.exchanges.collectives import bind, finish_group
from zgraph.runtime.exchanges.identity import CalledFor
from zgraph.runtime.handle import name_of
from zgraph.runtime.profiler import Probe, Program, Runner
from zgraph.tiers.copy_lanes import CopyLanes, lanes_of
from zgraph.tiers.stream_lanes import StreamLanes
from zgraph.tiers.tier import Copy, is_offloaded
from zgraph.torch_compat.aot import BoxedCodeGen, boxed
from zgraph.torch_compat.modules import generate_code, lazy_graph_module

aten, prims = torch.ops.aten, torch.ops.prims


def lower_fx(
    gm: fx.GraphModule,
    runner_of: Callable[[list[Any]], Runner | None] | None = None,
    ranks_per_host: int = 1,
    recorded: RecordedSteps | None = None,
) -> Callable[[list[Any]], Any]:
    """Generate Python code with one line per node: no fusion, no reordering; each value is freed at its last use.

    Args:
        gm: the final forward, backward or inference graph.
        runner_of: called with the inputs of each call; returns a runner that runs the call through an instrumented
            program, or None to run the call directly. None: all calls run directly.
        ranks_per_host: number of ranks on each host; decides how collectives are dispatched.
        recorded: how calls without a runner are recorded and replayed as a CUDA graph; None: they are not recorded.

    Returns:
        A function that takes one list and empties it (AOTAutograd's boxed convention). If a collective fails, the
        function raises a CollectiveError that names the affected parameters.
    """
    # A new module: AOTAutograd's would be regenerated, through three calls, each time it runs.
    gm = edits.copy_of(gm)
    drop_dependences(gm.graph)
    guarded = _guarded_lines(gm)
    starts = [start.name for start in nodes.call_functions(gm.graph, nodes.is_collective)]
    waits = {wait.name: nodes.start_of(wait).name for wait in nodes.call_functions(gm.graph, nodes.is_wait)}
    _update_beside_compute(gm.graph)
    _copy_beside_compute(gm.graph)
    called_for = CalledFor()
    _divide_in_place(gm.graph)
    for number, start in enumerate(nodes.call_functions(gm.graph, nodes.is_collective)):
        for wait in filter(nodes.is_group_wait, nodes.waits_of(start)):
            wait.target, wait.args = bind(finish_group), (start, nodes.group_of(start))
        start.target = dispatcher_of(start, number, ranks_per_host, called_for)
    _call_cast_kernels(gm.graph)
    for node in nodes.call_functions(gm.graph, nodes.is_cast_shards):
        node.target = cast_each
    shorten_calls(gm.graph)
    program = _program(gm, guarded, called_for)
    if recorded is not None:
        program = recorded.of(program, gm)
    if runner_of is None:
        return boxed(program)

    def build(probe: Probe, watch_memory: bool) -> Program:
        return _program(_instrumented(gm, probe, starts if watch_memory else [], waits), guarded, called_for)

    def run(args: list[Any]) -> Any:
        runner = runner_of(args)
        return program(args) if runner is None else runner.run(build, args)

    return boxed(run)


def drop_dependences(graph: fx.Graph) -> None:
    """Replace each `depend` node by the value that it returns, or by a copy where sharing memory would be visible."""
    found = list(nodes.call_functions(graph, lambda node: node.target is torch.ops.zgraph.depend.default))
    if not found:
        return
    written = {source for node in graph.nodes for source in dataflow.written_sources(node)}
    returned = dict.fromkeys(node for node in nodes.returned_by(graph) if isinstance(node, fx.Node))
    copied = [node for node in found if _must_copy(node, written, returned)]
    for node in found:
        sources = node.all_input_nodes
        if node in copied:
            node.target, node.args = aten.clone.default, (sources[0],)
            continue
        node.replace_all_uses_with(sources[0])
        edits.erase_dead(graph, [node, *(one for one in sources if not nodes.is_communication(one))])


def _must_copy(node: fx.Node, written: set[fx.Node], returned: dict[fx.Node, None]) -> bool:
    """Return whether a `depend` node must copy its value, because others would notice that the two share memory.

    True if the value is written to, if strides differ, or if the graph returns an alias of an input that was traced as
    a new tensor.
    """
    value = node.all_input_nodes[0]
    base = value
    while traits.is_view(base) and base.all_input_nodes:
        base = base.all_input_nodes[0]
    if base in written or not meta.same_layout(meta.value(node), meta.value(value)):
        return True
    return base.op == "placeholder" and any(view in returned for view in _views(node))


def _views(node: fx.Node) -> Iterator[fx.Node]:
    pending = [node]
    while pending:
        view = pending.pop()
        yield view
        pending.extend(user for user in view.users if traits.is_view(user) and user.args[0] is view)


def _call_cast_kernels(graph: fx.Graph) -> None:
    """Replace `prims.convert_element_type` by `aten._to_copy`: ten times faster, with bitwise equal results."""
    for node in nodes.call_functions(graph, lambda node: node.target is prims.convert_element_type.default):
        source, dtype = cast("tuple[fx.Node, torch.dtype]", node.args)
        if meta.tensor_value(source).stride() == meta.tensor_value(node).stride():  # otherwise strides may differ
            node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}


def _divide_in_place(graph: fx.Graph) -> None:
    """Divide the sum of an all-reduced bucket in place on CPU, where allocating memory costs more than the division."""
    for start in nodes.call_functions(graph, nodes.is_all_reduce):
        wait = nodes.wait_of(start)
        on_cpu = meta.tensor_value(start).device.type == "cpu"
        if wait is None or not (on_cpu and meta.handles(start) and sends_bucket(start)):
            continue
        for node in filter(nodes.is_sum_ranks, list(wait.users)):
            if len(wait.users) == 1 and node.args[3] == meta.tensor_value(wait).dtype and node.args[1] == 1:
                node.target = divide_in_place


def _copy_beside_compute(graph: fx.Graph) -> None:
    """Run copies between memory spaces concurrently with compute; each start passes an object to its wait.

    Before the program returns, it waits for all copies of state kept on the host of a GPU or on disk, because the host
    may use this state afterwards.
    """
    touched: dict[int, StreamLanes] = {}
    for node in nodes.call_functions(graph, lambda node: nodes.is_copy_start(node) or nodes.is_copy_wait(node)):
        if nodes.is_copy_wait(node):
            node.target = finish_copy
        else:
            lanes = lanes_of(_device_of(node))
            if isinstance(lanes, StreamLanes) and _touches_resting(node):
                touched[id(lanes)] = lanes
            if nodes.is_return(node):
                node.target = lanes.give_back
            elif nodes.is_store(node) or nodes.is_spill(node):
                node.target = lanes.store if nodes.is_store(node) else lanes.spill
            else:
                node.target, node.args = lanes.reload if nodes.is_reload(node) else lanes.offload, node.args[:1]
    for lanes in touched.values():
        with graph.inserting_before(nodes.output_of(graph)):
            graph.call_function(lanes.finish)


def _device_of(start: fx.Node) -> torch.device:
    """Return the device of a copy between host and device, given the copy's start."""
    node = start if nodes.is_reload(start) else start.all_input_nodes[1 if nodes.is_return(start) else 0]
    return meta.tensor_value(node).device


def _touches_resting(start: fx.Node) -> bool:
    """Return whether a copy reads or writes offloaded state that outlives the step; False for activations."""
    touched = (start, *start.all_input_nodes)
    return any(meta.kept_as(node) is not None and is_offloaded(meta.space(node)) for node in touched)


def _update_beside_compute(graph: fx.Graph) -> None:
    """Run optimizer updates of state kept on the host in a separate thread, concurrently with compute."""
    started: dict[int, fx.Node] = {}
    devices = (_device_of(start) for start in nodes.call_functions(graph, nodes.is_copy_start))
    device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
    for node in graph.nodes:
        number = meta.beside(node)
        if number is None:
            continue
        if nodes.is_update_wait(node):
            node.target, node.args = finish_update, (started[number], *node.args)
        else:
            started[number] = node
            node.target = _on_lane(cast("Callable[..., Any]", node.target), lanes_of(device))


def _on_lane(operator: Callable[..., Any], lanes: CopyLanes) -> Callable[..., Future[Any]]:

    def update(*args: Any, **kwargs: Any) -> Future[Any]:
        return lanes.update(operator, args, kwargs)

    return update


def finish_update(started: Future[Any], written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    started.result()


def finish_copy(started: Copy) -> Tensor:
    return started.wait()


def _instrumented(gm: fx.GraphModule, probe: Probe, starts: Sequence[str], waits: Mapping[str, str]) -> fx.GraphModule:
    """Return a copy of the program with a probe that times waits and, if `starts` is not empty, records allocations."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in [node for node in graph.nodes if node.op not in ("placeholder", "output")]:
        with graph.inserting_after(node):
            if starts:
                graph.call_function(probe.let_go)
            if node.name in starts:
                computed = [source for source in node.all_input_nodes if source.op != "placeholder"]
                graph.call_function(probe.hold, (node, *computed))
        if node.name in waits:
            node.target = probe.watched(cast("Callable[..., Any]", node.target), waits[node.name])
    return lazy_graph_module(gm, graph)


def _program(gm: fx.GraphModule, guarded: Mapping[str, Guarded], called_for: CalledFor) -> Program:
    """Generate the function that runs a graph; errors of collectives name the collective and its parameters."""
    gm.graph.set_codegen(BoxedCodeGen())
    # The class's forward, not the module's __call__, which would print its own report of a failing line.
    forward = generate_code(gm)
    if not guarded:
        return lambda args: forward(gm, args)
    handle_positions = {
        node.name: position
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if any(node.name in handles for _, _, handles, _ in guarded.values())
    }

    # Float inputs of a whole step: options of optimizers.
    float_positions = [
        (node.name, position)
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if isinstance(node.meta.get("val"), torch.SymFloat)
    ]

    def run(args: list[Any]) -> Any:
        handles = {name: args[position] for name, position in handle_positions.items()}
        called_for.begin(handles, tuple((name, args[position]) for name, position in float_positions))
        try:
            return forward(gm, args)
        except (torch.OutOfMemoryError, ZgraphError):
            raise  # unrelated to peers, or already explains what is wrong
        except RuntimeError as error:
            failed = guarded.get(_failed_line(error, forward))
            if failed is None:
                raise
            kind, group_name, handle_names, parameters = failed
            # Equal blocks share this graph: only the handles tell which block has called it.
            found = [name_of(handles.get(handle)) for handle in handle_names]
            names = [name if name != "?" else known for name, known in zip(found, parameters, strict=True)]
            raise collective_error(kind, names, group_name, error) from error
        finally:
            called_for.end()

    return run


Guarded = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _guarded_lines(gm: fx.GraphModule) -> dict[str, Guarded]:
    """Map the names of each collective's start and waits to the collective's (kind, group, handles, parameters)."""
    guarded: dict[str, Guarded] = {}
    for start in nodes.call_functions(gm.graph, nodes.is_collective):
        about = (str(start.target).split(".")[1], nodes.group_of(start), meta.handles(start), meta.parameters(start))
        guarded[start.name] = about
        guarded |= {wait.name: about for wait in nodes.waits_of(start)}
    return guarded


def _failed_line(error: BaseException, forward: Callable[..., Any]) -> str:
    """Return the variable assigned in the line of generated code that failed; "" if another function failed."""
    code = forward.__code__
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return linecache.getline(code.co_filename, trace.tb_lineno).split("=")[0].split(":")[0].strip()
        trace = trace.tb_next
    return ""
