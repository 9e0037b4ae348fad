"""Access to DTensors without the per-call overhead of the public functions."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from zgraph.torch_compat.operators import OpOverload


def local_of(tensor: DTensor) -> Tensor:
    """This rank's local part of a DTensor, outside autograd's graph (`_local_tensor`, 2.11 - 2.15).

    The public `to_local()` takes forty times as long, and even longer with gradients enabled.
    """
    return tensor._local_tensor


def put_local(tensor: DTensor, local: Tensor) -> None:
    """Replace this rank's local part of a DTensor by a tensor of the same shape (`_local_tensor`, 2.11 - 2.15)."""
    tensor._local_tensor = local


def put_whole(tensor: DTensor, whole: Tensor) -> None:
    """Make a DTensor replicated: each rank's local part is now `whole` (`_local_tensor`, `_spec`, 2.11 - 2.15)."""
    from torch.distributed.tensor import Replicate

    tensor._local_tensor = whole
    tensor._spec = replace(tensor._spec, placements=tuple(Replicate() for _ in tensor.placements))


def allow_lists_of(kind: type[DTensor]) -> None:
    """Let torch's optimizers and gradient clipping use foreach kernels for a subclass of DTensor, as for DTensor.

    `_foreach_supported_types` of torch.optim and torch.utils, 2.11 - 2.15.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utilities

    for kinds in cast("tuple[list[type], ...]", (of_optimizers, of_utilities)):
        if kind not in kinds:
            kinds.append(kind)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """Wrap a local tensor in a DTensor with the class, mesh, placements and shape of `like` (`_spec`, 2.11 - 2.15).

    `DTensor.from_local` checks its arguments, and `DTensor(...)` goes through a guard against Dynamo: both are slower.
    """
    return DTensor.__new__(type(like), local, like._spec, requires_grad=False)


def locals_of(tensors: Iterable[DTensor]) -> list[Tensor]:
    """The `local_of` of each tensor, read without a Python loop (`_local_tensor`, 2.11 - 2.15)."""
    return list(map(attrgetter("_local_tensor"), tensors))


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """`.grad` of each tensor, read without the `__torch_function__` lookup: for DTensors in a third of the time.

    `DisableTorchFunctionSubclass`, 2.11 - 2.15; DTensor disables `__torch_function__` itself.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("grad"), tensors))


def requires_grad_of(tensors: Iterable[Tensor]) -> list[bool]:
    """`.requires_grad` of each tensor, read without the `__torch_function__` lookup, as in `gradients_of`."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("requires_grad"), tensors))


def layouts_of(tensors: Iterable[DTensor]) -> list[Any]:
    """The spec of each tensor: mesh, placements, shape and dtype. Tensors may share a spec (`_spec`, 2.11 - 2.15)."""
    return list(map(attrgetter("_spec"), tensors))


@contextlib.contextmanager
def own_placements() -> Generator[None]:
    """Run the `with` block with empty caches of DTensor placements, and empty the caches again afterwards.

    Caches of `ShardingPropagator` (2.11 - 2.15) compare arguments with earlier ones. The comparison fails for symbolic
    numbers of different traces, because a number has a proxy only in its trace.
    """
    _forget_placements()
    try:
        yield
    finally:
        _forget_placements()


def _forget_placements() -> None:
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()


def on_local_parts(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator. Use local parts if it is pointwise, and has symbolic numbers and equally placed DTensors.

    DTensor hashes the arguments of its operators (`OpSchema.__hash__`, 2.11 - 2.15), and hashing a symbolic number
    turns it into a constant: then each new learning rate needs another graph.
    """
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not any(isinstance(arg, torch.SymFloat) for arg in args) or torch.Tag.pointwise not in func.tags:
        return func(*args, **kwargs)
    like = next(iter(tensors), None)
    if not isinstance(like, DTensor) or not all(_lies_like(one, like) for one in tensors):
        return func(*args, **kwargs)
    result = func(*(local_of(arg) if isinstance(arg, DTensor) else arg for arg in args), **kwargs)
    if func._schema.is_mutable:
        return like
    spec = replace(like._spec, tensor_meta=TensorMeta(like.shape, like.stride(), result.dtype))
    return DTensor.__new__(DTensor, result, spec, requires_grad=False)


def _lies_like(tensor: Tensor, like: DTensor) -> bool:
    if not isinstance(tensor, DTensor) or any(one.is_partial() for one in tensor.placements):
        return False
    one, other = ((part.shape, part.placements, part.device_mesh) for part in (tensor, like))
    return one == other


def sharded_rows(local: Tensor, mesh: DeviceMesh, rows: int) -> DTensor:
    """Wrap this rank's rows as a DTensor of `rows` rows, split in order over a mesh (`DTensorSpec`, 2.11 - 2.15).

    `DTensor.from_local` is not used, because it moves a host tensor to the mesh's device.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size((rows, *local.shape[1:]))
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(Shard(0) for _ in range(mesh.ndim)), tensor_meta=whole)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def replicated_scalar(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a 0-d tensor that is equal on all ranks as a DTensor, without `from_local`'s checks (2.11 - 2.15)."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(torch.Size(), (), local.dtype)
    spec = DTensorSpec(mesh, tuple(Replicate() for _ in range(mesh.ndim)), tensor_meta=whole)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def partial_norms(norms: Tensor, mesh: DeviceMesh, split: Sequence[bool], norm_type: float) -> DTensor:
    """Wrap norms of this rank's parts of tensors as a DTensor that is partial along the axes in `split` (2.11 - 2.15).

    `split` says for each axis of the mesh whether the tensors are split along it. Like the norms that DTensor computes
    of sharded tensors, the result has the placement `_NormPartial`.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    placements = [_NormPartial(norm_type) if is_split else Replicate() for is_split in split]
    return DTensor.from_local(norms, mesh, placements, run_check=False)


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Concatenate the axes of several meshes, as FSDP2 does with tensor parallelism (`_concatenate`, 2.11 - 2.15).

    Raises:
        RuntimeError: the meshes overlap, or are slices of different meshes.
    """
    return DeviceMesh._concatenate(list(meshes))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Placement that shards a dim already split into `split_factor` parts by another axis (2.11 - 2.15)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def mixes_dtensors(error: RuntimeError) -> bool:
    """Whether the error's text says that an operator refused to mix DTensors and plain tensors (2.11 - 2.13)."""
    return "mixed torch.Tensor and DTensor" in str(error)
