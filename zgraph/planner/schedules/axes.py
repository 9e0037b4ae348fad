"""The axes of a planned cluster, such as pp x dp x tp, and a graph's traffic along each axis."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zgraph.errors import is_count
from zgraph.graph import nodes
from zgraph.graph.traffic import transfers_of
from zgraph.scheduling.timeline import Timeline
from zgraph.torch_compat.groups import resolve_group

AXES = ("pp", "replicate", "dp", "cp", "ep", "tp")
PIPELINE = "pp"


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of one rank along an axis.

    Attributes:
        sent_bytes: bytes sent.
        exposed_us: time for which compute waits for the traffic.
        hidden_us: time for which data is sent while compute runs.
    """

    sent_bytes: int = 0
    exposed_us: float = 0.0
    hidden_us: float = 0.0

    def __add__(self, other: AxisTraffic) -> AxisTraffic:
        return AxisTraffic(
            self.sent_bytes + other.sent_bytes,
            self.exposed_us + other.exposed_us,
            self.hidden_us + other.hidden_us,
        )

    def times(self, runs: int) -> AxisTraffic:
        """Return the traffic of `runs` runs."""
        return AxisTraffic(self.sent_bytes * runs, self.exposed_us * runs, self.hidden_us * runs)


@dataclass(frozen=True)
class Axes:
    """Sizes of a cluster's axes, outermost first, as for `init_device_mesh`.

    Attributes:
        sizes: size of each axis by name (one of `AXES`). If "dp" is missing, it is added with size 1.

    Raises:
        ValueError: no axis is given, a name is unknown, or a size is not a positive whole number.
    """

    sizes: Mapping[str, int] = field(hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Mapping) or not self.sizes:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"zgraph.plan: world={self.sizes!r}; write the size of each axis, the outermost first, such as "
                '{"pp": 4, "dp": 8, "tp": 2}, or world_size=8 for data parallelism only.'
            )
        for name, size in self.sizes.items():
            if name not in AXES:
                near = difflib.get_close_matches(str(name), AXES, 1)
                guess = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(f"zgraph.plan: world has an axis {name!r}, and a plan knows {', '.join(AXES)}{guess}")
            if not is_count(size):
                raise ValueError(
                    f"zgraph.plan: world has {size!r} ranks on its axis {name!r}; write a number from 1 on."
                )
        sizes = dict(self.sizes)
        if "dp" not in sizes:  # a rank shards over itself
            outer = [name for name in sizes if name in AXES[: AXES.index("dp")]]
            sizes = {name: sizes[name] for name in outer} | {"dp": 1} | sizes
        object.__setattr__(self, "sizes", sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole cluster."""
        return math.prod(self.sizes.values())

    @property
    def stages(self) -> int:
        """Size of the pipeline axis; 1 without a pipeline."""
        return self.sizes.get(PIPELINE, 1)

    @property
    def inner(self) -> tuple[str, ...]:
        """All axes except the pipeline's."""
        return tuple(name for name in self.sizes if name != PIPELINE)

    def stride(self, axis: str) -> int:
        """Return the difference between the global ranks of two neighbours along an axis."""
        names = list(self.sizes)
        return math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])

    def mesh(self) -> DeviceMesh:
        """Return the device mesh of all axes, over the default process group."""
        return init_device_mesh("cpu", tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))

    def along(self, group_name: str) -> str:
        """Return the axes that a process group spans, joined by " x "; "alone" for a group of one rank."""
        members = dist.get_process_group_ranks(resolve_group(group_name))
        differ = [
            name for name, size in self.sizes.items() if len({rank // self.stride(name) % size for rank in members}) > 1
        ]
        return " x ".join(differ) or "alone"

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())


def traffic_of(order: Iterable[fx.Node], timeline: Timeline, axes: Axes) -> dict[str, AxisTraffic]:
    """Return the traffic of a graph by axis.

    Args:
        order: nodes of the graph.
        timeline: timeline of the same nodes.
        axes: axes of the cluster.
    """
    found: dict[str, AxisTraffic] = {}
    for node in order:
        if not (nodes.is_collective(node) or nodes.is_marker(node)):
            continue
        times = timeline.exposed_us.get(node, 0.0), timeline.hidden_us.get(node, 0.0)
        for transfer in transfers_of(node):
            axis = axes.along(transfer.group_name)
            found[axis] = found.get(axis, AxisTraffic()) + AxisTraffic(transfer.sent_bytes, *times)
            times = 0.0, 0.0  # a marker's time is that of all of its collectives
    return found
