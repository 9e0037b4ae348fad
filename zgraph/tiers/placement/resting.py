"""Memory of a sharded model's offloaded tensors: which tier holds a tensor, and moves between tiers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.tiers.copy_lanes import lanes_of
from zgraph.tiers.devices import KINDS, is_gpu
from zgraph.tiers.offload import Offload
from zgraph.tiers.stores import allocated, copied_out
from zgraph.tiers.tier import DEVICE, HOST, Store, Tier
from zgraph.torch_compat.dtensor import dtensor_like, local_of
from zgraph.torch_compat.fake_values import fake_storage_key, is_fake

T = TypeVar("T", bound=Tensor)


@dataclass(eq=False)
class Resting:
    """Memory of the tensors that one sharded model offloads on this rank.

    Attributes:
        options: the user's options.
        stores: the memory of each tier in use, the host's last.
        planned: in a plan, whose tensors have no values, (tier, tensor) by storage key; None outside of plans.
        traced: (tier, tensor) by storage key, for fake tensors of a trace that are in a tier other than the host.
        roots: modules passed to `zgraph.shard`.
        device: device of all computation. If it is a GPU, offloaded tensors are copied to it first.
    """

    options: Offload
    stores: dict[Tier, Store] = field(default_factory=dict[Tier, Store])
    planned: dict[int, tuple[Tier, Tensor]] | None = None
    traced: dict[int, tuple[Tier, Tensor]] = field(default_factory=dict[int, tuple[Tier, Tensor]])
    roots: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet[nn.Module])
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, options: Offload, mesh: DeviceMesh) -> Resting:
        """Open the memory that the options ask for, on this rank of a mesh.

        Raises:
            ValueError: this machine or mesh does not support the options.
        """
        if mesh.device_type not in KINDS:
            raise ValueError(
                f"zgraph.shard: offload is not available on a mesh of {mesh.device_type} yet; use a mesh of CPUs "
                f"or of {', '.join(KINDS)}, or leave offload out."
            )
        on_gpu = is_gpu(mesh.device_type)
        device = torch.device(mesh.device_type)
        if on_gpu:
            device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        lanes = lanes_of(device)
        stores = {tier: lanes.stores.open(tier, lanes, mesh.get_rank()) for tier in options.tiers}
        return cls(options, stores, device=device)

    def names(self) -> dict[int, str]:
        """Return the names of the sharded modules' parameters, by the parameters' ids."""
        named = (entry for root in self.roots for entry in root.named_parameters())
        return {id(parameter): name for name, parameter in named}

    @property
    def computes_elsewhere(self) -> bool:
        """Whether all computation runs on a GPU, so that nothing computes with offloaded tensors on the host."""
        return self.device.type != "cpu"

    @classmethod
    def on_paper(cls, options: Offload) -> Resting:
        """Create the memory of a plan, whose tensors have no values: nothing is allocated, and no file is made."""
        return cls(options, planned={})

    def forbids_gradients(self) -> str | None:
        """Return an error message if the options forbid computing gradients, otherwise None."""
        if self.options.param_bits is not None:
            return (
                f"zgraph.Offload: a forward that computes gradients, but param_bits={self.options.param_bits}: weights "
                "are stored as codes, for inference; run it under torch.no_grad(), or leave param_bits out."
            )
        return None

    def space_of(self, tensor: Tensor) -> Tier:  # hot: called for every input of each call
        """Return the tier of a local tensor."""
        if self.planned is not None:
            tier, _ = self.planned.get(fake_storage_key(tensor), (DEVICE, None))
            return tier
        if not tensor.ndim:
            return DEVICE
        if self.traced and is_fake(tensor) and fake_storage_key(tensor) in self.traced:
            return self.traced[fake_storage_key(tensor)][0]
        for tier, store in self.stores.items():
            if store.holds(tensor):
                return tier
        return DEVICE

    def place_shard(self, shard: Tensor, name: str) -> Tensor:
        """Move a parameter's local shard to the tier of parameters, and return the moved shard."""
        return self._placed(shard, self.options.params_tier, f"{name}.shard")

    def place_parameter(self, sharded: DTensor, name: str) -> DTensor:
        """Move a DTensor parameter's local shard to the tier of parameters, and return the new DTensor."""
        return self._placed(sharded, self.options.params_tier, f"{name}.shard")

    def place_state(self, tensor: Tensor, name: str) -> Tensor:
        """Move a tensor to the tier of optimizer state, and return the moved tensor."""
        return self._placed(tensor, self.options.optimizer_tier, name)

    def fetched(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: a copy if it is in another tier."""
        return tensor if self.space_of(tensor) == DEVICE else lanes_of(self.device).reload(tensor).wait()

    def settle(self, optimizer: optim.Optimizer, names: dict[int, str]) -> None:
        """Move the state of an optimizer to the tier of optimizer state, unless it is there already.

        Args:
            optimizer: any optimizer; numbers, 0-d tensors and state of other models' parameters are not moved.
            names: names of the model's parameters, by the parameters' ids.
        """
        tier = self.options.optimizer_tier
        if tier is None and not self.computes_elsewhere:
            return
        for parameter, entries in optimizer.state.items():
            name = names.get(id(parameter))
            for key, value in entries.items() if name is not None else ():
                if not isinstance(value, Tensor):
                    continue
                if not value.ndim:
                    continue
                local = _local(value)
                if tier is None:
                    entries[key] = _moved(value, self.device)
                elif self.space_of(local) != tier or self._is_pageable(local):
                    entries[key] = self._placed(value, tier, f"{name}.{key}")

    def settle_counts(self, optimizer: optim.Optimizer) -> None:
        """Move step counts to the device if the optimizer reads them there, as a captured step does.

        Args:
            optimizer: an optimizer that has only parameters of this model.
        """
        if not self.computes_elsewhere:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") or group.get("capturable") else ():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and not value.ndim:
                        optimizer.state[parameter][key] = _moved(value, self.device)

    def join_parameters(self, optimizer: optim.Optimizer, names: dict[int, str]) -> None:
        """Move an optimizer's state to its parameters' device, where an uncaptured step computes.

        After the step `settle` moves the state back.
        """
        for parameter, entries in optimizer.state.items():
            device = _local(parameter).device
            for key, value in entries.items() if id(parameter) in names else ():
                if isinstance(value, Tensor) and (value.ndim or device.type == "cpu"):
                    entries[key] = _moved(value, device)

    def _is_pageable(self, local: Tensor) -> bool:
        """Return whether a host tensor is unpinned, such as a tensor from `load_state_dict`; copies of it block."""
        has_values = bool(local.numel()) and not is_fake(local)
        return self.computes_elsewhere and has_values and self.space_of(local) == HOST and not local.is_pinned()

    def _placed(self, tensor: T, tier: Tier | None, name: str) -> T:
        local = _local(tensor)
        if tier is None or local.is_meta or not local.ndim:
            return tensor
        if self.space_of(local) == tier and not self._is_pageable(local):
            return tensor
        if self.planned is not None:
            self.planned[fake_storage_key(local)] = tier, local
            return tensor
        if tier != HOST and is_fake(local):
            moved = torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format)
            self.traced[fake_storage_key(moved)] = tier, moved
        else:
            store, lanes = self.stores[tier], lanes_of(self.device)
            moved = lanes.stores.checked(allocated(store, local, name), name, None if tier == HOST else store)
            if tier == HOST:
                moved.copy_(local)
            else:
                copied_out(store, local.cpu().contiguous(), moved, lanes).wait()
        return cast(Any, dtensor_like(moved, tensor) if isinstance(tensor, DTensor) else moved)


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _moved(tensor: T, device: torch.device) -> T:
    """Return the same tensor with its local part on a device."""
    local = _local(tensor)
    if local.device == device:
        return tensor
    moved = local.to(device)
    return cast(Any, dtensor_like(moved, tensor) if isinstance(tensor, DTensor) else moved)
