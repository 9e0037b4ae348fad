"""Live ranges and memory curves: which storages of a graph are alive after each node, and where they peak."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph import meta, nodes
from zgraph.runtime.window import OPEN
from zgraph.torch_compat import OpOverload, alias_positions, fake_storage_key, hint_of
from zgraph.workspace import remaining_bytes, staging_bytes, workspace_bytes

# By their schema they return a view; they copy where they must, which the fake value tells.
_MAY_COPY = frozenset({"aten.reshape", "aten.contiguous", "aten.to", "aten.flatten", "aten.ravel"})
AT_ONCE = 2  # collectives of a gloo group; a third waits for a thread (torch 2.11 - 2.13)


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """What an allocator makes of a request.

    Attributes:
        block_bytes: sizes are multiples of it.
        header_bytes: it keeps with each allocation.
        mapped_from_bytes: requests from this size on take whole pages; None: none do.
        page_bytes: of the operating system.
    """

    block_bytes: int = 1
    header_bytes: int = 0
    mapped_from_bytes: int | None = None
    page_bytes: int = 4096

    def allocated_bytes(self, requested_bytes: int) -> int:
        if requested_bytes == 0:
            return 0
        mapped = self.mapped_from_bytes is not None and requested_bytes >= self.mapped_from_bytes
        block = self.page_bytes if mapped else self.block_bytes
        return -(-(requested_bytes + self.header_bytes) // block) * block


EXACT = Allocator()
CUDA = Allocator(block_bytes=512)
# glibc raises its threshold to the largest mapped block that was freed, up to 32 MiB: after a first step it is there.
GLIBC = Allocator(block_bytes=16, header_bytes=8, mapped_from_bytes=32 * 2**20)


@dataclass(frozen=True)
class LiveRange:
    """One storage, from the node that makes it to the last one that reads it or a view of it.

    Attributes:
        node: that makes it, or the input that brings it.
        bytes: as allocated.
        first, last: positions in the program, both included; the range of what is returned reaches to the end.
        held: somebody else holds it, before, during and after; it costs nothing here.
    """

    node: fx.Node
    bytes: int
    first: int
    last: int
    held: bool = False


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive beside what somebody else holds.

    Attributes:
        nodes: the program, in order; for a step those of the forward and then those of the backward graph.
        bytes_during: highest while each node runs: what was there before, its results and its workspace.
        bytes_after: when each has run and what nobody reads again is gone.
        ranges: of every storage, in order of their first position.
        held_bytes: of inputs that somebody else holds.
        unknown: nodes whose size only the data will tell; they count as 0 bytes.
    """

    nodes: tuple[fx.Node, ...]
    bytes_during: tuple[int, ...]
    bytes_after: tuple[int, ...]
    ranges: tuple[LiveRange, ...]
    held_bytes: int
    unknown: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_during, default=0)

    @property
    def peak_position(self) -> int:
        """The first position at which the peak is reached."""
        return self.bytes_during.index(self.peak_bytes) if self.nodes else 0

    def alive_at(self, position: int) -> list[LiveRange]:
        """What is alive while the node at that position runs, the largest first."""
        alive = [entry for entry in self.ranges if not entry.held and entry.first <= position <= entry.last]
        return sorted(alive, key=lambda entry: (-entry.bytes, entry.first))

    def explain(self, count: int = 5) -> str:
        """One line: the peak, where it is, and the largest of what is alive there."""
        if not self.nodes:
            return "peak 0 bytes"
        alive = ", ".join(f"{entry.node.name} {entry.bytes}" for entry in self.alive_at(self.peak_position)[:count])
        text = f"peak {self.peak_bytes} bytes at {self.nodes[self.peak_position].name}: {alive}"
        return f"{text}; without {', '.join(self.unknown)}, whose size only the data tells" if self.unknown else text


def memory_curve(
    graph: fx.Graph,
    *,
    owned: Collection[fx.Node] = (),
    allocator: Allocator = EXACT,
    threads: int = 1,
    late_peers: bool = False,
) -> MemoryCurve:
    """The curve of one graph, run node by node as `lower_fx` runs it.

    Where Inductor compiles islands it is an upper estimate: inside one, values that are fused away are never stored.

    Args:
        graph: with a fake value in each node's meta; nothing is changed.
        owned: inputs that nobody but this program holds: they die at their last use, unread ones at the end.
        allocator: how requests are rounded.
        threads: of the CPU kernels.
        late_peers: what a backend stages for a collective stays until its wait, as on a slow link; otherwise only the
            start itself sees it.
    """
    walk = _Walk(allocator, threads, late_peers)
    walk.enter(graph, owned=owned)
    walk.run(graph)
    walk.hold(nodes.returned_by(graph))
    return walk.curve()


def live_ranges(graph: fx.Graph, *, owned: Collection[fx.Node] = ()) -> tuple[LiveRange, ...]:
    """The range of every storage of a graph, in order of first position; arguments as in `memory_curve`."""
    return memory_curve(graph, owned=owned).ranges


@dataclass(frozen=True)
class Placements:
    """Where the values of a graph lie.

    Attributes:
        storages: of the whole graph, each with the node that makes it.
        lies_in: of each node: positions in `storages`.
        workspace_bytes: of each node.
    """

    storages: tuple[LiveRange, ...]
    lies_in: Mapping[fx.Node, tuple[int, ...]]
    workspace_bytes: Mapping[fx.Node, int]


def placements(graph: fx.Graph) -> Placements:
    """Which storages the nodes of a graph make, and which they only look at; all inputs are held."""
    walk = _Walk(EXACT, threads=1, late_peers=False)
    walk.enter(graph)
    walk.run(graph)
    numbers = {storage: number for number, storage in enumerate(walk.storages)}
    return Placements(
        storages=walk.curve().ranges,
        lies_in={node: tuple(numbers[one] for one in walk.storages_of(node)) for node in walk.program},
        workspace_bytes=dict(zip(walk.program, walk.workspace, strict=True)),
    )


def step_curve(
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    user_outputs: int,
    allocator: Allocator = EXACT,
    threads: int = 1,
    late_peers: bool = False,
) -> MemoryCurve:
    """The curve of a training step: forward, then backward, beside the parameters and the step's inputs.

    What forward saves dies at its last use in backward, and costs nothing where it is a view of an input. The user
    holds the outputs to the end, autograd hands the tangents over, and the gradients stay. Of a window it is the first
    step that is shown: later ones find gathered parameters and sums of gradients there.

    Args:
        forward, backward: of one frame, as AOTAutograd partitions them.
        user_outputs: how many of forward's outputs are the user's; backward takes the others.
        allocator, threads, late_peers: as in `memory_curve`.
    """
    walk = _Walk(allocator, threads, late_peers)
    walk.enter(forward)
    walk.run(forward)
    returned = nodes.returned_by(forward)
    walk.hold(returned[:user_outputs])
    walk.enter_backward(backward, returned[user_outputs:])
    walk.run(backward)
    walk.hold(nodes.returned_by(backward))
    return walk.curve()


@dataclass(eq=False)
class _Storage:
    node: fx.Node
    bytes: int
    first: int
    last: int
    held: bool


@dataclass(frozen=True)
class _Work:
    """A collective in flight: it holds its buffers until it has been waited for."""

    buffers: list[_Storage]
    staging_bytes: int


class _Walk:
    """Follows programs node by node.

    Attributes:
        places: for each item of a node's value (a tensor is one item) the storages it lies in.
        workspace: at each position of the program.
    """

    def __init__(self, allocator: Allocator, threads: int, late_peers: bool) -> None:
        self.allocator = allocator
        self.threads = threads
        self.at_once = AT_ONCE if late_peers else 0
        self.program: list[fx.Node] = []
        self.workspace: list[int] = []
        self.storages: list[_Storage] = []
        self.places: dict[fx.Node, list[list[_Storage]]] = {}
        self.to_the_end: list[_Storage] = []
        self.unknown: list[str] = []
        self.aliases: dict[Any, tuple[int | None, ...]] = {}

    def enter(self, graph: fx.Graph, owned: Collection[fx.Node] = ()) -> None:
        """The inputs of a graph; those that are views of one storage share it."""
        known: dict[int, _Storage] = {}
        for node in graph.find_nodes(op="placeholder"):
            self._step(node)
            self.places[node] = self._placed(node, known, held=node not in owned)
            if not node.users:
                self.hold([node])

    def enter_backward(self, graph: fx.Graph, saved: Sequence[Any]) -> None:
        """The inputs of a backward graph: sizes, then the tensors that forward has saved, then tangents."""
        tensors = iter([node for node in saved if isinstance(node, fx.Node) and isinstance(meta.value(node), Tensor)])
        known: dict[int, _Storage] = {}
        for node in graph.find_nodes(op="placeholder"):
            self._step(node)
            source = next(tensors, None) if isinstance(meta.value(node), Tensor) else None
            self.places[node] = self._placed(node, known, held=False) if source is None else self.places[source]
            if not node.users:
                self.hold([node])

    def run(self, graph: fx.Graph) -> None:
        """The calls of a graph, whose results die at their last use."""
        in_flight: dict[fx.Node, _Work] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            here = self._step(node)
            read = [storage for source in node.all_input_nodes for storage in self.storages_of(source)]
            # The oldest run, the others queue.
            running = itertools.islice(in_flight.values(), self.at_once)
            self.workspace[here] = sum(work.staging_bytes for work in running)
            if nodes.is_getitem(node) and isinstance(meta.value(cast(fx.Node, node.args[0])), tuple | list):
                source, index = cast("tuple[fx.Node, int]", node.args)
                self.places[node] = [self.places[source][index]]
            elif nodes.is_wait(node):
                started = cast(fx.Node, node.args[0])
                self.places[node] = self.places[started]  # which the fake values do not tell
                work = in_flight.pop(cast(fx.Node, started.args[0]) if nodes.is_getitem(started) else started, None)
                read += work.buffers if work is not None else ()
            elif node.op != "output":
                self._call(node, here)
                if nodes.is_start(node):
                    in_flight[node] = _Work(read, self.allocator.allocated_bytes(staging_bytes(node)))
                    self.workspace[here] += in_flight[node].staging_bytes
            for storage in read:
                storage.last = here

    def _call(self, node: fx.Node, here: int) -> None:
        known = {
            key: storage
            for source in node.all_input_nodes
            for key, storage in zip(_keys(meta.value(source)), self.storages_of(source), strict=True)
        }
        constant = node.op == "get_attr"  # the module holds it
        self.places[node] = self._placed(node, known, held=constant, shared=self._shared(node))
        self.workspace[here] += self.allocator.allocated_bytes(workspace_bytes(node, threads=self.threads))
        remaining = self.allocator.allocated_bytes(remaining_bytes(node))
        if remaining:
            self.storages.append(_Storage(node, remaining, here, here, held=False))
            self.to_the_end.append(self.storages[-1])
        if nodes.is_kept_gather(node) and OPEN in node.args:
            self.hold([node])  # for the rest of the window

    def _shared(self, node: fx.Node) -> Sequence[_Storage | None]:
        """For each result of a call the storage that its schema says it lies in.

        The fake values alone do not tell: a pass may have given the node another input than it was traced with.
        """
        if node.target not in self.aliases:
            may_copy = isinstance(node.target, OpOverload) and str(node.target.overloadpacket) in _MAY_COPY
            self.aliases[node.target] = () if may_copy else alias_positions(node.target)
        shared: list[_Storage | None] = []
        for position in self.aliases[node.target]:
            source = node.args[position] if position is not None and position < len(node.args) else None
            shared.append(self.storages_of(source)[0] if isinstance(source, fx.Node) else None)
        if node.target is torch.ops.aten._unsafe_view.default:  # whose schema does not say so
            return self.storages_of(node.all_input_nodes[0])[:1]
        return shared

    def hold(self, values: Iterable[Any]) -> None:
        """Values that are alive at the end."""
        for node in values:
            if isinstance(node, fx.Node):
                self.to_the_end.extend(self.storages_of(node))

    def curve(self) -> MemoryCurve:
        for storage in self.to_the_end:
            storage.last = len(self.program) - 1
        begins, ends = [0] * len(self.program), [0] * len(self.program)
        for storage in self.storages:
            if not storage.held:
                begins[storage.first] += storage.bytes
                ends[storage.last] += storage.bytes
        during: list[int] = []
        after: list[int] = []
        alive = 0
        for position, workspace in enumerate(self.workspace):
            alive += begins[position]
            during.append(alive + workspace)
            # What the program returns is still there after its last node.
            alive -= ends[position] if position < len(self.program) - 1 else 0
            after.append(alive)
        return MemoryCurve(
            nodes=tuple(self.program),
            bytes_during=tuple(during),
            bytes_after=tuple(after),
            ranges=tuple(LiveRange(**vars(storage)) for storage in self.storages),
            held_bytes=sum(storage.bytes for storage in self.storages if storage.held),
            unknown=tuple(self.unknown),
        )

    def _step(self, node: fx.Node) -> int:
        self.program.append(node)
        self.workspace.append(0)
        return len(self.program) - 1

    def storages_of(self, node: fx.Node) -> list[_Storage]:
        return [storage for item in self.places.get(node, ()) for storage in item]

    def _placed(
        self, node: fx.Node, known: dict[int, _Storage], *, held: bool, shared: Sequence[_Storage | None] = ()
    ) -> list[list[_Storage]]:
        """Where a value lies: where its schema says, else in a storage known by its fake one, else in a new one."""
        value = meta.value(node)
        items = value if isinstance(value, tuple | list) else [value]
        if len(shared) == 1:  # one result, which may be a list of views
            shared = [shared[0]] * len(items)
        return [
            [
                (shared[number] if number < len(shared) else None) or self._find(node, tensor, known, held)
                for tensor in _tensors(item)
            ]
            for number, item in enumerate(items)
        ]

    def _find(self, node: fx.Node, value: Tensor, known: dict[int, _Storage], held: bool) -> _Storage:
        key = fake_storage_key(value)
        if key not in known:
            size = storage_bytes(value)
            if size is None:
                self.unknown.append(node.name)
            here = len(self.program) - 1
            known[key] = _Storage(node, self.allocator.allocated_bytes(size or 0), here, here, held)
            self.storages.append(known[key])
        return known[key]


def storage_bytes(value: Tensor) -> int | None:
    """Bytes of the storage behind a fake tensor, by the hints of symbolic sizes; None where there is no hint."""
    if value.layout == torch.strided:
        return hint_of(value.untyped_storage().nbytes())
    numel = hint_of(value.numel())
    return None if numel is None else numel * value.dtype.itemsize


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in cast("Sequence[Any]", value) for tensor in _tensors(item)]
    return []


def _keys(value: Any) -> list[int]:
    return [fake_storage_key(tensor) for tensor in _tensors(value)]
