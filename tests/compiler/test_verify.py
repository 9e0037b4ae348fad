"""Every check of the verifier is broken once on purpose, and says who, where, what was found and what to do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import pytest
import torch
from torch import fx

from tests.support.graphs import Drawing, Traced, fake_world, mlp, names_of, traced
from zgraph import Fact, GraphPass, PassContext, PassList, VerifyError
from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.verify import Snapshot, Where, check_values, check_waits_sunk, verify
from zgraph.graph import meta, nodes
from zgraph.passes import ChooseLifetimes, DedupeGathers, LowerGathers, LowerReductions, SinkWaits, presets
from zgraph.torch_compat.collectives import wait_op

aten = torch.ops.aten
Rewrite = Callable[[fx.Graph], object]


@dataclass(frozen=True, kw_only=True)
class BadPass(GraphPass):
    """Does to one graph what a careless pass might do."""

    rewrite: Rewrite
    only: Direction = "forward"
    promises: frozenset[str] = frozenset()
    name: ClassVar[str] = "bad_pass"

    @property
    def provides(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.promises

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction == self.only:
            self.rewrite(gm.graph)
        return ctx.direction == self.only


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def run_bad(rewrite: Rewrite, after: Sequence[GraphPass] = (), found: Traced | None = None, **options: object) -> None:
    """The joint passes, `after`, and then the bad one, on a real model."""
    found = found or traced(mlp, after)
    bad = BadPass(rewrite=rewrite, **options)  # pyright: ignore[reportArgumentType]
    pipeline = PassList([DedupeGathers(), ChooseLifetimes(), bad])
    for _ in pipeline.run("graph", found.ctx, found.graphs, lambda *_: None):
        pass


def caught(rewrite: Rewrite, after: Sequence[GraphPass] = (), **options: object) -> str:
    with pytest.raises(VerifyError) as error:
        run_bad(rewrite, after, **options)
    return str(error.value)


def first(graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> fx.Node:
    return next(nodes.call_functions(graph, predicate))


def is_mm(node: fx.Node) -> bool:
    return node.target in (aten.mm.default, aten.addmm.default)


LOWERED = (LowerGathers(), LowerReductions())


def test_a_pass_that_keeps_the_rules_passes() -> None:
    def add_a_copy(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        with graph.inserting_after(product):
            copied = meta.create(graph, aten.clone.default, (product,))
        product.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)

    found = traced(mlp, LOWERED)
    run_bad(add_a_copy, found=found)
    assert "clone_default" in names_of(found.graphs["forward"].graph)


def test_use_before_definition_is_caught() -> None:
    def use_early(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        product.prepend(next(iter(product.users)))

    text = caught(use_early)
    assert text.startswith("bad_pass on the forward graph: the graph is malformed: ")
    assert "before it has been defined" in text


def test_renamed_input_is_caught() -> None:
    def rename(graph: fx.Graph) -> None:
        first_input = next(iter(graph.nodes))
        first_input.name = "weight"

    text = caught(rename)
    assert "bad_pass on the forward graph: the inputs changed from ('primals_1'" in text
    assert "to ('weight'" in text
    assert text.endswith("keep every placeholder.")


def test_lost_output_is_caught() -> None:
    def lose(graph: fx.Graph) -> None:
        out = nodes.output_of(graph)
        out.args = (tuple(nodes.returned_by(graph)[:-1]),)

    count = len(nodes.returned_by(traced(mlp).graphs["forward"].graph))
    assert f"the graph returned {count} values and now returns {count - 1}; keep them." in caught(lose)


def test_output_of_another_dtype_is_caught() -> None:
    def narrow(graph: fx.Graph) -> None:
        out = nodes.output_of(graph)
        result, *others = nodes.returned_by(graph)
        with graph.inserting_before(out):
            half = meta.create(graph, aten._to_copy.default, (result,), {"dtype": torch.bfloat16})
        out.args = ((half, *others),)

    text = caught(narrow)
    assert "output 0 was float32[6, 5] strides [5, 1] and is now bfloat16[6, 5] strides [5, 1]" in text
    assert "outputs keep shape and dtype" in text
    assert "--> _to_copy_default: bf16[6, 5]" in text


def test_wrong_value_of_a_new_node_is_caught() -> None:
    def lie(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        with graph.inserting_after(product):
            turned = meta.create(graph, aten.t.default, (product,))
        meta.set_value(turned, meta.value(product))

    text = caught(lie)
    assert "t_default yields float32[7, 6] strides [1, 7], but its meta says float32[6, 7] strides [7, 1]" in text
    assert "create nodes with zgraph.graph.meta.create, or set the value after changing arguments." in text
    assert "--> t_default: f32[6, 7] = aten.t(addmm)" in text


def test_stale_value_behind_a_node_changed_in_place_is_caught() -> None:
    """The reader's own call did not change; what it reads did."""

    def change_in_place(graph: fx.Graph) -> None:
        turn = first(graph, lambda node: node.target is aten.t.default)
        turn.target = aten.clone.default
        meta.set_value(turn, meta.evaluate(turn))

    assert "addmm cannot run on the fake values of its inputs" in caught(change_in_place)


def test_value_of_a_wait_is_checked() -> None:
    def lie(graph: fx.Graph) -> None:
        wait = first(graph, nodes.is_wait)
        with graph.inserting_after(wait):
            again = meta.create(graph, wait_op(), (wait.args[0],))
        meta.set_value(again, meta.tensor_value(wait).new_empty(3))

    assert "but its meta says float32[3]" in caught(lie, LOWERED)


def test_call_that_cannot_run_is_caught() -> None:
    def misfit(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        product.args = (product.args[0], product.args[1], product.args[1])

    text = caught(misfit)
    assert "bad_pass on the forward graph: addmm cannot run on the fake values of its inputs" in text
    assert "--> addmm: f32[6, 7]" in text


def test_new_node_that_cannot_run_is_caught() -> None:
    def misfit(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        with graph.inserting_after(product):
            graph.call_function(aten.mm.default, (product, product))

    text = caught(misfit)
    assert "bad_pass on the forward graph: mm_default cannot run on the fake values of its inputs" in text
    assert "--> mm_default: ? = aten.mm(addmm, addmm)" in text


def test_node_without_a_value_receives_one() -> None:
    def add_by_hand(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        with graph.inserting_after(product):
            graph.call_function(aten.t.default, (product,))

    found = traced(mlp)
    run_bad(add_by_hand, found=found)
    turned = first(found.graphs["forward"].graph, lambda node: node.name == "t_default")
    assert tuple(meta.tensor_value(turned).shape) == (7, 6)


def test_input_without_a_value_is_named() -> None:
    drawing = Drawing()
    x = drawing.input("x", 2, 3)
    gm = drawing.done(drawing.call(aten.relu.default, x))
    x.meta.clear()
    with pytest.raises(VerifyError, match=r"relu_default reads x, which has no fake value; create nodes with zgraph"):
        check_all(gm.graph)


def test_reader_of_a_start_without_wait_is_caught() -> None:
    def skip_the_wait(graph: fx.Graph) -> None:
        start = first(graph, nodes.is_all_gather)
        wait = cast(fx.Node, nodes.wait_of(start))
        wait.replace_all_uses_with(start)

    text = caught(skip_the_wait, LOWERED)
    assert "all_gather_0_weight has no wait before slice_tensor reads it; read its wait instead." in text
    assert "--> slice_tensor" in text


def test_start_never_waited_for_is_caught() -> None:
    def start_only(graph: fx.Graph) -> None:
        start = first(graph, nodes.is_all_gather)
        with graph.inserting_after(start):
            meta.create(graph, start.target, start.args, name="gather_for_nobody")

    text = caught(start_only, LOWERED)
    assert "gather_for_nobody is started and never waited for; erase it or add its wait." in text


@pytest.mark.parametrize("what", ["sent", "view of sent", "result", "twice"])
def test_write_to_a_buffer_in_flight_is_caught(what: Literal["sent", "view of sent", "result", "twice"]) -> None:
    drawing = Drawing()
    shard, other = drawing.input("shard", 4, 8), drawing.input("other", 4, 8)
    buffer = drawing.call(aten.clone.default, shard)
    start = drawing.start_gather(buffer, "w")
    target = {"sent": buffer, "result": start, "twice": buffer, "view of sent": buffer}[what]
    if what == "view of sent":
        target = drawing.call(aten.t.default, buffer)
        other = drawing.call(aten.t.default, other)
    if what == "result":
        other = drawing.call(aten.cat.default, [other, other])
    if what == "twice":  # a second gather of the same buffer has ended, the first has not
        drawing.wait(drawing.start_gather(buffer, "v"))
    write = drawing.call(aten.copy_.default, target, other, name="write")
    # a start that is itself written to must still only be read by its wait
    expected = "all_gather_w has no wait before write reads it" if what == "result" else ""
    expected = expected or f"write writes to {target.name} while all_gather_w is in flight; put write after the wait"
    gm = drawing.done(drawing.wait(start))
    with pytest.raises(VerifyError, match=expected):
        check_all(gm.graph)

    wait = cast(fx.Node, nodes.wait_of(start))
    if what != "result":
        wait.append(write)
        check_all(gm.graph)


def test_write_by_keyword_to_a_buffer_in_flight_is_caught() -> None:
    drawing = Drawing()
    shard, out = drawing.input("shard", 4, 8), drawing.input("out", 4, 8)
    start = drawing.start_gather(out, "w")
    drawing.call(aten.neg.out, shard, out=out, name="write")
    gm = drawing.done(drawing.wait(start))
    with pytest.raises(VerifyError, match="write writes to out while all_gather_w is in flight"):
        check_all(gm.graph)


def test_models_own_coalesced_collective_ends_at_its_wait() -> None:
    drawing = Drawing()
    buffer, other = drawing.input("buffer", 4, 8), drawing.input("other", 4, 8)
    start = drawing.call(torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default, [buffer, other], 2, "0")
    parts = [drawing.call(operator.getitem, start, place) for place in (0, 1)]
    write = drawing.call(aten.copy_.default, buffer, other, name="write")
    waits = [drawing.call(wait_op(), part) for part in parts]
    gm = drawing.done(*waits)
    with pytest.raises(
        VerifyError, match="write writes to buffer while all_gather_into_tensor_coalesced_default is in"
    ):
        check_all(gm.graph)
    waits[-1].append(write)
    check_all(gm.graph)
    waits[0].replace_all_uses_with(parts[0])
    with pytest.raises(VerifyError, match="has no wait before getitem reads it; read its wait instead"):
        check_all(gm.graph)


def check_all(graph: fx.Graph, *facts: str) -> None:
    where = Where(pass_name="bad_pass", direction="forward")
    verify(graph, Snapshot.of(graph), facts, where)
    check_values(graph.nodes, where)


@pytest.mark.parametrize("position", [1, -1], ids=["first", "last"])
def test_gathered_parameter_saved_for_backward_is_caught(position: int) -> None:
    """Without choose_lifetimes the partitioner saves whole parameters; through views and casts they are found."""

    def save_a_view(graph: fx.Graph) -> None:
        gathered = first(graph, lambda node: nodes.is_wait(node) and node.name == "wait_2_weight")
        returned = [*nodes.returned_by(graph)]
        saved = next(user for user in gathered.users if user.target is aten.slice.Tensor)
        returned[position] = saved
        nodes.output_of(graph).args = (tuple(returned),)
        meta.set_value(saved, meta.value(saved))

    found = traced(mlp, LOWERED)
    graph = found.graphs["forward"].graph
    assert found.ctx.user_outputs == 1
    before = Snapshot.of(graph)
    save_a_view(graph)
    same_interface = Snapshot(before.calls, before.values, before.placeholders, Snapshot.of(graph).outputs)
    where = Where(pass_name="bad_pass", direction="forward")
    verify(graph, same_interface, (), where, user_outputs=1)
    with pytest.raises(VerifyError) as error:
        verify(graph, same_interface, [Fact.LIFETIMES_CHOSEN], where, user_outputs=1)
    text = str(error.value)
    assert "saves the gathered 2.weight for backward" in text
    assert "put choose_lifetimes before the partition and keep its recompute tags." in text


def test_gather_read_by_a_later_part_is_caught() -> None:
    """x -> mm(x, w) in forward; backward reads the transposed w of forward, or a gather of its own."""
    drawing = Drawing()
    x, shard = drawing.input("x", 4, 4), drawing.input("shard", 2, 4)
    gathers = [drawing.wait(drawing.start_gather(shard, "w")) for _ in range(2)]
    product = drawing.call(aten.mm.default, x, gathers[0])
    graph = drawing.done(drawing.call(aten.mm.default, product, drawing.call(aten.t.default, gathers[1]))).graph
    for node in nodes.call_functions(graph, lambda _: True):
        meta.set_part(node, 0)
    *_, start, wait, _, transposed, last, _ = graph.nodes
    for node in (transposed, last):
        meta.set_part(node, 1)
    where = Where(pass_name="bad_pass", direction="step")
    with pytest.raises(VerifyError, match="reads the gathered w of an earlier forward or backward"):
        verify(graph, Snapshot.of(graph), [Fact.LIFETIMES_CHOSEN], where)
    meta.tag_saved(start)
    verify(graph, Snapshot.of(graph), [Fact.LIFETIMES_CHOSEN], where)
    del start.meta["zgraph_saved"]
    for node in (start, wait):
        meta.set_part(node, 1)
    verify(graph, Snapshot.of(graph), [Fact.LIFETIMES_CHOSEN], where)


@pytest.mark.parametrize(
    ("fact", "direction", "marker"),
    [(Fact.GATHERS_LOWERED, "forward", "unshard"), (Fact.REDUCTIONS_LOWERED, "backward", "reduce_grad")],
)
def test_marker_left_behind_is_caught(fact: Fact, direction: Direction, marker: str) -> None:
    text = caught(lambda graph: first(graph, is_mm), promises=frozenset({fact}), only="inference")
    assert f"bad_pass on the {direction} graph: {marker}" in text
    assert f"is still there although {fact} was promised." in text


def test_wait_that_is_not_sunk_is_caught() -> None:
    def raise_a_wait(graph: fx.Graph) -> None:
        product = first(graph, is_mm)
        start = [node for node in graph.nodes if nodes.is_all_gather(node)][-1]
        shard = cast(fx.Node, start.args[0])
        wait = cast(fx.Node, nodes.wait_of(start))
        for node in (shard, start, wait):
            if node.op == "call_function":
                product.prepend(node)

    run_bad(raise_a_wait, (*LOWERED, SinkWaits()))
    text = caught(raise_a_wait, (*LOWERED, SinkWaits()), promises=frozenset({Fact.WAITS_SUNK}))
    assert "bad_pass on the forward graph: wait_4_weight waits before addmm, which does not need it." in text


def test_sunk_wait_may_stand_before_other_communication() -> None:
    drawing = Drawing()
    x, shard, other = drawing.input("x", 8, 8), drawing.input("shard", 4, 8), drawing.input("other", 4, 8)
    one, two = drawing.start_gather(shard, "w"), drawing.start_gather(other, "v")
    whole = drawing.wait(one)
    second = drawing.wait(two)
    product = drawing.call(aten.mm.default, x, whole)
    gm = drawing.done(drawing.call(aten.mm.default, product, second))
    where = Where(pass_name="bad_pass", direction="forward")
    with pytest.raises(VerifyError, match="wait_v waits before mm_default"):
        check_waits_sunk(gm.graph, where)
    product.append(second)
    check_waits_sunk(gm.graph, where)


def test_an_error_shows_ten_nodes_on_either_side() -> None:
    drawing = Drawing()
    value = drawing.input("x", 2, 3)
    for _ in range(30):
        value = drawing.call(aten.relu.default, value)
    gm = drawing.done(value)
    middle = list(gm.graph.nodes)[15]
    meta.set_value(middle, meta.tensor_value(value).new_empty(1))
    with pytest.raises(VerifyError) as error:
        check_all(gm.graph)
    _, *shown = str(error.value).splitlines()
    assert len(shown) == 21
    assert shown[10].startswith(f"--> {middle.name}: f32[1] = aten.relu(")


@dataclass(frozen=True, kw_only=True)
class LiesInPlace(GraphPass):
    """Alters what is recorded of a value, and says that it has done nothing."""

    name: ClassVar[str] = "lies_in_place"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for node in nodes.call_functions(gm.graph, lambda node: node.target is aten.relu.default):
            meta.tensor_value(node).resize_(1)
        return False


def test_value_altered_in_place_is_found_by_full_replay() -> None:
    drawing = Drawing()
    gm = drawing.done(drawing.call(aten.relu.default, drawing.input("x", 4), name="relu"))
    ctx = PassContext()
    list(PassList([LiesInPlace()]).run("graph", ctx, {"forward": gm}, lambda *_: None))
    with pytest.raises(VerifyError, match=r"a pass of phase graph on the forward graph: relu"):
        list(PassList([], replay_all=True).run("graph", ctx, {"forward": gm}, lambda *_: None))


def test_the_default_passes_pass_when_everything_is_replayed() -> None:
    found = traced(mlp)
    pipeline = PassList(presets.default(), replay_all=True)
    runs = list(pipeline.run("graph", found.ctx, found.graphs, lambda *_: None))
    assert [run.name for run in runs if run.direction == "forward"] == [entry.name for entry in pipeline.of("graph")]
