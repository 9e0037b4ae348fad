"""Checks of the mesh passed to `zgraph.shard`."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zgraph.errors import check_kind
from zgraph.tiers.devices import kind_of_group


def check_mesh(mesh: DeviceMesh | None, module: nn.Module) -> DeviceMesh:
    """Check and return the mesh to shard over; without a mesh, return one axis of all ranks.

    Raises:
        ValueError: this rank cannot shard over the mesh.
    """
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "zgraph.shard: no process group; start the script with torchrun and call "
                "torch.distributed.init_process_group first. On one device leave zgraph.shard out: "
                'torch.compile(model, backend="zgraph") works without it.'
            )
        first = next((parameter for parameter in module.parameters() if not parameter.is_meta), None)
        if isinstance(first, DTensor):  # sharded before, and may be stored on another device
            device_type = first.device_mesh.device_type
        elif first is not None:
            device_type = first.device.type
        else:  # meta parameters only: the device on which the process group works
            device_type = "cpu" if dist.group.WORLD is None else kind_of_group(dist.group.WORLD).type
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    instead = (
        'write init_device_mesh("cpu", (world_size,)), or DeviceMesh.from_group(group, "cpu") where you have a process '
        "group"
    )
    check_kind("zgraph.shard: mesh", mesh, DeviceMesh, instead)
    if mesh.ndim > 2:
        axes = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"zgraph.shard: the mesh has {mesh.ndim} axes {axes}; zgraph shards over one, and replicates over one "
            f"more at most. Pass one or two of them, such as mesh[{axes[-2:]!r}]."
        )
    if dist.get_world_size() % mesh.size():
        raise ValueError(
            f"zgraph.shard: a mesh of {mesh.size()} ranks {mesh.mesh.tolist()} does not divide the world of "
            f"{dist.get_world_size()}; start torchrun with a multiple of {mesh.size()} ranks, or make another mesh."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"zgraph.shard: rank {dist.get_rank()} is not part of the mesh {mesh.mesh.tolist()}; call shard only on "
            "the mesh's own ranks, with a mesh whose size fits the world."
        )
    return mesh
