"""Pinned memory of the host that a graph takes where tensors pass between a disk and a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import fx

from zgraph.analysis.storages import storage_bytes
from zgraph.graph import meta, nodes
from zgraph.graph.lanes import DISK
from zgraph.runtime.offload.staging import staging_bytes


def staging_of(order: Iterable[fx.Node], device_type: str | None = None) -> int:
    """Bytes that the rank with most of them takes, from its first such transfer on.

    Args:
        order: nodes of a graph, or of a step's.
        device_type: device on which they will run; None: that of their values.
    """
    sizes: dict[bool, list[int]] = {True: [], False: []}  # of what is read, and of what is written
    for start in order:
        if not nodes.is_copy_start(start) or meta.lane(start) != DISK:
            continue
        is_read = nodes.is_reload(start)
        on_device = start if is_read else cast(fx.Node, start.args[0])
        if (device_type or meta.tensor_value(on_device).device.type) == "cpu":
            continue
        at_rest = start if nodes.is_spill(start) else cast(fx.Node, start.args[0 if is_read else 1])
        size = meta.longest_bytes(at_rest) or storage_bytes(meta.tensor_value(at_rest)) or 0
        sizes[is_read].append(size)
    return staging_bytes(sizes[True], sizes[False])
