"""Places of memory: one of the user's, from which a step trains as from those of zgraph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import zgraph
from tests.support.graphs import fake_world
from tests.support.lazy_streams import LazyLanes
from tests.support.ranks import Ranks, worlds
from tests.support.resting import HOST
from tests.support.shared_memory import LANE, SharedFiles, SharedMemory
from tests.support.step_scripts import LR, Script, Setting, compare
from tests.support.whole_tensors import whole
from zgraph.sharding.scope import state_of
from zgraph.tiers.copy_lanes import lanes_of
from zgraph.tiers.devices import is_gpu
from zgraph.tiers.thread_lanes import ThreadLanes
from zgraph.tiers.tier import DEVICE, Disk, Store, Transit, is_offloaded, listed
from zgraph.tiers.tier import HOST as ON_HOST

ALL = zgraph.Offload(params=SharedMemory(), optimizer=SharedMemory())
STATE = zgraph.Offload(optimizer=SharedMemory())
BESIDE_HOST = zgraph.Offload(params="host", optimizer=SharedMemory())
CPU = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"))


def fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(Script, fused, at_rest=ALL),
        Setting(Script, fused, at_rest=STATE, stage=1, target=CPU),
        Setting(Script, fused, at_rest=BESIDE_HOST, stage=2),
        Setting(Script, fused, at_rest=ALL, target=CPU, activations=True),
        Setting(Script, fused, at_rest=ALL, stage=0, preset={"compression": zgraph.passes.LoCo()}),
        Setting(Script, fused, at_rest=ALL, close=True),
    ],
)
def test_a_step_trains_from_a_tier_of_the_user(ranks: Ranks, setting: Setting) -> None:
    ranks.run(compare, setting)


def summed(model: Any, optimizer: optim.Optimizer) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def explained() -> tuple[str, int, set[str]]:
    """The text, copies of the tier's lane, and names of ledger lines, after two steps."""
    script, report = Script(Setting(Script, fused, at_rest=ALL)), zgraph.Report()
    pipeline = zgraph.PassList(zgraph.passes.presets.planned(), target=CPU)
    options = {"lowering": "fx", "report": report, "passes": pipeline}
    step: Any = zgraph.training_step(script.model, script.opt, options=options)(script.step)
    for number in range(2):
        step(*script.arguments(number))
    state = state_of(script.model)
    assert state is not None and state.scope.resting is not None
    store = state.scope.resting.stores[SharedMemory()]
    assert isinstance(store, SharedFiles)
    return str(zgraph.explain(script.model)), store.copies, {line.space for line in report.graphs[-1].ledger}


@worlds(2)
def test_reports_and_ledgers_name_a_tier_of_the_user(ranks: Ranks) -> None:
    for text, copies, lines in ranks.run(explained):
        assert copies > 0 and lines == {"device", "host", "disk", "shared memory"}
        assert "memory of a rank, shared memory: parameters " in text and f"{LANE}" in text


def test_tiers_answer_what_graphs_ask() -> None:
    assert [is_offloaded(tier) for tier in (None, DEVICE, ON_HOST, Disk())] == [False, False, True, True]
    assert listed(["shared memory", "host"]) == ("device", "host", "disk", "shared memory")
    assert Transit(ON_HOST, to_device=True).lane != Transit(ON_HOST, to_device=False).lane
    assert ALL.tiers == (SharedMemory(), ON_HOST) and HOST.tiers == (ON_HOST,)
    with pytest.raises(ValueError, match="tier device has no lane"):
        _ = Transit(DEVICE, to_device=True).lane
    with pytest.raises(NotImplementedError, match=r"Tier\.open: return the store of this rank"):
        DEVICE.open(None, 0)  # pyright: ignore[reportArgumentType]


def planned_on(backend: str) -> Any:
    return zgraph.plan(
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))),
        world_size=4,
        batch=lambda: (torch.zeros(8, 64),),
        hardware=replace(zgraph.Hardware.preset("h100"), backend=backend),
        offload=HOST,
        optimizer_fn=lambda model: optim.AdamW(model.parameters(), fused=True),
        step_fn=summed,
    )


def test_another_gpu_is_one_row() -> None:
    """Intel's, as far as CPUs can tell: the ledger with pinned memory, and copies on lanes, are those of CUDA."""
    xpu, cuda, cpu = map(planned_on, ("xccl", "nccl", "gloo"))
    assert xpu.ledger == cuda.ledger != cpu.ledger
    assert [one.lane for one in xpu.compiled.graphs[-1].copies] == [one.lane for one in cuda.compiled.graphs[-1].copies]
    assert [is_gpu(kind) for kind in ("xpu", "cuda", "cpu", "meta")] == [True, True, False, False]
    assert isinstance(lanes_of(torch.device("cpu")), ThreadLanes)


def two_models() -> None:
    """The second one is made while the first trains, and dies before it ends."""
    first = Script(Setting(Script, fused, at_rest=ALL))
    step: Any = zgraph.training_step(first.model, first.opt, options={"lowering": "fx"})(first.step)
    plain = Script(Setting(Script, fused))
    for number in range(4):
        if number == 1:
            second = Script(Setting(Script, fused, at_rest=ALL))
            other: Any = zgraph.training_step(second.model, second.opt, options={"lowering": "fx"})(second.step)
            other(*second.arguments(0))
            del second, other
        step(*first.arguments(number))
        plain.step(*plain.arguments(number))
    found, expected = first.left(), plain.left()
    for name, value in expected.items():
        assert value is None or torch.equal(whole(found[name]), whole(value)), name


@worlds(2)
def test_models_with_equal_tiers_share_the_memory(ranks: Ranks) -> None:
    ranks.run(two_models)


def test_a_gpu_waits_for_stores_of_the_user() -> None:
    lanes, store = LazyLanes(), SharedFiles()
    lanes.stores.by_key["shared memory"] = store
    source, kept = torch.ones(9), store.empty(torch.ones(9), "weight")
    lanes.store(source, kept)
    lanes.drain()
    assert kept.eq(1.0).all() and store.copies == 1


class Narrow(SharedFiles):
    def empty(self, like: torch.Tensor, name: str) -> torch.Tensor:
        return super().empty(like.bfloat16(), name)


@dataclass(frozen=True, kw_only=True)
class NarrowMemory(SharedMemory):
    def open(self, lanes: Any, rank: int) -> Store:
        return Narrow()


def rounded() -> str:
    script = Script(Setting(Script, fused, at_rest=zgraph.Offload(optimizer=NarrowMemory(name="narrow"))))
    try:
        script.step(*script.arguments(0))
    except zgraph.ZgraphError as error:
        return str(error)
    return "not refused"


@worlds(2)
def test_a_tier_that_would_round_is_refused(ranks: Ranks) -> None:
    for text in ranks.run(rounded):
        assert "Narrow.empty() returned" in text and "of torch.float32" in text


class Empty(SharedFiles):
    def empty(self, like: torch.Tensor, name: str) -> Any:
        return None


class Unstarted(SharedFiles):
    def start_in(self, kept: torch.Tensor, lanes: Any) -> Any:
        return None


class Unreturned(SharedFiles):
    def start_in(self, kept: torch.Tensor, lanes: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)


class Unshaped(SharedFiles):
    def start_out(self, source: torch.Tensor, kept: torch.Tensor, lanes: Any) -> Any:
        return SimpleNamespace(wait=lambda: kept.flatten())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Empty, r"Empty\.empty\(\) returned None for new state; return a tensor like the one that is given, \(3, 2\)"),
        (Unstarted, r"Unstarted\.start_in\(\) returned None; return an object with wait\(\)"),
        (Unreturned, r"that Unreturned\.start_in\(\) started returned None from wait\(\); return the copied tensor"),
        (Unshaped, r"that Unshaped\.start_out\(\) started returned \(6,\) of torch.float32 from wait\(\); .* \(3, 2\)"),
    ],
)
def test_stores_that_return_no_copy_are_refused(kind: type[SharedFiles], message: str) -> None:
    for lanes in (ThreadLanes(), LazyLanes()):
        store = kind()
        lanes.stores.by_key["shared memory"] = store
        with pytest.raises(zgraph.ZgraphError, match=rf"zgraph\.Tier: .*{message}"):
            lanes.reload(lanes.spill(torch.ones(3, 2), "shared memory").wait()).wait()


class Forgetful(SharedFiles):
    def holds(self, tensor: torch.Tensor) -> bool:
        return False


class Claiming(SharedFiles):
    """Never forgets an address, and all memory has one that it knows."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("lanes", [ThreadLanes(), LazyLanes()], ids=["CPU", "GPU"])
def test_stores_that_take_memory_for_another_are_refused(lanes: Any) -> None:
    """A reload would read the host's memory on the lanes of another tier, before the offload has ended."""
    store, other = Forgetful(), Claiming()  # which lanes do not keep alive
    lanes.stores.by_key["shared memory"] = store
    with pytest.raises(zgraph.ZgraphError, match=r"Forgetful\.holds\(\) returned False for new state, which its empty"):
        lanes.spill(torch.ones(3), "shared memory")
    lanes.stores.by_key["claims all"] = other
    with pytest.raises(zgraph.ZgraphError, match=r"Claiming\.holds\(\) returned True for new memory of an activation"):
        lanes.offload(torch.ones(3))
    del store, other
    lanes.offload(torch.ones(3)).wait()


def test_shared_memory_forgets_tensors_that_have_died() -> None:
    store = SharedFiles()
    kept = store.empty(torch.ones(9), "weight")
    view = kept[1:]
    del kept
    assert store.holds(view)
    del view
    assert not store.begins


@dataclass(frozen=True, kw_only=True)
class OpensNothing(SharedMemory):
    def open(self, lanes: Any, rank: int) -> Any:
        return None


def test_what_is_no_tier_is_refused() -> None:
    with pytest.raises(ValueError, match=r"params=SharedMemory is a class; write params=SharedMemory\(\), an instance"):
        zgraph.Offload(params=SharedMemory)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"optimizer=\{\} is unknown"):
        zgraph.Offload(optimizer={})  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"lacks a lane for its copies; give Tier both: to_device = from_device = zgraph"
    ):
        zgraph.Offload(params=zgraph.Tier(name="mine"))
    lanes = ThreadLanes()
    with pytest.raises(zgraph.ZgraphError, match=r"OpensNothing\.open\(\) returned a NoneType without holds, empty, "):
        lanes.stores.open(OpensNothing(), lanes, 0)
    with fake_world(2):
        for given in ("host", zgraph.Offload):
            with pytest.raises(ValueError, match=r"zgraph\.shard: offload=.* write offload=zgraph\.Offload\(params="):
                zgraph.shard(nn.Linear(2, 2), offload=given)  # pyright: ignore[reportArgumentType]


def test_another_tier_of_the_same_name_is_refused() -> None:
    lanes = ThreadLanes()
    store = lanes.stores.open(SharedMemory(), lanes, 0)
    assert lanes.stores.open(SharedMemory(), lanes, 0) is store
    with pytest.raises(ValueError, match="have the same name; give each a name of its own"):
        lanes.stores.open(NarrowMemory(), lanes, 0)
    del store
    assert isinstance(lanes.stores.open(NarrowMemory(), lanes, 0), Narrow)
