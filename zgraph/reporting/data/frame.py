"""What `report.json` holds of one compiled frame: plain columns, without tensors, graphs or clocks.

A row of a table is the same position in each of its columns. Texts that come again and again are held once, in
`FrameData.strings`, and columns hold their positions. docs/report-json.md explains every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Strings:
    """Texts by number, in the order in which they were first met."""

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
        name, call: texts.
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
        line: position in the lines, which have the name.
        op, target, shape, dtype, stride, module, source: positions in the strings; a contiguous stride is "".
        parameters: that the node works for: position of their names, joined by ", ".
        bytes: of what the node yields.
        storage: memory class of the storage it lies in.
        lane: position in the lanes; -1: takes no time.
        cost_us, start_us, end_us, exposed_us: predicted; None: the pipeline has no target.
        inputs: positions of the nodes it reads; users are the inverse.
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
    """Collectives of a final graph in program order, which is that of their numbers.

    Attributes:
        node, wait: positions of the start, and of the first wait; -1: waited for in another graph, or not lowered.
        kind, group, dtype, codec, reason: positions in the strings; a codec is "" where numbers travel as they are.
        group_size: ranks.
        payload_bytes, sent_bytes, received_bytes: of this rank.
        parameters: positions in the frame's table of parameters.
        predicted_us, exposed_us: None as of nodes.
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
        nodes: its nodes.
        collectives: its collectives.
        predicted_us, exposed_us: of one call; None: no target.
        critical: positions of the nodes on the critical path.
        peak_bytes: of the graph alone, as `zgraph.explain` says it; None: could not be predicted.
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
    """Storages of a step, in the order in which they come to be.

    Attributes:
        node: that makes it, by its position in the step.
        bytes: as allocated.
        first, last: positions at which it is alive, both included.
        kind: position in the memory classes.
        space: position in the memory spaces.
        held: 1 where somebody else holds it before and afterwards, so that it does not count.
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
        directions: of the graphs whose nodes follow one another.
        nodes: how many positions there are.
        storages: that are alive at any time.
        workspace_bytes: that each call takes beside storages while it runs.
        held_bytes: of the inputs, which somebody else holds.
        budget_bytes: that the step was planned for; None: no limit.
        peak_bytes, peak_position: where the step holds most.
        at_peak: positions of the storages that are alive there, the largest first.
        unknown: nodes whose size only the data tells; they count nothing.
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
    """A graph before or after a pass.

    Attributes:
        sent_bytes: by this rank.
        peak_bytes: of the graph alone.
        predicted_us, exposed_us: of one call; None: no target.
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
        options: of the pass, as it shows itself.
        direction: of the graph; "joint" before the partition.
        notes: what the pass had to say.
        before, after: None where no dump was wanted.
        hunks: what changed in the text: position in the text before, lines removed there, and the lines put there, as
            runs of first and count.
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
        name: fully qualified.
        shape, dtype, lifetime, codec, rests: positions in the strings; dtype is that at rest, and rests the memory it
            rests in: "device", "host" or "disk".
        zero_stage: 0 to 3; -1: unknown.
        local_bytes: at rest on this rank.
        collectives: that carry it, as (position of the graph in `FrameData.graphs`, position of the collective).
        feedback_bytes: that error feedback keeps for it between steps, on this rank.
        wire_bytes: its share of what they send: by elements, where they carry several.
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
        frame: Dynamo's "frame/recompile".
        reason: the guard that failed, if the frame was compiled before.
        lowering: "inductor" or "fx".
        from_step: optimizer step from which on these graphs run; before, others without some passes did.
        hardware: name, backend and memory of the machine that times are predicted for; None: no target.
        lanes: names, as columns number them.
        captured: by direction the lines of the graph before any pass, as runs of first and count.
        passes: in the order in which they ran.
        seconds: of the passes, in their order: by the clock, and so not part of report.json.
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
