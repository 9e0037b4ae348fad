"""Process groups: lookup by name and device, sibling groups, and fake ones."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


def resolve_group(group_name: str) -> ProcessGroup:
    """The process group of that name (2.11 - 2.15: public only through functional collectives)."""
    return _resolve_process_group(cast(Any, group_name))


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Name of a group's backend for a device, such as "gloo" or "nccl"; "" if it has none.

    2.11 - 2.15: `dist.get_backend` says "undefined" for a group that serves several devices, such as the one that
    `init_device_mesh` makes if `init_process_group` was not called; hence `_get_backend`.
    """
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # none for this device
        return ""


def find_group(group_name: str) -> ProcessGroup | None:
    """The process group of that name; None if there is none (`_world.pg_names`, 2.11 - 2.15)."""
    from torch.distributed.distributed_c10d import _world

    return next((group for group, name in _world.pg_names.items() if name == group_name), None)


def groups_of_ranks() -> int:
    """Number of groups of more than one rank that this rank is in (`_world.pg_names`, 2.11 - 2.15)."""
    from torch.distributed.distributed_c10d import _world

    return sum(dist.get_world_size(group) > 1 for group in _world.pg_names)


def make_sibling_group(
    group: ProcessGroup, group_name: str, members: Sequence[int] | None = None, *, high_priority: bool = False
) -> ProcessGroup:
    """Make a second group with the ranks, backend and timeout of a group; only its members call this.

    Args:
        group: the existing group.
        group_name: name of the new group.
        members: ranks within `group` that the new group has; None: all.
        high_priority: run its NCCL collectives on a high-priority stream
            (`ProcessGroupNCCL.Options.is_high_priority_stream`).

    If the default group is bound to a device (`init_process_group(device_id=...)`), so is the new one, which is then
    split off the default group's communicator immediately; all ranks of the world take part in that.

    2.11 - 2.15: `dist.new_group` would need every rank of the world, and `use_local_synchronization` names a group by
    how many groups a rank is in, on which its members may disagree. `_new_process_group_helper` accepts a name.
    `destroy_process_group()` destroys the new group with all others.
    """
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    ranks = dist.get_process_group_ranks(group)
    if members is not None:
        ranks = [ranks[member] for member in members]
    backend, store = _world.pg_map[group]
    device = next(iter(group._device_types), torch.device("cpu"))  # empty for a group that is its own backend
    options = getattr(group._get_backend(device), "options", None)  # a fake backend has none
    timeout = options._timeout if options is not None else timedelta(minutes=30)
    chosen: Any = None
    if high_priority and "nccl" in str(backend):
        chosen = dist.ProcessGroupNCCL.Options()
        chosen.is_high_priority_stream = True
        chosen._timeout = timeout
    made, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend,
        store,
        cast(Any, group_name),
        backend_options=chosen,
        timeout=timeout,
        device_id=dist.distributed_c10d._get_default_group().bound_device_id,
        group_desc=group_name,
    )
    _world.pg_group_ranks[cast("ProcessGroup", made)] = {rank: place for place, rank in enumerate(ranks)}
    keep_gloo_from_preempting()
    return cast("ProcessGroup", made)


def keep_gloo_from_preempting() -> None:
    """Keep the threads on which gloo reads its sockets from preempting others on their core; only on Linux.

    gloo sends on the thread that starts a send, and locks the connection meanwhile. Arriving data wakes the reading
    thread, which preempts the sender on its core, finds the lock taken, and retries until its time slice ends (gloo's
    `Pair::handleEvents`, 2.11 - 2.15): about three milliseconds a bucket if a rank has one core. A SCHED_BATCH thread
    does not preempt another when it wakes (sched(7)).
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or the system does not allow it
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def collectives_so_far(group: ProcessGroup) -> int:
    """Number of collectives a group has started, as counted by its flight recorder's `collective_seq_id`.

    2.11 - 2.15: `_get_sequence_number_for_group` of its backend, which counts a coalesced collective once.
    """
    return cast(Any, group)._get_sequence_number_for_group()


def flight_recorder_directory() -> Path:
    """Directory to which torch's flight recorder dumps when the watchdog ends a process.

    2.13: the directory of TORCH_FR_DUMP_TEMP_FILE, or TORCH_NCCL_DEBUG_INFO_TEMP_FILE, a path without the rank; else
    `torch` in the user's cache (DebugInfoWriter in FlightRecorder.cpp; 2.11 and 2.12 know both variables).
    """
    given = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if given:
        return Path(given).parent
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch"


class NoMessageToItself:
    """Mixin, listed before torch's `PipelineStage`, for a stage whose neighbour may be on the same rank.

    2.11: a schedule opens with a message between each pair of neighbours (`_get_init_p2p_neighbors_ops`), even if both
    are on one rank, as in a V schedule, and gloo refuses to send to itself. Stages of one rank exchange no messages in
    any version. 2.12 - 2.15 open differently and never call this.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        stage = cast(Any, super())
        return [one for one in stage._get_init_p2p_neighbors_ops() if one.peer != dist.get_rank()]


def kept_of_forward(stage: Any, chunk: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Outputs and inputs of a micro-batch's forward that torch's `PipelineStage` keeps until its backward.

    2.11 - 2.14: `fwd_cache`. 2.15: `_forward_chunk_states`, where an output that has been sent is replaced by its
    autograd edge (`GradientEdge`) or None.
    """
    states: Any = getattr(stage, "_forward_chunk_states", None)
    if states is None:
        return stage.fwd_cache[chunk]
    return states[chunk].stage_output_for_backward(), states[chunk].input_values


def stages_hold_messages() -> bool:
    """Whether torch's `PipelineStage` holds sent and received tensors longer than it needs them.

    2.11 - 2.14: outputs stay until their backward, their messages until the step ends, and there is a buffer for each
    micro-batch's activation and gradient. 2.15 releases an output that has been sent (`release_fwd_send_outputs`) and
    has one buffer for gradients.
    """
    from torch.distributed.pipelining import PipelineStage

    return not hasattr(PipelineStage, "release_fwd_send_outputs")


def default_store() -> Store:
    """The rendezvous store of the default group (2.11 - 2.15: there is no public getter)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextmanager
def fake_world(world: int) -> Generator[None]:
    """Make this process rank 0 of a fake default group, whose collectives return immediately and move nothing.

    torch.testing._internal.distributed.fake_pg registers the backend "fake" (2.11 - 2.15).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_fake_world() -> bool:
    """Whether the default group is fake, without other processes (backend "fake", 2.11 - 2.15)."""
    return dist.get_backend() == "fake"


def is_distributed_ready() -> bool:
    return dist.is_available() and dist.is_initialized()
