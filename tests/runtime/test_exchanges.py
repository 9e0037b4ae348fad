"""Exchanges carry the parameters they are for: ranks that go different ways are told so, on all ranks, in seconds."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zgraph
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks, fresh_ranks
from zgraph.passes import LowerReductions, presets
from zgraph.runtime.exchanges import watch
from zgraph.runtime.exchanges.identity import Exchanges, tag_of
from zgraph.runtime.exchanges.watch import Watch, announcing, watch_of
from zgraph.sharding.scope import state_of
from zgraph.torch_compat.groups import default_store

WIDTH = 4


class Layers(nn.Module):
    """Equal layers, of which a call names those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
        for number in numbers:
            x = torch.tanh(self.layers[number](x))
        return x.sum()


def layers(stage: int, mode: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = zgraph.shard(Layers(), zero_stage=stage)
    return model, with_fx(model) if mode == "fx" else model, torch.optim.SGD(model.parameters(), 0.1)


def train(call: Any, optimizer: torch.optim.Optimizer, numbers: tuple[int, ...]) -> None:
    call(torch.ones(2, WIDTH), numbers).backward()
    optimizer.step()
    optimizer.zero_grad()


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except zgraph.AgreementError as error:
        return str(error)
    return "nothing was raised"


def other_layers(stage: int, mode: str, ways: tuple[tuple[int, ...], ...]) -> tuple[str, bool]:
    """Both ways alike on all ranks, then each rank its own; then again alike, with the same model."""
    _, call, optimizer = layers(stage, mode)
    for numbers in ways:
        train(call, optimizer, numbers)
    text = refusal(lambda: train(call, optimizer, ways[dist.get_rank()]))
    optimizer.zero_grad()
    train(call, optimizer, ways[0])
    return text, True


@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        *((stage, "eager") for stage in range(4)),
        (2, "fx"),
        # Three ways are compiled in each; what is exchanged at which stage is seen without a compiler.
        (3, "fx"),
        *long((0, "fx"), (1, "fx")),
    ],
)
def test_ranks_running_different_equal_shaped_layers_are_told(ranks: Ranks, stage: int, mode: str) -> None:
    for text, goes_on in ranks.run(other_layers, stage, mode, ((0, 1), (0, 2), (0, 3))):
        assert goes_on
        assert "do not do the same" in text and "layers.1." in text and "layers.2." in text
        assert "zgraph.shard(model, units=[...])" in text


@pytest.mark.parametrize(
    ("stage", "mode"),
    [(0, "eager"), (3, "eager"), (3, "fx"), (0, "fx")],  # its buckets are those of stage 3's reductions
)
def test_a_rank_with_a_layer_less_is_told(ranks: Ranks, stage: int, mode: str) -> None:
    """Buckets then differ in size, which ends a process of gloo's."""
    for text, goes_on in ranks.run(other_layers, stage, mode, ((0, 1, 2), (0, 1), (0, 1))):
        assert goes_on and "layers." in text


def own_reductions(algorithm: Any, stage: int) -> tuple[Any, ...]:
    """A pipeline in which gloo reduces by itself; the model, as called."""
    passes = [
        LowerReductions(algorithm=algorithm) if isinstance(one, LowerReductions) else one for one in presets.default()
    ]
    model = zgraph.shard(Layers(), zero_stage=stage)
    call = with_fx(model, passes=zgraph.PassList(passes))
    return model, call, torch.optim.SGD(model.parameters(), 0.1)


def other_layers_in_own_reductions(algorithm: str, stage: int) -> str:
    _, call, optimizer = own_reductions(algorithm, stage)
    for numbers in ((0, 1), (0, 2)):
        train(call, optimizer, numbers)
    return refusal(lambda: train(call, optimizer, ((0, 1), (0, 2))[dist.get_rank()]))


@pytest.mark.parametrize(("algorithm", "stage"), [("all_reduce", 0), ("reduce_scatter", 2)])
def test_reductions_of_the_backend_itself_have_an_identity(ranks: Ranks, algorithm: str, stage: int) -> None:
    for text in ranks.run(other_layers_in_own_reductions, algorithm, stage):
        assert "do not do the same" in text and "layers.1." in text and "layers.2." in text


def same_means(algorithm: str, stage: int, window: bool) -> None:
    """Gradients of the backend's own reductions equal those of exchanges: the sum of two numbers has no order."""
    found: list[dict[str, torch.Tensor]] = []
    for chosen in ("all_to_all", algorithm):
        torch.manual_seed(0)
        model, call, _ = own_reductions(chosen, stage)
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        if window:
            with zgraph.no_sync(model):
                call(x + 1, (3, 0)).backward()
        call(x, (0, 1, 2)).backward()
        found.append({name: one.grad.to_local() for name, one in model.named_parameters() if one.grad is not None})
    expected, given = found
    assert expected.keys() == given.keys() and len(given) == (8 if window else 6)
    for name, grad in expected.items():
        assert torch.equal(given[name], grad), name
        assert grad.any(), name


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("algorithm", "stage"), [("all_reduce", 0), ("reduce_scatter", 2)])
def test_reductions_of_the_backend_itself_bring_the_same_means(
    ranks: Ranks, algorithm: str, stage: int, window: bool
) -> None:
    ranks.run(same_means, algorithm, stage, window)


def one_steps_earlier() -> str:
    """Rank 1 has no reduction for one layer, and asks its peers at the end of the step how many they had."""
    _, call, optimizer = layers(0, "eager")
    return refusal(lambda: train(call, optimizer, (0, 1) if dist.get_rank() == 0 else (1,)))


def test_a_step_ends_on_all_ranks_after_as_many_exchanges(ranks: Ranks) -> None:
    for text in ranks.run(one_steps_earlier):
        assert "waits for reduction of layers.0." in text and "for optimizer.step()" in text


def one_evaluates() -> str:
    """Rank 0 evaluates, which gathers, while the others train on."""
    model, call, optimizer = layers(3, "eager")
    train(call, optimizer, (0, 1))

    def differently() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, WIDTH), (2,))
        train(call, optimizer, (0, 1))

    return refusal(differently)


def test_rank_evaluating_alone_is_told_what_others_do(ranks: Ranks) -> None:
    for text in ranks.run(one_evaluates):
        assert "all_gather of layers.2.weight" in text and "all_gather of layers.0." in text


def one_compiles() -> str:
    """Rank 0 meets a way that it has not compiled, while the others run one that they have."""
    _, call, optimizer = layers(3, "fx")
    train(call, optimizer, (0, 1))
    return refusal(lambda: train(call, optimizer, (2, 1, 0) if dist.get_rank() == 0 else (0, 1)))


def test_rank_compiling_something_else_does_not_block_peers() -> None:
    with fresh_ranks(2) as ranks:
        for text in ranks.run(one_compiles):
            assert "rank 0 compiles a forward graph" in text and "rank 1 waits for all_gather of layers.0." in text


def slow_ranks() -> float:
    """Each rank in turn is slower than a watch is patient: nobody is told anything."""
    _, call, optimizer = layers(3, "eager")
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(2.5)
        train(call, optimizer, (0, 1, 2))
    return call.layers[0].weight.full_tensor().sum().item()


def test_a_slow_rank_is_waited_for(ranks: Ranks) -> None:
    first, *others = ranks.run(slow_ranks)
    assert others == [first] * (ranks.world - 1)


def fail_alike() -> float:
    """All ranks meet the same error, catch it, and go on; one idles for longer than a watch is patient."""
    model, call, optimizer = layers(3, "eager")
    train(call, optimizer, (0, 1))
    first: Any = state_of(model.layers[0])  # pyright: ignore[reportIndexIssue, reportArgumentType]
    with contextlib.suppress(zgraph.ZgraphError), announcing([first.by_attribute["weight"].handle]):
        raise zgraph.ZgraphError("zgraph: all ranks meet this")
    if dist.get_rank() == 0:
        time.sleep(2.5)
    train(call, optimizer, (0, 1))
    return call.layers[0].weight.full_tensor().sum().item()


def test_ranks_that_fail_alike_go_on(ranks: Ranks) -> None:
    first, *others = ranks.run(fail_alike)
    assert others == [first] * (ranks.world - 1)


def watch_that_fails() -> list[str]:
    _, call, optimizer = layers(3, "eager")
    train(call, optimizer, (0,))
    watch = watch_of(default_store())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.look = lambda: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
        deadline = time.monotonic() + 20
        while not caught and time.monotonic() < deadline:
            time.sleep(0.05)
    return [str(one.message) for one in caught]


def test_a_watch_does_not_end_silently() -> None:
    with fresh_ranks(2) as ranks:
        for texts in ranks.run(watch_that_fails):
            (text,) = texts
            assert "watch over exchanges has ended: division by zero" in text


def copies_apart() -> str:
    """A copy, such as an average of the weights, has names and shapes of its model; rank 1 takes one for the other."""
    model, _, _ = layers(3, "eager")
    other = copy.deepcopy(model)
    called = (model, other)[dist.get_rank() % 2]
    return refusal(lambda: called(torch.ones(2, WIDTH), (0,)).sum())


def test_a_copy_of_a_model_is_another_model(ranks: Ranks) -> None:
    assert all("do not do the same" in text for text in ranks.run(copies_apart))


def test_tags_differ_by_key_place_and_size() -> None:
    def exchanges(model: int) -> Exchanges:
        return Exchanges("dp", dist.HashStore(), model)

    first = exchanges(3)
    keys = [first.next(7), first.next(7), exchanges(3).next(8), exchanges(4).next(7)]
    tags = {tag_of(key, place, nbytes) for key in keys for place in (0, 1) for nbytes in (16, 32)}
    assert len(tags) == 16 and all(1 << 30 <= tag < 1 << 31 for tag in tags)
    assert exchanges(3).next(7) == keys[0]


@pytest.mark.parametrize(("sizes", "has_started"), [([8, 8], True), ([4, 4], True), ([8, 4], False), ([2, 2], False)])
def test_each_message_of_a_grouped_gather_has_been_started(sizes: list[int], has_started: bool) -> None:
    """They share a key, and differ in size: none hides another."""
    store = dist.HashStore()
    watch = Watch(store, 0)
    for nbytes in (8, 4):
        watch.started.append((7, 0, [nbytes] * 2, [nbytes] * 2))
    waits = {"key": [7, 0], "ranks": [0, 1], "messages": {"0": sizes}}
    dist.PrefixStore("zgraph/watch", store).set("waits/1", json.dumps(waits))
    assert (watch.stuck(1) is None) == has_started


@pytest.mark.parametrize("has_started", [True, False])
def test_only_ranks_that_wait_for_each_other_are_told(has_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for A, rank 1 for B, which rank 0 has not started; if rank 1 has started A, rank 2 is only slow."""
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    store, told = dist.HashStore(), set[tuple[int, int]]()
    with fake_world(3):
        watches = [Watch(store, rank) for rank in (0, 1)]
        for rank, started in ((0, "A"), (1, "AB" if has_started else "B")):
            monkeypatch.setattr(watches[rank], "tell", lambda peer, found, text, rank=rank: told.add((rank, peer)))
            watches[rank].started.extend((ord(name), 0, [8] * 3, [8] * 3) for name in started)
            about: Any = SimpleNamespace(exchanges=SimpleNamespace(began=1), names=[])
            exchange: Any = SimpleNamespace(key=[ord(started[-1]), 0], about=about, group=dist.group.WORLD)
            exchange.sends = exchange.receives = [8] * 3
            watches[rank].waits = exchange
        for _ in range(3):
            for each in watches:
                each.look()
        for each in watches:
            each.waits = None
    assert told == (set() if has_started else {(0, 1), (1, 0)})


# --- what else ranks have to do alike ---------------------------------------------------------------------------------


def own_learning_rate(stage: int, mode: str, tensors: bool) -> str:
    """Each rank lowers its rate by its own loss, as schedulers do that look at one; then all take one again."""
    model, call, optimizer = layers(stage, mode)
    kind = torch.tensor if tensors else float
    optimizer.param_groups[0]["lr"] = kind(0.1)

    def plain() -> None:
        train(call, optimizer, (0, 1))

    step = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(plain) if mode == "step" else plain
    step()
    optimizer.param_groups[0]["lr"] = kind(0.1 + 0.1 * dist.get_rank())
    parameters: list[Any] = list(model.parameters())
    before = [parameter.to_local().clone() for parameter in parameters]
    text = refusal(step)
    assert all(
        torch.equal(one.to_local(), old) for one, old in zip(parameters, before, strict=True)
    )  # none has stepped
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = kind(0.05)
    step()
    return text


@pytest.mark.parametrize(
    ("stage", "mode", "tensors"),
    [
        *((0, "eager", False), (3, "eager", True), (2, "step", False), (1, "step", True)),
        (0, "fx", False),  # which steps as without a compiler
    ],
)
def test_ranks_step_with_the_same_options(ranks: Ranks, stage: int, mode: str, tensors: bool) -> None:
    for text in ranks.run(own_learning_rate, stage, mode, tensors):
        assert "=0.1" in text and "=0.2" in text


def saved_on_one_rank(stage: int, folder: str, what: str) -> str:
    """Only rank 0 saves, while the others train on."""
    model, call, optimizer = layers(stage, "eager")
    train(call, optimizer, (0, 1))

    def on_one() -> None:
        if dist.get_rank() == 0 and what == "state dict":
            zgraph.full_state_dict(model)
        elif dist.get_rank() == 0:
            zgraph.save_checkpoint(folder, model, optimizer, step=1)
        train(call, optimizer, (0, 1))

    return refusal(on_one)


@pytest.mark.parametrize("what", ["state dict", "checkpoint"])
def test_a_rank_that_saves_alone_is_told(ranks: Ranks, what: str, tmp_path: Path) -> None:
    for text in ranks.run(saved_on_one_rank, 3, str(tmp_path), what):
        assert "rank 0 waits for zgraph." in text and "rank 1 for all_gather of layers.0." in text


def test_replicas_are_saved_by_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing travels for it."""
    assert ranks.run(saved_on_one_rank, 0, str(tmp_path), "state dict") == ["nothing was raised"] * 2


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("a, b and 1 more", ["a", "b", "c"]), ("a, b and 1 more", ["a", "b", "d"]), "differ first in c on rank 0, d"),
        (("a and 1 more", ["a", "b"]), ("a and 1 more", ["a", "b"]), "after another number of exchanges"),
        (("gather of a", ["a"]), ("gather of a, b", ["a", "b"]), "rank 0 may run outside of graphs"),
        (("gather of a", ["a"]), ("gather of b", ["b"]), ""),
    ],
)
def test_an_error_says_what_its_texts_leave_out(first: Any, second: Any, expected: str) -> None:
    found = watch._difference({1: second, 0: first})
    assert expected in found and bool(found) == bool(expected)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def one_rank_is_elsewhere() -> list[str]:
    """What is logged while rank 1 sits in a collective of the script until rank 0 has logged something."""
    model, lines = zgraph.shard(nn.Linear(4, 4)), Lines()
    logging.getLogger("zgraph").addHandler(lines)
    usual, watch.SILENCE_S = watch.SILENCE_S, 0.0
    store = dist.PrefixStore("elsewhere", default_store())
    try:
        if dist.get_rank() == 0:
            threading.Thread(target=_tell_when_logged, args=(lines, store), daemon=True).start()
            model(torch.ones(1, 4))
        else:
            store.wait(["logged"])
            model(torch.ones(1, 4))
    finally:
        watch.SILENCE_S = usual
        logging.getLogger("zgraph").removeHandler(lines)
    return lines.texts


def _tell_when_logged(lines: Lines, store: Any) -> None:
    while not lines.texts:
        time.sleep(0.01)
    store.set("logged", "1")


def test_a_rank_that_waits_long_says_for_what_and_for_whom() -> None:
    with fresh_ranks(2) as ranks:  # a process says it once
        (text,), silent = ranks.run(one_rank_is_elsewhere)
    assert "waited 0 s for all_gather of weight; rank(s) 1 wait for no exchange" in text and not silent
