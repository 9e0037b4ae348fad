"""What a collective sends: the formulas, on numbers written out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.graphs import Drawing, fake_world, mlp, traced
from zgraph.graph import meta
from zgraph.graph.traffic import Transfer, transfers
from zgraph.torch_compat.collectives import reduce_scatter_op

funcol = torch.ops._c10d_functional


@pytest.fixture(params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_world(request.param):
        yield request.param


def only(drawing: Drawing) -> Transfer:
    (found,) = transfers(drawing.graph)
    return found


def test_a_gather_sends_its_chunk_to_every_other_rank(world: int) -> None:
    drawing = Drawing()
    drawing.start_gather(drawing.input("shard", 5, 7, dtype=torch.bfloat16), "w")
    assert only(drawing) == Transfer(
        kind="all_gather_into_tensor",
        group_name="0",
        group_size=world,
        dtype=torch.bfloat16,
        payload_bytes=70,
        sent_bytes={2: 70, 3: 140, 4: 210}[world],
        parameters=("w",),
    )


def test_an_exchange_keeps_its_own_piece(world: int) -> None:
    drawing = Drawing()
    drawing.start_exchange(drawing.input("pieces", 12, 5), "w")
    found = only(drawing)
    assert (found.kind, found.payload_bytes) == ("all_to_all_single", 240)
    assert found.sent_bytes == {2: 120, 3: 160, 4: 180}[world]


def test_a_reduce_scatter_sends_as_much_as_an_exchange(world: int) -> None:
    drawing = Drawing()
    drawing.call(reduce_scatter_op(), drawing.input("pieces", 12, 5), "sum", world, "0")
    assert only(drawing).sent_bytes == {2: 120, 3: 160, 4: 180}[world]


def test_an_all_reduce_sends_twice_that(world: int) -> None:
    drawing = Drawing()
    drawing.call(funcol.all_reduce.default, drawing.input("grad", 12, 5), "sum", "0")
    assert only(drawing).sent_bytes == {2: 240, 3: 320, 4: 360}[world]


def test_models_own_coalesced_gather_counts_all_tensors(world: int) -> None:
    drawing = Drawing()
    shards = [drawing.input("a", 5, 7), drawing.input("b", 3, dtype=torch.float32)]
    drawing.call(funcol.all_gather_into_tensor_coalesced.default, shards, world, "0")
    found = only(drawing)
    assert (found.payload_bytes, found.sent_bytes) == (152, 152 * (world - 1))
    assert found.parameters == ()


@pytest.mark.parametrize(
    ("stage", "rows", "mean"), [(3, 2, None), (3, 7, None), (0, 7, None), (0, 1, None), (0, 7, torch.float32)]
)
def test_markers_count_as_the_collectives_of_their_own_kernels(
    world: int, stage: int, rows: int, mean: torch.dtype | None
) -> None:
    """What was asked to travel in bf16 comes back in bf16, unless the means are asked for in fp32."""
    drawing = Drawing()
    handle = drawing.input("handle", 96, dtype=torch.uint8)
    shard = drawing.input("shard", rows if stage == 0 else -(-rows // world), 3)
    whole = drawing.call(
        torch.ops.zgraph.unshard.default,
        shard,
        handle,
        [rows, 3],
        torch.float32,
        None,
        None,
        stage,
        "mean",
        "alone",
        "",
        "0",
    )
    policy = (torch.float32, torch.bfloat16, mean, stage, "mean", "alone", "", "0")
    drawing.call(torch.ops.zgraph.reduce_grad.default, whole, handle, *policy)
    found = [(sent.kind, sent.dtype, sent.payload_bytes, sent.sent_bytes) for sent in transfers(drawing.graph)]
    others = world - 1
    if stage == 3:
        chunk = -(-rows // world) * 3  # elements, padding included
        assert found == [
            ("all_gather_into_tensor", torch.float32, chunk * 4, chunk * 4 * others),
            ("all_to_all_single", torch.bfloat16, world * chunk * 2, chunk * 2 * others),
        ]
    else:
        chunk = -(-rows * 3 // world)
        back = mean or torch.bfloat16
        assert found == [
            ("all_to_all_single", torch.bfloat16, world * chunk * 2, chunk * 2 * others),
            ("all_gather_into_tensor", back, chunk * back.itemsize, chunk * back.itemsize * others),
        ]


def test_the_gradient_of_a_scalar_is_one_element(world: int) -> None:
    drawing = Drawing()
    handle = drawing.input("handle", 96, dtype=torch.uint8)
    policy = (torch.float32, None, None, 0, "mean", "alone", "", "0")
    drawing.call(torch.ops.zgraph.reduce_grad.default, drawing.input("grad"), handle, *policy)
    assert [sent.sent_bytes for sent in transfers(drawing.graph)] == [4 * (world - 1)] * 2


def test_a_group_of_one_sends_nothing() -> None:
    with fake_world(1):
        for options in ({}, {"zero_stage": 0}):
            found = traced(mlp, world=1, **options)
            assert not [sent for gm in found.graphs.values() for sent in transfers(gm.graph)]


def test_transfers_come_in_program_order(world: int) -> None:
    drawing = Drawing()
    for name in ("b", "a", "c"):
        drawing.wait(drawing.start_gather(drawing.input(name, 2, 2), name))
    assert [sent.parameters for sent in transfers(drawing.graph)] == [("b",), ("a",), ("c",)]
    assert not [node for node in drawing.graph.nodes if node.op == "placeholder" and meta.parameters(node)]
