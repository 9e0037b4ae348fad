"""Memory of a planned cluster's ranks: sizes in each memory space, and advice if a rank's memory is too small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import MemoryCurve
from zgraph.compiler.memory_ledger import SpaceUse
from zgraph.sharding.scope import state_of
from zgraph.tiers.offload import Offload
from zgraph.tiers.pinned_pool import pinned_bytes
from zgraph.tiers.placement.resting import Resting
from zgraph.tiers.tier import DEVICE, HOST, listed
from zgraph.torch_compat.dtensor import local_of

ADAM_MOMENTS = 2  # moments of each trained element


def rest_on_paper(model: nn.Module, offload: Offload | None) -> Resting | None:
    """Assign the fake parameters of a sharded model to memory spaces, as offload options say.

    Args:
        model: sharded model, possibly with an offload of its own.
        offload: offload to plan; None: the model's own, if it has one.

    Returns:
        Record of the memory space of each tensor; None without offload.

    Raises:
        ValueError: nothing is sharded, the model has another offload, or the offload is not available for training.
    """
    states = (state_of(part) for part in model.modules())
    scopes = list(dict.fromkeys(state.scope for state in states if state is not None))
    known = next((scope.resting for scope in scopes if scope.resting is not None), None)
    options = known.options if known is not None else offload
    if options is None:
        return None
    if not scopes:
        raise ValueError(f"zgraph.plan: shard_fn shards nothing, and offload={offload}; shard, or leave offload out.")
    if known is not None and offload is not None and known.options != offload:
        raise ValueError(
            f"zgraph.plan: offload={offload}, but shard_fn shards with {known.options}; write the same for both, or "
            "leave one out."
        )
    if options.param_bits is not None:
        raise ValueError(
            f"zgraph.plan: param_bits={options.param_bits} is for inference, and a plan is that of a training step; "
            "leave param_bits out."
        )
    resting = known or Resting.on_paper(options)
    for scope in scopes:
        scope.resting = resting
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            resting.place_parameter(parameter, name)
    return resting


def plan_ledger(
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer] | None,
    resting: Resting | None,
    curves: Sequence[MemoryCurve],
    *,
    pinned: bool = False,
) -> tuple[SpaceUse, ...]:
    """Return the bytes that this rank uses in each memory space.

    Args:
        model: sharded model.
        optimizers: optimizers with their state; None: two moments of each trained element are counted instead.
        resting: record of the memory space of each offloaded tensor; None: there is no offload.
        curves: memory curves of the step's frames.
        pinned: whether host memory is pinned, as with GPUs.
    """
    found: dict[tuple[str, bool], int] = {}  # by space, and whether it is state
    tier = DEVICE if resting is None else resting.options.optimizer_tier or DEVICE
    for value in map(_local, (*model.parameters(), *model.buffers())):
        space = DEVICE if resting is None else resting.space_of(value)
        found[space.name, False] = found.get((space.name, False), 0) + _bytes(value, pinned and space == HOST)
    for value, count in _state_of(model, optimizers):
        space = tier if value.ndim else DEVICE
        found[space.name, True] = found.get((space.name, True), 0) + count * _bytes(value, pinned and space == HOST)
    return tuple(
        SpaceUse(
            space=space,
            parameters=found.get((space, False), 0),
            state=found.get((space, True), 0),
            step=max((max(_alive(curve, space), default=0) for curve in curves), default=0),
            staging=max((curve.staging_bytes for curve in curves), default=0) if space == HOST.name else 0,
        )
        for space in listed(name for name, _ in found)
    )


def what_would_fit(ledger: Sequence[SpaceUse], libraries_bytes: int, machine: Hardware) -> str:
    """Return advice to the user if a rank needs more memory than it has; "" if the memory is large enough.

    Args:
        ledger: bytes used in each memory space.
        libraries_bytes: further device memory, of libraries.
        machine: hardware of the rank. If the device is a CPU, tensors stored on the host use its memory too.
    """
    device, host = (next(line for line in ledger if line.space == tier.name) for tier in (DEVICE, HOST))
    in_memory = [device] if machine.is_gpu else [device, host]
    used = sum(line.together for line in in_memory) + libraries_bytes
    too_much = used - machine.memory_bytes
    if too_much <= 0:
        return ""
    ways: list[str] = []
    if device.step > too_much:
        ways.append(
            f"a target with budget_bytes={device.step - too_much}, for which the step is planned, or refused if no "
            "plan is found"
        )
    tier = "host" if machine.is_gpu else "disk"
    parameters = sum(line.parameters for line in in_memory)
    state = sum(line.state for line in in_memory)
    freed = {f'optimizer="{tier}"': state, f'params="{tier}"': parameters, f'both on "{tier}"': parameters + state}
    ways += [f"an offload with {name}" for name, size in freed.items() if size >= too_much][:1]
    ways.append("more ranks")
    return f"does not fit, by {too_much} bytes; what would help: {', or '.join(ways)}"


def _alive(curve: MemoryCurve, space: str) -> Sequence[int]:
    return curve.bytes_during if space == DEVICE.name else curve.bytes_in(space)


def _state_of(model: nn.Module, optimizers: Sequence[optim.Optimizer] | None) -> Iterator[tuple[Tensor, int]]:
    """Yield (tensor, count): this rank's optimizer state contains `count` tensors of the size of `tensor`.

    Args:
        model: sharded model.
        optimizers: optimizers with their state; None: two moments are assumed for each parameter.
    """
    if optimizers is None:
        trained = [_local(value) for value in model.parameters() if value.requires_grad]
        yield from ((torch.empty_like(value, device="meta"), ADAM_MOMENTS) for value in trained)
        return
    for entries in (entries for one in optimizers for entries in one.state.values()):
        yield from ((_local(value), 1) for value in entries.values() if isinstance(value, Tensor))


def _local(value: Tensor) -> Tensor:
    return local_of(value) if isinstance(value, DTensor) else value.detach()


def _bytes(tensor: Tensor, pinned: bool) -> int:
    nbytes = tensor.numel() * tensor.dtype.itemsize
    return pinned_bytes(nbytes) if pinned else nbytes
