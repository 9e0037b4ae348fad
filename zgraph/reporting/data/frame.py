"""The part of `report.json` for one compiled frame: plain columns, without tensors, graphs or clocks.

A row of a table is the same position in each of the table's columns. Repeated texts are stored once, in
`FrameData.strings`, and columns hold the positions of texts there. docs/report-json.md explains every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Strings:
    """Texts by number, in the order of their first use."""

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
    """Every line of code that any graph of the frame had after any pass; see `zgraph.graph.text.Line`.

    Attributes:
        name, call: text of the node's name, and text of the node's call.
        value, parameters: positions in the strings.
    """

    name: list[str] = field(default_factory=list[str])
    value: list[int] = field(default_factory=list[int])
    call: list[str] = field(default_factory=list[str])
    parameters: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class NodeColumns:
    """Nodes of a final graph in program order.

    Attributes:
        line: position in the frame's lines, which have the node's name.
        op, target, shape, dtype, stride, module, source: positions in the strings; a contiguous stride is "".
        parameters: position in the strings: names of the parameters that the node works for, joined by ", ".
        bytes: size of the node's result.
        storage: memory class of the result's storage.
        lane: position in the lanes; -1: the node takes no time.
        cost_us, start_us, end_us, exposed_us: predictions; None: the pipeline has no target.
        inputs: positions of the nodes that the node reads.
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
    """Collectives of a final graph, numbered in program order.

    Attributes:
        node, wait: positions of the start and of its first wait. `wait` -1: in another graph, or not lowered.
        kind, group, dtype, codec, reason: positions in the strings; the codec is "" if numbers are sent uncompressed.
        group_size: number of ranks in the group.
        payload_bytes, sent_bytes, received_bytes: bytes of this rank.
        parameters: positions in the frame's table of parameters.
        predicted_us, exposed_us: predictions; None: the pipeline has no target.
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
        predicted_us, exposed_us: predicted times of one call; None: no target.
        critical: positions of the nodes on the critical path.
        peak_bytes: peak of this graph only, as shown by `zgraph.explain`; None: could not be predicted.
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
    """Storages of a step, in the order of their creation.

    Attributes:
        node: position of the node that creates the storage, in the step.
        bytes: allocated bytes.
        first, last: first and last position at which the storage is alive.
        kind: position in the memory classes.
        space: position in the memory spaces.
        held: 1 if the storage is held outside of the step, before and after it, and so is not counted; else 0.
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
    """Memory of one step of the frame, forward and then backward.

    Attributes:
        directions: directions of the graphs, in execution order.
        nodes: number of positions.
        storages: all storages that are alive at some position.
        workspace_bytes: workspace of each call, in addition to storages.
        held_bytes: size of the inputs, which are held outside of the step.
        budget_bytes: budget that the step was planned for; None: no limit.
        peak_bytes, peak_position: most bytes that the step holds, and the position at which it does.
        at_peak: positions of the largest storages alive at the peak, largest first.
        unknown: nodes whose size depends on data; they count as 0.
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
    """Totals of a graph before or after a pass.

    Attributes:
        sent_bytes: bytes that this rank sends.
        peak_bytes: peak of this graph only.
        predicted_us, exposed_us: predicted times of one call; None: no target.
    """

    nodes: int
    sent_bytes: int
    peak_bytes: int | None = None
    predicted_us: float | None = None
    exposed_us: float | None = None


@dataclass(kw_only=True)
class PassData:
    """One pass on one graph.

    Attributes:
        options: repr of the pass, with its options.
        direction: direction of the graph; "joint" before the partition.
        notes: notes of the pass.
        before, after: totals before and after the pass; None if passes were not recorded.
        hunks: changes of the text: (position before the pass, number of removed lines, inserted lines). Inserted lines
            are runs (first, count).
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
    """Parameters that the frame reads.

    Attributes:
        name: fully qualified name.
        shape, dtype, lifetime, codec, rests: positions in the strings. dtype is the dtype between steps; rests is the
            memory space between steps: "device", "host" or "disk".
        zero_stage: 0 to 3; -1: unknown.
        local_bytes: bytes that this rank keeps between steps.
        collectives: collectives that carry the parameter: (position in `FrameData.graphs`, position of the collective).
        feedback_bytes: bytes of the parameter's error feedback that this rank keeps between steps.
        wire_bytes: the parameter's share of the bytes that these collectives send; if a collective carries several
            parameters, in proportion to their elements.
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
        reason: the guard that failed, if the frame was compiled before.
        lowering: "inductor" or "fx".
        from_step: first optimizer step that runs these graphs; in earlier steps some passes have not run.
        hardware: name, backend and memory of the machine that times are predicted for; None: no target.
        lanes: names of the lanes, numbered in the columns.
        captured: by direction, the lines of the graph before any pass, as runs of first and count.
        passes: passes in execution order.
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
