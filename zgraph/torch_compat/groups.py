"""Process groups: lookup by name and device, groups derived from others, and fake groups."""

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
    """Return the process group with a name (torch 2.11 - 2.15: public only through functional collectives)."""
    return _resolve_process_group(cast(Any, group_name))


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of a group's backend for a device, such as "gloo"; "" if the group has no such backend.

    torch 2.11 - 2.15: `_get_backend`, because `dist.get_backend` returns "undefined" for groups that serve several
    devices.
    """
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # no backend for this device
        return ""


def find_group(group_name: str) -> ProcessGroup | None:
    """Return the process group with a name, or None (torch 2.11 - 2.15: `_world.pg_names`)."""
    from torch.distributed.distributed_c10d import _world

    return next((group for group, name in _world.pg_names.items() if name == group_name), None)


def groups_of_ranks() -> int:
    """Return the number of this process's groups with more than one rank (torch 2.11 - 2.15: `_world.pg_names`)."""
    from torch.distributed.distributed_c10d import _world

    return sum(dist.get_world_size(group) > 1 for group in _world.pg_names)


def make_sibling_group(
    group: ProcessGroup, group_name: str, members: Sequence[int] | None = None, *, high_priority: bool = False
) -> ProcessGroup:
    """Create a process group of some or all ranks of a group, with the same backend and timeout.

    Only members of the new group call this. Exception: if the default group is bound to a device
    (`init_process_group(device_id=...)`), the new communicator is split off that of the default group at creation, and
    all ranks of the world must take part in this split.

    torch 2.11 - 2.15: `_new_process_group_helper`, because it accepts a name. `dist.new_group` must be called by all
    ranks of the world, or chooses names that may differ between members (`use_local_synchronization`).
    `destroy_process_group()` destroys the new group with all others.

    Args:
        group: the existing group.
        group_name: name of the new group.
        members: members of the new group, as ranks within `group`; None: all ranks.
        high_priority: whether the new group's NCCL collectives run on a high-priority stream
            (`ProcessGroupNCCL.Options.is_high_priority_stream`).
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


def gloo_group(store: Store, rank: int, count: int, timeout_s: float) -> ProcessGroup:
    """Create a gloo group that is not registered with torch.distributed, so that it may come and go during a run.

    torch 2.11 - 2.15: `ProcessGroupGloo(store, rank, size, timeout)`, which waits until all members have created it.

    Args:
        store: store under a prefix of its own.
        rank, count: number of this member, and of all.
        timeout_s: seconds after which the creation, or a message, fails with a RuntimeError.
    """
    from torch.distributed import ProcessGroupGloo  # absent in builds without gloo

    return cast(Any, ProcessGroupGloo(store, rank, count, timedelta(seconds=timeout_s)))


def keep_gloo_from_preempting() -> None:
    """Keep gloo's receiving threads from preempting other threads, by the scheduling policy SCHED_BATCH; Linux only.

    gloo sends on the thread that starts a send, and locks the connection meanwhile. Arriving data wakes the receiving
    thread. If this thread preempts the sender, it finds the lock taken and retries until its time slice ends
    (`Pair::handleEvents`, torch 2.11 - 2.15). With one core per rank this costs about three milliseconds per bucket.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or the system does not allow it
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def collectives_so_far(group: ProcessGroup) -> int:
    """Return the number of collectives that a group has started, as in the flight recorder's `collective_seq_id`.

    torch 2.11 - 2.15: `_get_sequence_number_for_group`, which counts a coalesced collective once.
    """
    return cast(Any, group)._get_sequence_number_for_group()


def flight_recorder_directory() -> Path:
    """Return the directory into which torch's flight recorder dumps when the watchdog ends a process.

    It is the directory of the path in TORCH_FR_DUMP_TEMP_FILE or TORCH_NCCL_DEBUG_INFO_TEMP_FILE (torch 2.11 - 2.13).
    Without these variables, it is the folder `torch` in the user's cache (2.13: DebugInfoWriter in FlightRecorder.cpp).
    """
    given = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if given:
        return Path(given).parent
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch"


class NoMessageToItself:
    """Mixin for torch's `PipelineStage`, for schedules with neighbouring stages on one rank, such as V schedules.

    The mixin comes before `PipelineStage` in the list of base classes. torch 2.11: a schedule begins with a message
    between all neighbouring stages (`_get_init_p2p_neighbors_ops`), and gloo refuses to send to the same rank; so this
    class leaves out such messages. 2.12 - 2.15 never call the method.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        stage = cast(Any, super())
        return [one for one in stage._get_init_p2p_neighbors_ops() if one.peer != dist.get_rank()]


def kept_of_forward(stage: Any, chunk: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the outputs and inputs of a micro-batch's forward that a `PipelineStage` keeps until the backward.

    torch 2.11 - 2.14: `fwd_cache`. 2.15: `_forward_chunk_states`, where a sent output is replaced by a `GradientEdge`
    or None.
    """
    states: Any = getattr(stage, "_forward_chunk_states", None)
    if states is None:
        return stage.fwd_cache[chunk]
    return states[chunk].stage_output_for_backward(), states[chunk].input_values


def stages_hold_messages() -> bool:
    """Return whether torch's `PipelineStage` keeps sent and received tensors longer than needed.

    torch 2.11 - 2.14: a stage keeps outputs until their backward, sent messages until the step ends, and two buffers
    for each micro-batch (activation and gradient). 2.15 releases sent outputs (`release_fwd_send_outputs`) and has one
    buffer for all gradients.
    """
    from torch.distributed.pipelining import PipelineStage

    return not hasattr(PipelineStage, "release_fwd_send_outputs")


def default_store() -> Store:
    """Return the rendezvous store of the default group (torch 2.11 - 2.15: `_get_default_store`)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextmanager
def fake_world(world: int) -> Generator[None]:
    """Make this process rank 0 of a fake default group in a `with` block.

    Collectives of a fake group return immediately and move no data. torch 2.11 - 2.15:
    torch.testing._internal.distributed.fake_pg registers the backend "fake".
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_fake_world() -> bool:
    """Return whether the default group is fake, that is, has no other processes (torch 2.11 - 2.15: backend "fake")."""
    return is_distributed_ready() and dist.get_backend() == "fake"


def is_distributed_ready() -> bool:
    return dist.is_available() and dist.is_initialized()
