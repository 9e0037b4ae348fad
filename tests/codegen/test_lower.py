"""The fx lowering: boxed, in order, dropping values at their last use, and naming what fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph
from tests.support.compiled import with_fx
from tests.support.graphs import Drawing, fake_world, names_of
from tests.support.ranks import Ranks
from zgraph.codegen.lower_fx import lower_fx
from zgraph.graph import meta
from zgraph.runtime.handle import make_handle
from zgraph.torch_compat.collectives import all_gather_op, wait_op

aten = torch.ops.aten
# What a gather runs as where no messages can be sent.
FILL = all_gather_op()


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def _module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)


class Watcher:
    """Measures nothing, and notes when the instrumented program calls it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run(self, build: Any, args: list[Any]) -> Any:
        return build(self, True)(args)

    def watched(self, wait: Any, name: str) -> Any:
        def run(started: Tensor) -> Any:
            self.seen.append(("wait", name))
            return wait(started)

        return run

    def hold(self, *values: Any) -> None:
        self.seen.append(("hold", *[tuple(value.shape) for value in values]))

    def let_go(self) -> None:
        self.seen.append("let go")


def lower_watched(gm: fx.GraphModule, watcher: Any = None) -> Any:
    return lower_fx(gm, lambda args: watcher or cast(Any, Watcher()))


both = pytest.mark.parametrize("lower", [lower_fx, lower_watched])


@both
def test_input_list_is_emptied_and_values_die_at_last_use(lower: Any) -> None:
    alive: list[bool] = []
    watched: list[weakref.ref[Tensor]] = []

    def look(value: Tensor) -> Tensor:
        alive.append(watched[0]() is not None)
        return value + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(look, (x,))
    after = graph.call_function(look, (before,))
    graph.output((after,))
    args = [torch.ones(2)]
    watched.append(weakref.ref(args[0]))
    (result,) = lower(_module(graph))(args)
    assert args == []
    assert alive == [True, False]
    assert torch.equal(result, torch.full((2,), 3.0))


@both
def test_nodes_run_in_the_order_of_the_graph(lower: Any) -> None:
    ran: list[int] = []
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(lambda value, number: ran.append(number), (x, number)) for number in (1, 2, 3)]
    graph.output((x,))
    made[0].prepend(made[2])  # what a scheduling pass does
    lower(_module(graph))([torch.ones(1)])
    assert ran == [3, 1, 2]


@pytest.mark.parametrize(("rows", "runs"), [(4, "_to_copy"), (2, "convert_element_type")])
def test_a_cast_runs_as_the_kernel_where_strides_agree(rows: int, runs: str) -> None:
    """A view with gaps, the first rows of a transposed matrix, is left to the prim, which says what strides it gets."""
    drawing = Drawing()
    x = drawing.input("x", 3, 4)
    part = drawing.call(aten.slice.Tensor, drawing.call(aten.t.default, x), 0, 0, rows)
    gm = drawing.done(meta.create_cast(drawing.graph, part, torch.bfloat16))
    calls: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    value = torch.randn(3, 4)
    with Record():
        (found,) = lower_fx(gm)([value])
    assert runs in calls
    assert torch.equal(found, value.t()[:rows].bfloat16())


def _gather_graph(group_name: str = "0") -> fx.Graph:
    graph = fx.Graph()
    shard, handle = graph.placeholder("shard"), graph.placeholder("handle")
    start = graph.call_function(all_gather_op(), (shard, 2, group_name))
    wait = graph.call_function(wait_op(), (start,))
    for node in (start, wait):
        meta.set_parameters(node, ["h.0.weight"], ["handle"])
    graph.output((wait,))
    assert handle.name == "handle"
    return graph


def test_a_failing_collective_names_the_parameter_of_this_call() -> None:
    """The graph was compiled for block 0 and is shared; the handle says that block 7 called it."""
    run = lower_fx(_module(_gather_graph("no such group")))
    with pytest.raises(zgraph.CollectiveError) as caught:
        run([torch.ones(2), make_handle("h.7.weight")])
    assert "all_gather_into_tensor of h.7.weight failed on rank 0" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


class Network(TorchDispatchMode):
    """Collectives move nothing; one of their ops fails."""

    def __init__(self, failing: Any, error: Exception) -> None:
        super().__init__()
        self.failing = failing
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.failing:
            raise self.error
        return args[0] if func in (FILL, wait_op()) else func(*args, **(kwargs or {}))


def test_an_instrumented_program_is_watched_and_computes_the_same() -> None:
    """all_gather(shard), wait, all_gather(wait), wait: the second reads what was computed, not an input"""
    graph = _gather_graph()
    (wait,) = graph.find_nodes(op="call_function", target=wait_op())
    with graph.inserting_after(wait):
        start = graph.call_function(all_gather_op(), (wait, 2, "0"))
    with graph.inserting_after(start):
        second = graph.call_function(wait_op(), (start,))
    graph.output_node().args = ((second,),)
    names, watcher, asked = names_of(graph), Watcher(), list[Any]([None])
    run = lower_fx(_module(graph), lambda args: asked[0])
    results: list[Tensor] = []
    for asked[0] in (None, watcher, None):
        with Network(None, RuntimeError()):
            results += run([torch.ones(2), make_handle("w")])
    assert watcher.seen == [
        *(("hold", (2,)), "let go", ("wait", start.args[0].args[0].name), "let go"),
        *(("hold", (2,), (2,)), "let go", ("wait", start.name), "let go"),
    ]
    assert [tuple(result.shape) for result in results] == [(2,)] * 3
    assert names_of(graph) == names


@both
@pytest.mark.parametrize("failing", [FILL, wait_op()], ids=["start", "wait"])
def test_a_start_and_its_wait_fail_as_one_collective(failing: Any, lower: Any) -> None:
    cause = RuntimeError("connection reset")
    run = lower(_module(_gather_graph()))
    with Network(failing, cause), pytest.raises(zgraph.CollectiveError) as caught:
        run([torch.ones(2), make_handle("h.7.weight")])
    assert "all_gather_into_tensor of h.7.weight failed on rank 0 (group 0): connection reset." in str(caught.value)
    assert caught.value.__cause__ is cause


def test_without_a_readable_handle_the_compiled_name_is_told() -> None:
    run = lower_fx(_module(_gather_graph()))
    with (
        Network(wait_op(), RuntimeError("gone")),
        pytest.raises(zgraph.CollectiveError, match=r"of h\.0\.weight failed"),
    ):
        run([torch.ones(2), torch.ones(3)])


def test_running_out_of_memory_in_a_collective_stays_that() -> None:
    error = torch.OutOfMemoryError("no memory")
    run = lower_fx(_module(_gather_graph()))
    with Network(FILL, error), pytest.raises(torch.OutOfMemoryError) as caught:
        run([torch.ones(2), make_handle("h.7.weight")])
    assert caught.value is error


@both
def test_a_graph_with_collectives_lets_its_inputs_go_too(lower: Any) -> None:
    alive: list[bool] = []
    graph = _gather_graph()
    (wait,) = graph.find_nodes(op="call_function", target=wait_op())
    with graph.inserting_before(graph.output_node()):
        copied = graph.call_function(torch.clone, (wait,))
        graph.call_function(lambda value: alive.append(watched() is not None), (copied,))
    graph.output_node().args = ((copied,),)
    args = [torch.ones(2), make_handle("w")]
    watched = weakref.ref(args[0])
    with Network(None, RuntimeError()):
        lower(_module(graph))(args)
    assert args == [] and alive == [False]


def c10d_operations(zero_stage: int) -> set[str]:
    """What the process group was asked to run in one compiled training step."""
    model = zgraph.shard(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)), zero_stage=zero_stage)
    compiled = with_fx(model)
    compiled(torch.ones(2, 6)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(torch.ones(2, 6)).sum().backward()
    return {event.key for event in profile.key_averages() if event.key.startswith("c10d::")}


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_nothing_but_messages_is_sent(ranks: Ranks, zero_stage: int) -> None:
    """Two of gloo's ALLGATHER_COALESCED that finish at once free one string twice (torch_compat.all_gather_into)."""
    for operations in ranks.run(c10d_operations, zero_stage):
        assert operations == {"c10d::send", "c10d::recv_"}


@pytest.mark.parametrize("error", [RuntimeError("plain"), KeyError("other")])
def test_any_other_error_passes_through(error: Exception) -> None:
    def fail(value: Any) -> None:
        raise error

    graph = _gather_graph()
    first = next(iter(graph.nodes))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.call_function(fail, (first,))
    with pytest.raises(type(error)) as caught:
        lower_fx(_module(graph))([torch.ones(2), make_handle("w")])
    assert caught.value is error


def dependent(drawing: Drawing, value: fx.Node, *others: fx.Node) -> fx.Node:
    return drawing.call(torch.ops.zgraph.depend.default, value, list(others))


def test_unread_gather_of_a_dependent_value_runs_without_copying() -> None:
    drawing = Drawing()
    x, shard = drawing.input("x", 3, 4), drawing.input("shard", 4)
    whole = drawing.wait(drawing.start_gather(shard, "weight"))
    token = dependent(drawing, drawing.call(aten.new_empty.default, x, [0], dtype=torch.uint8), whole)
    y = drawing.call(aten.relu.default, x)
    gm = drawing.done(drawing.call(aten.neg.default, dependent(drawing, y, token)))
    calls: list[object] = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    given = [torch.ones(3, 4), torch.ones(4)]
    with Note():
        (found,) = lower_fx(gm)(given)
    assert torch.equal(found, -torch.ones(3, 4))
    assert calls == [FILL, wait_op(), aten.relu.default, aten.neg.default]


@pytest.mark.parametrize("case", ["input", "view of an input", "written", "expanded"])
def test_dependent_value_is_copied_where_aliasing_would_show(case: str) -> None:
    drawing = Drawing()
    x, other = drawing.input("x", 4), drawing.input("other", 4)
    value = {
        "input": lambda: x,
        "view of an input": lambda: drawing.call(aten.view.default, x, [2, 2]),
        "written": lambda: drawing.call(aten.relu.default, x),
        "expanded": lambda: drawing.call(aten.expand.default, drawing.call(aten.sum.default, x), [4]),
    }[case]()
    found = dependent(drawing, value, other)
    if case == "written":
        drawing.call(aten.add_.Tensor, found, other)
    results = lower_fx(drawing.done(value, found))([given := torch.ones(4), torch.ones(4)])
    first, second = results
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert second.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    assert second.is_contiguous()
    assert torch.equal(second, first + 1 if case == "written" else first)
