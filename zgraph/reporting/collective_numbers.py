"""Writes files that translate the collective numbers in the dumps of NCCL's flight recorder into parameter names.

On NCCL a failed collective raises no `CollectiveError` by default: a wait is only queued, and after a failure or a
timeout torch's watchdog thread dumps the flight recorder and ends the process. The dump identifies collectives only by
number. So each compiled graph writes the list of its collectives to the directory of the dump. At the start of a call
the graph also writes how many collectives the group has started so far:

    process 4711, graph 0/0 forward, on group 0 its last call began after collective 0000001234
      +1 all_gather_into_tensor: embed.weight
      +2 all_gather_into_tensor_coalesced: layers.0.attn.q.weight, layers.0.attn.k.weight

If the dump says that `collective_seq_id` 1236 of group 0 never ended, it was entry +2: q.weight and k.weight.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zgraph.graph import meta, nodes
from zgraph.runtime.groups import group_backend
from zgraph.torch_compat.aot import boxed
from zgraph.torch_compat.groups import collectives_so_far, flight_recorder_directory, resolve_group

_DIGITS = 10  # rewritten in place at each call


@dataclass(frozen=True)
class Numbered:
    """Descriptions of one graph's collectives on one NCCL process group, in program order.

    Attributes:
        group_name: name of the process group.
        collectives: kind and parameters of each collective, as text.
    """

    group_name: str
    collectives: tuple[str, ...]


def numbered(graph: fx.Graph) -> list[Numbered]:
    """List a graph's collectives separately for each NCCL process group, because each group has its own count."""
    found: dict[str, list[str]] = {}
    for start in nodes.call_functions(graph, nodes.is_collective):
        device = next((meta.tensor_value(sent).device for sent in nodes.sent_by(start)), torch.device("cpu"))
        if group_backend(nodes.group_of(start), device) == "nccl":
            about = ", ".join(meta.parameters(start)) or "the model's own"
            found.setdefault(nodes.group_of(start), []).append(f"{str(start.target).split('.')[1]}: {about}")
    return [Numbered(group_name, tuple(each)) for group_name, each in found.items()]


def with_numbers(run: Callable[[list[Any]], Any], graph: fx.Graph, title: str, rank: int) -> Callable[[list[Any]], Any]:
    """Wrap a graph's callable so that each call first records how many collectives each NCCL group has started.

    The counts are written to a file in the directory of the flight recorder's dump. If the file cannot be written, the
    callable is returned unchanged.

    Args:
        run: callable of the graph.
        graph: graph whose collectives are listed in the file.
        title: title of the graph, such as "0/0 forward".
        rank: rank of this process.

    Returns:
        The wrapped callable; `run` itself if the graph has no collective on NCCL.
    """
    groups = numbered(graph)
    if not groups:
        return run
    places = _write(groups, title, flight_recorder_directory() / f"zgraph_collectives_rank_{rank}.txt")
    if places is None:
        return run
    descriptor, offsets = places
    members = [resolve_group(one.group_name) for one in groups]

    def noting(args: list[Any]) -> Any:
        for group, offset in zip(members, offsets, strict=True):
            os.pwrite(descriptor, b"%0*d" % (_DIGITS, collectives_so_far(group)), offset)
        return run(args)

    return boxed(noting)


def _write(groups: Sequence[Numbered], title: str, path: Path) -> tuple[int, list[int]] | None:
    """Append lists of collectives to a file; return its open descriptor, and the file offset of each group's number.

    Returns None if the file cannot be written.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        end = os.lseek(descriptor, 0, os.SEEK_END)
        offsets: list[int] = []
        for one in groups:
            whose = f"process {os.getpid()}, graph {title}, on group {one.group_name}"
            head = f"{whose} its last call began after collective ".encode()
            rows = "".join(f"  +{place} {text}\n" for place, text in enumerate(one.collectives, 1))
            offsets.append(end + len(head))
            end += os.write(descriptor, head + b"0" * _DIGITS + f"\n{rows}".encode())
        return descriptor, offsets
    return None
