"""A group of gathers has one start, one wait, and one kernel that casts what its members send."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zgraph
from tests.support.costs import costs_of
from tests.support.graphs import Drawing, by_rank, fake_world, mlp, traced
from tests.support.judges.lockstep import assert_same_results
from tests.support.ranks import Ranks
from zgraph import Hardware, PassList
from zgraph.analysis.liveness import memory_curve
from zgraph.analysis.storages import rows_of_its_own, storages_of
from zgraph.compiler.verify import Where, check_waits_sunk
from zgraph.dialect.grouped_gathers import cast_each
from zgraph.errors import VerifyError
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.passes import BucketCollectives, HoistStarts, LowerGathers, LowerReductions, SinkWaits, presets
from zgraph.passes.common.merge_collectives import Bucket, merge
from zgraph.runtime.chunks import pad_rows

aten = torch.ops.aten
GROUPED = (LowerGathers(), LowerReductions(), BucketCollectives(bucket_bytes=2**20, gathers="coalesced"))
NARROW: dict[str, Any] = {"param_dtype": torch.bfloat16}


def test_a_group_has_one_wait_and_one_cast() -> None:
    with fake_world(2):
        graph = traced(mlp, [*GROUPED, SinkWaits(), HoistStarts()], **NARROW).graphs["forward"].graph
    (start,) = nodes.call_functions(graph, nodes.is_gather)
    (wait,) = nodes.waits_of(start)
    (together,) = nodes.call_functions(graph, nodes.is_cast_shards)
    assert len(meta.parameters(start)) == 5 and nodes.start_of(wait) is start
    assert [node.args for node in nodes.sent_by(start)] == [(together, place) for place in range(5)]
    following = wait.next
    for result in nodes.results_of(wait):  # right behind it: the list of them keeps all alive
        assert following is result
        following = following.next
    gathered = dict.fromkeys(node for result in nodes.results_of(wait) for node in dataflow.reshaped_values(result))
    rest = [node for node in graph.nodes if traits.cast_dtype(node) is not None and node not in gathered]
    assert not any(node.all_input_nodes[0].op == "placeholder" and meta.parameters(node) for node in rest)


@pytest.mark.parametrize("world", [2, 4])
def test_results_and_agreement_on_uneven_ranks(world: int) -> None:
    before = by_rank(mlp, world=world, **NARROW)
    after = by_rank(mlp, [*GROUPED, SinkWaits()], world=world, **NARROW)
    hardware = Hardware.preset("cpu")
    for direction in ("forward", "backward"):
        graphs = [found.graphs[direction] for found in after]
        assert_same_results([found.graphs[direction] for found in before], graphs)
        assert any(map(nodes.is_cast_shards, graphs[0].graph.nodes))
        with fake_world(world):
            assert len({memory_curve(gm.graph, agreed=True).peak_bytes for gm in graphs}) == 1
            agreed: list[Any] = []
            for gm in graphs if direction == "forward" else ():
                order = list(gm.graph.nodes)
                own = rows_of_its_own(order)
                costs = costs_of(gm.graph, hardware)
                storages = storages_of(order, inputs_die=direction == "backward", agreed=True)
                agreed.append(
                    (
                        [(node.name, costs[node]) for node in order if node not in own and costs[node].us],
                        sorted((storage.first.name, storage.nbytes) for storage in storages),
                    )
                )
            assert agreed == agreed[:1] * world


def test_cast_shards_are_padded() -> None:
    shards = [torch.randn(3, 4), torch.randn(0, 2), torch.randn(5), torch.randn(4, 6).t()]
    rows = [3, 2, 8, 7]
    for shard, count, found in zip(shards, rows, cast_each(shards, rows, torch.bfloat16), strict=True):
        assert found.is_contiguous() and torch.equal(found, pad_rows(shard.to(torch.bfloat16), count))
    assert cast_each([torch.zeros(0, 3)], [0], torch.float16)[0].shape == (0, 3)


def drawn_group() -> tuple[Drawing, list[torch.fx.Node]]:
    """Two gathers, the second of which is read behind another product."""
    drawing = Drawing()
    x, shard, other = drawing.input("x", 8, 8), drawing.input("shard", 4, 8), drawing.input("other", 4, 8)
    starts = [drawing.start_gather(shard, "w"), drawing.start_gather(other, "v")]
    waits = [drawing.wait(start) for start in starts]
    square = drawing.call(aten.mm.default, x, x)
    product = drawing.call(aten.mm.default, square, waits[0])
    gm = drawing.done(drawing.call(aten.mm.default, product, waits[1]))
    merge(gm.graph, Bucket(tuple(starts), starts[0]), "coalesced")
    return drawing, [square, product]


def test_group_is_awaited_at_its_first_read_result() -> None:
    with fake_world(2):
        drawing, (square, product) = drawn_group()
    graph = drawing.graph
    where = Where(pass_name="bad_pass", direction="forward")
    with pytest.raises(VerifyError, match=r"wait_group_w_2 waits before mm_default, which does not need it"):
        check_waits_sunk(graph, where)
    (wait,) = nodes.call_functions(graph, nodes.is_wait)
    square.append(wait)
    last = wait
    for result in nodes.results_of(wait):
        last.append(result)
        last = result
    check_waits_sunk(graph, where)
    assert product.prev is last


# --- real ranks -----------------------------------------------------------------------------------------------------


def grouped() -> PassList:
    bucketing = BucketCollectives(bucket_bytes=2**20, gathers="coalesced")
    return PassList([bucketing if entry.name == bucketing.name else entry for entry in presets.default()])


def trained(lowering: str) -> tuple[list[torch.Tensor], set[str]]:
    """Gradients of a compiled step, and which collectives `zgraph.measure` saw it wait for."""
    torch.compiler.reset()
    torch.manual_seed(0)
    source, x = mlp().state_dict(), torch.randn(6, 5)
    model = zgraph.shard(mlp(), param_dtype=torch.bfloat16)
    model.load_state_dict(source)
    options: dict[str, Any] = {"lowering": lowering, "passes": grouped(), "report": (report := zgraph.Report())}
    called: Any = torch.compile(model, backend="zgraph", options=options)

    def step() -> None:
        model.zero_grad()
        called(x).float().square().sum().backward()

    step()
    with zgraph.measure(model):
        step()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # pyright: ignore
    return gradients, {name for found in report.measured.values() for name in found.blocked_us}


@pytest.mark.parametrize("lowering", ["fx", "inductor"])
def test_groups_run_and_are_measured(ranks: Ranks, lowering: str) -> None:
    """Under Inductor as well the products are eager ones, and what is left, sums and ReLU, rounds as in eager mode."""
    with_eager = ranks.run(trained, "fx")
    groups = ["all_gather_group_0_weight_5", "all_gather_group_4_weight_2"]
    for (gradients, waits), (expected, _) in zip(ranks.run(trained, lowering), with_eager, strict=True):
        assert sorted(name for name in waits if "group" in name) == groups
        for found, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, wanted)
