"""Tensor parallelism: zgraph further shards the part of a parameter that each rank of a tensor-parallel axis has.

`parallelize_module` makes parameters DTensors on a `tp` axis. As with FSDP2, zgraph shards each rank's part over
zgraph's axes, so between forwards the parameter is a DTensor on `tp` and zgraph's axes. In forward the part is
gathered, and wrapped as a DTensor on `tp` alone, as before; DTensor's operators compute and communicate on `tp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from zgraph.runtime.shard_layout import ShardLayout
from zgraph.torch_compat.dtensor import joined_mesh, strided_shard


@dataclass(frozen=True)
class TensorSplit:
    """Placement of a parameter on a tensor-parallel axis.

    Attributes:
        shape: shape of the whole parameter.
        mesh: the tensor-parallel axis, a mesh of T ranks.
        placement: `Shard` or `Replicate`; None for a plain parameter, equal on all ranks.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placement: Placement | None

    @classmethod
    def of(cls, name: str, parameter: Tensor, mesh: DeviceMesh) -> TensorSplit:
        """Return the placement of a parameter on the tensor-parallel axis `mesh`.

        Raises:
            ValueError: zgraph cannot shard a DTensor with this placement further.
        """
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            return cls(shape, mesh, None)
        (placement,) = parameter.placements
        if isinstance(placement, Replicate):
            return cls(shape, mesh, placement)
        if type(placement) is not Shard:
            raise ValueError(
                f"zgraph.shard: {name} is placed as {placement} on the tensor-parallel mesh {mesh}; zgraph can only "
                "divide Shard and Replicate further. Give its module another style in parallelize_module."
            )
        dim = placement.dim % len(shape)
        if shape[dim] % mesh.size():
            raise ValueError(
                f"zgraph.shard: {name} of shape {list(shape)} is split on dim {dim} over {mesh.size()} ranks, which "
                f"then hold parts of different sizes; use a size that {mesh.size()} divides, or leave its module out "
                "of parallelize_module."
            )
        return cls(shape, mesh, Shard(dim))

    @property
    def size(self) -> int:
        """Number of ranks on the tensor-parallel axis."""
        return self.mesh.size()

    @property
    def dim(self) -> int | None:
        """Tensor dim that the axis splits; None if all ranks of the axis have the same tensor."""
        return self.placement.dim if isinstance(self.placement, Shard) and self.size > 1 else None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each rank's part, which zgraph gathers and reduces."""
        return tuple(rows // self.size if dim == self.dim else rows for dim, rows in enumerate(self.shape))

    def as_read(self, part: Tensor) -> Tensor:
        """Return the tensor that forward reads: `part` as a DTensor on the axis, unless the parameter is plain."""
        if self.placement is None:
            return part
        return DTensor.from_local(part, self.mesh, [self.placement], run_check=False)

    def lies_on(self, mesh: DeviceMesh) -> bool:
        """Return whether the axis is part of `mesh`, which it can be if an earlier call sharded experts over `mesh`."""
        return set(self.mesh.mesh_dim_names or ()) <= set(mesh.mesh_dim_names or ())

    def check_divisor(self, name: str, reduction: str, mesh: DeviceMesh) -> None:
        """Check that a parameter sharded by an earlier call, such as an expert's, was given a divisor for its gradient.

        Args:
            name: name of the parameter.
            reduction: reduction of the parameter, see `zgraph.shard`.
            mesh: mesh over which all other parameters are now sharded.

        Raises:
            ValueError: `reduction` is "mean", but this mean is over fewer ranks than the means of the other parameters.
        """
        if self.size > 1 and self.lies_on(mesh) and reduction == "mean":
            raise ValueError(
                f"zgraph.shard: {name} is split over {self.mesh.mesh_dim_names}, and the gradients of all other "
                f"parameters are averaged over {mesh.size()} ranks. Its gradient is a sum over the tokens of all these "
                f"ranks, so its mean over the {mesh.size() // self.size} that hold it would be {self.size} times too "
                f"large: write reduction={mesh.size()} where it is sharded, or the number to divide by."
            )


def placements_at_rest(layout: ShardLayout, ndim: int, split: TensorSplit | None) -> tuple[Placement, ...]:
    """Return a parameter's placements between forwards, on zgraph's axes and then on the tensor-parallel axis.

    Args:
        layout: layout of this rank's part on zgraph's axes.
        ndim: number of zgraph's axes.
        split: placement on the tensor-parallel axis; None: there is no such axis.
    """
    own = layout.placements(ndim)
    if split is None:
        return own
    if layout.is_sharded and split.dim == 0:  # split over the tensor-parallel axis first, although it comes last
        own = (*own[:-1], strided_shard(0, split.size))
    return (*own, split.placement or Replicate())


def tensor_axis(parameters: Iterable[tuple[str, DeviceMesh]], mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the tensor-parallel axis of a model; None if there is none.

    Args:
        parameters: (name, mesh) of each DTensor that zgraph has not made.
        mesh: mesh over which zgraph shards.

    Raises:
        ValueError: the DTensors are on different meshes, or on a mesh of several axes.
    """
    found: dict[DeviceMesh, str] = {}
    for name, of_parameter in parameters:
        found.setdefault(of_parameter, name)
    if not found:
        return None
    axis, name = next(iter(found.items()))
    if len(found) > 1:
        others = ", ".join(f"{name} on {one}" for one, name in found.items())
        raise ValueError(
            f"zgraph.shard: the model's DTensors are on several meshes ({others}); only one tensor-parallel axis "
            'composes with zgraph. Parallelize all modules over the same mesh["tp"].'
        )
    if axis.ndim > 1:
        raise ValueError(
            f"zgraph.shard: {name} is on the {axis.ndim} axes of {axis}; only one tensor-parallel axis composes with "
            'zgraph, which adds its own. Write parallelize_module(module, mesh["tp"], plan).'
        )
    return axis


def mesh_at_rest(mesh: DeviceMesh, axis: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh on which parameters are stored between forwards: zgraph's axes and the tensor-parallel axis.

    Raises:
        ValueError: the two meshes overlap, or are not slices of one mesh.
    """
    if axis is None:
        return mesh
    names, others = mesh.mesh_dim_names, axis.mesh_dim_names
    advice = (
        'slice both from one mesh: mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")); '
        'parallelize_module(..., mesh["tp"], ...); zgraph.shard(..., mesh["dp"]).'
    )
    if names is None or others is None:
        raise ValueError(f"zgraph.shard: the axes of {mesh} and of the tensor-parallel {axis} need names; {advice}")
    twice = [name for name in names if name in others]
    if twice:
        raise ValueError(
            f"zgraph.shard: the axis {twice[0]!r} is used twice: the model is tensor-parallel over it, and zgraph "
            f"would shard over it, too; {advice}"
        )
    try:
        joined = joined_mesh([mesh, axis])
    except RuntimeError as error:
        raise ValueError(
            f"zgraph.shard: {mesh} and the tensor-parallel {axis} do not make up one mesh ({error}); {advice}"
        ) from error
    if joined.get_coordinate() is None:
        raise ValueError(f"zgraph.shard: this rank is missing in the mesh that {mesh} and {axis} make up; {advice}")
    return joined
