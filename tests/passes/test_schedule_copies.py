"""ScheduleCopies: copies of what rests elsewhere, and updates there, placed by costs: never worse than by rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zgraph
from tests.support.budget import long
from tests.support.graphs import KeepEach, fake_world, mlp
from tests.support.hash_seeds import HashSeeds
from tests.support.memory.allocations import Count, counted, steady_rise
from tests.support.models import Language
from tests.support.ranks import Ranks, worlds
from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Link
from zgraph.analysis.liveness import curve_of
from zgraph.analysis.storages import storages_of
from zgraph.graph import edits, meta, nodes
from zgraph.graph.text import graph_text
from zgraph.passes import BucketCollectives, ScheduleCopies, StreamStates, presets
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline
from zgraph.tiers.lanes import DEVICE_TO_HOST, DISK, HOST_TO_DEVICE, HOST_UPDATES
from zgraph.torch_compat.operators import written_arguments

CPU = zgraph.Hardware.preset("cpu")
HOST = zgraph.Offload(params="host", optimizer="host")
STATE = zgraph.Offload(optimizer="host", update="device")
OFF = zgraph.Offload(params="disk", optimizer="disk", path="nobody makes this folder")
MIXED = zgraph.Offload(params="host", optimizer="disk", path="nobody makes this folder")


def machine(copies: float, updates: float = 20_000.0) -> zgraph.Hardware:
    """A CPU with links to host and disk of so many bytes per microsecond."""
    link = Link(latency_us=5.0, bytes_per_us=copies)
    links: dict[str, Any] = {"host_to_device": link, "device_to_host": link, "disk": link}
    return replace(CPU, host_memory_bytes_per_us=updates, flops_per_us={torch.float32: 50_000.0}, **links)


@dataclass(frozen=True)
class Outcome:
    """Of one placing: its run on the simulator, and bytes at the peak of the device."""

    timeline: Timeline
    bytes: int

    @property
    def us(self) -> float:
        return self.timeline.step_us


@dataclass(frozen=True)
class Compared(zgraph.GraphPass):
    """Scores the order by rules, then places copies by costs within the peak of the rules, and scores that.

    Attributes:
        found: by rules, by costs.
        graphs: as planned.
    """

    found: list[Outcome] = field(default_factory=list[Outcome])
    graphs: list[fx.GraphModule] = field(default_factory=list[fx.GraphModule])
    name = "compared"

    @property
    def needs_target(self) -> bool:
        return True

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        if ctx.direction != "step":
            return False
        self.found.append(outcome(gm, ctx))
        changed = ScheduleCopies().run(gm, ctx)  # without a budget, which is then that peak
        self.found.append(outcome(gm, ctx))
        self.graphs.append(edits.copy_of(gm))
        return changed


def outcome(gm: fx.GraphModule, ctx: zgraph.PassContext) -> Outcome:
    assert ctx.cost_of is not None
    order = list(gm.graph.nodes)
    costs = {node: ctx.cost_of(node) for node in order if node.op == "call_function"}
    peak = curve_of(order, storages_of(order, agreed=True)).peak_bytes
    return Outcome(simulate(order, costs, ctx.sharing), peak)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compared(
    offload: zgraph.Offload,
    hardware: zgraph.Hardware,
    stream: StreamStates,
    world: int = 2,
    layers: int = 2,
    width: int = 32,
) -> Compared:
    """Both placings of the step of a small GPT."""
    passes: list[zgraph.GraphPass] = [
        stream if isinstance(one, StreamStates) else one for one in presets.planned(bucket_bytes=20_000)
    ]
    judge = Compared()
    zgraph.plan(
        lambda: Language(layers=layers, width=width),
        world_size=world,
        batch=lambda: (torch.zeros(4, 16, dtype=torch.long),),
        hardware=hardware,
        passes=zgraph.PassList([*passes[:-1], judge], target=zgraph.Target(hardware=hardware), replay_all=True),
        offload=offload,
        optimizer_fn=adamw,
        step_fn=stepped,
    )
    return judge


AT_REST, STREAMED = StreamStates(), StreamStates(updates="streamed")
PLACED = {
    "host, updates beside": (HOST, 2000.0, AT_REST),
    "host, streamed": (HOST, 500.0, STREAMED),
    "host, slow link": (HOST, 50.0, STREAMED),
    "disk": (OFF, 500.0, AT_REST),
    "slow disk": (OFF, 50.0, AT_REST),
    "both": (MIXED, 500.0, AT_REST),
}


OTHERS = [name for name in PLACED if name != "host, updates beside"]  # differ from it in figures


@pytest.mark.parametrize("world", [2, *long(1)])  # where nothing is gathered or reduced
@pytest.mark.parametrize("name", ["host, updates beside", *OTHERS[::2], *long(*OTHERS[1::2])])
def test_at_the_same_peak_costs_are_never_slower_than_rules(name: str, world: int) -> None:
    offload, rate, stream = PLACED[name]
    judge = compared(offload, machine(rate), stream, world)
    by_rules, by_costs = judge.found
    assert by_costs.us <= by_rules.us * (1 + 1e-9)
    assert by_costs.bytes <= by_rules.bytes
    check_order(judge.graphs[0].graph)


def test_costs_hide_copies_that_rules_start_too_late() -> None:
    """One use ahead is not enough for a slow link."""
    judges = [compared(HOST, machine(500.0), STREAMED), compared(OFF, machine(500.0), AT_REST)]
    assert sum(judge.found[1].us for judge in judges) < 0.99 * sum(judge.found[0].us for judge in judges)


def test_early_copies_leave_room_for_what_an_update_makes() -> None:
    """An update's gradients in fp32 meet copies that wait for it: a search that did not expect them is repeated."""
    small = replace(STREAMED, update_bytes=80 * 1024)
    by_rules, by_costs = compared(STATE, machine(500.0), small, world=1, layers=4, width=64).found
    assert by_costs.us < 0.96 * by_rules.us
    assert by_costs.bytes <= by_rules.bytes


def test_copies_in_both_directions_share_what_the_link_to_the_host_gives() -> None:
    small = replace(STREAMED, update_bytes=20 * 1024)
    free, shared = (
        compared(STATE, replace(machine(500.0), host_gain_both_ways=gain), small, world=1).found[1].timeline
        for gain in (2.0, 1.0)
    )
    one_by_one_us = free.busy_us[HOST_TO_DEVICE] + free.busy_us[DEVICE_TO_HOST]
    assert free.step_us < one_by_one_us <= shared.step_us


def check_order(graph: fx.Graph) -> None:
    """Each copy is waited for once, behind its start; nobody reads what is being stored to or updated."""
    under_way: dict[fx.Node, fx.Node] = {}  # what must not be touched, with why
    updates: dict[int | None, list[fx.Node]] = {}
    waited: list[fx.Node] = []
    for node in graph.nodes:
        if nodes.is_update_wait(node):
            for written in updates.pop(meta.beside(node)):
                del under_way[written]
            continue
        if nodes.is_copy_wait(node):
            start = nodes.start_of(node)
            waited.append(start)
            under_way = {kept: why for kept, why in under_way.items() if why is not start}
            continue
        if node.op != "call_function":
            continue
        assert not any(source in under_way for source in node.all_input_nodes), node.name
        if nodes.is_store(node):
            under_way[node.all_input_nodes[1]] = node
        elif meta.beside(node) is not None:
            updates[meta.beside(node)] = list(dict.fromkeys(written_arguments(node)))
            under_way |= dict.fromkeys(updates[meta.beside(node)], node)
    assert not under_way and len(waited) == len(set(waited))
    assert set(waited) == set(nodes.call_functions(graph, nodes.is_copy_start))


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offload", "out"), [(OFF, DISK), (HOST, DEVICE_TO_HOST)])
def test_copies_cost_bytes_of_the_rank_with_most_rows(offload: zgraph.Offload, out: Any) -> None:
    judge = compared(offload, machine(100.0), STREAMED, world=3, layers=1)
    graph = judge.graphs[0].graph
    costs = CostModel(machine(100.0))
    stores = list(nodes.call_functions(graph, nodes.is_store))
    assert stores
    for store in stores:
        kept = store.all_input_nodes[1]
        assert costs.cost(store).lane == out
        assert costs.cost(store).moved_bytes == meta.longest_bytes(kept) or meta.tensor_value(kept).ndim == 0
        assert costs.cost(store).us == pytest.approx(5.0 + costs.cost(store).moved_bytes / 100.0)
    for reload in nodes.call_functions(graph, nodes.is_reload):
        assert costs.cost(reload).lane == (HOST_TO_DEVICE if out == DEVICE_TO_HOST else DISK)
        assert costs.cost(reload).moved_bytes == meta.longest_bytes(reload.all_input_nodes[0])


def agreed_by(rank: int, gathers: str) -> tuple[int, dict[str, tuple[int, str]], list[str], int]:
    """What a rank of two counts and starts in a step whose rows only the second one pads, and how often it pads."""
    graphs: list[fx.GraphModule] = []
    passes = [
        replace(one, gathers=gathers) if isinstance(one, BucketCollectives) else one
        for one in presets.default(bucket_bytes=10**6)
    ]
    with fake_world(2, rank):
        model = zgraph.shard(mlp(), offload=HOST)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"lowering": "fx", "passes": zgraph.PassList([*passes, KeepEach(graphs)])}
        whole: Any = zgraph.training_step(model, optimizer, options=options)(stepped(model, optimizer))
        whole(torch.ones(2, 5))
        order = list(graphs[-1].graph.nodes)
        storages = storages_of(order, agreed=True)
    rows = {one.first.name: (one.nbytes, max(one.readers).name) for one in storages if nodes.is_reload(one.first)}
    started = [node.name for node in order if nodes.is_start(node) or nodes.is_copy_start(node)]
    pads = sum(
        node.target is torch.ops.aten.constant_pad_nd.default and len(meta.parameters(node)) > 0 for node in order
    )
    return curve_of(order, storages).peak_bytes, rows, started, pads


@pytest.mark.parametrize("gathers", ["flat", "coalesced", "sequential"])
def test_ranks_that_pad_host_rows_schedule_like_the_others(gathers: str) -> None:
    (*first, pads), (*second, more) = (agreed_by(rank, gathers) for rank in range(2))
    assert pads < more
    assert first == second


def test_host_adam_update_costs_28_bytes_per_element() -> None:
    judge = compared(HOST, machine(500.0, updates=10.0), AT_REST, world=1, layers=1)
    costs = CostModel(machine(500.0, updates=10.0))
    updates = [node for node in judge.graphs[0].graph.nodes if "_fused_adamw_" in str(node.target)]
    elements = sum(parameter.numel() for parameter in Language(layers=1, width=32).parameters() if parameter.ndim)
    found = [costs.cost(update) for update in updates if meta.beside(update) is not None]
    assert {cost.lane for cost in found} == {HOST_UPDATES}
    counts = sum(len(update.args[0]) for update in updates if meta.beside(update) is not None)  # pyright: ignore
    steps = 4 * counts * 1  # their counts are read
    assert sum(cost.moved_bytes for cost in found) == pytest.approx(28 * elements + steps, rel=0.01)
    assert all(cost.us == cost.moved_bytes / 10.0 for cost in found)


def test_the_host_of_a_single_rank_updates_beside_backward() -> None:
    """Without collectives, too, an update starts when its gradient is there."""
    judge = compared(zgraph.Offload(optimizer="host"), machine(2000.0), AT_REST, world=1, width=512)
    order = list(judge.graphs[0].graph.nodes)
    updates = [node for node in order if meta.beside(node) is not None and written_arguments(node)]
    products = [node for node in order if node.target is torch.ops.aten.mm.default]
    behind = [sum(update < product for product in products) for update in updates]
    assert behind[0] > len(products) // 2 and behind[-1] <= 1
    timeline = judge.found[1].timeline
    exposed_us = sum(us for node, us in timeline.exposed_us.items() if meta.beside(node) is not None)
    assert exposed_us < 0.5 * timeline.busy_us[HOST_UPDATES]


def test_slow_host_is_waited_for_at_step_end() -> None:
    """Whatever the order: all updates pass through its lane."""
    for updates in (1.0, 100_000.0):
        timeline = compared(HOST, machine(2000.0, updates), AT_REST, layers=1).found[1].timeline
        busy_us = timeline.busy_us[HOST_UPDATES]
        exposed_us = sum(us for node, us in timeline.exposed_us.items() if meta.beside(node) is not None)
        assert (exposed_us > 0.5 * busy_us) == (updates == 1.0)


# --- pipeline ---------------------------------------------------------------------------------------------------------


def test_model_without_offload_is_left_alone() -> None:
    report = zgraph.Report()
    pipeline = zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=CPU))
    with pytest.raises(zgraph.PreconditionError, match="schedule_copies"):
        zgraph.PassList([*presets.default(), ScheduleCopies()], target=zgraph.Target(hardware=CPU))
    model = nn.Linear(4, 4)
    options: dict[str, Any] = {"passes": pipeline, "lowering": "fx", "report": report}
    compiled: Any = torch.compile(model, backend="zgraph", options=options)
    compiled(torch.ones(2, 4)).sum().backward()
    notes = [note for note in report.notes if note.startswith("schedule_copies")]
    assert notes and all(note.endswith("everything rests on the device") for note in notes)


def test_an_option_that_cannot_be_honoured() -> None:
    with pytest.raises(ValueError, match="in_flight_bytes=0 holds nothing"):
        ScheduleCopies(in_flight_bytes=0)


def printed() -> None:
    print(graph_text(compared(MIXED, machine(500.0), AT_REST, layers=1).graphs[0].graph))


def test_the_graph_is_the_same_under_every_hash_seed(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    one, other = hash_seeds.printed(f"from {__name__} import printed; printed()", tmp_path)
    assert "store_start" in one and one == other


# --- memory -----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 128, 8


def peaks(offload: zgraph.Offload, passes: Sequence[zgraph.GraphPass]) -> tuple[int, int]:
    """Predicted and counted peak of a step of which nearly everything rests elsewhere."""
    report = zgraph.Report()
    torch.manual_seed(0)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = zgraph.shard(nn.Sequential(*parts), offload=offload)
    optimizer = adamw(model)
    pipeline = zgraph.PassList(passes, target=zgraph.Target(hardware=machine(500.0)))
    options = {"lowering": "fx", "passes": pipeline, "report": report}
    step: Any = zgraph.training_step(model, optimizer, options=options)(stepped(model, optimizer))
    x = torch.randn(2, WIDTH)
    step(x)
    counts: list[Count] = []
    for _ in range(4):
        with counted() as count:
            step(x)
        counts.append(count)
    peak = report.graphs[-1].peak
    assert peak is not None
    return peak.bytes, steady_rise(counts[1:])


@worlds(2)
@pytest.mark.parametrize("stream", [STREAMED, AT_REST])
def test_the_peak_of_the_device_is_the_predicted_one(ranks: Ranks, stream: StreamStates) -> None:
    passes = [stream if isinstance(one, StreamStates) else one for one in presets.planned(bucket_bytes=4 * WIDTH**2)]
    for predicted, measured in ranks.run(peaks, HOST, passes):
        assert measured == pytest.approx(predicted, rel=0.05)
