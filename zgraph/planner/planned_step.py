"""`Plan`, the result of `zgraph.plan`: predicted memory, traffic and time of a training step on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import MemoryCurve
from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.memory_ledger import SpaceUse
from zgraph.compression.methods import CompressionMethod
from zgraph.planner.memory import what_would_fit
from zgraph.planner.outer_rounds import LATENCY_US, OuterPlan, plan_rounds
from zgraph.planner.planned_pipeline import pipeline_document, pipeline_lines, pipeline_tables
from zgraph.planner.schedules.axes import Axes, AxisTraffic
from zgraph.planner.schedules.pipeline_plan import PipelinePlan
from zgraph.reporting.export.folder import write_plans, write_report
from zgraph.reporting.summary import Report
from zgraph.reporting.tables import Table, as_html, duration, size
from zgraph.scheduling.timeline import Timeline
from zgraph.step.outer.outer_steps import CODEC
from zgraph.tiers.tier import DEVICE, HOST

GIB = 2**30
LARGEST = 3  # storages that tables name at each frame's peak


@dataclass(frozen=True)
class PlannedGraph:
    """One graph of a planned step.

    Attributes:
        direction: "forward", "backward", "inference" or "step".
        nodes: number of nodes of the final graph.
        sent_bytes: bytes sent by one rank in one run.
        timeline: simulated timeline.
        traffic: traffic along each axis of the cluster, if its axes are named.
        stage: index of the pipeline stage; None: there is no pipeline.
        runs: number of runs in a step.
    """

    direction: Direction
    nodes: int
    sent_bytes: int
    timeline: Timeline
    traffic: Mapping[str, AxisTraffic] = field(default_factory=dict[str, AxisTraffic])
    stage: int | None = None
    runs: int = 1

    @property
    def exposed_us(self) -> float:
        return sum(self.timeline.exposed_us.values())

    @property
    def busy(self) -> dict[str, float]:
        """Fraction of the graph's time (0 to 1) in which each lane is busy, by the lane's name."""
        return {str(lane): self.timeline.utilisation(lane) for lane in self.timeline.busy_us}


@dataclass(frozen=True)
class Plan:
    """Predicted memory, traffic and time of one training step on each rank of a cluster; `print` it.

    Attributes:
        world_size, hardware: number of ranks in the cluster, and the hardware of each.
        ledger: bytes in each memory space (device, host, disk) on the rank that needs most: parameters; the state of
            the planned optimizer, else AdamW's two moments; and the additional peak of the frame that needs most
            (activations, gathered parameters, gradients, copies of offloaded tensors).
        cublas_bytes: GPU memory of cuBLAS workspaces, in the allocator.
        communicator_bytes: GPU memory of NCCL buffers, outside of the allocator.
        graphs: graphs in the order of compilation.
        curves: memory over each frame, forward and backward together.
        compiled: report of the compile, which `report` writes.
        optimizer: name of the optimizer whose step is planned too; "" if there is none.
        host_budget_bytes: most bytes that a rank may keep on the host; None: no limit.
        axes: axes of the cluster; None: only the number of ranks was given.
        pipeline: stages and schedules of a pipeline; None: there is none. With a pipeline, memory and bytes are those
            of the rank with the most, and times are those of the planned schedule.
        trained: number of elements of each trained parameter that a rank would exchange with other sites.
    """

    world_size: int
    hardware: Hardware
    ledger: tuple[SpaceUse, ...]
    cublas_bytes: int
    communicator_bytes: int
    graphs: tuple[PlannedGraph, ...]
    curves: tuple[MemoryCurve, ...]
    compiled: Report = field(default_factory=Report, repr=False, compare=False)
    optimizer: str = ""
    host_budget_bytes: int | None = None
    axes: Axes | None = None
    pipeline: PipelinePlan | None = None
    trained: tuple[int, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers in all memory spaces."""
        return sum(line.parameters for line in self.ledger)

    @property
    def moment_bytes(self) -> int:
        """Bytes of optimizer state in all memory spaces."""
        return sum(line.state for line in self.ledger)

    @property
    def step_bytes(self) -> int:
        """Peak bytes of the step on the device, not counting parameters and optimizer state."""
        return self._device.step

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on one rank's device: parameters, optimizer state, the step and libraries; no driver context.

        Bytes in other memory spaces are counted by `host_bytes` and `disk_bytes`.
        """
        return self._device.together + self._libraries

    @property
    def host_bytes(self) -> int:
        return self._line(HOST.name).together

    @property
    def disk_bytes(self) -> int:
        return self._line("disk").together

    @property
    def fits(self) -> bool:
        """Whether a rank's memory is large enough; on a CPU, tensors stored on the host count too."""
        return not self._advice

    @property
    def _device(self) -> SpaceUse:
        return self._line(DEVICE.name)

    def _line(self, space: str) -> SpaceUse:
        return next(line for line in self.ledger if line.space == space)

    @property
    def _libraries(self) -> int:
        return self.cublas_bytes + self.communicator_bytes

    @property
    def _advice(self) -> str:
        return what_would_fit(self.ledger, self._libraries, self.hardware)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in one step."""
        if self.pipeline is not None:
            of_ranks = map(self.pipeline.traffic_of, range(self.pipeline.ranks))
            return max(sum(sent.sent_bytes for sent in found.values()) for found in of_ranks)
        return sum(graph.sent_bytes for graph in self.graphs)

    @property
    def step_us(self) -> float:
        """Time of the whole step in microseconds; without the optimizer if none was planned."""
        if self.pipeline is not None:
            return self.pipeline.run.step_us
        return sum(graph.timeline.step_us for graph in self.graphs)

    @property
    def traffic(self) -> dict[str, AxisTraffic]:
        """Traffic of one rank in one step by axis: bytes sent, and time exposed and hidden."""
        if self.pipeline is not None:
            return self.pipeline.traffic()
        found: dict[str, AxisTraffic] = {}
        for graph in self.graphs:
            for axis, traffic in graph.traffic.items():
                found[axis] = found.get(axis, AxisTraffic()) + traffic
        return found

    def outer_steps(
        self,
        *,
        sites: int,
        link: str,
        every: int = 30,
        codec: CompressionMethod | None = CODEC,
        latency_us: float = LATENCY_US,
    ) -> OuterPlan:
        """Plan `zgraph.OuterSteps` between sites, each of which is the planned cluster.

        Args:
            sites: number of sites.
            link: rate of each site's link, in each direction, such as "100mbit".
            every, codec: as for `zgraph.OuterSteps`.
            latency_us: latency of an exchange between sites, in microseconds.

        Returns:
            The smallest number of fragments and the delay with which steps hide rounds as far as the link allows.

        Raises:
            ValueError: an option is invalid, or the plan is that of a pipeline.
        """
        if self.pipeline is not None:
            raise ValueError(
                "zgraph.Plan.outer_steps: plan the stages of a pipeline one by one; each has its own sites."
            )
        return plan_rounds(
            self.trained,
            self.step_us,
            ranks=self.world_size,
            sites=sites,
            link=link,
            every=every,
            codec=codec,
            latency_us=latency_us,
        )

    def report(self, directory: str | Path, outer: OuterPlan | None = None) -> Path:
        """Write the plan to files, as `zgraph.report` does for a compiled model, and return the folder of rank 0.

        For a pipeline there is an additional page, `index.html`: a timeline of micro-batches on each rank, the costs of
        ranks, stages and schedules, and the graphs of each stage. With outer steps this page has the rounds on the lane
        "site", below the steps that hide them.

        Args:
            directory: parent of the folder of rank 0.
            outer: rounds between sites, from `outer_steps`; None: there is one site.
        """
        folder = write_report(Path(directory), self.compiled, self.moment_bytes, self.world_size)
        plans = {} if self.pipeline is None else {"pipeline": pipeline_document(self.pipeline)}
        plans |= {} if outer is None else {"sites": outer.document()}
        if plans:
            write_plans(folder, plans)
        return folder

    def __str__(self) -> str:
        capacity, device = self.hardware.memory_bytes / GIB, self._device
        lines = [
            f"zgraph.plan for {self._ranks} of {self.hardware.name}",
            f"memory of a rank: parameters {size(device.parameters)}, {self._state} {size(device.state)}, "
            f"peak of the step beside them {size(self.step_bytes)}; "
            f"together {size(self.peak_bytes)} of {capacity:.0f} GiB",
            *(
                [f"  cuBLAS workspaces {size(self.cublas_bytes)}, NCCL communicators {size(self.communicator_bytes)}"]
                if self.cublas_bytes
                else []
            ),
            *(f"  {self._elsewhere(line)}" for line in self.ledger[1:] if line.together),
            *([f"  {self._advice}"] if self._advice else []),
            *(f"  {_peak(curve)}" for curve in self.curves if curve.nodes and self.pipeline is None),
            f"{self._title}: {self.step_us / 1e3:.2f} ms, {size(self.sent_bytes)} sent by each rank",
        ]
        lines += [] if self.pipeline is None else [f"  {line}" for line in pipeline_lines(self.pipeline)]
        for graph in self.graphs if self.pipeline is None else ():
            used = ", ".join(f"{lane} {share:.0%}" for lane, share in graph.busy.items())
            lines.append(
                f"  {graph.direction}: {graph.nodes} nodes, {graph.timeline.step_us / 1e3:.2f} ms, "
                f"{size(graph.sent_bytes)} sent, {graph.exposed_us / 1e3:.2f} ms exposed; busy: {used}"
            )
        lines += [f"    {text}" for graph in self.compiled.graphs for text in graph.decisions]
        lines += [
            f"  along {axis}: {size(sent.sent_bytes)} sent, {sent.exposed_us / 1e3:.2f} ms exposed, "
            f"{sent.hidden_us / 1e3:.2f} ms hidden"
            for axis, sent in self.traffic.items()
        ]
        return "\n".join(lines)

    def tables(self) -> list[Table]:
        """The plan as tables for a terminal or a notebook."""
        memory = {
            "parameters": self._device.parameters,
            self._state: self._device.state,
            "peak of the step beside them": self.step_bytes,
            "cuBLAS workspaces": self.cublas_bytes,
            "NCCL communicators": self.communicator_bytes,
            "together": self.peak_bytes,
            f"memory of {self.hardware.name}": self.hardware.memory_bytes,
            **{
                f"{kind}, {line.space}": count
                for line in self.ledger[1:]
                for kind, count in (("parameters", line.parameters), (self._state, line.state), ("step", line.step))
            },
        }
        peaks = tuple(
            (size(curve.peak_bytes), curve.nodes[curve.peak_position].name, ", ".join(curve.unknown))
            for curve in self.curves
            if curve.nodes
        )
        at_peak = [
            (str(entry.node.name), size(entry.bytes), curve.nodes[curve.peak_position].name)
            for curve in self.curves
            for entry in curve.alive_at(curve.peak_position)[:LARGEST]
        ]
        graphs = [
            (
                graph.direction if graph.stage is None else f"{graph.direction} of stage {graph.stage}, x {graph.runs}",
                str(graph.nodes),
                size(graph.sent_bytes),
                duration(graph.timeline.step_us),
                duration(graph.exposed_us),
                ", ".join(f"{lane} {share:.0%}" for lane, share in graph.busy.items()),
            )
            for graph in self.graphs
        ]
        exposed_us = sum(graph.exposed_us for graph in self.graphs)
        step = ("step", "", size(self.sent_bytes), duration(self.step_us), duration(exposed_us), "")
        return [
            Table(
                f"memory of one of {self._ranks}",
                (),
                tuple((name, size(count)) for name, count in memory.items() if count),
            ),
            Table("peak of each frame", ("bytes", "while this runs", "of unknown size"), peaks),
            Table("largest at the peak", ("of node", "bytes", "while this runs"), tuple(at_peak)),
            Table(
                self._title,
                ("graph", "nodes", "sent", "time", "exposed", "busy lanes"),
                (*graphs, *([step] if len(graphs) > 1 else [])),
            ),
            *([] if self.pipeline is None else pipeline_tables(self.pipeline)),
            Table(
                "traffic of the step by axis",
                ("axis", "sent", "exposed", "hidden"),
                tuple(
                    (axis, size(sent.sent_bytes), duration(sent.exposed_us), duration(sent.hidden_us))
                    for axis, sent in self.traffic.items()
                ),
            ),
        ]

    def _elsewhere(self, line: SpaceUse) -> str:
        kinds = {"parameters": line.parameters, self._state: line.state, "the step beside them": line.step}
        limit = f" of host_budget_bytes={self.host_budget_bytes}" if line.space == HOST.name else ""
        return (
            f"on {'the host' if line.space == 'host' else line.space}: "
            f"{', '.join(f'{kind} {size(count)}' for kind, count in kinds.items() if count)}; together "
            f"{size(line.together)}{limit if self.host_budget_bytes else ''}"
        )

    @property
    def _ranks(self) -> str:
        return f"{self.world_size} ranks{f' ({self.axes})' if self.axes is not None else ''}"

    @property
    def _state(self) -> str:
        return f"state of {self.optimizer}" if self.optimizer else "AdamW's moments"

    @property
    def _title(self) -> str:
        return f"step with {self.optimizer}" if self.optimizer else "step without optimizer"

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        names = ("world_size", "parameter_bytes", "moment_bytes", "cublas_bytes", "communicator_bytes", "step_bytes")
        return {
            **{
                name: getattr(self, name)
                for name in (*names, "peak_bytes", "host_bytes", "disk_bytes", "sent_bytes", "step_us")
            },
            "optimizer": self.optimizer or None,
            "hardware": self.hardware.name,
            "memory_bytes": self.hardware.memory_bytes,
            "memory": [asdict(line) for line in self.ledger],
            "host_budget_bytes": self.host_budget_bytes,
            "fits": self.fits,
            "axes": None if self.axes is None else dict(self.axes.sizes),
            "pipeline": None if self.pipeline is None else self.pipeline.as_json(),
            "traffic": {axis: asdict(sent) for axis, sent in self.traffic.items()},
            "graphs": [
                {
                    "direction": graph.direction,
                    "stage": graph.stage,
                    "runs": graph.runs,
                    "nodes": graph.nodes,
                    "sent_bytes": graph.sent_bytes,
                    "step_us": graph.timeline.step_us,
                    "exposed_us": graph.exposed_us,
                    "busy": graph.busy,
                }
                for graph in self.graphs
            ],
        }

    def _repr_html_(self) -> str:
        return as_html(self.tables())


def _peak(curve: MemoryCurve) -> str:
    """Return a line of text about a frame's memory peak: its bytes, the running node, and the largest live storages."""
    position = curve.peak_position
    largest = ", ".join(f"{entry.node.name} {size(entry.bytes)}" for entry in curve.alive_at(position)[:LARGEST])
    unknown = f"; without {', '.join(curve.unknown)}, whose size depends on data" if curve.unknown else ""
    return f"peak {size(curve.peak_bytes)} while {curve.nodes[position].name} runs: {largest}{unknown}"
