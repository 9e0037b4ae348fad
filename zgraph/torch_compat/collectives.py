"""Torch's functional collectives as operators, and their works, the objects on which a wait waits."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch._ops import OpOverload as OpOverload

from zgraph.torch_compat.groups import resolve_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Gather equally long tensors into one tensor. Calls `all_gather_into_tensor`, which torch 2.13 renames."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
    return gather(output, input, group=group, async_op=async_op)  # pyright: ignore[reportDeprecated]


def reduce_scatter(output: Tensor, input: Tensor, group: ProcessGroup) -> dist.Work | None:
    """Start a reduce_scatter of equally long parts. Calls `reduce_scatter_tensor`, which torch 2.13 renames."""
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
    return scatter(output, input, group=group, async_op=True)


# The ops themselves, not torch.distributed._functional_collectives: passes build nodes out of OpOverloads.


def all_gather_op() -> Any:
    """all_gather_into_tensor(input, group_size, group_name) -> [group_size * input.shape[0], ...]"""
    return torch.ops._c10d_functional.all_gather_into_tensor.default


def all_gather_into(output: Tensor, input: Tensor, group_name: str) -> Tensor:
    """Start an all_gather into the tensor `output`, in the only way that is safe on gloo.

    torch 2.11 - 2.13: the operator of `all_gather_op` runs on gloo as ALLGATHER_COALESCED. Each worker thread of gloo
    stores the name of its last operation in one string of the group, without a lock (ProcessGroupGloo::runLoop). If two
    threads store names of more than 15 characters at once, the string is freed twice. The out variant used here runs as
    ALLGATHER.
    """
    world = dist.get_world_size(resolve_group(group_name))
    return torch.ops._c10d_functional.all_gather_into_tensor_out.default(input, world, group_name, out=output)


def grouped_gather_op() -> Any:
    """all_gather_into_tensor_coalesced(inputs, group_size, group_name) -> gathered tensor of each input"""
    return torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default


def gather_group(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup) -> dist.Work:
    """Start gathering each input into its output, in one launch on NCCL; return one work for all of them.

    torch 2.11 - 2.15: `ProcessGroup.allgather_into_tensor_coalesced`. The functional operator would need a wait for
    each output.
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
    """wait_tensor(input) -> the same tensor, after its collective has ended"""
    return torch.ops._c10d_functional.wait_tensor.default


def wait(started: Tensor) -> Tensor:
    """Wait for the functional collective that computes `started`; return this tensor."""
    return wait_op()(started)


def register_work(result: Tensor, work: dist.Work) -> None:
    """Make `wait(result)` also wait for `work`; a result may have several (torch 2.11 - 2.15: `_register_work`)."""
    _register_work(result, work)


def is_functional_collective(target: object) -> bool:
    """Return whether a node's target is a functional collective; False for wait_tensor and in-place variants."""
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("_c10d_functional", "_c10d_functional_autograd"):
        return False
    return target is not wait_op() and not target._schema.is_mutable
