"""Low-rank factors: their algebra against dense fp64, the law of error feedback, and PyTorch's own PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph.codegen  # noqa: F401  (registers the operators)
from examples.benchmarks.low_rank_twin import in_rank_order, low_rank_mean, orthonormal_rows
from tests.support.ranks import Ranks
from zgraph.codegen.kernels.orthonormal import orthonormalize, sum_in_blocks
from zgraph.codegen.low_rank_kernels import first_right, next_right
from zgraph.compression.low_rank import FactorLayout, matrix_shape, orthonormalize_work
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.handle import make_handle
from zgraph.runtime.window_state import ALONE, attach_state, state_behind

SIZES = [(33, 70), (70, 33), (33, 70), (16, 16), (1100, 3), (33, 70)]  # three of a size, one longer than a block
ROUNDING = 2.0**-24


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Bucket:
    """What one rank runs for the matrices above, by the operators."""

    rank: int

    def __post_init__(self) -> None:
        self.rows, self.columns = map(list, zip(*SIZES, strict=True))
        self.handles = [make_handle(f"weight {place}") for place in range(len(SIZES))]
        for handle in self.handles:
            attach_state(handle, nn.Module(), "")

    @property
    def sizes(self) -> tuple[list[int], list[int], int]:
        return self.rows, self.columns, self.rank

    @property
    def kept(self) -> list[Feedback]:
        return [state_behind(handle).feedbacks.by_slot["first_hop"] for handle in self.handles]

    def left(self, grads: list[Tensor]) -> list[Tensor]:
        return torch.ops.zgraph.low_rank_left(grads, self.handles, *self.sizes)

    def right(self, left: Tensor, deltas: list[Tensor]) -> list[Tensor]:
        return torch.ops.zgraph.low_rank_right(left, deltas, self.handles, *self.sizes)

    def means(self, basis: Tensor, right: Tensor, first: int = 0, count: int = 1 << 30) -> list[Tensor]:
        """Of each matrix the rows from the first on, and zeros where there are fewer than so many."""
        firsts = [min(first, rows) for rows in self.rows]
        counts = [min(count, rows) for rows in self.rows]
        sizes = (*self.sizes, firsts, counts)
        return torch.ops.zgraph.low_rank_means(basis, right, self.handles, *sizes, torch.float32, ALONE)


def together(buckets: list[Bucket], grads: list[list[Tensor]]) -> list[list[Tensor]]:
    """One reduction over ranks that lie side by side; the means that each of them holds."""
    lefts = [bucket.left(own) for bucket, own in zip(buckets, grads, strict=True)]
    left = in_rank_order([one for one, *_ in lefts], len(buckets))
    rights = [bucket.right(left, deltas) for bucket, (_, *deltas) in zip(buckets, lefts, strict=True)]
    right = in_rank_order([own for _, own in rights], len(buckets))
    return [bucket.means(basis, right) for bucket, (basis, _) in zip(buckets, rights, strict=True)]


def gradients(ranks: int, seed: int, scale: float = 1.0) -> list[list[Tensor]]:
    return [
        [scale * random(*size, seed=1000 * seed + 100 * rank + place) for place, size in enumerate(SIZES)]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rank_with_few_rows_has_bits_of_the_whole_mean(count: int) -> None:
    """MKL multiplies three rows or fewer by another kernel."""
    bucket, (grads,) = Bucket(rank=2), gradients(1, seed=7)
    left, *deltas = bucket.left(grads)
    basis, right = bucket.right(left, deltas)
    kept = [feedback.tensors["right"] for feedback in bucket.kept]
    whole = bucket.means(basis, right)
    for first in range(0, max(bucket.rows), count):
        for feedback, before in zip(bucket.kept, kept, strict=True):
            feedback.tensors["right"] = before
        for part, mean in zip(bucket.means(basis, right, first, count), whole, strict=True):
            expected = mean[first : first + count]
            assert torch.equal(part[: len(expected)], expected)
            assert not part[len(expected) :].any()


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_operators_equal_the_plain_twin(ranks: int, rank: int) -> None:
    """Bit for bit, in four steps, whoever shares a batch; and every rank holds the same."""
    buckets = [Bucket(rank) for _ in range(ranks)]
    errors = [[torch.zeros(size) for _ in range(ranks)] for size in SIZES]
    rights = [first_right(f"weight {place}", torch.empty(rank, columns)) for place, (_, columns) in enumerate(SIZES)]
    for step in range(4):
        grads = gradients(ranks, step)
        found = together(buckets, grads)
        for place in range(len(SIZES)):
            of_ranks = [own[place] for own in grads]
            mean, errors[place], rights[place] = low_rank_mean(of_ranks, errors[place], rights[place], ranks)
            for number, bucket in enumerate(buckets):
                assert torch.equal(found[number][place], mean)
                assert torch.equal(bucket.kept[place].tensors["error"], errors[place][number])
                assert torch.equal(bucket.kept[place].tensors["right"], rights[place])


def test_a_mean_is_the_projection_of_the_dense_mean() -> None:
    """P (P^T M), in fp64, of the mean M; after some steps on one M the best approximation of rank r."""
    rank, grads = 3, gradients(2, 0)
    buckets = [Bucket(rank) for _ in range(2)]
    errors = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    rights = [first_right(f"weight {place}", torch.empty(rank, n)).double() for place, (_, n) in enumerate(SIZES)]
    for _ in range(3):
        found = together(buckets, grads)[0]
        for place, right in enumerate(rights):
            mean = (grads[0][place].double() + grads[1][place].double()) / 2 + errors[place]
            basis = torch.linalg.qr(mean @ right.t())[0]
            expected = basis @ basis.t() @ mean
            rights[place] = basis.t() @ mean
            errors[place] = mean - expected
            torch.testing.assert_close(found[place].double(), expected, rtol=0, atol=2e-5 * mean.abs().max().item())


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_the_law_of_error_feedback(scale: float) -> None:
    """What was rebuilt of a rank's own, and what it keeps, are its gradient and its old error."""
    buckets = [Bucket(2) for _ in range(2)]
    sent = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    given = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step in range(5):
        grads = gradients(2, step, scale)
        for total, *parts in zip(given, *grads, strict=True):
            total += sum(part.double() for part in parts) / 2
        for total, mean in zip(sent, together(buckets, grads)[0], strict=True):
            total += mean.double()
    for place in range(len(SIZES)):
        kept = sum(bucket.kept[place].tensors["error"].double() for bucket in buckets) / 2
        torch.testing.assert_close(sent[place] + kept, given[place], rtol=0, atol=100 * ROUNDING * scale)
        assert kept.norm() > 0.1 * given[place].norm() or min(SIZES[place]) <= 4


def test_non_finite_gradients_leave_no_trace() -> None:
    """On no rank, whichever had it; its mean is NaN, and other matrices go on."""
    buckets = [Bucket(2) for _ in range(2)]
    together(buckets, gradients(2, 0))
    before = [[{k: v.clone() for k, v in kept.tensors.items()} for kept in bucket.kept] for bucket in buckets]
    grads = gradients(2, 1)
    grads[1][0][5, 7] = float("nan")
    grads[0][3][0, 0] = float("inf")
    found = together(buckets, grads)
    for bucket, old, means in zip(buckets, before, found, strict=True):
        for place, (kept, mean) in enumerate(zip(bucket.kept, means, strict=True)):
            broken = place in (0, 3)
            assert bool(mean.isnan().all()) == broken and bool(mean.isnan().any()) == broken
            assert all(torch.equal(kept.tensors[key], value) == broken for key, value in old[place].items())
    assert all(mean.isfinite().all() for mean in together(buckets, gradients(2, 2))[0])


def test_a_gradient_of_less_rank_keeps_its_spare_directions() -> None:
    """Zeros, then a matrix of rank one, then a full one: nothing is NaN, and no direction is lost for good."""
    bucket = Bucket(2)
    assert all((mean == 0).all() for mean in together([bucket], [[torch.zeros(size) for size in SIZES]])[0])
    thin = [random(m, 1, seed=place) @ random(1, n, seed=place + 50) for place, (m, n) in enumerate(SIZES)]
    for mean, expected in zip(together([bucket], [thin])[0], thin, strict=True):
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert all((kept.tensors["right"].abs().amax(1) > 0).all() for kept in bucket.kept)
    for mean in together([bucket], gradients(1, 3))[0]:
        assert torch.linalg.matrix_rank(mean) == 2


def test_rows_become_orthonormal() -> None:
    for seed, shape in enumerate([(4, 5, 3000), (1, 32, 100), (2, 3, 1024)]):
        rows = random(*shape, seed=seed) * torch.logspace(-15, 15, shape[1])[:, None]
        twins = [orthonormal_rows(matrix) for matrix in rows]
        orthonormalize(rows)
        products = rows.double() @ rows.double().transpose(1, 2)
        torch.testing.assert_close(products, torch.eye(shape[1]).double().expand_as(products), rtol=0, atol=1e-5)
        assert torch.equal(rows, torch.stack(twins))


def test_rows_that_others_span_become_zeros() -> None:
    first = random(2, 500, seed=0)
    rows = torch.cat([first, first.sum(0, keepdim=True), random(1, 500, seed=1), torch.zeros(1, 500)])
    orthonormalize(rows)
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 1, 0, 1, 0])


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    values, threads = random(3, 100_003, seed=0), torch.get_num_threads()
    try:
        found: list[Tensor] = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found += [sum_in_blocks(values), sum_in_blocks(values[:1])]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found[::2])
    assert all(torch.equal(each, found[1]) for each in found[1::2])


def test_matrices_of_more_than_two_dims_have_the_smallest_factors() -> None:
    assert matrix_shape((64, 32, 3, 3)) == (64, 288)
    assert matrix_shape((8, 64, 5, 5)) == (512, 25)
    assert matrix_shape((3, 4)) == (3, 4)


def test_factors_of_a_bucket_lie_side_by_side() -> None:
    layout = FactorLayout((3, 5, 3), (4, 2, 4), rank=2)
    assert [(batch.members, batch.left_at, batch.right_at) for batch in layout.batches()] == [
        ((0, 2), 0, 0),
        ((1,), 12, 16),
    ]
    flat = torch.arange(layout.left_numel)
    assert torch.equal(torch.cat([part.flatten() for part in layout.left(flat)]), flat)


def test_the_next_right_factor_replaces_what_is_of_no_use() -> None:
    right = torch.tensor([[0.0, 4.0, -8.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 0.0], [float("inf"), 1.0, 1.0]])
    before = torch.arange(12.0).view(4, 3)
    assert torch.equal(next_right(right, before), torch.cat([torch.tensor([[0.0, 0.5, -1.0]]), before[1:]]))


# --- beside PyTorch's hook --------------------------------------------------------------------------------------------


@dataclass
class OneGradient:
    """What a hook of DDP is given, as far as it looks."""

    grad: Tensor

    def buffer(self) -> Tensor:
        return self.grad.view(-1)

    def gradients(self) -> list[Tensor]:
        return [self.grad]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def beside_the_hook(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Five steps of one matrix: the hook's mean and what the operators make of the same gradients and first factor."""
    size, world, me = (48, 40), dist.get_world_size(), dist.get_rank()
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, warm_start=True)
    state.iter = 2
    right = first_right("hook", torch.empty(rank, size[1]))
    state.p_memory_dict[0], state.q_memory_dict[0] = torch.empty(size[0] * rank), right.t().reshape(-1).clone()
    errors = [torch.zeros(size) for _ in range(world)]
    found: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        grads = [random(*size, seed=10 * step + each) for each in range(world)]
        ours, errors, right = low_rank_mean(grads, errors, right, world)
        future: Any = powerSGD_hook(state, OneGradient(grads[me].clone()))  # pyright: ignore[reportArgumentType]
        found.append((future.wait().view(size), ours))
    return found


@pytest.mark.parametrize("rank", [1, 3])
def test_pytorchs_hook_finds_the_same_means(ranks: Ranks, rank: int) -> None:
    """It keeps each rank's difference from the mean as error too, which cancels in every sum."""
    for theirs, ours in ranks.run(beside_the_hook, rank)[0]:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5 * theirs.abs().max().item())


class CountWork(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.launches += 1
            read = {id(value): value.nbytes for value in args if isinstance(value, Tensor)}  # a square reads once
            self.moved += sum(read.values()) + result.nbytes
        return result


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_orthogonalization_is_said_to_cost_what_it_does(rank: int) -> None:
    layout = FactorLayout((4096, 4096, 3000), (8, 8, 8), rank)
    left = random(layout.left_numel, seed=1)
    with CountWork() as counted:
        for rows in layout.left(left):
            orthonormalize(rows)
    launches, moved = orthonormalize_work(layout)
    assert launches == counted.launches
    assert moved == pytest.approx(counted.moved, rel=0.02)  # but for what has one number for each row
