"""The part of `report.json` for one compiled frame, as tables of plain values.

Tables are stored by column: entry i of each list belongs to row i. Repeated texts are stored once, in
`FrameData.strings`; columns hold indices into that list. docs/report-json.md explains every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Strings:
    """Table of distinct texts, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


@dataclass(kw_only=True)
class LineColumns:
    """Table of the distinct code lines of a frame's graphs, before and after every pass; one line describes one node.

    Attributes:
        name: name of the node.
        call: the call that computes the node, as text.
        value: description of the node's value, as an index into `FrameData.strings`.
        parameters: names of the node's parameters, as an index into `FrameData.strings`.
    """

    name: list[str] = field(default_factory=list[str])
    value: list[int] = field(default_factory=list[int])
    call: list[str] = field(default_factory=list[str])
    parameters: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class NodeColumns:
    """Table of the nodes of a final graph, in program order.

    Attributes:
        line: index of the node's line in `FrameData.lines`.
        op, target, shape, dtype, stride, module, source: indices into `FrameData.strings`; a contiguous stride is "".
        parameters: names of the node's parameters, joined by ", ": index into `FrameData.strings`.
        bytes: size of the node's result.
        storage: memory class of the result's storage, as an index into the memory classes.
        lane: index into `FrameData.lanes`; -1: the node takes no time.
        cost_us, start_us, end_us, exposed_us: predicted times in microseconds; None: the pipeline has no target.
        inputs: indices of the nodes that the node reads.
    """

    line: list[int]
    op: list[int]
    target: list[int]
    shape: list[int]
    dtype: list[int]
    stride: list[int]
    module: list[int]
    source: list[int]
    parameters: list[int]
    bytes: list[int]
    storage: list[int]
    lane: list[int]
    cost_us: list[float] | None
    start_us: list[float] | None
    end_us: list[float] | None
    exposed_us: list[float] | None
    inputs: list[list[int]]


@dataclass(kw_only=True)
class CollectiveColumns:
    """Table of the collectives of a final graph, in program order.

    Attributes:
        node: index of the node that starts the collective.
        wait: index of the first node that waits for the collective; -1: the wait is in another graph, or there is none.
        kind, group, dtype, codec, reason: indices into `FrameData.strings`; the codec of uncompressed data is "".
        group_size: number of ranks in the group.
        payload_bytes: size of this rank's input.
        sent_bytes, received_bytes: bytes that this rank sends and receives.
        parameters: indices of the parameters in `FrameData.parameters`.
        predicted_us, exposed_us: predicted times in microseconds; None: the pipeline has no target.
    """

    node: list[int] = field(default_factory=list[int])
    wait: list[int] = field(default_factory=list[int])
    kind: list[int] = field(default_factory=list[int])
    group: list[int] = field(default_factory=list[int])
    group_size: list[int] = field(default_factory=list[int])
    dtype: list[int] = field(default_factory=list[int])
    codec: list[int] = field(default_factory=list[int])
    payload_bytes: list[int] = field(default_factory=list[int])
    sent_bytes: list[int] = field(default_factory=list[int])
    received_bytes: list[int] = field(default_factory=list[int])
    parameters: list[list[int]] = field(default_factory=list[list[int]])
    predicted_us: list[float] | None = None
    exposed_us: list[float] | None = None
    reason: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class GraphData:
    """One final graph.

    Attributes:
        direction: "forward", "backward", "inference" or "step".
        nodes: nodes of the graph.
        collectives: collectives of the graph.
        predicted_us, exposed_us: predicted time of one call, and its exposed part; None: the pipeline has no target.
        sent_bytes, received_bytes: bytes that this rank sends and receives in one call.
        critical: indices of the nodes on the critical path.
        peak_bytes: predicted peak memory of this graph by itself, as in `zgraph.explain`; None: not predictable.
    """

    direction: str
    nodes: NodeColumns
    collectives: CollectiveColumns
    predicted_us: float | None
    exposed_us: float | None
    sent_bytes: int
    received_bytes: int
    critical: list[int]
    peak_bytes: int | None


@dataclass(kw_only=True)
class StorageColumns:
    """Table of the storages of a step, in the order of their creation.

    Positions count the nodes of all graphs of the step, in execution order.

    Attributes:
        node: position of the node that creates the storage.
        bytes: allocated bytes.
        first, last: first and last position at which the storage is alive.
        kind: index into the memory classes.
        space: index into the memory spaces.
        held: 1 if the storage is allocated outside of the step, and so is not counted; else 0.
    """

    node: list[int] = field(default_factory=list[int])
    bytes: list[int] = field(default_factory=list[int])
    first: list[int] = field(default_factory=list[int])
    last: list[int] = field(default_factory=list[int])
    kind: list[int] = field(default_factory=list[int])
    space: list[int] = field(default_factory=list[int])
    held: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class MemoryData:
    """Predicted memory of one step of the frame, over all of its graphs.

    Positions count the nodes of all graphs of the step, in execution order.

    Attributes:
        directions: directions of the graphs, in execution order.
        nodes: number of nodes of all graphs.
        storages: storages of the step.
        workspace_bytes: workspace of the call at each position, in addition to storages.
        held_bytes: size of the inputs, which are allocated outside of the step.
        budget_bytes: memory budget of the step; None: no limit.
        peak_bytes: peak memory of the step, without `held_bytes`.
        peak_position: position of the peak.
        at_peak: indices of the largest storages alive at the peak, largest first.
        unknown: names of nodes whose size depends on data; they count as 0 bytes.
    """

    directions: list[str]
    nodes: int
    storages: StorageColumns
    workspace_bytes: list[int]
    held_bytes: int
    budget_bytes: int | None
    peak_bytes: int
    peak_position: int
    at_peak: list[int]
    unknown: list[str]


@dataclass(kw_only=True)
class Totals:
    """Traffic, memory and time of a graph before or after a pass.

    Attributes:
        nodes: number of nodes.
        sent_bytes: bytes that this rank sends.
        peak_bytes: predicted peak memory of this graph by itself; None: not predictable.
        predicted_us, exposed_us: predicted time of one call, and its exposed part; None: the pipeline has no target.
    """

    nodes: int
    sent_bytes: int
    peak_bytes: int | None = None
    predicted_us: float | None = None
    exposed_us: float | None = None


@dataclass(kw_only=True)
class PassData:
    """One run of a pass on one graph.

    Attributes:
        name: name of the pass.
        options: repr of the pass, with its options.
        direction: direction of the graph; "joint" for a joint forward-backward graph.
        changed: whether the graph's text changed.
        notes: messages of the pass, such as why it did nothing.
        before, after: totals of the graph before and after the pass; None if passes were not recorded.
        hunks: for each changed place, (position of the first removed line, number of removed lines, inserted lines).
            The inserted lines are given as runs (first, count) of consecutive line numbers.
    """

    name: str
    options: str
    direction: str
    changed: bool
    notes: list[str]
    before: Totals | None
    after: Totals | None
    hunks: list[tuple[int, int, list[tuple[int, int]]]]


@dataclass(kw_only=True)
class ParameterColumns:
    """Table of the parameters that the frame reads.

    Attributes:
        name: fully qualified name.
        shape, dtype, lifetime, codec: indices into `FrameData.strings`; dtype is the dtype between steps.
        rests: memory space between steps, "device", "host" or "disk": index into `FrameData.strings`.
        zero_stage: 0 to 3; -1: unknown.
        local_bytes: bytes of the parameter that this rank keeps between steps.
        feedback_bytes: bytes of the parameter's error feedback that this rank keeps between steps.
        collectives: collectives that carry the parameter: (index of the graph, index of the collective in the graph).
        wire_bytes: bytes that these collectives send for the parameter. The bytes of a collective are divided among its
            parameters by their numbers of elements.
    """

    name: list[str] = field(default_factory=list[str])
    shape: list[int] = field(default_factory=list[int])
    dtype: list[int] = field(default_factory=list[int])
    zero_stage: list[int] = field(default_factory=list[int])
    lifetime: list[int] = field(default_factory=list[int])
    codec: list[int] = field(default_factory=list[int])
    rests: list[int] = field(default_factory=list[int])
    local_bytes: list[int] = field(default_factory=list[int])
    feedback_bytes: list[int] = field(default_factory=list[int])
    collectives: list[list[tuple[int, int]]] = field(default_factory=list[list[tuple[int, int]]])
    wire_bytes: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class FrameData:
    """One compiled frame.

    Attributes:
        frame: Dynamo's number of the frame and of its recompile, such as "0/1".
        reason: guard whose failure caused a recompile; "" if there was none, or Dynamo does not name it.
        lowering: "inductor" or "fx".
        from_step: first optimizer step that runs these graphs; warm-up steps before it run other graphs.
        hardware: name, backend and memory of the machine for which times are predicted; None: no target.
        strings: texts, to which columns refer by index.
        lanes: names of the lanes.
        lines: code lines of all graphs, before and after every pass.
        graphs: final graphs.
        memory: predicted memory of a step; None: not predictable.
        captured: lines of each direction's graph before any pass, as runs of line numbers (first, count).
        passes: passes in execution order.
        parameters: parameters that the frame reads.
        seconds: measured time of each pass; not part of report.json, because it differs between runs.
    """

    frame: str
    reason: str
    lowering: str
    from_step: int
    hardware: dict[str, str | int] | None
    strings: list[str]
    lanes: list[str]
    lines: LineColumns
    graphs: list[GraphData]
    memory: MemoryData | None
    captured: dict[str, list[tuple[int, int]]]
    passes: list[PassData]
    parameters: ParameterColumns
    seconds: list[float]
