"""Live ranges and memory curves: which storages of a graph are alive after each node, and where they peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zgraph.analysis.storages import Finder, Storage
from zgraph.analysis.workspace import staging_bytes, workspace_bytes
from zgraph.graph import nodes

AT_ONCE = 2  # collectives of a gloo group; a third waits for a thread (torch 2.11 - 2.13)


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """What an allocator makes of a request.

    Attributes:
        block_bytes: sizes are multiples of it.
        header_bytes: it keeps with each allocation.
        mapped_from_bytes: requests from this size on take whole pages; None: none do.
        page_bytes: of the operating system.
        slack_bytes: the most that a block of more than so much may be larger than what it is given for.
    """

    block_bytes: int = 1
    header_bytes: int = 0
    mapped_from_bytes: int | None = None
    page_bytes: int = 4096
    slack_bytes: int = 0

    def allocated_bytes(self, requested_bytes: int) -> int:
        if requested_bytes == 0:
            return 0
        mapped = self.mapped_from_bytes is not None and requested_bytes >= self.mapped_from_bytes
        block = self.page_bytes if mapped else self.block_bytes
        slack = self.slack_bytes if requested_bytes > self.slack_bytes else 0
        return -(-(requested_bytes + self.header_bytes) // block) * block + slack


EXACT = Allocator()
CUDA = Allocator(block_bytes=512)
# A cached block of more than 1 MiB is split where more than 1 MiB would be left over (CUDACachingAllocator.cpp:
# should_split, kSmallSize), so that each may carry so much at worst.
CUDA_AT_WORST = Allocator(block_bytes=512, slack_bytes=2**20)
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
    device_type: str | None = None,
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
        device_type: on which the graph will run, see `workspace_bytes`.
    """
    found = Finder()
    found.enter(graph.find_nodes(op="placeholder"), owned)
    found.run(graph.nodes)
    found.keep(nodes.returned_by(graph))
    transient = _transient(graph, allocator, threads, late_peers, device_type)
    return _curve(list(graph.nodes), found, allocator, list(transient))


def live_ranges(graph: fx.Graph, *, owned: Collection[fx.Node] = ()) -> tuple[LiveRange, ...]:
    """The range of every storage of a graph, in order of first position; arguments as in `memory_curve`."""
    return memory_curve(graph, owned=owned).ranges


@dataclass(frozen=True)
class Placements:
    """Where the values of a graph lie.

    Attributes:
        storages: of the whole graph.
        lies_in: of each node: positions in `storages`.
        workspace_bytes: of each node.
    """

    storages: tuple[Storage, ...]
    lies_in: Mapping[fx.Node, tuple[int, ...]]
    workspace_bytes: Mapping[fx.Node, int]


def placements(graph: fx.Graph) -> Placements:
    """Which storages the nodes of a graph make, and which they only look at; all inputs are held."""
    found = Finder()
    found.enter(graph.find_nodes(op="placeholder"))
    found.run(graph.nodes)
    transient = _transient(graph, EXACT, threads=1, late_peers=False)
    lies_in = dict.fromkeys(graph.nodes, ()) | found.lies_in()
    return Placements(tuple(found.storages()), lies_in, dict(zip(graph.nodes, transient, strict=True)))


def step_curve(
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    user_outputs: int,
    allocator: Allocator = EXACT,
    threads: int = 1,
    late_peers: bool = False,
    device_type: str | None = None,
) -> MemoryCurve:
    """The curve of a training step: forward, then backward, beside the parameters and the step's inputs.

    What forward saves dies at its last use in backward, and costs nothing where it is a view of an input. The user
    holds the outputs to the end, autograd hands the tangents over, and the gradients stay. Before torch 2.13 autograd
    keeps the tangents until backward is over, which is not counted: nothing for a model that returns its loss. Of a
    window it is the first step that is shown: later ones find gathered parameters and sums of gradients there.

    Args:
        forward, backward: of one frame, as AOTAutograd partitions them.
        user_outputs: how many of forward's outputs are the user's; backward takes the others.
        allocator, threads, late_peers, device_type: as in `memory_curve`.
    """
    found = _enter_step(forward, backward, user_outputs)
    found.run(backward.nodes)
    found.keep(nodes.returned_by(backward))
    transient = [
        taken
        for graph in (forward, backward)
        for taken in _transient(graph, allocator, threads, late_peers, device_type)
    ]
    return _curve([*forward.nodes, *backward.nodes], found, allocator, transient)


def owned_inputs(forward: fx.Graph, backward: fx.Graph, *, user_outputs: int) -> list[fx.Node]:
    """The inputs of a backward graph that nobody but the step holds, as in `step_curve`: saved values and tangents."""
    found = _enter_step(forward, backward, user_outputs)
    return [node for node in backward.find_nodes(op="placeholder") if not found.is_held(node)]


def _enter_step(forward: fx.Graph, backward: fx.Graph, user_outputs: int) -> Finder:
    """The storages of forward, and backward's inputs among them."""
    found = Finder()
    found.enter(forward.find_nodes(op="placeholder"))
    found.run(forward.nodes)
    returned = nodes.returned_by(forward)
    found.keep(returned[:user_outputs])
    found.enter_backward(backward.find_nodes(op="placeholder"), returned[user_outputs:])
    return found


def curve_of(order: Sequence[fx.Node], storages: Iterable[Storage]) -> MemoryCurve:
    """The curve of these storages alone, in one order of many; what calls take beside their results is left out."""
    return _over(order, list(storages), [0] * len(order), ())


def _curve(order: Sequence[fx.Node], found: Finder, allocator: Allocator, transient: Sequence[int]) -> MemoryCurve:
    storages = found.storages()
    if allocator is not EXACT:
        storages = [replace(one, nbytes=allocator.allocated_bytes(one.nbytes)) for one in storages]
    return _over(order, storages, transient, tuple(found.unknown))


def _over(
    order: Sequence[fx.Node], storages: Sequence[Storage], transient: Sequence[int], unknown: tuple[str, ...]
) -> MemoryCurve:
    numbers = {node: number for number, node in enumerate(order)}
    ledger = Ledger.of(numbers, storages)
    during: list[int] = []
    after: list[int] = []
    for number in range(len(order)):
        during.append(ledger.issue(number) + transient[number])
        after.append(ledger.alive_bytes)
    return MemoryCurve(
        nodes=tuple(order),
        bytes_during=tuple(during),
        bytes_after=tuple(after),
        ranges=tuple(_range(storage, numbers) for storage in storages),
        held_bytes=sum(storage.nbytes for storage in storages if storage.held),
        unknown=unknown,
    )


def _range(storage: Storage, numbers: Mapping[fx.Node, int]) -> LiveRange:
    first = numbers[storage.first]
    last = len(numbers) - 1 if storage.outlives else max([first, *map(numbers.__getitem__, storage.readers)])
    return LiveRange(storage.first, storage.nbytes, first, last, storage.held)


def _transient(
    graph: fx.Graph, allocator: Allocator, threads: int, late_peers: bool, device_type: str | None = None
) -> Iterator[int]:
    """What each node takes beside storages: its workspace, and what is staged for collectives in flight."""
    at_once = AT_ONCE if late_peers else 0
    in_flight: dict[fx.Node, tuple[str, int]] = {}  # by what is waited for: the group, and what it stages
    for node in graph.nodes:
        taken = _staged(in_flight.values(), at_once) if node.op != "placeholder" else 0
        if nodes.is_wait(node):
            in_flight.pop(node.all_input_nodes[0], None)
        elif node.op == "call_function":
            taken += allocator.allocated_bytes(workspace_bytes(node, threads=threads, device_type=device_type))
            if nodes.is_start(node):
                group_name = nodes.group_of(node)
                works = {
                    one: (group_name, allocator.allocated_bytes(staging_bytes(one))) for one in nodes.started_by(node)
                }
                taken += sum(sorted(staged for _, staged in works.values())[-AT_ONCE:])
                in_flight |= works
        yield taken


def _staged(in_flight: Iterable[tuple[str, int]], at_once: int) -> int:
    """Bytes staged by the oldest works of each group, which run; the others queue."""
    running = Counter[str]()
    total = 0
    for group_name, staged in in_flight:
        running[group_name] += 1
        total += staged if running[group_name] <= at_once else 0
    return total


class Ledger:
    """Which storages are alive while nodes are issued by number, one after the other, in any order.

    Attributes:
        allocates: the storages that each node makes.
        sizes: of the storages.
        alive_bytes: behind the last node that was issued.
    """

    def __init__(
        self, allocates: list[list[int]], reads: list[list[int]], sizes: list[int], readers: list[int]
    ) -> None:
        self.allocates = allocates
        self.sizes = sizes
        self.alive_bytes = 0
        self._reads = reads
        self._readers = readers  # that are still to come

    @classmethod
    def of(cls, numbers: Mapping[fx.Node, int], storages: Iterable[Storage]) -> Ledger:
        allocates: list[list[int]] = [[] for _ in numbers]
        reads: list[list[int]] = [[] for _ in numbers]
        sizes: list[int] = []
        readers: list[int] = []
        for storage in storages:
            if storage.held:
                continue
            readers_once = dict.fromkeys((storage.first, *storage.readers))
            for reader in readers_once:
                reads[numbers[reader]].append(len(sizes))
            allocates[numbers[storage.first]].append(len(sizes))
            sizes.append(storage.nbytes)
            readers.append(len(readers_once) + storage.outlives)
        return cls(allocates, reads, sizes, readers)

    def copy(self) -> Ledger:
        """The same state, to go on from in another way."""
        new = Ledger(self.allocates, self._reads, self.sizes, self._readers.copy())
        new.alive_bytes = self.alive_bytes
        return new

    def issue(self, node: int) -> int:
        """The bytes alive while the node runs; what it reads last is released behind it."""
        for storage in self.allocates[node]:
            self.alive_bytes += self.sizes[storage]
        peak = self.alive_bytes
        for storage in self._reads[node]:
            self._readers[storage] -= 1
            if not self._readers[storage]:
                self.alive_bytes -= self.sizes[storage]
        return peak
