"""The only file that touches private torch names; each entry says on which versions it was checked.

Everything here was read and run on torch 2.13.0, and run with the CUDA builds of 2.11.0 and 2.13.0; the 2.11 and 2.12
notes say what differs there. A new torch release is adopted by running the suite (`make test TORCH=...`) and reading
this page, nothing else.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import ctypes
import inspect
import os
import platform
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import _register_work
from torch._ops import OpOverload as OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

P = ParamSpec("P")
R = TypeVar("R")

OLDEST = (2, 11)
NEWEST = (2, 13)


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ImportError(f"zgraph: cannot read the torch version {version!r}; install torch>=2.11,<2.14.")
    return int(found[1]), int(found[2])


def require_supported_torch(version: str) -> None:
    """Refuse a torch that zgraph was not checked with.

    Raises:
        ImportError: version lies outside 2.11 ... 2.13.
    """
    release = _release(version)
    if release < OLDEST:
        raise ImportError(f"zgraph: torch {version} is too old; install torch>=2.11,<2.14.")
    if release > NEWEST:
        raise ImportError(
            f"zgraph: torch {version} is newer than this zgraph was checked with; install torch>=2.11,<2.14 "
            "or a newer zgraph."
        )


# --- process groups ---------------------------------------------------------------------------------------------


def resolve_group(group_name: str) -> ProcessGroup:
    """The process group of that name (2.11 - 2.13: public only through functional collectives)."""
    return _resolve_process_group(cast(Any, group_name))


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """ "gloo", "nccl", ...: what moves a group's tensors of a device; "" where nothing does.

    2.11 - 2.13: `dist.get_backend` says "undefined" of a group that serves several devices, such as `init_device_mesh`
    makes where nobody has called `init_process_group`; hence `_get_backend`.
    """
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # none for this device
        return ""


def find_group(group_name: str) -> ProcessGroup | None:
    """The process group of that name, None where there is none (`_world.pg_names`, 2.11 - 2.13)."""
    from torch.distributed.distributed_c10d import _world

    return next((group for group, name in _world.pg_names.items() if name == group_name), None)


def groups_of_ranks() -> int:
    """How many groups of more than one rank this rank is in (`_world.pg_names`, 2.11 - 2.13)."""
    from torch.distributed.distributed_c10d import _world

    return sum(dist.get_world_size(group) > 1 for group in _world.pg_names)


def make_beside(
    group: ProcessGroup, group_name: str, members: Sequence[int] | None = None, *, high_priority: bool = False
) -> ProcessGroup:
    """A second group of the same ranks, backend and timeout, of this name; called by its members alone.

    Args:
        group: whose ranks they are.
        group_name: of the new one.
        members: which of them, by their rank in the group; None: all.
        high_priority: of the stream on which its collectives run, where it is NCCL's
            (`ProcessGroupNCCL.Options.is_high_priority_stream`).

    Where the default group is bound to a device (`init_process_group(device_id=...)`) the new one is as well, and is
    split off its communicator here and now; all ranks of the world take part in that.

    2.11 - 2.13: `dist.new_group` would need every rank of the world, and `use_local_synchronization` names a group by
    how many groups a rank is in, which members of one group need not agree on. `_new_process_group_helper` takes a
    name. `destroy_process_group()` destroys what it has made with all others.
    """
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    ranks = dist.get_process_group_ranks(group)
    if members is not None:
        ranks = [ranks[member] for member in members]
    backend, store = _world.pg_map[group]
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # a fake one has none
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
    return cast("ProcessGroup", made)


def collectives_so_far(group: ProcessGroup) -> int:
    """How many collectives a group has started, as its flight recorder counts them in `collective_seq_id`.

    2.11 - 2.13: `_get_sequence_number_for_group` of its backend, which counts a coalesced collective once.
    """
    return cast(Any, group)._get_sequence_number_for_group()


def flight_recorder_directory() -> Path:
    """Where torch's flight recorder writes its dump when the watchdog ends a process.

    2.13: the directory of TORCH_FR_DUMP_TEMP_FILE, or TORCH_NCCL_DEBUG_INFO_TEMP_FILE, a path without the rank; else
    `torch` in the user's cache (DebugInfoWriter in FlightRecorder.cpp; not checked on 2.11 and 2.12).
    """
    given = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if given:
        return Path(given).parent
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch"


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Gather equal pieces into one tensor. 2.13 renames all_gather_into_tensor and warns of the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
    return gather(output, input, group=group, async_op=async_op)  # pyright: ignore[reportDeprecated]


def default_store() -> Store:
    """The rendezvous store of the default group (2.11 - 2.13: there is no public getter)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextmanager
def fake_world(world: int) -> Generator[None]:
    """This process as rank 0 of a group of its own making, whose collectives return at once and move nothing.

    torch.testing._internal.distributed.fake_pg, which registers the backend "fake" (2.11 - 2.13).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_fake_world() -> bool:
    """Whether the default group has nobody else in it (backend "fake", 2.11 - 2.13)."""
    return dist.get_backend() == "fake"


def fake_mode() -> Any:
    """A mode whose tensors have shapes and no values; real ones may be beside them (FakeTensorMode, 2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# --- DTensor --------------------------------------------------------------------------------------------------------


def local_of(tensor: DTensor) -> Tensor:
    """This rank's part, without a place in autograd's graph (`_local_tensor`, 2.11 - 2.13).

    `to_local()` of it takes forty times as long, more yet where gradients are enabled.
    """
    return tensor._local_tensor


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of the same mesh, placements and shape as another, around this local tensor (`_spec`, 2.11 - 2.13).

    `DTensor.from_local` checks first, and `DTensor(...)` goes through a guard against Dynamo: both take far longer.
    """
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)


def locals_of(tensors: Iterable[DTensor]) -> list[Tensor]:
    """`local_of` of each, many at once (`_local_tensor`, 2.11 - 2.13)."""
    return list(map(attrgetter("_local_tensor"), tensors))


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """`.grad` of each; of a DTensor it takes a third of the time past the search for a `__torch_function__`.

    `DisableTorchFunctionSubclass`, 2.11 - 2.13; DTensor's own is the disabled one.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("grad"), tensors))


def layouts_of(tensors: Iterable[DTensor]) -> list[Any]:
    """What says how each lies on its mesh, of which shape and dtype; tensors may share one (`_spec`, 2.11 - 2.13)."""
    return list(map(attrgetter("_spec"), tensors))


def sharded_rows(local: Tensor, mesh: DeviceMesh, rows: int) -> DTensor:
    """This rank's rows of a tensor whose `rows` lie on all ranks of a mesh in order (`DTensorSpec`, 2.11 - 2.13).

    `DTensor.from_local` would move a tensor of the host to the mesh's device.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size((rows, *local.shape[1:]))
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(Shard(0) for _ in range(mesh.ndim)), tensor_meta=whole)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def replicated_scalar(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """A number that all ranks of a mesh have, without what `DTensor.from_local` checks (`DTensorSpec`, 2.11 - 2.13)."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(torch.Size(), (), local.dtype)
    spec = DTensorSpec(mesh, tuple(Replicate() for _ in range(mesh.ndim)), tensor_meta=whole)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def foreach_norms(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """The norm of each, as torch's own clipping takes it (`_foreach_norm`, 2.11 - 2.13)."""
    return tuple(torch._foreach_norm(list(tensors), norm_type))


def foreach_scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all in place, as torch's own clipping does (`_foreach_mul_`, 2.11 - 2.13)."""
    torch._foreach_mul_(list(tensors), factor)


def partial_norms(norms: Tensor, mesh: DeviceMesh, split: Sequence[bool], norm_type: float) -> DTensor:
    """Norms of what each rank has of some tensors, which are split along these axes of a mesh (2.11 - 2.13).

    `_NormPartial` is what DTensor's own norms of sharded tensors return.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    placements = [_NormPartial(norm_type) if is_split else Replicate() for is_split in split]
    return DTensor.from_local(norms, mesh, placements, run_check=False)


# --- functional collectives (2.11 - 2.13) -------------------------------------------------------------------------
# The ops themselves, not torch.distributed._functional_collectives: passes build nodes out of OpOverloads.


def all_gather_op() -> Any:
    """all_gather_into_tensor(input, group_size, group_name) -> [group_size * input.shape[0], ...]"""
    return torch.ops._c10d_functional.all_gather_into_tensor.default


def all_gather_into(output: Tensor, input: Tensor, group_name: str) -> Tensor:
    """What `all_gather_op` computes, through its variant that fills a given tensor.

    2.11 - 2.13: all_gather_into_tensor runs as gloo's ALLGATHER_COALESCED. Each gloo worker thread stores the name of
    the operation it has finished into one string of the group, without a lock (ProcessGroupGloo::runLoop). A name of
    more than 15 characters lies on the heap, so two such gathers that finish at once free it twice. The out variant
    runs as ALLGATHER.
    """
    world = dist.get_world_size(resolve_group(group_name))
    return torch.ops._c10d_functional.all_gather_into_tensor_out.default(input, world, group_name, out=output)


def grouped_gather_op() -> Any:
    """all_gather_into_tensor_coalesced(inputs, group_size, group_name) -> as all_gather_into_tensor, of each"""
    return torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default


def gather_group(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup) -> dist.Work:
    """Gather each input into its output, launched as one where the backend can (NCCL); one work for all.

    2.11 - 2.13: `ProcessGroup.allgather_into_tensor_coalesced`, which the functional op calls as well. That one leaves
    its work with every output, to be waited for once for each.
    """
    return group.allgather_into_tensor_coalesced(list(outputs), list(inputs))


def all_to_all_op() -> Any:
    """all_to_all_single(input, output_split_sizes, input_split_sizes, group_name)"""
    return torch.ops._c10d_functional.all_to_all_single.default


def reduce_scatter_op() -> Any:
    """reduce_scatter_tensor(input, reduce_op, group_size, group_name) -> [input.shape[0] / group_size, ...]"""
    return torch.ops._c10d_functional.reduce_scatter_tensor.default


def all_reduce_op() -> Any:
    """all_reduce(input, reduce_op, group_name)"""
    return torch.ops._c10d_functional.all_reduce.default


def wait_op() -> Any:
    """wait_tensor(input): the same tensor, usable"""
    return torch.ops._c10d_functional.wait_tensor.default


def wait(started: Tensor) -> Tensor:
    """The result of a functional collective, usable."""
    return wait_op()(started)


def register_work(result: Tensor, work: dist.Work) -> None:
    """Let `wait(result)` wait for this as well; several works of one tensor add up (`_register_work`, 2.11 - 2.13)."""
    _register_work(result, work)


def works_waited_for() -> int:
    """How much is registered to be waited for (`_get_work_registry_size`, 2.11 - 2.13)."""
    from torch._C._distributed_c10d import _get_work_registry_size

    return _get_work_registry_size()


def is_functional_collective(target: object) -> bool:
    """Whether target starts a functional collective (wait_tensor and in-place variants are not starts)."""
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("_c10d_functional", "_c10d_functional_autograd"):
        return False
    return target is not wait_op() and not target._schema.is_mutable


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's call by the names in its schema (`_schema`, 2.11 - 2.13)."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs  # fewer, where defaults are left out


def argument_of(node: fx.Node, name: str) -> object:
    """A named argument of an operator's call, or its default; None where there is none (`_schema`, 2.11 - 2.13)."""
    if not isinstance(node.target, OpOverload):
        return None
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node's call writes to, by its schema (`_schema`, 2.11 - 2.13)."""
    if not isinstance(node.target, OpOverload):
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            items = given if isinstance(given, list | tuple) else (given,)
            written.extend(item for item in items if isinstance(item, fx.Node))
    return written


def returns_alias(target: object) -> bool:
    """Whether the call's result shares storage with its first argument, by its schema (`_schema`, 2.11 - 2.13)."""
    if not isinstance(target, OpOverload):
        return False
    return any(returned.alias_info is not None for returned in target._schema.returns)


def alias_positions(target: object) -> tuple[int | None, ...]:
    """For each result of an operator which argument it shares storage with, by its schema (`_schema`, 2.11 - 2.13)."""
    if not isinstance(target, OpOverload):
        return ()
    arguments = target._schema.arguments
    return tuple(
        next(
            (
                position
                for position, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.before_set & returned.alias_info.before_set
            ),
            None,
        )
        if returned.alias_info is not None
        else None
        for returned in target._schema.returns
    )


def is_binary(target: OpOverload) -> bool:
    """Whether the operator computes with two tensors alike, self and other, by its schema (`_schema`, 2.11 - 2.13)."""
    arguments = target._schema.arguments
    return len(arguments) > 1 and arguments[1].name == "other" and torch.Tag.pointwise in target.tags


def is_pure(target: OpOverload) -> bool:
    """Whether equal arguments yield equal bits and nothing is written, by schema and tags (`_schema`, 2.11 - 2.13)."""
    random = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    return not target._schema.is_mutable and not random.intersection(target.tags)


def is_higher_order(target: object) -> bool:
    """Whether a node's target calls other graphs, as torch.cond does (HigherOrderOperator, 2.11 - 2.13)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


# --- symbolic sizes and flops -------------------------------------------------------------------------------------


def size_expression(size: Any) -> Any:
    """An integer as it is, a symbolic one (or a product of some) as its sympy expression (`node.expr`, 2.11 - 2.13)."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def flop_formula(target: object) -> Callable[..., Any] | None:
    """torch's count of the flops of an operator, from shapes in place of tensors, and `out_val`.

    2.11 - 2.13: torch.utils.flop_counter.flop_registry, by operators without overload; the module does not export it.
    """
    from torch.utils.flop_counter import flop_registry

    if not isinstance(target, OpOverload):
        return None
    return flop_registry.get(target.overloadpacket)


# --- kernels for many tensors -------------------------------------------------------------------------------------


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target; one kernel on CUDA, casts included (`_foreach_copy_`, 2.11 - 2.13)."""
    torch._foreach_copy_(list(targets), list(sources))


def zero_each(targets: Sequence[Tensor]) -> None:
    """Fill each with zeros; one kernel on CUDA (`_foreach_zero_`, 2.11 - 2.13)."""
    torch._foreach_zero_(list(targets))


# --- autograd -----------------------------------------------------------------------------------------------------


def is_in_backward() -> bool:
    """Whether this thread is running a backward (`_current_graph_task_id`, 2.11 - 2.13)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that this thread is running has come to its end (2.11 - 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


def second_derivatives_vanish() -> bool:
    """Whether what `DTensor.to_local` passes to its tensor as gradient has no graph of its own.

    2.11: `_ToTorchTensor.backward` makes a DTensor by hand, so that `create_graph=True` yields a leaf, and the second
    derivative of what was computed from it is silently zero. From 2.12 on it calls `DTensor.from_local`.
    """
    return _release(torch.__version__) < (2, 12)


def tangents_outlive_backward() -> bool:
    """Whether gradients of outputs are held until a compiled backward has ended, although it empties its list of them.

    2.11 and 2.12: AOTAutograd's `CompiledFunction.backward` takes them as `*flat_args`; 2.13 hands the tuple on.
    """
    return _release(torch.__version__) < (2, 13)


# --- watching operators -------------------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):
    """Sees every operator that runs while it is entered (torch.utils._python_dispatch, 2.11 - 2.13)."""


def written_tensors(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to, by its schema (`_schema`, 2.11 - 2.13)."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            items = given if isinstance(given, list | tuple) else (given,)
            written.extend(item for item in items if isinstance(item, Tensor))
    return written


def storage_key(tensor: Tensor) -> int | None:
    """One number for all views of a plain tensor, also while its storage is resized (`_cdata`, 2.11 - 2.13).

    None for tensors without a storage of their own: sparse ones, and subclasses that wrap others.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages share it in Python and C++, itself too (`_storage_Use_Count`, 2.11 - 2.13)."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_profiling() -> bool:
    """Whether a profile is being taken already: they do not nest (`_profiler_enabled`, 2.11 - 2.13)."""
    return torch.autograd._profiler_enabled()


def allocation_events(
    taken: torch.profiler.profile, prefix: str
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """What a profile with memory has seen on the CPU, in nanoseconds (`kineto_results`, 2.11 - 2.13).

    Returns:
        Begin and end of each label that starts with the prefix; and for each allocation or release when it was and its
        bytes, in order.
    """
    spans: dict[str, tuple[int, int]] = {}
    events: list[tuple[int, int]] = []
    for event in cast(Any, taken.profiler).kineto_results.events():
        name = event.name()
        if name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            events.append((event.start_ns(), event.nbytes()))
        elif name.startswith(prefix):
            spans[name] = (event.start_ns(), event.start_ns() + event.duration_ns())
    return spans, sorted(events, key=lambda event: event[0])


# --- fake values --------------------------------------------------------------------------------------------------


def fake_storage_key(value: Tensor) -> int:
    """One number for all fake tensors that share storage, good while they are alive (`_cdata`, 2.11 - 2.13).

    Sparse tensors, which have no storage of their own, share none.
    """
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def hint_of(size: object) -> int | None:
    """A size as a number, without a guard; None for one that only the data will tell (`SymNode.hint`, 2.11 - 2.13)."""
    if not isinstance(size, torch.SymInt):
        return cast(int, size)
    try:
        hint = size.node.hint
    except Exception:  # 2.11 - 2.13 raise errors of their own, of the shape environment, for data-dependent sizes
        return None
    return hint if isinstance(hint, int) else None


# --- Dynamo -------------------------------------------------------------------------------------------------------


def never_a_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo trace the function as part of its caller, and run it as it is where the caller is not traced.

    A function that Dynamo compiles alone has its integers turned into symbols as soon as two calls differ in them.
    2.11 - 2.13: `torch._dynamo.eval_frame.skip_code` does the same, and would load Dynamo at import.
    """
    from torch._C._dynamo.eval_frame import _FrameAction

    return _skip_frames(function, inside=_FrameAction.DEFAULT)


def no_frames_inside(function: Callable[P, R]) -> Callable[P, R]:
    """As `never_a_frame`, and what the function calls is run as it is too, such as `DTensor.to_local` (2.11 - 2.13)."""
    from torch._C._dynamo.eval_frame import _FrameAction

    return _skip_frames(function, inside=_FrameAction.SKIP)


def _skip_frames(function: Callable[P, R], inside: Any) -> Callable[P, R]:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    strategy = _FrameExecStrategy(_FrameAction.SKIP, inside)
    set_code_exec_strategy(function.__code__, strategy)  # pyright: ignore[reportFunctionMemberAccess]
    return function


# --- AOTAutograd --------------------------------------------------------------------------------------------------

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def aot_autograd(
    *,
    compile_forward: Compiler,
    compile_backward: Compiler,
    compile_inference: Compiler,
    partition: Partitioner,
    decompose: bool = False,
) -> Callable[..., Any]:
    """A Dynamo backend that traces forward and backward (2.11 - 2.13).

    `decompose` takes operators apart as Inductor needs it; else they stay what they are in eager mode.

    `functorch.compile.aot_module_simplified` is the public part of it, but would leave the generated backward visible
    to Dynamo.
    """
    from torch._dynamo.backends.common import aot_autograd as build

    return build(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=partition,
        decompositions=inductor_decompositions() if decompose else {},
    )


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partitioner, which honours `meta["recompute"]`.

    2.11 - 2.13: where Inductor may draw in its own way (`fallback_random` is off), operators on GPUs that backward
    computes again draw from generators of the graph instead of the device's.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor import config

    with config.patch(fallback_random=True):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def may_be_written(node: fx.Node) -> bool:
    """Whether AOTAutograd lets a saved tensor change until backward reads it (2.11 - 2.13)."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def rng_state_operators() -> tuple[object, object]:
    """What the partitioner wraps random operators in that backward computes again (2.11 - 2.13).

    `save(operator, ...)` returns the generator's state and the operator's result, `run(state, operator, ...)` the
    result.
    """
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


def checkpoint_operator() -> object:
    """What calls a checkpointed region in a Dynamo graph: `(body, *operands, **options of checkpoint)`; 2.11 - 2.13."""
    return torch.ops.higher_order.tag_activation_checkpoint


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether torch.compile made it around another module (2.11 - 2.13)."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def without_compile(module: nn.Module) -> nn.Module:
    """The module inside what torch.compile returned, else the module itself (`_orig_mod`, 2.11 - 2.13)."""
    return cast(nn.Module, module._orig_mod) if is_compiled_wrapper(module) else module


def aot_input_index(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a joint-graph placeholder came from; None for tangents and unknown kinds.

    2.11 - 2.13 leave a descriptor in `meta["desc"]`; DTensor inputs are flattened, so several placeholders may share
    one index.
    """
    described: Any = node.meta.get("desc")
    while described is not None and hasattr(described, "base"):
        described = described.base
    index = getattr(described, "idx", None)
    return index if isinstance(index, int) else None


def is_tangent(node: fx.Node) -> bool:
    """Whether a joint-graph placeholder is a gradient of an output, by its name as in the partitioner (2.11 - 2.13)."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def mutated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Inputs of a joint graph that hold something else once the step has run (2.11 - 2.13).

    Nodes write to them, or an output describes itself (`meta["desc"]`) as what is copied into one afterwards.
    """
    written = [node for call in graph.nodes for node in written_arguments(call)]
    output = next(iter(reversed(graph.nodes)))
    copied = [getattr(one, "mutated_input", None) for one in output.meta.get("desc", ())]
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if node in written or any(node.meta.get("desc") == one for one in copied if one is not None)
    ]


def dynamo_example(node: fx.Node) -> object:
    """The real value behind a placeholder of a Dynamo graph, or None once Dynamo has dropped it (2.11 - 2.13)."""
    return getattr(node.meta.get("grapharg"), "_example", None) and node.meta["grapharg"].example


def dynamo_fake(node: fx.Node) -> object:
    """The fake value of a placeholder of a Dynamo graph (2.11 - 2.13)."""
    return node.meta.get("example_value")


def compile_id() -> str:
    """Dynamo's "frame/recompile" id of this compile, such as "0/1"; "manual" outside of one (2.11 - 2.13)."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "manual" if current is None else str(current)


def recompile_reason() -> str:
    """The guard that failed, when the frame being compiled was compiled before; "" else.

    Dynamo notes it for its own metrics (`get_metrics_context`, 2.11 - 2.13), of the variant it asked first. "" also
    where it has noted nothing: wording and place are Dynamo's affair.
    """
    from torch._dynamo.utils import get_metrics_context

    noted = get_metrics_context()._metrics.get("recompile_reason")
    # "0/1: guard    # line of code that it comes from", and then lines of a stack; 0/1 is the variant.
    return "" if noted is None else str(noted).partition("\n")[0].partition(": ")[2].partition(" # ")[0].strip()


def graph_breaks() -> dict[str, int]:
    """Graph breaks that Dynamo has met in this process, by reason (`counters`, 2.11 - 2.13).

    A break counts each time Dynamo traces up to it: once for the outermost frame, again for each frame inside it that
    Dynamo then compiles alone.
    """
    from torch._dynamo.utils import counters

    found: dict[str, int] = {}
    for text, count in counters["graph_break"].items():
        reason = text.partition("\n")[0]
        found[reason] = found.get(reason, 0) + count
    return found


def raise_through_dynamo(message: str) -> NoReturn:
    """Raise a ValueError out of a backend so that the caller of the compiled model gets it as it is.

    Dynamo wraps what backends raise in BackendCompilerFailed. 2.11 - 2.13: a ShortenTraceback passes, less Dynamo's own
    part of the traceback, and with a hint for Dynamo's developers added to its arguments.
    """
    from torch._dynamo.exc import ShortenTraceback

    class OptionError(ShortenTraceback, ValueError):
        __qualname__ = "OptionError"

        def __str__(self) -> str:
            return message

    raise OptionError(message, first_useful_frame=inspect.currentframe()) from None


def without_fake_mode() -> AbstractContextManager[Any]:
    """Real tensors while a compile is under way: torch._subclasses.fake_tensor.unset_fake_temporarily (2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Sequence[object]) -> Any:
    """The FakeTensorMode that made these values, or None (2.11 - 2.13)."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values))


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that `run` takes one list and empties it (`_boxed_call`, 2.11 - 2.13)."""
    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class BoxedCodeGen(CodeGen):
    """Generated code takes one list and empties it, so that each input dies at its last use.

    2.12 and newer carry the same class under a private name; 2.11 does not.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {getattr(self, '_func_name', 'forward')}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args_list")
        lines.append("    args_list.clear()")
        return "\n".join(lines)


# --- Inductor -------------------------------------------------------------------------------------------------------


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor expects to be taken apart, random operators as eager torch draws them (2.11 - 2.13)."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        return select_decomp_table()


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile a functional aten graph that returns a tuple; called inside a compile (compile_fx_inner, 2.11 - 2.13).

    Args:
        gm: its output tensors keep the strides that `meta["val"]` says.
        inputs: fake values of its placeholders.

    Returns:
        A function of one list, which it empties.
    """
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    returned = next(iter(reversed(gm.graph.nodes)))
    returned.meta["user_visible_output_idxs"] = list(range(len(returned.args[0])))
    context = TracingContext.try_get()
    strides = None if context is None else context.output_strides
    if context is not None:
        context.output_strides = None  # AOTAutograd would take the island's for those of its own graph
    try:
        with V.set_fake_mode(fake_mode_of(inputs)), config.patch(dict(_ISLAND_OPTIONS)):
            return cast("Callable[[list[Any]], Any]", compile_fx_inner(gm, list(inputs)))
    finally:
        if context is not None:
            context.output_strides = strides


# What may be set for whole programs, and is wrong or useless for an island of one:
# - random operators as eager torch draws them;
# - a CUDA graph for each island would copy its inputs, keep its outputs in a pool of its own, and be captured again for
#   each set of addresses: what collectives write lies elsewhere in each step;
# - what lies outside was traced with the strides that outputs have.
# max_autotune and its like may stay: they choose kernels, by measurements on this rank, and change no order.
_ISLAND_OPTIONS = MappingProxyType({"fallback_random": True, "triton.cudagraphs": False, "pad_outputs": False})


def load_cpp(source: str) -> ctypes.CDLL:
    """C++ without headers of torch, compiled as Inductor compiles, and loaded.

    The library is kept in Inductor's cache directory, by source, command line and processor, so that it is compiled
    once on a machine; processes that come at the same time wait for the first. Exact: no multiplication is contracted
    with an addition, and nothing is assumed of NaNs, signed zeros or the order of sums.

    Run on 2.11 and 2.13 (`cpp_builder`, `codecache.write`, `torch.utils._filelock`). Inductor's own options
    (`CppOptions`) turn off the vectorization of loops, so they are not taken.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
        OSError: the cache directory cannot be written to, or libraries in it cannot be loaded.
    """
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir, write
    from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder, get_cpp_compiler
    from torch.utils._filelock import FileLock

    if sys.platform == "win32":
        raise RuntimeError("the kernels are written for g++ and clang++, which Windows does not use")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [
        "O3",
        *(["march=native"] if x86 else ["mcpu=native"]),
        "std=c++17",
        "shared",
        "fPIC",
        "ffp-contract=off",
        "fno-math-errno",
        "fno-trapping-math",
        *(["fopenmp"] if sys.platform == "linux" else []),
    ]
    options = BuildOptionsBase(compiler=get_cpp_compiler(), cflags=flags)
    command = CppBuilder("o", "i", options).get_command_line()
    key, path = write(source, "cpp", extra=f"{command} {_processor()}")
    library = os.path.join(os.path.dirname(path), f"{key}.so")
    with FileLock(os.path.join(get_lock_dir(), f"{key}.lock"), timeout=LOCK_TIMEOUT):
        if not os.path.exists(library):
            # Under a name of its own first: a process that is killed leaves nothing that looks whole.
            builder = CppBuilder(f"{key}.{os.getpid()}", path, options, output_dir=os.path.dirname(path))
            builder.build()
            os.replace(builder.get_target_file_path(), library)
    return ctypes.CDLL(library)


def _processor() -> str:
    """What "native" stands for here: kind and features of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].strip(" :") in kept)


# --- optimizers -----------------------------------------------------------------------------------------------------


class OptimizerOfLists(torch.optim.Optimizer):
    """Base, beside an element-wise optimizer of torch.optim, of one that may be told what its step works on.

    `_init_group(group, parameters, gradients, *states)` fills empty lists with the parameters of a group that have
    gradients, with these gradients, and with entries of their state, which it makes where there is none; it returns
    flags, of complex parameters for instance (read on 2.13).
    """

    def lists_of(self, group: dict[str, Any], lists: tuple[list[Any], ...], fill: Callable[..., Any]) -> Any:
        """Fill the lists, by `fill(group, *lists)` or otherwise, and return what that returns."""
        raise NotImplementedError

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        return self.lists_of(group, lists, cast(Any, super())._init_group)


# --- loss scaling ---------------------------------------------------------------------------------------------------


class AgreeingGradScaler(torch.amp.GradScaler):
    """A GradScaler that shows its overflow flags to `agree` before it acts on them.

    `_unscale_grads_` (2.11 - 2.13) makes all of them: for `unscale_`, for a step without it, and for the fused
    optimizers, which unscale on their own.
    """

    def agree(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Tensor]) -> None:
        """Change the flags (0-d, 1.0: an inf or a NaN was found) in place."""
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = flags or {found_inf.device: found_inf}  # a rank without gradients takes part all the same
        self.agree(optimizer, flags)
        return flags


# --- pytrees, checks ------------------------------------------------------------------------------------------------


def tree_flatten(tree: object) -> tuple[list[Any], Any]:
    """torch's own pytree, which knows Hugging Face's ModelOutput (2.11 - 2.13)."""
    from torch.utils._pytree import tree_flatten as flatten

    return flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils._pytree import tree_unflatten as unflatten

    return unflatten(leaves, spec)


def replace_parameter(owner: torch.nn.Module, name: str, value: Tensor) -> None:
    """Put value where owner keeps the parameter `name` (`_parameters`, all versions).

    `setattr` would do, were it not for modules that intercept it (`nn.RNNBase`) or forbid it.
    """
    owner._parameters[name] = cast(torch.nn.Parameter, value)


def local_parameters(owner: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's own parameters by name, without the detour over attribute access (`_parameters`, all versions)."""
    return owner._parameters


def local_buffers(owner: torch.nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, persistent or not (`_buffers`, all versions)."""
    return owner._buffers


def reset_method(module: torch.nn.Module) -> Callable[[], object] | None:
    """`reset_parameters`; nn.MultiheadAttention and nn.Transformer call theirs `_reset_parameters` (2.11 - 2.13)."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def storage_info(name: str, offset: int, length: int) -> Any:
    """Where a DCP checkpoint keeps an entry (`_StorageInfo`, 2.11 - 2.13); torch's reader looks for this class."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def is_distributed_ready() -> bool:
    return dist.is_available() and dist.is_initialized()
