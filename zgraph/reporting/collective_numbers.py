"""Lists the parameters of NCCL collectives by the numbers that torch's flight recorder gives these collectives.

On NCCL there is no `CollectiveError` by default: a wait is only queued, and if a collective fails or times out, torch's
watchdog thread writes the flight recorder's dump and ends the process. The dump has numbers instead of names. Each
compiled graph therefore writes a list of its collectives to the directory of the dump. At each call it also writes the
number of the last collective before its own:

    process 4711, graph 0/0 forward, on group 0 its last call began after collective 0000001234
      +1 all_gather_into_tensor: embed.weight
      +2 all_gather_into_tensor_coalesced: layers.0.attn.q.weight, layers.0.attn.k.weight

If the dump says that `collective_seq_id` 1236 of group 0 never ended, it is entry +2: q.weight and k.weight.
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
    """The collectives of one graph on one NCCL group, in order; each text names a collective's kind and parameters."""

    group_name: str
    collectives: tuple[str, ...]


def numbered(graph: fx.Graph) -> list[Numbered]:
    """Return a graph's collectives for each NCCL group, since each group counts its own collectives.

    A gather that a window keeps runs, and counts, only once in the window.
    """
    found: dict[str, list[str]] = {}
    for start in nodes.call_functions(graph, nodes.is_collective):
        device = next((meta.tensor_value(sent).device for sent in nodes.sent_by(start)), torch.device("cpu"))
        if group_backend(nodes.group_of(start), device) == "nccl":
            about = ", ".join(meta.parameters(start)) or "the model's own"
            found.setdefault(nodes.group_of(start), []).append(f"{str(start.target).split('.')[1]}: {about}")
    return [Numbered(group_name, tuple(each)) for group_name, each in found.items()]


def with_numbers(run: Callable[[list[Any]], Any], graph: fx.Graph, title: str, rank: int) -> Callable[[list[Any]], Any]:
    """Wrap the callable of a graph so that each call records the number of the last collective before it.

    The file lies in the directory of the flight recorder's dump. If it cannot be written, nothing is recorded.

    Args:
        run: callable of the graph.
        graph: the graph, with the collectives that it runs.
        title: title of the graph, such as "0/0 forward".
        rank: rank of this process.

    Returns:
        `run` itself if no group uses NCCL.
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
    """Append `groups` to a file; return the file's open descriptor, and the offset of each group's number."""
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
