"""Access to DTensors without the overhead of the public functions."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.torch_version import TorchVersion

from zgraph.torch_compat.operators import OpOverload


def local_of(tensor: DTensor) -> Tensor:
    """Return a DTensor's local tensor, without autograd (torch 2.11 - 2.15: `_local_tensor`).

    The public `to_local()` takes at least forty times as long.
    """
    return tensor._local_tensor


def put_local(tensor: DTensor, local: Tensor) -> None:
    """Replace a DTensor's local tensor by another of the same shape (torch 2.11 - 2.15: `_local_tensor`)."""
    tensor._local_tensor = local


def put_whole(tensor: DTensor, whole: Tensor) -> None:
    """Make a DTensor replicated, with the local tensor `whole` (torch 2.11 - 2.15: `_local_tensor`, `_spec`)."""
    from torch.distributed.tensor import Replicate

    tensor._local_tensor = whole
    tensor._spec = replace(tensor._spec, placements=tuple(Replicate() for _ in tensor.placements))


def have_one_layout(one: DTensor, other: DTensor) -> bool:
    """Return whether two DTensors have the same shape, placements and mesh (torch 2.11 - 2.15: `_spec`)."""
    left, right = one._spec, other._spec
    return left is right or (
        left.shape == right.shape
        and left.placements == right.placements
        and (left.mesh is right.mesh or left.mesh == right.mesh)
    )


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one axis with all ranks of a mesh of several axes (torch 2.13: `_flatten`).

    All ranks of the root mesh call this.
    """
    return mesh if mesh.ndim == 1 else mesh._flatten()


def allow_lists_of(kind: type[DTensor]) -> None:
    """Let torch's optimizers and gradient clipping use foreach kernels for a subclass of DTensor.

    torch 2.11 - 2.15: `_foreach_supported_types` of torch.optim and torch.utils.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utilities

    for kinds in cast("tuple[list[type], ...]", (of_optimizers, of_utilities)):
        if kind not in kinds:
            kinds.append(kind)


def call_dispatch_of(kind: type[DTensor]) -> None:
    """Let all operators that torch knows by now call the `__torch_dispatch__` of a subclass of DTensor.

    torch 2.11 ignores the method: it runs operators of subclasses in C++, as those of DTensor, except where a rule is
    registered for an operator and a class, as by `torch.library.register_torch_dispatch`. torch 2.12 - 2.15 call the
    method, and nothing is registered. torch 2.11: `simple_registry.singleton`, `_dispatch_get_all_op_names`.
    """
    if TorchVersion(torch.__version__) >= "2.12":  # false for prereleases, some of which ignore the method
        return
    from torch._library.simple_registry import singleton

    rule = cast(Any, kind).__torch_dispatch__.__func__
    for name in torch._C._dispatch_get_all_op_names():
        rules = singleton.find(name).torch_dispatch_rules
        if rules.find(kind) is None:
            rules.register(kind, rule)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """Wrap a local tensor in a DTensor with the class, mesh, placements and shape of `like`.

    torch 2.11 - 2.15: `_spec`.

    Faster than `DTensor.from_local` and `DTensor(...)`, which check their arguments.
    """
    return DTensor.__new__(type(like), local, like._spec, requires_grad=False)


def dtensor_of(local: Tensor, like: DTensor, shape: tuple[int, ...]) -> DTensor:
    """Wrap a local tensor in a DTensor with the class, mesh and placements of `like`, but a whole shape of its own.

    torch 2.11 - 2.15: `_spec`, `TensorMeta`.
    """
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    spec = replace(like._spec, tensor_meta=TensorMeta(torch.Size(shape), strides, local.dtype))
    return DTensor.__new__(type(like), local, spec, requires_grad=False)


def locals_of(tensors: Iterable[DTensor]) -> list[Tensor]:
    """Return the local tensor of each DTensor, without a Python loop (torch 2.11 - 2.15: `_local_tensor`)."""
    return list(map(attrgetter("_local_tensor"), tensors))


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """Return `.grad` of each tensor, for DTensors in a third of the usual time.

    torch 2.11 - 2.15: `DisableTorchFunctionSubclass`, which skips `__torch_function__`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("grad"), tensors))


def requires_grad_of(tensors: Iterable[Tensor]) -> list[bool]:
    """Return `.requires_grad` of each tensor, as fast as `gradients_of`."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("requires_grad"), tensors))


def layouts_of(tensors: Iterable[DTensor]) -> list[Any]:
    """Return the spec of each DTensor: mesh, placements, shape and dtype (torch 2.11 - 2.15: `_spec`).

    Tensors may share a spec.
    """
    return list(map(attrgetter("_spec"), tensors))


@contextlib.contextmanager
def own_placements() -> Generator[None]:
    """Run the `with` block with empty caches of DTensor's sharding propagation, and empty them again afterwards.

    torch 2.11 - 2.15: the caches of `ShardingPropagator` fail if they compare symbolic numbers of different traces.
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
    """Call an operator; a pointwise one with symbolic numbers runs on the local tensors of equally placed DTensors.

    torch 2.11 - 2.15: DTensor hashes an operator's arguments (`OpSchema.__hash__`), which turns symbolic numbers into
    constants; then each new learning rate would need another graph.
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
    """Wrap this rank's rows as a DTensor with `rows` rows, sharded over all axes of a mesh.

    torch 2.11 - 2.15: `DTensorSpec`.

    Unlike `DTensor.from_local`, this leaves a host tensor on the host.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size((rows, *local.shape[1:]))
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(Shard(0) for _ in range(mesh.ndim)), tensor_meta=whole)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def replicated_scalar(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a 0-d tensor, equal on all ranks, as a replicated DTensor, without checks (torch 2.11 - 2.15)."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(torch.Size(), (), local.dtype)
    spec = DTensorSpec(mesh, tuple(Replicate() for _ in range(mesh.ndim)), tensor_meta=whole)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def partial_norms(norms: Tensor, mesh: DeviceMesh, split: Sequence[bool], norm_type: float) -> DTensor:
    """Wrap norms of local tensors as a DTensor that, reduced over the mesh, has the norms of the whole tensors.

    torch 2.11 - 2.15: placement `_NormPartial`, as in DTensor's own norms.

    Args:
        norms: norm of each local tensor.
        mesh: mesh of the tensors.
        split: for each mesh axis, whether the tensors are sharded along it.
        norm_type: order of the norm.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    placements = [_NormPartial(norm_type) if is_split else Replicate() for is_split in split]
    return DTensor.from_local(norms, mesh, placements, run_check=False)


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Concatenate the axes of several meshes, as FSDP2 does with tensor parallelism.

    torch 2.11 - 2.15: `_concatenate`.

    Raises:
        RuntimeError: the meshes overlap, or are slices of different meshes.
    """
    return DeviceMesh._concatenate(list(meshes))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement for a dim that another mesh axis has already split into `split_factor` parts.

    torch 2.11 - 2.15: `_StridedShard`.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def mixes_dtensors(error: RuntimeError) -> bool:
    """Return whether an error is about mixing DTensors and plain tensors (torch 2.11 - 2.13: by its text)."""
    return "mixed torch.Tensor and DTensor" in str(error)
