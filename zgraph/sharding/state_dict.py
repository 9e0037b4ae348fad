"""State dicts of sharded models: plain whole tensors go in and come out, and torch.compile leaves no trace in the keys.

What `state_dict()` returns are the DTensors at rest, which torch.distributed.checkpoint stores and reshards. The hooks
here let `load_state_dict` take whole tensors too, and `full_state_dict` gives them back.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook

from zgraph.errors import ZgraphError
from zgraph.runtime.chunks import chunk_rows, local_rows, pad_rows
from zgraph.sharding.dry_run_load import COMPILED, dry_run_of
from zgraph.sharding.scope import state_of
from zgraph.torch_compat.dynamo import without_compile
from zgraph.torch_compat.groups import is_distributed_ready
from zgraph.torch_compat.modules import local_parameters

ASSIGN = "assign_to_params_buffers"  # how torch tells a module's load hooks of assign=True


def follow_state_dicts(module: nn.Module) -> None:
    """Let one module of a sharded model, not its children, translate the state dicts it writes and reads."""
    module.register_state_dict_post_hook(_strip_names)
    module.register_load_state_dict_pre_hook(_accept)


@functools.cache  # one hook, whichever models follow
def follow_compiled_modules() -> None:
    """Let what torch.compile makes of sharded modules load keys without `_orig_mod.`; the first `shard` calls it.

    The wrapper sees a state dict before the module inside, finds none of its keys there, and has no hook of its own;
    torch's registration hook is the public way to be told that one is being built. It leaves all other modules alone,
    and stays: copies of sharded models, which nobody announces, need it as well.
    """

    def meet(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if f"{name}." == COMPILED and submodule is not None and state_of(submodule) is not None:
            module.register_load_state_dict_pre_hook(_accept_compiled)
            module.register_load_state_dict_post_hook(_strip_missing)

    register_module_module_registration_hook(meet)


def _strip_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Take `_orig_mod.` out of the keys that a compiled module's wrapper has put before this module's."""
    if not prefix.endswith(COMPILED):
        return
    outer = prefix.removesuffix(COMPILED)
    for key in [key for key in state_dict if key.startswith(prefix)]:  # popped and put back: the order stays
        state_dict[outer + key.removeprefix(prefix)] = state_dict.pop(key)
    versions: dict[str, Any] = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(prefix)]:
        versions[(outer + f"{key}.".removeprefix(prefix)).removesuffix(".")] = versions.pop(key)


def _strip_missing(wrapper: nn.Module, incompatible: Any) -> None:
    """Take `_orig_mod.` out of the keys that `load_state_dict` reports, in place, as torch's hooks may."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(COMPILED, "") for key in keys]


def _accept_compiled(
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Give keys without `_orig_mod.` to the module inside; nothing is loaded if some value cannot be."""
    inner = f"{prefix}{COMPILED}"
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(inner):
            state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
    module = without_compile(wrapper)
    given = {key.removeprefix(inner): value for key, value in state_dict.items() if key.startswith(inner)}
    assign = bool(local_metadata.get(ASSIGN))
    rehearsal = dry_run_of(module, given, assign)
    try:
        # Whether the caller is strict is not told to hooks: only what fails either way is found here.
        nn.Module.load_state_dict(module, rehearsal, strict=False, assign=assign)
    except RuntimeError:
        state_dict.update({inner + key: value for key, value in rehearsal.items()})  # torch will say what is wrong


def _accept(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Turn whole tensors into DTensors like those at rest, which torch can copy."""
    if f"{COMPILED[:-1]}" not in dict(module.named_children()):
        compiled = f"{prefix}{COMPILED}"
        for key in [key for key in state_dict if key.startswith(compiled)]:
            state_dict[prefix + key.removeprefix(compiled)] = state_dict.pop(key)
    state = state_of(module)
    if state is None:
        return
    if state.scope.opened:  # found by the rehearsal, so nothing was loaded yet
        raise ZgraphError(
            f"zgraph: load_state_dict in an open no_sync window (at {prefix or type(module).__name__}). What it has "
            "gathered would hide the new values, and its gradients are of the old ones; run the last forward and "
            "backward outside of no_sync first."
        )
    if not state.by_attribute:
        return
    # Copied, never assigned: a new tensor would be strange to the optimizer, and would tear tied parameters apart.
    assign = bool(local_metadata.pop(ASSIGN, False))
    for attribute in state.by_attribute:
        key = f"{prefix}{attribute}"
        sharded, value = local_parameters(module).get(attribute), state_dict.get(key)
        if not isinstance(sharded, DTensor) or not isinstance(value, Tensor) or value.shape != sharded.shape:
            continue  # torch says what is wrong
        if assign and value.dtype != sharded.dtype:
            errors.append(
                f"zgraph: assign=True would make the sharded {key} {value.dtype}, and it rests as {sharded.dtype}, "
                "which the optimizer relies on. Leave assign out to convert the values, or build the model in "
                f"{value.dtype} before zgraph.shard."
            )
            state_dict[key] = sharded.detach()
        elif not isinstance(value, DTensor):
            state_dict[key] = distribute_tensor(
                value.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None
            )


def full_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """The whole model as plain CPU tensors, on rank 0: what the unsharded model's `state_dict` would hold.

    Every rank must call it. Parameters travel one by one, so a device holds one whole parameter at a time beyond the
    shards. Tied parameters share storage, dtypes are those at rest, persistent buffers are rank 0's.

    Args:
        model: sharded or not, compiled or not.

    Returns:
        Keys without `_orig_mod.`, on CPU, for `load_state_dict` of a plain model, `torch.save`, safetensors or
        Hugging Face's `save_pretrained(..., state_dict=)`; empty on all ranks but the first.
    """
    module = without_compile(model)
    first = not is_distributed_ready() or dist.get_rank() == 0
    result: OrderedDict[str, Any] = OrderedDict()
    done: dict[int, Tensor | None] = {}
    # keep_vars: with it tied parameters are one object, not two detached ones.
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            result[key] = value
            continue
        if id(value) not in done:
            done[id(value)] = _whole_on_first(value.detach(), first)
        result[key] = done[id(value)]
    return result if first else OrderedDict()


def _whole_on_first(value: Tensor, first: bool) -> Tensor | None:
    """A plain copy on the CPU of rank 0; None on the others."""
    if not isinstance(value, DTensor):
        return value.to("cpu", copy=True) if first else None
    axes = [axis for axis, placement in enumerate(value.placements) if isinstance(placement, Shard)]
    local = value.to_local()
    if not axes:
        return local.to("cpu", copy=True) if first else None
    mesh, axis = value.device_mesh, axes[0]
    coordinate = mesh.get_coordinate() or []
    if any(place for other, place in enumerate(coordinate) if other != axis):
        return None  # a replica of shards that rank 0's group has too
    group = mesh.get_group(axis)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    chunk = pad_rows(local, chunk_rows(value.shape[0], world))
    pieces = [torch.empty_like(chunk) for _ in range(world)] if rank == 0 else None
    dist.gather(chunk, pieces, group=group, group_dst=0)
    if pieces is None:
        return None
    whole = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    start = 0
    for peer in range(world):
        rows = local_rows(value.shape[0], world, peer)
        whole[start : start + rows].copy_(pieces[peer][:rows])
        start += rows
    return whole
