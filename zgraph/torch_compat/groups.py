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
    """The process group of a name (2.11 - 2.15: public only through functional collectives)."""
    return _resolve_process_group(cast(Any, group_name))


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Name of a group's backend for a device, such as "gloo" or "nccl"; "" if the group has none for the device.

    2.11 - 2.15: `dist.get_backend` returns "undefined" for a group that serves several devices, such as the default
    group that `init_device_mesh` makes if `init_process_group` was not called. So `_get_backend` is used.
    """
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # none for this device
        return ""


def find_group(group_name: str) -> ProcessGroup | None:
    """The process group of a name; None if no group has it (`_world.pg_names`, 2.11 - 2.15)."""
    from torch.distributed.distributed_c10d import _world

    return next((group for group, name in _world.pg_names.items() if name == group_name), None)


def groups_of_ranks() -> int:
    """Number of groups of more than one rank that this rank is in (`_world.pg_names`, 2.11 - 2.15)."""
    from torch.distributed.distributed_c10d import _world

    return sum(dist.get_world_size(group) > 1 for group in _world.pg_names)


def make_sibling_group(
    group: ProcessGroup, group_name: str, members: Sequence[int] | None = None, *, high_priority: bool = False
) -> ProcessGroup:
    """Make a new group of a group's ranks, with its backend and timeout; called by the new group's members only.

    Args:
        group: the existing group.
        group_name: name of the new group.
        members: members of the new group, as ranks within `group`; None for all ranks.
        high_priority: whether to run the new group's NCCL collectives on a high-priority stream
            (`ProcessGroupNCCL.Options.is_high_priority_stream`).

    If the default group is bound to a device (`init_process_group(device_id=...)`), the new group is, too. Then the new
    group is split off the default group's communicator immediately, and all ranks of the world must take part in this
    split.

    2.11 - 2.15: `dist.new_group` is not used, because every rank of the world must call it. With
    `use_local_synchronization` it names a group by a rank's number of groups, which may differ between members.
    `_new_process_group_helper` accepts a name. `destroy_process_group()` destroys the new group with all others.
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
    """Keep gloo's threads that read sockets from preempting other threads on their core; only on Linux.

    gloo sends on the thread that starts a send, and locks the connection meanwhile. Arriving data wakes the reading
    thread, which preempts the sender on its core, finds the lock taken, and retries until its time slice ends (gloo's
    `Pair::handleEvents`, 2.11 - 2.15). This costs about three milliseconds a bucket if a rank has one core. So reading
    threads get the policy SCHED_BATCH, under which a waking thread preempts no other (sched(7)).
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or the system does not allow it
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def collectives_so_far(group: ProcessGroup) -> int:
    """Number of collectives that a group has started, counted like `collective_seq_id` of the flight recorder.

    2.11 - 2.15: `_get_sequence_number_for_group`, which counts a coalesced collective once.
    """
    return cast(Any, group)._get_sequence_number_for_group()


def flight_recorder_directory() -> Path:
    """Directory to which torch's flight recorder dumps when the watchdog ends a process.

    2.13: the directory of the path in the variable TORCH_FR_DUMP_TEMP_FILE or TORCH_NCCL_DEBUG_INFO_TEMP_FILE, else the
    folder `torch` in the user's cache (DebugInfoWriter in FlightRecorder.cpp; 2.11 and 2.12 know both variables).
    """
    given = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if given:
        return Path(given).parent
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch"


class NoMessageToItself:
    """Mixin, listed before torch's `PipelineStage`, for a stage whose neighbour may be on the same rank.

    2.11: a schedule begins with a message between each pair of neighbouring stages (`_get_init_p2p_neighbors_ops`),
    even if both are on one rank, as in a V schedule; gloo refuses to send to the same rank. Later messages pass only
    between ranks. 2.12 - 2.15 begin differently and never call the method.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        stage = cast(Any, super())
        return [one for one in stage._get_init_p2p_neighbors_ops() if one.peer != dist.get_rank()]


def kept_of_forward(stage: Any, chunk: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Outputs and inputs of a micro-batch's forward pass that torch's `PipelineStage` keeps until the backward pass.

    2.11 - 2.14: `fwd_cache`. 2.15: `_forward_chunk_states`, where an output that has been sent is replaced by its
    autograd edge (`GradientEdge`) or None.
    """
    states: Any = getattr(stage, "_forward_chunk_states", None)
    if states is None:
        return stage.fwd_cache[chunk]
    return states[chunk].stage_output_for_backward(), states[chunk].input_values


def stages_hold_messages() -> bool:
    """Whether torch's `PipelineStage` holds sent and received tensors longer than it needs them.

    2.11 - 2.14: a stage keeps outputs until their backward, sent messages until the step ends, and one buffer for the
    activation and one for the gradient of each micro-batch. 2.15 releases an output that has been sent
    (`release_fwd_send_outputs`) and has one buffer for all gradients.
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
    """Whether the default group is fake, that is, has no other processes (backend "fake", 2.11 - 2.15)."""
    return dist.get_backend() == "fake"


def is_distributed_ready() -> bool:
    return dist.is_available() and dist.is_initialized()
