"""Ranks agree on their communication before the first collective: an error or a correct wait, never a hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore, PrefixStore

import zgraph
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, fresh_ranks
from zgraph.compiler.agreement import Signature, _Board, _difference, agree, changes_of, places_of_updates
from zgraph.graph import meta


def different_models() -> str:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zgraph.shard(model)
    called = with_fx(model[rank:])  # rank 1 compiles a part of it
    try:
        called(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def test_ranks_with_different_models_get_an_error_at_once() -> None:
    with fresh_ranks(2) as ranks:
        started = time.monotonic()
        first, second = ranks.run(different_models)
        waited = time.monotonic() - started
    assert "different communication" in first and "different communication" in second
    assert "rank 0 has all_gather_into_tensor f32" in first
    assert "0.weight" in first  # by name, not only by number
    assert "Nothing has been sent" in first
    assert "the modules of 0.weight, 0.bias, name these modules: zgraph.shard(model, optional=[...])" in first
    assert waited < 60  # well below the agreement's own limit: nobody waited for it to pass


def test_advice_on_other_buckets_of_the_same_parameters_names_the_batch() -> None:
    one, two = (
        Signature("forward", ("gather 8",), ("a, b",), (0, 1)),
        Signature("forward", ("4", "4"), ("a", "b"), (0, 1)),
    )
    text = _difference(0, one, 1, two)
    assert "torch._dynamo.mark_dynamic" in text and "optional=" not in text


def recompile_alone() -> list[float]:
    """Rank 0 alone sees a new batch size and recompiles; its peers run what they have."""
    torch.manual_seed(0)
    model = zgraph.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    called = torch.compile(model, backend="zgraph", dynamic=False, options={"lowering": "fx"})
    losses: list[float] = []
    for step in range(3):
        rows = 2 + step if dist.get_rank() == 0 else 2
        loss = called(torch.ones(rows, 4)).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_a_rank_that_recompiles_alone_goes_on(ranks: Ranks) -> None:
    first, second = ranks.run(recompile_alone)
    assert len(first) == len(second) == 3


def evaluate_alone() -> str:
    """Rank 0 evaluates under no_grad, which is a graph that rank 1 never compiles."""
    model = zgraph.shard(nn.Linear(4, 4))
    called = with_fx(model, agreement_timeout_s=3)
    called(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        return "did not evaluate"
    try:
        with torch.no_grad():
            called(torch.ones(2, 4))
    except Exception as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_evaluates_alone_gets_an_error_in_time() -> None:
    with fresh_ranks(2) as ranks:
        first, second = ranks.run(evaluate_alone)
    assert second == "did not evaluate"
    assert "rank(s) 1 compiled no such graph within 3 s" in first
    assert "inference graph" in first and "agreement_timeout_s" in first


def compile_late() -> float:
    """Rank 1 arrives two seconds later; rank 0 waits, and both are right."""
    model = zgraph.shard(nn.Linear(4, 4))
    if dist.get_rank() == 1:
        time.sleep(2)
    called = with_fx(model)
    called(torch.ones(2, 4)).sum().backward()
    return model.weight.grad.full_tensor().sum().item()


def test_a_slow_rank_is_waited_for(ranks: Ranks) -> None:
    first, second = ranks.run(compile_late)
    assert first == second


class _Single:
    """A world of two in one process, to test the board alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def as_rank(self, rank: int) -> None:
        self.monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)


def _signature(*entries: str, direction: str = "forward") -> Signature:
    return Signature(direction, entries, tuple("w" for _ in entries), (0, 1))


def test_an_equal_signature_of_any_earlier_compile_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = HashStore()
    world = _Single(monkeypatch)
    world.as_rank(1)
    with pytest.raises(zgraph.AgreementError, match=r"within 0\.05 s"):
        agree([_signature("a", "b")], 0.05, store)
    world.as_rank(0)
    agree([_signature("a", "b")], 0.05, store)


def test_the_first_differing_entry_of_each_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = HashStore()
    world = _Single(monkeypatch)
    _Board(PrefixStore("zgraph/agreement", store), 1).wait_with(_signature("gather x", "gather z", "gather y"))
    world.as_rank(0)
    with pytest.raises(zgraph.AgreementError, match=r"collective 1 of the forward.*0 has gather y.*1 has gather z"):
        agree([_signature("gather x", "gather y")], 60, store)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("updates 0 of 2 on the host", r'0 has none.*update="host"'),
        ("changes by aten.mul(0.5), 2 times", r"rank 0 by nothing more, rank 1 by aten\.mul\(0\.5\), 2 times"),
    ],
)
def test_differing_non_collectives_have_their_own_advice(
    monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    store: Any = HashStore()
    world = _Single(monkeypatch)
    _Board(PrefixStore("zgraph/agreement", store), 1).wait_with(_signature("gather x", line))
    world.as_rank(0)
    with pytest.raises(zgraph.AgreementError, match=expected):
        agree([_signature("gather x")], 60, store)


def test_a_difference_ends_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's word stays, so that it learns of the difference, and is none for what this rank compiles later."""
    store: Any = HashStore()
    world = _Single(monkeypatch)
    _Board(PrefixStore("zgraph/agreement", store), 1).wait_with(_signature("gather z"))
    world.as_rank(0)
    for expected in ("the first difference", "compiled no such graph"):
        with pytest.raises(zgraph.AgreementError, match=expected):
            agree([_signature("gather x")], 0.05, store)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_where_the_updates_of_a_gpu_run_is_agreed_upon(device: str) -> None:
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    with FakeTensorMode():
        shard.meta["val"] = torch.empty(2, device=device)
    there, _ = (graph.call_function(torch.ops.aten._fused_adamw_.default, ([shard],)) for _ in range(2))
    assert places_of_updates(graph) == []
    meta.set_beside(there, 0)
    assert places_of_updates(graph) == ["updates 0 of 2 on the host"] * (device == "cuda")


def test_a_rank_that_has_given_up_waiting_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = HashStore()
    world = _Single(monkeypatch)
    world.as_rank(1)
    with pytest.raises(zgraph.AgreementError, match="compiled no such graph"):
        agree([_signature("gather z")], 0.05, store)
    world.as_rank(0)
    with pytest.raises(zgraph.AgreementError, match="compiled no such graph"):
        agree([_signature("gather y")], 0.05, store)


def test_names_do_not_count_but_order_does() -> None:
    first = Signature("forward", ("a", "b"), ("h.0", "h.1"), (0, 1))
    other_block = Signature("forward", ("a", "b"), ("h.4", "h.5"), (0, 1))
    assert first.digest == other_block.digest
    assert first.digest != Signature("forward", ("b", "a"), ("h.0", "h.1"), (0, 1)).digest
    assert Signature.from_json(first.to_json()) == first


def test_a_number_in_a_tensor_is_one_of_the_constants_of_a_change() -> None:
    def changes(number: float) -> list[str]:
        holder = nn.Module()
        holder.register_buffer("number", torch.tensor(number))
        graph = fx.Graph()
        weight = graph.placeholder("weight")
        meta.set_kept(weight, "parameters")
        graph.output(graph.call_function(torch.ops.aten.mul_.Tensor, (weight, graph.get_attr("number"))))
        return changes_of(fx.GraphModule(holder, graph).graph)

    assert changes(0.5) == changes(0.5) != changes(0.25)
