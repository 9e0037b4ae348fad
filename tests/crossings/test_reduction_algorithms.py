"""Which collectives reduce a gradient: by backend, topology and cost; and the one way in which sums are divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.budget import long
from tests.support.graphs import Traced, apply, by_rank, fake_world, inputs_for, mlp, tensors_in, traced
from tests.support.judges.lockstep import assert_same_results, run_together
from zgraph import Hardware
from zgraph.dialect.sum_ranks import sum_pieces
from zgraph.graph import meta, nodes
from zgraph.graph.edits import copy_of
from zgraph.graph.traffic import transfers
from zgraph.passes import BucketCollectives, CompressGradients, LoCo, LowerGathers, LowerReductions, TwoHop
from zgraph.passes.common.reduction_algorithms import Reduction, choose_algorithm

BF16, F32 = torch.bfloat16, torch.float32
H100 = Hardware.preset("h100")
LARGE = 10**9


def chosen(numel: int, wire: torch.dtype, mean: torch.dtype | None, world: int, **given: Any) -> str:
    reduction = Reduction(numel=numel, wire=wire, mean=mean, result=F32)
    return choose_algorithm(reduction, **{"backend": "nccl", "world": world, "stride": 1, "hardware": H100, **given})


@pytest.mark.parametrize(
    ("numel", "wire", "mean", "world", "expected"),
    [
        (LARGE, BF16, None, 8, "all_to_all"),  # half the bytes over NVLink
        (LARGE, BF16, None, 64, "reduce_scatter"),  # of each node one link for each rank, where a ring crosses once
        (LARGE, F32, None, 8, "reduce_scatter"),  # as many bytes, and nothing to sum
        (LARGE, F32, None, 64, "reduce_scatter"),
        (LARGE, BF16, BF16, 8, "all_to_all"),
        (LARGE, F32, F32, 8, "reduce_scatter"),  # an all_reduce divides every element on every rank
        (10**5, F32, F32, 8, "all_reduce"),  # one launch less
        (10**5, F32, F32, 64, "reduce_scatter"),  # across nodes it is not considered
    ],
)
def test_the_cheapest_on_nccl(numel: int, wire: Any, mean: Any, world: int, expected: str) -> None:
    assert chosen(numel, wire, mean, world) == expected


def test_gloo_never_reduces_by_itself() -> None:
    for hardware in (None, H100):
        assert chosen(10**5, F32, F32, 8, backend="gloo", hardware=hardware) == "all_to_all"


def test_unknown_hardware_keeps_the_default_reduction() -> None:
    assert chosen(LARGE, BF16, None, 8, hardware=None) == "reduce_scatter"


def test_neighbours_across_nodes_share_none() -> None:
    """Eight ranks, each on a node of its own."""
    assert chosen(10**5, F32, F32, 8, stride=8) == "reduce_scatter"


def on_nccl(world: int, hardware: Hardware | None = H100, **options: Any) -> Traced:
    found = traced(mlp, [LowerGathers()], world=world, **options)
    found.know(planned_backend="nccl", hardware=hardware)
    return found


def lowered(found: Traced, **options: Any) -> fx.Graph:
    assert apply(LowerReductions(**options), found, "backward")
    return found.graphs["backward"].graph


def started(graph: fx.Graph) -> set[tuple[str, torch.dtype]]:
    return {(sent.kind, sent.dtype) for sent in transfers(graph) if "gather" not in sent.kind}


@pytest.mark.parametrize(
    ("world", "options", "lowering", "expected"),
    [
        (2, {"reduce_dtype": BF16}, {}, ("all_to_all_single", BF16)),
        (16, {"reduce_dtype": BF16}, {"algorithm": "reduce_scatter"}, ("reduce_scatter_tensor", F32)),
        (16, {"reduce_dtype": BF16}, {"algorithm": "narrow_reduce_scatter"}, ("reduce_scatter_tensor", BF16)),
        (2, {}, {}, ("reduce_scatter_tensor", F32)),
        (2, {"zero_stage": 0}, {}, ("all_reduce", F32)),
        (16, {"zero_stage": 0}, {}, ("reduce_scatter_tensor", F32)),
        (2, {"zero_stage": 0}, {"algorithm": "all_to_all"}, ("all_to_all_single", F32)),
    ],
    ids=str,
)
def test_nccl_receives_one_reduction_and_no_division(world: int, options: Any, lowering: Any, expected: Any) -> None:
    with fake_world(world):
        graph = lowered(on_nccl(world, **options), **lowering)
        assert started(graph) == {expected}
    assert not list(graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)), "one operator divides"


def test_all_gradients_of_a_kind_take_one_way() -> None:
    """A small one alone would be all-reduced; beside large ones it joins their buckets."""
    slow = replace(H100, memory_bytes_per_us=1.0)
    with fake_world(2):
        graph = lowered(on_nccl(2, slow, zero_stage=0))
        assert started(graph) == {("reduce_scatter_tensor", F32)}


# Any two of the three.
@pytest.mark.parametrize(
    ("options", "bucket_bytes", "world"),
    [
        ({}, 1, 2),
        ({"reduce_dtype": BF16}, 200, 2),
        ({"reduction": "sum"}, 2**20, 3),
        # Each value stands above.
        ({}, 200, 3),
        ({"reduce_dtype": BF16}, 2**20, 3),
        *long(({}, 2**20, 2), ({"reduce_dtype": BF16}, 1, 3)),
        *long(({"reduction": "sum"}, 1, 3), ({"reduction": "sum"}, 200, 2)),
    ],
    ids=str,
)
def test_an_all_reduce_yields_the_same_means(world: int, bucket_bytes: int, options: Any) -> None:
    """Whole numbers, whose sums have no order; what travels narrow is wide in an all_reduce."""
    ranks = by_rank(mlp, [LowerGathers()], world=world, zero_stage=0, mean_dtype=F32, **options)
    before = [copy_of(found.graphs["backward"]) for found in ranks]
    for rank, found in enumerate(ranks):
        with fake_world(world, rank):
            graph = lowered(found, algorithm="all_reduce")
            apply(BucketCollectives(bucket_bytes=bucket_bytes), found, "backward")
            assert {kind for kind, _ in started(graph)} == {"all_reduce"}
    assert len(list(nodes.call_functions(graph, nodes.is_all_reduce))) == {1: 5, 200: 3, 2**20: 1}[bucket_bytes]
    assert_same_results(before, [found.graphs["backward"] for found in ranks], whole_numbers=True)


def test_all_reduced_bucket_is_divided_once_into_views() -> None:
    ranks = by_rank(mlp, [LowerGathers()], world=3, zero_stage=0)
    for rank, found in enumerate(ranks):
        with fake_world(3, rank):
            lowered(found, algorithm="all_reduce")
            apply(BucketCollectives(bucket_bytes=2**20), found, "backward")
    graphs = [found.graphs["backward"] for found in ranks]
    assert len(list(nodes.call_functions(graphs[0].graph, nodes.is_sum_ranks))) == 1
    (start,) = nodes.call_functions(graphs[0].graph, nodes.is_all_reduce)
    assert len(meta.parameters(start)) == 5
    with fake_world(3):
        assert next(transfers(graphs[0].graph)).sent_bytes == 2 * meta.tensor_value(start).nbytes * 2 // 3
    for returned in run_together(graphs, [inputs_for(gm, seed) for seed, gm in enumerate(graphs)]):
        assert len({grad.untyped_storage().data_ptr() for grad in tensors_in(returned)}) == 1


# --- one way to divide ----------------------------------------------------------------------------------------------


class _Divisors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in str(func):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_cuda_divides_and_does_not_multiply_by_the_reciprocal() -> None:
    """torch's CUDA kernel multiplies where the divisor is a number, or lies on the host."""
    with FakeTensorMode(), _Divisors() as divisors:
        sum_pieces(torch.empty(12, device="cuda"), 3, 3, F32)
    (divisor,) = divisors.found
    assert isinstance(divisor, Tensor) and divisor.device.type == "cuda"


def test_three_ranks_divide_as_ieee_says() -> None:
    received = torch.randn(3, 4101, generator=torch.Generator().manual_seed(0))
    a, b, c = received.numpy()
    expected = ((a + b) + c) / np.float32(3)
    found = torch.ops.zgraph.sum_ranks(received.flatten(), 3, 3, F32)
    assert torch.equal(found, torch.from_numpy(expected))
    assert not np.array_equal(expected, ((a + b) + c) * (np.float32(1) / np.float32(3))), "the two ways differ"


def test_five_pieces_are_summed_in_rank_order() -> None:
    received = torch.randn(5, 4101, generator=torch.Generator().manual_seed(0))
    first, *others = received.numpy()
    in_order, backwards = first, first
    for piece in others:
        in_order = in_order + piece
    for piece in reversed(others):
        backwards = backwards + piece
    assert torch.equal(sum_pieces(received.flatten(), 5, 1, F32), torch.from_numpy(in_order))
    assert not np.array_equal(in_order, backwards), "the order makes a difference"


# --- compressed gradients -------------------------------------------------------------------------------------------


def groups_of(world: int, hardware: Hardware | None, method: LoCo | TwoHop) -> list[tuple[str, int]]:
    with fake_world(world):
        found = on_nccl(world, hardware)
        apply(CompressGradients(method=method, min_numel=30, min_dims=2), found, "backward")
        sent = [
            one for one in transfers(found.graphs["backward"].graph) if one.methods and one.parameters == ("0.weight",)
        ]
        return [(json_name(one.methods), one.group_size) for one in sent]


def json_name(methods: tuple[str, ...]) -> str:
    (text,) = methods
    return "LoCo" if "LoCo" in text else "NoFeedback"


def test_codes_cross_to_another_node_once() -> None:
    """Four ranks on two nodes: 8 bits inside, and only the sums of a node cross, in 4 bits."""
    machine = replace(H100, ranks_per_host=2)
    assert groups_of(4, machine, LoCo()) == [("NoFeedback", 2), ("LoCo", 2)]
    assert groups_of(4, machine, LoCo(hops=2)) == [("NoFeedback", 2), ("LoCo", 2)]
    assert groups_of(4, machine, LoCo()) == groups_of(4, None, TwoHop(ranks_per_host=2))


@pytest.mark.parametrize(
    ("hardware", "method"),
    [
        (replace(H100, ranks_per_host=2), LoCo(hops=1)),  # asked for
        (None, LoCo()),  # unknown
        (H100, LoCo()),  # all on one node
        (replace(H100, ranks_per_host=1), LoCo()),
        (replace(H100, ranks_per_host=3), LoCo()),  # nodes of 3 and 1
    ],
)
def test_one_hop_where_none_would_be_saved(hardware: Hardware | None, method: LoCo) -> None:
    assert groups_of(4, hardware, method) == [("LoCo", 4)]
