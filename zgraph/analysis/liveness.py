"""Live ranges and memory curves: the storages of a graph that are alive while each node runs, and their peak.

Every predicted peak is computed here. `LiveRanges` processes a program in a known order: a graph, a whole step, or
a candidate step that has no graph yet. `Ledger` counts the same bytes while an order is being built, and `alive_bytes`
sums ranges that are known already, such as those of a pipeline's micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx

from zgraph.analysis.storages import Finder, Storage, as_all_ranks_count
from zgraph.analysis.workspace import computes_elsewhere, disk_staging_bytes, transient_bytes
from zgraph.graph import nodes
from zgraph.tiers.pinned_pool import pinned_bytes
from zgraph.tiers.tier import DEVICE, HOST


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Rules by which an allocator rounds requests.

    Attributes:
        block_bytes: sizes are rounded up to multiples of this.
        header_bytes: overhead of each allocation.
        mapped_from_bytes: smallest request that is rounded up to pages; None: no request is.
        page_bytes: page size of the operating system.
        slack_bytes: maximum waste per request, added to each request that is larger than the slack.
    """

    block_bytes: int = 1
    header_bytes: int = 0
    mapped_from_bytes: int | None = None
    page_bytes: int = 4096
    slack_bytes: int = 0

    def allocated_bytes(self, requested_bytes: int) -> int:
        if not requested_bytes:
            return 0
        mapped = self.mapped_from_bytes is not None and requested_bytes >= self.mapped_from_bytes
        block = self.page_bytes if mapped else self.block_bytes
        slack = self.slack_bytes if requested_bytes > self.slack_bytes else 0
        return -(-(requested_bytes + self.header_bytes) // block) * block + slack


EXACT = Allocator()
CUDA = Allocator(block_bytes=512)
# A cached block of more than 1 MiB is split if more than 1 MiB would be left over (CUDACachingAllocator.cpp:
# should_split, kSmallSize), so each wastes 1 MiB at worst.
CUDA_AT_WORST = Allocator(block_bytes=512, slack_bytes=2**20)
# glibc raises its threshold to the largest mapped block that was freed, up to 32 MiB: assumed reached after a step.
GLIBC = Allocator(block_bytes=16, header_bytes=8, mapped_from_bytes=32 * 2**20)


@dataclass(frozen=True)
class LiveRange:
    """The time from the allocation of one storage to the last node that reads it, directly or through a view.

    Attributes:
        node: node that allocates the storage, or input that passes it in.
        bytes: size as allocated.
        first, last: positions in the program, inclusive; storages of outputs live to the end.
        held: whether the storage is also held outside of the program, and so does not count here.
        space: name of the memory space of the storage.
    """

    node: fx.Node
    bytes: int
    first: int
    last: int
    held: bool = False
    space: str = DEVICE.name


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive on the device while a program runs, without storages held outside of it.

    Attributes:
        nodes: nodes of the program in order; for a step, first the nodes of forward, then the nodes of backward.
        bytes_during: peak while each node runs, including its results and its workspace.
        bytes_after: bytes after each node, once storages without further readers have been freed.
        ranges: live range of every storage, ordered by first position.
        held_bytes: bytes of inputs on the device that are held outside of the program.
        unknown: names of nodes whose results have a size that depends on data; these results count as 0 bytes.
        staging_bytes: bytes of pinned host memory through which tensors pass between a disk and a GPU.
    """

    nodes: tuple[fx.Node, ...]
    bytes_during: tuple[int, ...]
    bytes_after: tuple[int, ...]
    ranges: tuple[LiveRange, ...]
    held_bytes: int
    unknown: tuple[str, ...]
    staging_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_during, default=0)

    @property
    def peak_position(self) -> int:
        """First position in the program at which the peak is reached."""
        return self.bytes_during.index(self.peak_bytes) if self.nodes else 0

    def alive_at(self, position: int) -> list[LiveRange]:
        """Return the live ranges on the device at a position in the program, largest first."""
        own = [entry for entry in self.ranges if not entry.held and entry.space == DEVICE.name]
        alive = [entry for entry in own if entry.first <= position <= entry.last]
        return sorted(alive, key=lambda entry: (-entry.bytes, entry.first))

    def bytes_in(self, space: str) -> list[int]:
        """Return the bytes in one memory space while each node runs; those of the host include `staging_bytes`."""
        own = [entry for entry in self.ranges if entry.space == space and not entry.held]
        staged = self.staging_bytes if space == HOST.name else 0
        ranges = ((entry.bytes, entry.first, entry.last) for entry in own)
        return [staged + alive for alive in alive_bytes(ranges, len(self.nodes))]

    def peak_in(self, space: str) -> int:
        """Return the maximum bytes in one memory space, including inputs that are kept there."""
        held = sum(entry.bytes for entry in self.ranges if entry.held and entry.space == space)
        return held + max(self.bytes_in(space), default=0)

    def explain(self) -> str:
        """Describe in one line the peak, the node at which it occurs, and the five largest storages alive there."""
        if not self.nodes:
            return "peak 0 bytes"
        alive = ", ".join(f"{entry.node.name} {entry.bytes}" for entry in self.alive_at(self.peak_position)[:5])
        text = f"peak {self.peak_bytes} bytes at {self.nodes[self.peak_position].name}: {alive}"
        return f"{text}; without {', '.join(self.unknown)}, whose size depends on data" if self.unknown else text


def memory_curve(
    graph: fx.Graph,
    *,
    owned: Collection[fx.Node] = (),
    allocator: Allocator = EXACT,
    threads: int = 1,
    device_type: str | None = None,
    agreed: bool = False,
) -> MemoryCurve:
    """Return the memory curve of a graph whose nodes run one by one, as by `lower_fx`.

    If Inductor compiles islands (runs of compute), the curve is an upper bound, because fused values are never stored.

    Args:
        graph: graph whose nodes have fake values; it is not changed.
        owned: inputs that only this program holds. Each is freed after its last use, or at the end if it is unused.
        allocator: rounding of requests.
        threads: number of threads of CPU kernels.
        device_type: device on which the graph will run, see `workspace_bytes`.
        agreed: count bytes equally on all ranks, as `as_all_ranks_count` does. False: count for this rank.
    """
    found = Finder()
    found.enter(graph.find_nodes(op="placeholder"), owned)
    found.run(graph.nodes)
    found.keep(nodes.returned_by(graph))
    transient = transient_bytes(graph, allocator.allocated_bytes, threads=threads, device_type=device_type)
    curve = _curve(list(graph.nodes), found, allocator, list(transient), agreed, device_type)
    return replace(curve, staging_bytes=disk_staging_bytes(graph.nodes, device_type))


@dataclass(frozen=True)
class Placements:
    """The storages of a graph's values.

    Attributes:
        storages: all storages of the graph.
        lies_in: for each node, indices of its value's storages in `storages`.
        workspace_bytes: bytes of workspace of each node.
    """

    storages: tuple[Storage, ...]
    lies_in: Mapping[fx.Node, tuple[int, ...]]
    workspace_bytes: Mapping[fx.Node, int]


def placements(graph: fx.Graph) -> Placements:
    """Return the storages of a graph's values, with sizes equal on all ranks. All inputs count as held elsewhere."""
    found = Finder()
    found.enter(graph.find_nodes(op="placeholder"))
    found.run(graph.nodes)
    transient = transient_bytes(graph, EXACT.allocated_bytes)
    lies_in = dict.fromkeys(graph.nodes, ()) | found.lies_in()
    storages = as_all_ranks_count(found.storages(), graph.nodes)
    return Placements(tuple(storages), lies_in, dict(zip(graph.nodes, transient, strict=True)))


def step_curve(
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    user_outputs: int,
    allocator: Allocator = EXACT,
    device_type: str | None = None,
    agreed: bool = False,
) -> MemoryCurve:
    """Return the memory curve of forward, then backward. Parameters and the step's inputs do not count.

    Saved values are freed after their last use in backward; views of inputs do not count. Gradients, and the outputs
    that the user receives, stay to the end. Tangents (gradients of outputs) belong to backward. Before torch 2.13,
    autograd keeps tangents until backward ends; this is not counted, and makes no difference for a model that returns
    its loss. In a `no_sync` window this is the curve of the first step: later steps start with gathered parameters and
    accumulated gradients.

    Args:
        forward, backward: graphs of one frame, as AOTAutograd partitions them.
        user_outputs: number of forward's outputs that the user receives; the others are saved for backward.
        allocator, device_type, agreed: as in `memory_curve`.
    """
    found = _enter_step(forward, backward, user_outputs)
    found.run(backward.nodes)
    found.keep(nodes.returned_by(backward))
    transient = [
        taken
        for graph in (forward, backward)
        for taken in transient_bytes(graph, allocator.allocated_bytes, device_type=device_type)
    ]
    order = [*forward.nodes, *backward.nodes]
    curve = _curve(order, found, allocator, transient, agreed, device_type)
    return replace(curve, staging_bytes=disk_staging_bytes(order, device_type))


def owned_inputs(forward: fx.Graph, backward: fx.Graph, *, user_outputs: int) -> list[fx.Node]:
    """Return the inputs of a backward graph that nothing else holds: saved values, and gradients of outputs."""
    found = _enter_step(forward, backward, user_outputs)
    return [node for node in backward.find_nodes(op="placeholder") if not found.is_held(node)]


def _enter_step(forward: fx.Graph, backward: fx.Graph, user_outputs: int) -> Finder:
    """Register the storages of forward and of backward's inputs."""
    found = Finder()
    found.enter(forward.find_nodes(op="placeholder"))
    found.run(forward.nodes)
    returned = nodes.returned_by(forward)
    found.keep(returned[:user_outputs])
    found.enter_backward(backward.find_nodes(op="placeholder"), returned[user_outputs:])
    return found


def curve_of(order: Sequence[fx.Node], storages: Iterable[Storage]) -> MemoryCurve:
    """Return the memory curve of `storages` if nodes run in `order`, without workspace."""
    return _over(order, list(storages), [0] * len(order), ())


def _curve(
    order: Sequence[fx.Node],
    found: Finder,
    allocator: Allocator,
    transient: Sequence[int],
    agreed: bool,
    device_type: str | None,
) -> MemoryCurve:
    storages = found.storages()
    if agreed:
        storages = as_all_ranks_count(storages, order)
    if any(one.space == HOST for one in storages) and computes_elsewhere(order, device_type):
        storages = [replace(one, nbytes=pinned_bytes(one.nbytes)) if one.space == HOST else one for one in storages]
    if allocator is not EXACT:
        storages = [replace(one, nbytes=allocator.allocated_bytes(one.nbytes)) for one in storages]
    return _over(order, storages, transient, tuple(found.unknown))


def _over(
    order: Sequence[fx.Node], storages: Sequence[Storage], transient: Sequence[int], unknown: tuple[str, ...]
) -> MemoryCurve:
    numbers = {node: number for number, node in enumerate(order)}
    makes, reads = _accesses(numbers, storages)
    alive = LiveRanges([one.nbytes if _counts(one) else 0 for one in storages])
    for made, read, taken in zip(makes, reads, transient, strict=True):
        alive.run(made, read, taken)
    alive.keep(number for number, one in enumerate(storages) if one.outlives)
    return MemoryCurve(
        nodes=tuple(order),
        bytes_during=tuple(alive.bytes_during()),
        bytes_after=tuple(alive.bytes_after()),
        ranges=tuple(
            LiveRange(one.first, one.nbytes, first, min(last, len(order) - 1), one.held, one.space.name)
            for one, first, last in zip(storages, alive.first, alive.last, strict=True)
        ),
        held_bytes=sum(one.nbytes for one in storages if one.held and one.space == DEVICE),
        unknown=unknown,
    )


def _counts(storage: Storage) -> bool:
    """Return whether a storage is in device memory and not held outside of the program."""
    return storage.space == DEVICE and not storage.held


def _accesses(numbers: Mapping[fx.Node, int], storages: Iterable[Storage]) -> tuple[list[list[int]], list[list[int]]]:
    """Return two lists with storage indices for each node: those it allocates, and those it reads or allocates."""
    makes: list[list[int]] = [[] for _ in numbers]
    reads: list[list[int]] = [[] for _ in numbers]
    for place, storage in enumerate(storages):
        makes[numbers[storage.first]].append(place)
        for reader in dict.fromkeys((storage.first, *storage.readers)):
            reads[numbers[reader]].append(place)
    return makes, reads


class LiveRanges:
    """Computes the live ranges of a program's storages, call by call.

    Storages are numbers, so that a candidate program without a graph can add storages of its own.

    Attributes:
        sizes: size of each storage in bytes.
        first: position of the call that allocates each storage; -1 if there is none.
        last: position of the last call that reads each storage; for a kept storage, the position after the last call.
        transient: bytes that each call allocates and frees again.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.first, self.last = [-1] * len(sizes), [-1] * len(sizes)
        self.transient: list[int] = []

    def run(self, makes: Iterable[int], reads: Iterable[int], transient: int = 0) -> int:
        """Process the next call; return its position."""
        here = len(self.transient)
        self.transient.append(transient)
        for storage in makes:
            self.first[storage] = self.last[storage] = here
        for storage in reads:
            self.last[storage] = here
        return here

    def keep(self, storages: Iterable[int]) -> None:
        """Let storages live until after the last call."""
        for storage in storages:
            self.last[storage] = len(self.transient)

    def bytes_during(self) -> list[int]:
        """Return the bytes alive while each call runs, including the bytes that the call allocates."""
        alive = alive_bytes(zip(self.sizes, self.first, self.last, strict=True), len(self.transient))
        return [bytes_ + taken for bytes_, taken in zip(alive, self.transient, strict=True)]

    def bytes_after(self) -> list[int]:
        """Return the bytes alive after each call."""
        after = alive_bytes(zip(self.sizes, self.first, self.last, strict=True), len(self.transient))
        for size, first, last in zip(self.sizes, self.first, self.last, strict=True):
            if first >= 0 and last < len(after):
                after[last] -= size
        return after


def alive_bytes(ranges: Iterable[tuple[int, int, int]], calls: int) -> list[int]:
    """Return the bytes alive during each call; ranges are (bytes, first call, last call), unused if first is -1."""
    change = [0] * (calls + 2)
    for size, begin, end in ranges:
        if begin >= 0:
            change[begin] += size
            change[end + 1] -= size
    return list(accumulate(change[:calls]))


@dataclass(slots=True)
class Ledger:
    """Counts the bytes alive on the device while an order of nodes is being built. Nodes and storages are numbers.

    Attributes:
        allocates: storages that each node allocates.
        reads: storages that each node reads or allocates.
        sizes: size of each storage in bytes.
        readers: for each storage, the number of its readers that have not been issued.
        alive_bytes: bytes alive after the last issued node.
    """

    allocates: list[list[int]]
    reads: list[list[int]]
    sizes: list[int]
    readers: list[int]
    alive_bytes: int = 0

    @classmethod
    def of(cls, numbers: Mapping[fx.Node, int], storages: Iterable[Storage]) -> Ledger:
        own = list(filter(_counts, storages))
        allocates, reads = _accesses(numbers, own)
        readers = [len(dict.fromkeys((one.first, *one.readers))) + one.outlives for one in own]
        return cls(allocates, reads, [one.nbytes for one in own], readers)

    def copy(self) -> Ledger:
        """Return an independent copy of the current state."""
        return Ledger(self.allocates, self.reads, self.sizes, self.readers.copy(), self.alive_bytes)

    def issue(self, node: int) -> int:
        """Append a node to the order, and return the bytes alive while it runs.

        Afterwards, storages without further readers are freed.
        """
        for storage in self.allocates[node]:
            self.alive_bytes += self.sizes[storage]
        peak = self.alive_bytes
        for storage in self.reads[node]:
            self.readers[storage] -= 1
            if not self.readers[storage]:
                self.alive_bytes -= self.sizes[storage]
        return peak
