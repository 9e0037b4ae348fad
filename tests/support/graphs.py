"""Small graphs without real ranks: one process plays one rank of a group that moves nothing.

`traced` compiles a sharded model in such a world and keeps its graphs as they stand after the passes one names;
`Drawing` makes a graph by hand, for the case that no model produces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg

import zgraph
from tests.support.compiled import with_fx
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext, Phase
from zgraph.compiler.pass_list import PassList
from zgraph.compiler.target import Target
from zgraph.compiler.verify import Snapshot, Where, check_values, verify
from zgraph.graph import meta
from zgraph.graph.edits import copy_of
from zgraph.passes import ChooseLifetimes, DedupeGathers
from zgraph.runtime.groups import separate_reductions
from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, wait_op
from zgraph.torch_compat.groups import resolve_group

aten = torch.ops.aten
JOINT_PASSES: tuple[GraphPass, ...] = (DedupeGathers(), ChooseLifetimes())


class _AgreeableStore(fake_pg.FakeStore):
    """On it every peer has already published whatever one asks for."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        return b""

    def check(self, keys: list[str]) -> bool:
        return True


@contextlib.contextmanager
def fake_world(world: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a default group whose collectives return at once and move nothing."""
    store = _AgreeableStore()  # kept here: the group does not keep its Python side alive
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    try:
        separate_reductions(resolve_group("0"))  # as zgraph.shard does, which `traced` may have called in another world
        yield
    finally:
        dist.destroy_process_group()


# --- models ---------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """Sizes that neither two nor three ranks divide."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 5, bias=False))


def deep() -> nn.Module:
    """Six equal layers of 256 bytes each, without biases."""
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])


class Twice(nn.Module):
    """Reads one layer's weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x)))


class Autocast(nn.Module):
    """Computes in bfloat16 with fp32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


class Leaky(nn.Module):
    """Returns one of its parameters beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(torch.relu(self.first(x))), self.first.weight


# --- tracing --------------------------------------------------------------------------------------------------------


@dataclass
class Traced:
    """What one compiled frame holds.

    Attributes:
        captured: the joint graph (or the one of inference) before any pass.
        graphs: forward and backward (or inference) before, or after some of, the passes of phase "graph".
        ctx: of the passes.
    """

    captured: fx.GraphModule
    graphs: dict[Direction, fx.GraphModule]
    ctx: PassContext

    def copy(self) -> Traced:
        graphs = {direction: copy_of(gm) for direction, gm in self.graphs.items()}
        return Traced(copy_of(self.captured), graphs, replace(self.ctx, graphs=graphs, notes=[]))

    def know(self, **changes: Any) -> None:
        """Let the passes that run from now on know something else."""
        self.ctx = replace(self.ctx, **changes)

    def aim_at(self, target: Target) -> None:
        """Let the passes that run from now on plan for a target."""
        self.ctx = target.known_to(self.ctx, self.captured.graph)


@dataclass(frozen=True, kw_only=True, eq=False)
class Keep(GraphPass):
    """Keeps a copy of every graph it sees, by direction, and the context."""

    kept: dict[Any, Any] = field(default_factory=dict[Any, Any])
    name: ClassVar[str] = "keep"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        self.kept[ctx.direction] = copy_of(gm)
        self.kept["ctx"] = ctx
        return False


@dataclass(frozen=True, eq=False)
class KeepEach(GraphPass):
    """Keeps a copy of each graph it sees in a list, one behind the other."""

    graphs: list[fx.GraphModule]
    name: ClassVar[str] = "keep_each"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        self.graphs.append(copy_of(gm))
        return False


@dataclass(frozen=True, kw_only=True, eq=False)
class KeepJoint(Keep):
    """The same, before the partition."""

    name: ClassVar[str] = "keep_joint"
    phase: ClassVar[Phase] = "joint"


def traced(
    build: Callable[[], nn.Module],
    passes: Iterable[GraphPass] = (),
    *,
    world: int = 2,
    rank: int = 0,
    train: bool = True,
    target: Target | None = None,
    **shard: Any,
) -> Traced:
    """The graphs of a model after dedupe_gathers, choose_lifetimes, the partition, and `passes` of phase "graph".

    To be called in the `fake_world` of that size and rank. A model is compiled once for each set of other arguments.
    """
    assert (dist.get_world_size(), dist.get_rank()) == (world, rank)
    found = _traced(build, world, rank, train, tuple(sorted(shard.items()))).copy()
    if target is not None:
        found.aim_at(target)
    pipeline = PassList([*JOINT_PASSES, *(entry for entry in passes if entry.phase == "graph")], target=target)
    for _ in pipeline.run("graph", found.ctx, found.graphs, lambda *_: None):
        pass
    found.ctx.notes.clear()
    return found


def by_rank(
    build: Callable[[], nn.Module], passes: Iterable[GraphPass] = (), *, world: int, **options: Any
) -> list[Traced]:
    """`traced` on every rank of a world, one after the other."""
    found: list[Traced] = []
    for rank in range(world):
        with fake_world(world, rank):
            found.append(traced(build, passes, world=world, rank=rank, **options))
    return found


@functools.cache
def _traced(build: Callable[[], nn.Module], world: int, rank: int, train: bool, shard: Any) -> Traced:
    joint, graphs = KeepJoint(), Keep()
    compile_model(build, {"passes": PassList([joint, *JOINT_PASSES, graphs])}, train=train, **dict(shard))
    ctx: PassContext = graphs.kept.pop("ctx")
    return Traced(joint.kept["joint" if train else "inference"], graphs.kept, ctx)


def compile_model(
    build: Callable[[], nn.Module],
    options: dict[str, Any],
    *,
    train: bool = True,
    batches: Iterable[int] = (6,),
    **shard: Any,
) -> None:
    """Shard and compile a model in this fake world; run it on batches of these sizes, and its backward if it trains."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = zgraph.shard(build(), **shard)
    compiled = cast("Callable[..., Any]", with_fx(model, **options))
    for size in batches:
        with torch.set_grad_enabled(train):
            result = compiled(torch.zeros(size, next(iter(model.parameters())).shape[-1]))
        if train:
            outputs = result if isinstance(result, tuple) else (result,)
            sum(out.float().sum() for out in outputs).backward()


def apply(graph_pass: GraphPass, found: Traced, direction: Direction, facts: Iterable[str] = ()) -> bool:
    """Run one pass on one graph and verify the result, all of it."""
    gm = found.graphs[direction]
    before = Snapshot.of(gm.graph)
    changed = graph_pass.run(gm, replace(found.ctx, direction=direction))
    if not changed:
        assert before.same_calls(gm.graph), "run returned False, but the graph changed"
    where = Where(pass_name=graph_pass.name, direction=direction)
    check_values(gm.graph.nodes, where)
    verify(
        gm.graph,
        before,
        {*facts, *graph_pass.provides},
        where,
        user_outputs=found.ctx.user_outputs if direction == "forward" else None,
    )
    return changed


# --- graphs by hand -------------------------------------------------------------------------------------------------


@dataclass
class Drawing:
    """A graph drawn node by node, each with its fake value."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    group_name: str = "0"

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            meta.set_value(node, torch.empty(shape, dtype=dtype))
        return node

    def call(self, target: Any, *args: Any, name: str | None = None, works_for: str = "", **kwargs: Any) -> fx.Node:
        node = meta.create(self.graph, target, args, kwargs, name=name)
        if works_for:
            meta.set_parameters(node, [works_for], [f"handle_{works_for}"])
        return node

    def start_gather(self, shard: fx.Node, parameter: str) -> fx.Node:
        size = dist.get_world_size()
        return self.call(
            all_gather_op(), shard, size, self.group_name, name=f"all_gather_{parameter}", works_for=parameter
        )

    def start_exchange(self, pieces: fx.Node, parameter: str) -> fx.Node:
        size = dist.get_world_size()
        splits = [meta.tensor_value(pieces).shape[0] // size] * size
        return self.call(
            all_to_all_op(),
            pieces,
            splits,
            splits,
            self.group_name,
            name=f"all_to_all_{parameter}",
            works_for=parameter,
        )

    def wait(self, start: fx.Node) -> fx.Node:
        (parameter,) = meta.parameters(start)
        return self.call(wait_op(), start, name=f"wait_{parameter}", works_for=parameter)

    def done(self, *returned: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(returned))
        return fx.GraphModule({}, self.graph)


def names_of(graph: fx.Graph) -> list[str]:
    """Names of the calls, in program order."""
    return [node.name for node in graph.nodes if node.op == "call_function"]


def inputs_for(gm: fx.GraphModule, seed: int, *, whole_numbers: bool = False) -> list[Any]:
    """Random values for a graph's inputs; whole numbers make small sums exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = meta.value(node)
        if not isinstance(value, Tensor):
            values.append(value)
        elif whole_numbers or not value.is_floating_point():
            values.append(torch.randint(-2, 3, tuple(value.shape), generator=generator).to(value.dtype))
        else:
            values.append(torch.randn(tuple(value.shape), generator=generator, dtype=torch.float64).to(value.dtype))
    return values


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
