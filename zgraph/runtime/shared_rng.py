"""Draws the same random numbers on all ranks, while each rank's own generators advance as usual."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zgraph.torch_compat.modules import tree_flatten, tree_unflatten
from zgraph.torch_compat.operators import OpOverload

# In-place random operators that do not read what they overwrite (aten names).
_OVERWRITING = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
)


class SharedRng:
    """Draws rank 0's random numbers on every rank.

    Also advances a saved copy of this rank's own random state, as if the rank had drawn its own numbers.
    """

    def __init__(self, mesh: DeviceMesh, seed: int | None) -> None:
        self.device_type = mesh.device_type
        own = random_state(self.device_type)
        if seed is not None:
            torch.manual_seed(seed)
        shared = tuple(_from_first_rank(state, mesh) for state in random_state(self.device_type))
        set_random_state(self.device_type, shared)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(own, shared, strict=True))
        self.own = None if same or seed is not None else own

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with rank 0's random state.

        A random operator also runs once with this rank's own state, to advance that state; this result is discarded.
        """
        if (
            self.own is not None
            and torch.Tag.nondeterministic_seeded in func.tags
            and kwargs.get("generator") is None  # otherwise the caller has seeded the generator
        ):
            shared = random_state(self.device_type)
            set_random_state(self.device_type, self.own)
            if func.overloadpacket.__name__ in _OVERWRITING:
                func(*args, **kwargs)
            else:
                leaves, spec = tree_flatten((args, kwargs))
                copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                copied_args, copied_kwargs = tree_unflatten(copies, spec)
                func(*copied_args, **copied_kwargs)
            self.own = random_state(self.device_type)
            set_random_state(self.device_type, shared)
        return func(*args, **kwargs)

    def settle(self) -> None:
        if self.own is not None:
            set_random_state(self.device_type, self.own)


def random_state(device_type: str) -> tuple[Tensor, ...]:
    """Return the states of the CPU's and the current device's random generators; for "cpu", of the CPU's only."""
    if device_type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device_type).get_rng_state()


def set_random_state(device_type: str, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device_type != "cpu":
        torch.get_device_module(device_type).set_rng_state(states[1])


def _from_first_rank(state: Tensor, mesh: DeviceMesh) -> Tensor:
    """Broadcast a random state from the first rank of the mesh to all others, and return it."""
    sent = state.to(mesh.device_type)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group)
    return sent.to(state.device)
