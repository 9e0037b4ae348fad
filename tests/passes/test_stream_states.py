"""StreamStates: copies of what rests elsewhere, ahead of its uses and behind its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import zgraph
from tests.support.graphs import KeepEach, fake_world
from tests.support.hash_seeds import HashSeeds
from tests.support.resting import HOST, STATE, check_rests
from zgraph.compiler.verify import Snapshot, Where, check_stores_landed, verify
from zgraph.errors import VerifyError
from zgraph.graph import meta, nodes
from zgraph.graph.text import graph_text
from zgraph.passes import StreamStates, presets
from zgraph.passes.memory import stream_states
from zgraph.tiers.tier import HOST as ON_HOST
from zgraph.torch_compat.operators import written_arguments

STREAMED_BY_OPTION = zgraph.Offload(params="host", optimizer="host", update="device")
STREAMED = StreamStates(updates="streamed")
WHERE = Where(pass_name="a_test", direction="step")


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two ranks, or as many as the test says."""
    with fake_world(getattr(request, "param", 2)):
        yield


def steps_of(
    at_rest: zgraph.Offload | None,
    stream: StreamStates | None = None,
    steps: int = 2,
    *,
    clips: bool = False,
    updates: int = 1,
    optimizer_options: dict[str, bool] | None = None,
    param_dtype: torch.dtype | None = None,
) -> tuple[list[fx.GraphModule], nn.Module, torch.optim.Optimizer]:
    """The final graphs of a first and of later steps of three layers; what they were called on."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model = zgraph.shard(layers, offload=at_rest, param_dtype=param_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **(optimizer_options or {"fused": True}))
    found: list[fx.GraphModule] = []
    *rules, last = presets.default(bucket_bytes=1)
    passes = [*rules, stream or last, KeepEach(found)]

    def step(x: torch.Tensor) -> None:
        for _ in range(updates):
            model(x).sum().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    options: dict[str, Any] = {"lowering": "fx", "passes": zgraph.PassList(passes)}
    whole: Any = zgraph.training_step(model, optimizer, options=options)(step)
    for _ in range(steps):
        whole(torch.ones(2, 4))
    return found, model, optimizer


def in_flight(graph: fx.Graph, kind: Callable[[fx.Node], bool]) -> int:
    """The most copies of a kind that are under way at once."""
    most, now = 0, 0
    for node in graph.nodes:
        now += kind(node)
        now -= nodes.is_copy_wait(node) and kind(nodes.start_of(node))
        most = max(most, now)
    return most


@pytest.mark.parametrize("clips", [False, True])
def test_each_update_reads_copies_that_are_stored_once(clips: bool) -> None:
    graphs, _, _ = steps_of(HOST, STREAMED, clips=clips)
    graph = graphs[-1].graph
    stored = [store.args[1] for store in nodes.call_functions(graph, nodes.is_store)]
    assert len(stored) == len(dict.fromkeys(stored)) == 3 * 3  # a weight and two moments of each layer
    for given in graph.find_nodes(op="placeholder"):
        if meta.space(given) == ON_HOST:  # nothing else touches what rests
            assert all(nodes.is_reload(user) or nodes.is_store(user) for user in given.users)
    reloads = list(nodes.call_functions(graph, nodes.is_reload))
    assert len(reloads) == 3 + 2 + 3 * 3  # gathers of forward, and of backward, which needs no gradient of the input


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stored_tensors_are_reloaded_after_their_wait(prefetch: int) -> None:
    """A step of two updates: the second forward, and the second update, read what the first update has written."""
    graphs, _, _ = steps_of(HOST, StreamStates(prefetch=prefetch, updates="streamed"), updates=2)
    graph = graphs[-1].graph
    stores: dict[object, list[fx.Node]] = {}
    for store in nodes.call_functions(graph, nodes.is_store):
        stores.setdefault(store.args[1], []).append(store)
    assert [len(found) for found in stores.values()] == [2] * 9
    again = [node for node in nodes.call_functions(graph, nodes.is_reload) if stores[node.args[0]][0] < node]
    assert len(again) == 3 + 2 + 3 * 3  # gathers of forward and backward, and an update, as in the first half
    for reload in again:
        landed = nodes.wait_of(stores[reload.args[0]][0])
        assert landed is not None and landed < reload


def test_no_more_is_in_flight_than_was_asked_for() -> None:
    """One use takes up to four copies: four gathers start together at the top, and an update reads three tensors."""
    for prefetch in (0, 1, 2):
        graphs, _, _ = steps_of(HOST, StreamStates(prefetch=prefetch, updates="streamed"))
        assert in_flight(graphs[-1].graph, nodes.is_reload) <= 4 * (prefetch + 1)
        assert in_flight(graphs[-1].graph, nodes.is_store) <= 3
    graphs, _, _ = steps_of(HOST, StreamStates(prefetch=2, in_flight_bytes=1, updates="streamed"))
    assert in_flight(graphs[-1].graph, nodes.is_reload) <= 4 * 2  # one use is always ahead


@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.parametrize(
    ("ahead_bytes", "budget_bytes", "expected"),
    [(0, None, 2), (3 * 64, None, 4), (3 * 64 + 63, None, 4), (2**20, None, 8), (2**20, 2**30, 2)],
)
def test_inference_reads_ahead_by_bytes_unless_there_is_a_budget(
    ahead_bytes: int, budget_bytes: int | None, expected: int
) -> None:
    """Copies of eight layers of 64 bytes: of the next one, and of as many later ones as the limit allows."""
    torch.compiler.reset()
    model = zgraph.shard(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8))), offload=HOST)
    found: list[fx.GraphModule] = []
    *rules, _ = presets.default(bucket_bytes=1)
    target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), budget_bytes=budget_bytes)
    passes = zgraph.PassList(
        [*rules, StreamStates(ahead_bytes=ahead_bytes), KeepEach(found)], target=target if budget_bytes else None
    )
    compiled: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx", "passes": passes})
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    assert in_flight(found[-1].graph, nodes.is_reload) == expected


@pytest.mark.parametrize("world", [1], indirect=True)
def test_fused_update_without_reductions_is_split_by_bytes() -> None:
    whole, _, _ = steps_of(HOST, STREAMED)
    split, _, _ = steps_of(HOST, StreamStates(update_bytes=2 * 3 * 64, updates="streamed"))
    fused = [[node for node in graphs[-1].graph.nodes if "_fused_" in str(node.target)] for graphs in (whole, split)]
    assert list(map(len, fused)) == [1, 2]  # of two layers, and of one
    assert len(list(nodes.call_functions(split[-1].graph, nodes.is_store))) == 9


@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("prefetch", "in_flight_bytes", "joined"),
    [(0, 2**20, 0), (1, 1, 1), (2, 1, 1), (2, 2**20, 2)],
)
def test_update_writes_to_copies_that_backward_has_just_read(
    prefetch: int, in_flight_bytes: int, joined: int, clips: bool
) -> None:
    """Backward reads the third and then the second layer, one and two uses ahead of the update."""
    stream = StreamStates(prefetch=prefetch, in_flight_bytes=in_flight_bytes, updates="streamed")
    graphs, _, _ = steps_of(HOST, stream, clips=clips)
    graph = graphs[-1].graph
    reloads = list(nodes.call_functions(graph, nodes.is_reload))
    assert len(reloads) == 3 + 2 + 3 * 3 - joined
    copies = dict.fromkeys(nodes.wait_of(reload) for reload in reloads)
    stores = list(nodes.call_functions(graph, nodes.is_store))
    assert len({store.args[1] for store in stores}) == len(stores) == 3 * 3
    (update,) = (node for node in graph.nodes if "_fused_" in str(node.target))
    assert all(store.args[0] in copies and update in store.args[0].users for store in stores)  # pyright: ignore


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_no_copy_is_held_while_its_gradient_is_reduced(param_dtype: torch.dtype | None) -> None:
    stream = StreamStates(prefetch=2, updates="streamed")
    graphs, _, _ = steps_of(HOST, stream, param_dtype=param_dtype)
    reloads = list(nodes.call_functions(graphs[-1].graph, nodes.is_reload))
    assert len(reloads) == 3 + 2 + 3 * 3


UPDATE_BYTES = 3 * 64  # a weight and two moments of a layer


@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.parametrize(
    ("prefetch", "in_flight_bytes", "ahead"),
    [(0, 3, 0), (1, 1, 1), (2, 3, 2), (2, 2, 1)],
)
def test_updates_are_read_as_far_ahead_as_was_asked_for(prefetch: int, in_flight_bytes: int, ahead: int) -> None:
    """Each update reads one layer; as many of them are on their way as `prefetch` says and their bytes allow."""
    stream = StreamStates(
        prefetch=prefetch,
        in_flight_bytes=in_flight_bytes * UPDATE_BYTES,
        update_bytes=UPDATE_BYTES,
        updates="streamed",
    )
    graphs, _, _ = steps_of(HOST, stream)
    order = list(graphs[-1].graph.nodes)
    updates = [node for node in order if "_fused_" in str(node.target)]
    assert len(updates) == 3
    read = [{nodes.start_of(one) for one in update.all_input_nodes if nodes.is_copy_wait(one)} for update in updates]
    started = [max(map(order.index, starts)) for starts in read]
    first = min(order.index(nodes.wait_of(one)) for one in read[0])  # pyright: ignore
    assert sum(place < first for place in started) == 1 + ahead


def test_new_state_is_returned_from_where_it_rests() -> None:
    graphs, _, optimizer = steps_of(HOST, StreamStates(), steps=1)
    moved = list(nodes.call_functions(graphs[0].graph, nodes.is_offload))
    assert len(moved) == 2 * 3
    assert all(any(user.op == "output" for user in nodes.wait_of(start).users) for start in moved)  # pyright: ignore
    for entries in optimizer.state.values():
        assert entries["step"].ndim == 0  # a number, which stays


@pytest.mark.parametrize("clips", [False, True])
def test_fused_updates_run_at_rest_beside_compute_until_their_wait(clips: bool) -> None:
    graphs, _, _ = steps_of(HOST, StreamStates(), steps=3, clips=clips)
    graph = graphs[-1].graph
    assert not any(map(nodes.is_store, graph.nodes))
    updates = {meta.beside(node): node for node in graph.nodes if meta.beside(node) is not None and not is_wait(node)}
    waits = {meta.beside(node): node for node in graph.nodes if is_wait(node)}
    assert len(updates) == 3
    for number, update in updates.items():
        assert update < waits[number]
        touched = {*update.all_input_nodes}
        for node in (one for one in graph.nodes if update < one < waits[number]):
            assert touched.isdisjoint(written_arguments(node))
        assert {node for node in touched if isinstance(meta.value(node), torch.Tensor)} == {
            *waits[number].all_input_nodes
        }
    later = [waits[number] for number in range(3)]
    assert list(updates.values())[1] > later[0] or later[0].next is list(updates.values())[1]


def is_wait(node: fx.Node) -> bool:
    return nodes.is_update_wait(node)


def steps_of_gpu(patch: pytest.MonkeyPatch, at_rest: zgraph.Offload, **options: Any) -> fx.Graph:
    """The last graph, as for a GPU, of which a CPU plays the part."""
    patch.setattr(stream_states, "computes_elsewhere", lambda order, ctx: True)
    graphs, _, _ = steps_of(at_rest, StreamStates(), **options)
    return graphs[-1].graph


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("at_rest", [HOST, STATE], ids=["all", "state"])
def test_host_updates_read_copies_of_gpu_tensors(
    monkeypatch: pytest.MonkeyPatch, at_rest: zgraph.Offload, clips: bool
) -> None:
    graph = steps_of_gpu(monkeypatch, at_rest, clips=clips)
    beside = [node for node in graph.nodes if meta.beside(node) is not None]
    updates, waits = [node for node in beside if not is_wait(node)], list(filter(is_wait, beside))
    assert len(updates) == len(waits) == 3
    assert not any(map(nodes.is_store, graph.nodes))
    started = [
        [nodes.start_of(node) for node in update.all_input_nodes if nodes.is_copy_wait(node)] for update in updates
    ]
    for number, update in enumerate(updates):
        for given in update.all_input_nodes:
            if isinstance(meta.value(given), torch.Tensor):
                assert meta.space(given) == ON_HOST, given
        assert len(started[number]) == (2 if at_rest == HOST else 3)  # a gradient, its count, its parameter
        if number < 2:  # the device waits for no copy that has just begun
            assert max(started[number + 1]) < min(nodes.wait_of(one) for one in started[number])  # pyright: ignore
    returns = list(nodes.call_functions(graph, nodes.is_return))
    if at_rest == HOST:  # a program that waits for the host issues nothing, so it does at the end
        assert returns == [] and all(wait > max(updates) for wait in waits)
    else:
        assert len(returns) == 3
        for number, back in enumerate(returns):
            assert waits[number] < back and (number == 2 or updates[number + 1] < waits[number])
            landed = nodes.wait_of(back)
            assert landed is not None and (number == 2 or landed < returns[number + 1])


@pytest.mark.parametrize("at_rest", [HOST, STATE], ids=["all", "state"])
def test_a_second_run_leaves_updates_on_the_host_alone(
    monkeypatch: pytest.MonkeyPatch, at_rest: zgraph.Offload
) -> None:
    graph = steps_of_gpu(monkeypatch, at_rest)
    before = graph_text(graph)
    assert not StreamStates().run(fx.GraphModule({}, graph), zgraph.PassContext(direction="step"))
    assert graph_text(graph) == before


def test_updates_that_a_gpu_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls, whatever an option asks for, and state that the step makes."""
    for options in ({"optimizer_options": {"foreach": True}}, {"steps": 1}):
        graph = steps_of_gpu(monkeypatch, HOST, **options)
        assert not any(meta.beside(node) is not None for node in graph.nodes)
        assert any(map(nodes.is_store, graph.nodes))
    graph = steps_of_gpu(monkeypatch, STREAMED_BY_OPTION)
    assert not any(meta.beside(node) is not None for node in graph.nodes)


@pytest.mark.parametrize("foreach", [False, True])
def test_unfused_updates_run_in_place_on_offloaded_tensors(foreach: bool) -> None:
    graphs, _, _ = steps_of(HOST, StreamStates(), steps=3, optimizer_options={"foreach": foreach})
    graph = graphs[-1].graph
    assert not any(meta.beside(node) is not None or nodes.is_store(node) for node in graph.nodes)
    assert len(list(nodes.call_functions(graph, nodes.is_reload))) == 3 + 2  # of gathers alone
    written = {argument for node in graph.nodes for argument in written_arguments(node)}
    at_rest = [node for node in graph.find_nodes(op="placeholder") if meta.space(node) == ON_HOST]
    assert len(at_rest) == 3 * 3 and written.issuperset(at_rest)


def test_model_on_the_device_is_left_alone() -> None:
    graphs, _, _ = steps_of(None, StreamStates())
    assert not any(map(nodes.is_copy_start, graphs[-1].graph.nodes))
    forward_only = fx.Graph()
    forward_only.output(forward_only.placeholder("x"))
    assert not StreamStates().run(fx.GraphModule({}, forward_only), zgraph.PassContext(direction="forward"))


def test_a_second_run_changes_nothing() -> None:
    graphs, _, _ = steps_of(HOST, STREAMED)
    gm = graphs[-1]
    before = graph_text(gm.graph)
    assert not STREAMED.run(gm, zgraph.PassContext(direction="step"))
    assert graph_text(gm.graph) == before


def test_a_pipeline_without_the_pass_gets_it() -> None:
    report = zgraph.Report()
    model = zgraph.shard(nn.Linear(4, 4), offload=HOST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", "report": report})
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.ones(2, 4))
    assert any(note.startswith("stream_states") for note in report.notes)


@pytest.mark.parametrize("is_compiled", [False, True])  # compiles an optimizer's step
def test_plain_step_stores_its_state_where_configured(is_compiled: bool) -> None:
    model = zgraph.shard(nn.Linear(4, 4), offload=HOST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1, momentum=0.9)  # of a model that has no part in it
    step: Any = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        step()
        other.step()
    check_rests(model, [optimizer])
    with pytest.raises(AssertionError):
        check_rests(model, [other])


def test_a_read_before_the_store_has_landed_is_found() -> None:
    graphs, _, _ = steps_of(HOST, STREAMED)
    graph = graphs[-1].graph
    before = Snapshot.of(graph)
    verify(graph, before, (), WHERE)
    store = next(nodes.call_functions(graph, nodes.is_store))
    with graph.inserting_after(store):
        reader = meta.create(graph, torch.ops.aten.sin.default, (store.args[1],))
    with pytest.raises(VerifyError, match=f"{reader.name} reads what {store.name} is writing to; put {reader.name}"):
        verify(graph, before, (), WHERE)


def test_read_during_a_concurrent_update_is_detected() -> None:
    graphs, _, _ = steps_of(HOST, StreamStates())
    graph = graphs[-1].graph
    check_stores_landed(graph, WHERE)
    update = next(node for node in graph.nodes if meta.beside(node) is not None)
    with graph.inserting_after(update):
        reader = graph.call_function(torch.ops.aten.sin.default, (written_arguments(update)[0],))
    with pytest.raises(VerifyError, match=f"{reader.name} reads what {update.name} is writing to"):
        check_stores_landed(graph, WHERE)


def test_views_and_gradients_may_be_touched_beside_an_update() -> None:
    """A view reads nothing, but who reads it does; gradients are read by an update, not written."""
    graphs, _, _ = steps_of(HOST, StreamStates())
    graph = graphs[-1].graph
    update: Any = next(node for node in graph.nodes if meta.beside(node) is not None)
    with graph.inserting_after(update):
        view = meta.create(graph, torch.ops.aten.view.default, (update.args[0][0], [-1]), like=update, name="view")
        graph.call_function(torch.ops.aten.sin.default, (update.args[1][0],))
    check_stores_landed(graph, WHERE)
    with graph.inserting_after(view):
        reader = graph.call_function(torch.ops.aten.sin.default, (view,))
    with pytest.raises(VerifyError, match=f"{reader.name} reads what {update.name} is writing to"):
        check_stores_landed(graph, WHERE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefetch": -1}, "prefetch=-1 is negative"),
        ({"ahead_bytes": -1}, "ahead_bytes=-1 is negative"),
        ({"stores_in_flight": 0}, "stores_in_flight=0; write 1 or more"),
        ({"in_flight_bytes": 0}, "in_flight_bytes=0 holds nothing"),
        ({"update_bytes": 0}, "update_bytes=0 holds no parameter"),
        ({"updates": "now"}, "updates='now' is unknown"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StreamStates(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": "gpu"}, 'params=\'gpu\' is unknown; write "host", "disk" or None'),
        ({}, "neither params nor optimizer is offloaded"),
        ({"optimizer": "host", "update": "gpu"}, 'update=\'gpu\' is unknown; write "host", "device" or None'),
        ({"params": "host", "update": "host"}, "update='host', but the optimizer's state is stored on the device"),
        (
            {"optimizer": "disk", "path": "a", "update": "host"},
            "is stored on disk, and comes to the device for each update",
        ),
        ({"optimizer": "disk"}, 'optimizer="disk" without a path'),
        ({"params": "disk", "path": ""}, 'params="disk" with an empty path; write path='),
        ({"optimizer": "host", "path": "/tmp"}, "nothing is stored on disk"),
        ({"optimizer": "host", "host_budget_bytes": 0}, "host_budget_bytes=0 holds nothing"),
    ],
)
def test_an_offload_that_cannot_be_honoured(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zgraph.Offload(**options)


def test_parts_of_a_model_rest_alike() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zgraph.shard(model[0], offload=HOST)
    with pytest.raises(ValueError, match="all parts of a model must be offloaded alike"):
        zgraph.shard(model, offload=zgraph.Offload(params="host"))


def test_host_budget_refuses_first_step_and_suggests_a_fit() -> None:
    shards, state = 3 * 32, 3 * 64  # bytes of a rank's rows
    steps_of(zgraph.Offload(params="host", optimizer="host", host_budget_bytes=shards + state))
    with pytest.raises(ValueError, match=rf'keeps {shards + state} bytes .*{shards} of parameters.*optimizer="disk"'):
        steps_of(zgraph.Offload(params="host", optimizer="host", host_budget_bytes=shards + state - 1))
    with pytest.raises(ValueError, match=r'With both on "disk"'):
        steps_of(zgraph.Offload(params="host", optimizer="host", host_budget_bytes=shards - 1))


def printed() -> None:
    with fake_world(2):
        print(graph_text(steps_of(HOST, STREAMED, clips=True)[0][-1].graph))


def test_the_graph_is_the_same_under_every_hash_seed(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    one, other = hash_seeds.printed(f"from {__name__} import printed; printed()", tmp_path)
    assert "store_start" in one
    assert one == other
