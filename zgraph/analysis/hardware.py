"""Descriptions of hardware: peak rates, links between ranks, and lower bounds on the time of operations."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

import torch

from zgraph.tiers.devices import kind_of_backend
from zgraph.tiers.staging import PIECE_BYTES

GB = 10**9  # data sheets count in powers of ten
GIB = 2**30
_TERA_PER_US = 10**6  # 1 T/s in units per microsecond


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link over which a rank sends.

    Attributes:
        latency_us: latency of one message.
        bytes_per_us: rate of one rank while all other ranks of its host are sending, too.
        gain_at_once: throughput of several concurrent transfers, divided by the throughput of a single one. More than 1
            if one transfer does not fill the link.
    """

    latency_us: float
    bytes_per_us: float
    gain_at_once: float = 1.0

    def __post_init__(self) -> None:
        _check("Link", "gain_at_once", self.gain_at_once)
        if self.gain_at_once < 1:
            raise ValueError(f"zgraph.Link: gain_at_once={self.gain_at_once} is less than 1; write 1 or more.")
        _check("Link", "latency_us", self.latency_us, zero_allowed=True)
        _check("Link", "bytes_per_us", self.bytes_per_us)

    def us(self, sent_bytes: float) -> float:
        """Return the time of one message, in microseconds."""
        return self.latency_us + sent_bytes / self.bytes_per_us


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hardware of one rank: its device, and its share of the host and of the links.

    Attributes:
        name: name for messages and reports.
        flops_per_us: peak rate of matrix products, by dtype; a dtype that is not listed counts as float32.
        memory_bytes_per_us: memory bandwidth, reads and writes together.
        launch_us: time of the smallest kernel.
        memory_bytes: memory that one rank may use.
        intra_host: link between ranks of the same host.
        inter_host: link between ranks of different hosts.
        ranks_per_host: number of ranks on a host; rank r is on host r // ranks_per_host.
        links: links of mesh axes for which neither intra_host nor inter_host is right; the keys are distances between
            neighbours of an axis in global ranks (1 for the innermost axis).
        host_to_device, device_to_host, disk: links of one rank.
        host_gain_both_ways: throughput of copies to the device and to the host at once, divided by that of one
            direction alone: 2 if they do not slow each other down.
        host_memory_bytes_per_us: bandwidth at which the host updates tensors kept there, reads and writes together.
            None: memory_bytes_per_us, which is right for a CPU device.
        backend: backend of torch.distributed between the ranks.
        collectives_at_once: number of collectives of one group that run concurrently; 1 on NCCL, and for point-to-point
            transfers.
        cpu_us_per_collective: compute time lost per collective, of any size, if the processor that issues it also
            computes.
        cpu_us_per_wire_byte: compute time lost per sent byte. CPUs copy the byte; on GPUs, NCCL's kernels occupy
            multiprocessors.
    """

    name: str
    flops_per_us: Mapping[torch.dtype, float] = field(hash=False)
    memory_bytes_per_us: float
    launch_us: float
    memory_bytes: int
    intra_host: Link
    inter_host: Link
    ranks_per_host: int
    host_to_device: Link
    device_to_host: Link
    disk: Link
    links: Mapping[int, Link] = field(default_factory=dict[int, Link], hash=False)
    host_gain_both_ways: float = 2.0
    host_memory_bytes_per_us: float | None = None
    backend: str = "gloo"
    collectives_at_once: int = 1
    cpu_us_per_collective: float = 0.0
    cpu_us_per_wire_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes_per_us", "memory_bytes", "ranks_per_host", "collectives_at_once"):
            _check("Hardware", name, getattr(self, name))
        if self.host_memory_bytes_per_us is not None:
            _check("Hardware", "host_memory_bytes_per_us", self.host_memory_bytes_per_us)
        if not 1 <= self.host_gain_both_ways <= 2:
            raise ValueError(
                f"zgraph.Hardware: host_gain_both_ways={self.host_gain_both_ways}; write a number from 1 to 2."
            )
        for name in ("launch_us", "cpu_us_per_collective", "cpu_us_per_wire_byte"):
            _check("Hardware", name, getattr(self, name), zero_allowed=True)
        if self.ranks_per_host != int(self.ranks_per_host):
            raise ValueError(f"zgraph.Hardware: ranks_per_host={self.ranks_per_host}; write a whole number of ranks.")
        if torch.float32 not in self.flops_per_us:
            raise ValueError(
                "zgraph.Hardware: flops_per_us has no torch.float32, which also serves for unlisted dtypes; add it."
            )
        for dtype, rate in self.flops_per_us.items():
            _check("Hardware", f"flops_per_us[{dtype}]", rate)
        for stride in self.links:
            _check("Hardware", "the distance of neighbours in links", stride)
        # Copy mappings, so that the caller cannot change them.
        object.__setattr__(self, "flops_per_us", dict(self.flops_per_us))
        object.__setattr__(self, "links", dict(self.links))

    def compute_us(self, flops: float, moved_bytes: float, dtype: torch.dtype, launches: int = 1) -> float:
        """Return the microseconds of a kernel: the maximum of the times for arithmetic, memory traffic and launches.

        Source: Williams, Waterman, Patterson 2009, "Roofline", with the launches as a floor.
        """
        peak = self.flops_per_us.get(dtype) or self.flops_per_us[torch.float32]
        return max(self.launch_us * launches, flops / peak, moved_bytes / self.memory_bytes_per_us)

    def host_update_us(self, moved_bytes: float) -> float:
        """Return the microseconds of an optimizer update on the host that moves the given bytes.

        Adam moves 28 bytes per fp32 element.
        """
        return moved_bytes / (self.host_memory_bytes_per_us or self.memory_bytes_per_us)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, which has memory of its own."""
        return kind_of_backend(self.backend).is_gpu

    def disk_copy_us(self, moved_bytes: float, *, to_device: bool) -> float:
        """Return the microseconds of a copy between a disk and the device, without concurrent copies.

        On a GPU the data pass through pinned host memory in pieces (`zgraph.tiers.staging`): while one piece is read
        from disk, the previous one is copied to the device. The total is the slower stage's time for all pieces, plus
        the faster stage's time for one piece.

            disk      [read 1][read 2][read 3]
            to device         [1]     [2]     [3]
        """
        if not self.is_gpu:
            return self.disk.us(moved_bytes)
        way = self.host_to_device if to_device else self.device_to_host
        piece_bytes = min(moved_bytes, PIECE_BYTES)
        pieces = math.ceil(moved_bytes / PIECE_BYTES)
        ways_us = pieces * way.latency_us + moved_bytes / way.bytes_per_us
        return max(self.disk.us(moved_bytes) + way.us(piece_bytes), ways_us + self.disk.us(piece_bytes))

    def link_along(self, stride: int) -> Link:
        """Return the slowest link of a group in which neighbours are `stride` global ranks apart."""
        alone = self.ranks_per_host // stride <= 1
        return self.links.get(stride, self.inter_host if alone else self.intra_host)

    def collective_us(self, kind: str, sent_bytes: float, size: int, stride: int = 1) -> float:
        """Return the microseconds of one collective, from its start to its result.

        A ring of N ranks needs N-1 message steps, an all_reduce 2 (N-1). In a ring across hosts, one rank of each
        host sends to the next host. An all_to_all consists of N-1 pairwise exchanges. Across hosts, NCCL uses trees or
        PAT where a ring is slower; their number of steps is logarithmic in the number of hosts.

        Args:
            kind: name of the op, such as "all_gather_into_tensor".
            sent_bytes: total bytes that one rank sends.
            size: number of ranks N of the group.
            stride: distance between neighbours of the group in global ranks.

        Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
        sections 4 and 5; the split into hops inside and between hosts follows NCCL's tuning.cc. Trees: Sanders, Speck,
        Traff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (NCCL 2.4). PAT: Jeaugey
        2025, arXiv 2506.20252 (NCCL 2.23 uses PAT only with one rank on each host; with more, this is a prediction).
        """
        rounds = 2 if kind.startswith("all_reduce") else 1
        inside, outside = self.intra_host, self.inter_host
        local = max(1, self.ranks_per_host // stride)  # members on one host

        def over(link: Link) -> float:
            return rounds * (size - 1) * link.latency_us + sent_bytes / link.bytes_per_us

        if stride in self.links:
            is_hierarchical = kind == "all_gather_into_tensor" and self.backend == "gloo"
            if is_hierarchical and 1 < local < size and size % local == 0:
                sent_bytes = sent_bytes / local  # sent to each host once: zgraph.runtime.exchanges.collectives
            return over(self.links[stride])
        halves = self.is_gpu and not kind.startswith("all_to_all")
        if local == 1:
            ring_us = (size - 1) * outside.latency_us
            latency_us = min(ring_us, _log2(size) * outside.latency_us) if halves else ring_us
            return rounds * latency_us + sent_bytes / outside.bytes_per_us
        if kind.startswith("all_to_all"):
            latency_us = (local - 1) * inside.latency_us + (size - local) * outside.latency_us
            to_peer = sent_bytes / max(size - 1, 1)
            transfer_us = max(
                to_peer * (local - 1) / inside.bytes_per_us, to_peer * (size - local) / outside.bytes_per_us
            )
        else:
            hosts = size / local
            latency_us = (size - hosts) * inside.latency_us + (hosts - 1) * outside.latency_us
            if halves:
                tree_us = (local - 1) * inside.latency_us + _log2(hosts) * outside.latency_us
                latency_us = min(latency_us, tree_us)
            latency_us = rounds * latency_us
            # The ring leaves a host once, using the links of all its members there.
            transfer_us = sent_bytes / min(inside.bytes_per_us, local * outside.bytes_per_us)
        return over(inside) if size <= local else latency_us + transfer_us

    # --- JSON -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        plain = asdict(self)
        plain["flops_per_us"] = {str(dtype).removeprefix("torch."): rate for dtype, rate in self.flops_per_us.items()}
        return json.dumps(plain, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Read hardware from the text of `to_json`.

        Raises:
            ValueError: the text is not valid; the message says why.
        """
        try:
            plain = json.loads(text)
        except ValueError as error:
            raise ValueError(f"zgraph.Hardware: not valid JSON: {error}; pass the text of to_json().") from error
        known = {entry.name for entry in fields(cls)}
        newer = {"host_memory_bytes_per_us", "host_gain_both_ways"}  # fields that older files lack
        if not isinstance(plain, dict) or set(cast("dict[str, Any]", plain)) | newer != known:
            found = sorted(cast("dict[str, Any]", plain)) if isinstance(plain, dict) else type(plain).__name__
            raise ValueError(f"zgraph.Hardware: found {found}, but to_json() writes {sorted(known)}.")
        values = cast("dict[str, Any]", plain)
        try:
            for name in ("intra_host", "inter_host", "host_to_device", "device_to_host", "disk"):
                values[name] = Link(**values[name])
            values["links"] = {int(stride): Link(**link) for stride, link in values["links"].items()}
            values["flops_per_us"] = {getattr(torch, name): rate for name, rate in values["flops_per_us"].items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(f"zgraph.Hardware: {error}; pass the text of to_json().") from error
        return cls(**values)

    # --- presets ----------------------------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str) -> Hardware:
        """Return a machine by name: "a100", "h100", "h200" (SXM, eight in a host) or "cpu".

        Figures are the vendors' peaks without sparsity; link rates are for one direction, half of the printed figures.
        Real programs do not reach them all: `zgraph.calibrate()` measures a real machine.

        Sources: NVIDIA A100 80GB, H100 and H200 data sheets (SXM; PCIe 4 or 5 x16 to the host); DGX A100 and DGX H100
        data sheets for the network (one port of 200 or 400 Gbit/s for each GPU) and the disks (an eighth of eight NVMe
        drives, here 3.5 GB/s); latencies of rings (LL128) over NVLink and a network from NCCL's tuning.cc. "cpu" is one
        socket of an AMD EPYC 7763: 64 cores of 2.45 GHz with two 8-wide fp32 FMA units, eight channels of DDR4-3200,
        10 Gbit/s Ethernet. Launch times, and the latencies of host, disk and Ethernet, are typical values, not from
        data sheets.

        Raises:
            ValueError: there is no such preset.
        """
        presets = _presets()
        if name not in presets:
            close = difflib.get_close_matches(str(name), presets, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the presets are {', '.join(presets)}."
            raise ValueError(f"zgraph.Hardware: unknown preset {name!r}; {hint}")
        return presets[name]


def _presets() -> dict[str, Hardware]:
    a100 = _gpu(
        "a100", fp64=19.5, fp32=19.5, half=312, byte=None, memory_tb=2.039, capacity_gb=80, nvlink=300, pcie=32, nic=25
    )
    h100 = _gpu(
        "h100", fp64=67, fp32=67, half=989.5, byte=1979, memory_tb=3.35, capacity_gb=80, nvlink=450, pcie=64, nic=50
    )
    h200 = _gpu(
        "h200", fp64=67, fp32=67, half=989.5, byte=1979, memory_tb=4.8, capacity_gb=141, nvlink=450, pcie=64, nic=50
    )
    cycles_per_us = 64 * 2450
    copy = Link(latency_us=0.0, bytes_per_us=204_800 / 2)  # reading and writing memory
    cpu = Hardware(
        name="cpu",
        flops_per_us={torch.float64: cycles_per_us * 16.0, torch.float32: cycles_per_us * 32.0},
        memory_bytes_per_us=204_800.0,
        launch_us=2.0,
        memory_bytes=256 * GIB,
        intra_host=Link(latency_us=50.0, bytes_per_us=2_000.0),
        inter_host=Link(latency_us=100.0, bytes_per_us=1_250.0),
        ranks_per_host=1,
        host_to_device=copy,
        device_to_host=copy,
        disk=Link(latency_us=100.0, bytes_per_us=3_500.0),
    )
    return {hardware.name: hardware for hardware in (a100, h100, h200, cpu)}


def _gpu(
    name: str,
    *,
    fp64: float,
    fp32: float,
    half: float,
    byte: float | None,
    memory_tb: float,
    capacity_gb: int,
    nvlink: float,
    pcie: float,
    nic: float,
) -> Hardware:
    """Return the `Hardware` of a GPU from data-sheet figures: Tflop/s, TB/s of memory, GB/s per direction of links."""
    tera = {torch.float64: fp64, torch.float32: fp32, torch.float16: half, torch.bfloat16: half}
    if byte is not None:
        tera |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), byte)
    host = Link(latency_us=10.0, bytes_per_us=pcie * 1e3)
    return Hardware(
        name=name,
        flops_per_us={dtype: rate * _TERA_PER_US for dtype, rate in tera.items()},
        memory_bytes_per_us=memory_tb * _TERA_PER_US,
        launch_us=4.0,
        memory_bytes=capacity_gb * GB,
        intra_host=Link(latency_us=1.9, bytes_per_us=nvlink * 1e3),
        inter_host=Link(latency_us=4.0, bytes_per_us=nic * 1e3),
        ranks_per_host=8,
        host_to_device=host,
        device_to_host=host,
        disk=Link(latency_us=100.0, bytes_per_us=3_500.0),
        host_memory_bytes_per_us=204_800.0 / 8,  # the EPYC socket of the preset "cpu", shared by eight GPUs
        backend="nccl",
    )


def _log2(count: float) -> float:
    """Return the number of rounds in which a broadcast reaches `count` hosts; 0 if `count` is at most 1."""
    return math.log2(max(count, 1))


def _check(who: str, name: str, value: object, *, zero_allowed: bool = False) -> None:
    least = "zero or a positive number" if zero_allowed else "a positive number"
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not (value > 0 or (zero_allowed and value == 0))
    ):
        raise ValueError(f"zgraph.{who}: {name}={value!r}; write {least}.")
