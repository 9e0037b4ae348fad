"""State dicts of sharded models: hooks to load unsharded tensors, and `full_state_dict`, which returns them.

`state_dict()` returns DTensors, which torch.distributed.checkpoint stores and reshards. Keys have no prefix of
torch.compile (`_orig_mod.`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook

from zgraph.errors import ZgraphError
from zgraph.runtime.chunks import pad_rows
from zgraph.runtime.exchanges.changes import note_origin
from zgraph.runtime.shard_layout import ShardLayout
from zgraph.sharding.model.dry_run_load import COMPILED, dry_run_of
from zgraph.sharding.model.param_spec import ParamSpec
from zgraph.sharding.scope import ShardedParam, sharded_parameters, state_of
from zgraph.torch_compat.dynamo import no_frames_inside, without_compile
from zgraph.torch_compat.groups import is_distributed_ready, resolve_group
from zgraph.torch_compat.modules import local_parameters

ASSIGN = "assign_to_params_buffers"  # torch's key that tells load hooks of assign=True


def follow_state_dicts(module: nn.Module) -> None:
    """Register hooks that translate the keys and values of the state dicts that this module saves and loads."""
    module.register_state_dict_post_hook(_strip_names)
    module.register_load_state_dict_pre_hook(_accept)


@cache
def follow_compiled_modules() -> None:
    """Register a global hook that lets torch.compile's wrappers load keys without `_orig_mod.`; once per process.

    A wrapper loads a state dict before the module inside, and finds none of the keys that it expects. torch's hook on
    module registration is the only public way to reach wrappers that are created later. There is one hook for all
    models, and it is never removed: Dynamo guards on global hooks if a forward builds a module, so that adding or
    removing a hook would recompile other models.
    """
    register_module_module_registration_hook(_follow_if_compiled)


@no_frames_inside  # `torch.compiler.disable(block)(x)` in a compiled forward builds a wrapper, too
def _follow_if_compiled(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if f"{name}." == COMPILED and submodule is not None and state_of(submodule) is not None:
        module.register_load_state_dict_pre_hook(_accept_compiled)
        module.register_load_state_dict_post_hook(_strip_missing)


def _strip_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Remove `_orig_mod.`, the prefix of torch.compile's wrapper, from this module's keys."""
    if not prefix.endswith(COMPILED):
        return
    outer = prefix.removesuffix(COMPILED)
    for key in [key for key in state_dict if key.startswith(prefix)]:  # popped and reinserted, to keep the order
        state_dict[outer + key.removeprefix(prefix)] = state_dict.pop(key)
    versions: dict[str, Any] = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(prefix)]:
        versions[(outer + f"{key}.".removeprefix(prefix)).removesuffix(".")] = versions.pop(key)


def _strip_missing(wrapper: nn.Module, incompatible: Any) -> None:
    """Remove `_orig_mod.` from the keys that `load_state_dict` reports in `incompatible`."""
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
    """Load keys without `_orig_mod.` into the module inside a wrapper, or nothing if any value cannot be loaded."""
    inner = f"{prefix}{COMPILED}"
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(inner):
            state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
    module = without_compile(wrapper)
    given = {key.removeprefix(inner): value for key, value in state_dict.items() if key.startswith(inner)}
    assign = bool(local_metadata.get(ASSIGN))
    dry_run = dry_run_of(module, given, assign)
    try:
        # Hooks are not told whether the caller is strict, so this detects only values that fail either way.
        nn.Module.load_state_dict(module, dry_run, strict=False, assign=assign)
    except RuntimeError:
        state_dict.update({inner + key: value for key, value in dry_run.items()})  # torch will say what is wrong


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
    """Replace unsharded tensors in a state dict by DTensors with the layouts of the module's parameters."""
    if f"{COMPILED[:-1]}" not in dict(module.named_children()):
        compiled = f"{prefix}{COMPILED}"
        for key in [key for key in state_dict if key.startswith(compiled)]:
            state_dict[prefix + key.removeprefix(compiled)] = state_dict.pop(key)
    state = state_of(module)
    if state is None:
        return
    if state.scope.accumulation.opened:  # the dry run comes here first, so nothing has been loaded yet
        raise ZgraphError(
            f"zgraph: load_state_dict in an open no_sync window (at {prefix or type(module).__name__}). Its gathered "
            "parameters would hide the new values, and its gradients are of the old ones; run the last forward and "
            "backward outside no_sync first."
        )
    if not state.by_attribute:
        return
    # Copied, never assigned: the optimizer would not know a new tensor, and tied parameters would come apart.
    assign = bool(local_metadata.pop(ASSIGN, False))
    for attribute, param in state.by_attribute.items():
        key = f"{prefix}{attribute}"
        sharded, value = local_parameters(module).get(attribute), state_dict.get(key)
        if _is_weight(value, param) and isinstance(sharded, DTensor):
            errors.append(
                f"zgraph: {key} is stored as codes (zgraph.Offload, param_bits), but the state dict has the weight. "
                "Load the weights before zgraph.shard, which then quantizes them."
            )
            state_dict[key] = sharded.detach()
            continue
        if not isinstance(sharded, DTensor) or not isinstance(value, Tensor) or value.shape != sharded.shape:
            continue  # torch reports the error
        if assign and value.dtype != sharded.dtype:
            errors.append(
                f"zgraph: assign=True would make the sharded {key} {value.dtype}, but it is stored as {sharded.dtype}, "
                "which the optimizer relies on. Leave assign out to convert the values, or build the model in "
                f"{value.dtype} before zgraph.shard."
            )
            state_dict[key] = sharded.detach()
        elif not isinstance(value, DTensor):
            whole = value.detach()
            placed = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
            note_origin(placed, whole)
            state_dict[key] = placed


def _is_weight(value: object, param: ShardedParam) -> bool:
    """Return whether `value` is an unencoded weight, although the parameter is stored as low-bit codes."""
    codes = param.spec.codes
    return codes is not None and isinstance(value, Tensor) and value.dtype != param.spec.dtype


def full_state_dict(model: nn.Module, *, keep: Callable[[str], bool] | None = None) -> OrderedDict[str, Any]:
    """Return the state dict of the unsharded model, as plain CPU tensors on rank 0.

    Every rank must call it. Parameters are gathered one by one, so besides its shards a device holds only one unsharded
    parameter at a time. Tied parameters share storage, dtypes are those of the sharded parameters, and persistent
    buffers are rank 0's. Weights stored as low-bit codes (`zgraph.Offload`, param_bits) are decoded.

    Args:
        model: any model, sharded or not, compiled or not.
        keep: whether to gather and return the entry with a given key, such as only the adapters of a frozen model; the
            same on all ranks. None: all entries.

    Returns:
        CPU tensors under keys without `_orig_mod.`, for `load_state_dict` of a plain model, `torch.save`, safetensors
        or Hugging Face's `save_pretrained(..., state_dict=)`. Empty on all ranks but rank 0.

    Raises:
        AgreementError: at stages 1 to 3 and on gloo, not all ranks call it, or they keep other entries.
    """
    module = without_compile(model)
    # keep_vars: keeps tied parameters one object, instead of two detached ones.
    entries = {key: value for key, value in module.state_dict(keep_vars=True).items() if keep is None or keep(key)}
    if any(param.spec.layout.zero_stage for param in sharded_parameters(module).values()):
        kept = "()" if keep is None else f"(keep=...) of {', '.join(entries) or 'no entries'}"
        meet(module, f"zgraph.full_state_dict{kept}")  # one rank by itself may save replicas
    first = not is_distributed_ready() or dist.get_rank() == 0
    result: OrderedDict[str, Any] = OrderedDict()
    done: dict[int, Tensor | None] = {}
    params = sharded_parameters(module).values()
    specs = {id(param.sharded): param.spec for param in params}
    for key, value in entries.items():
        if not isinstance(value, Tensor):
            result[key] = value
            continue
        if id(value) not in done:
            spec = specs.get(id(value))
            plain = _unsharded_on_first(value.detach(), spec, first)
            codes = None if spec is None else spec.codes
            done[id(value)] = plain if plain is None or codes is None else codes.decode(plain, codes.dtype)
        result[key] = done[id(value)]
    return result if first else OrderedDict()


def meet(module: nn.Module, call: str) -> None:
    """Wait until all ranks of a model have made the same call.

    Args:
        module: the sharded model.
        call: name of the call.

    Raises:
        AgreementError: a rank makes another call, such as its next forward.
    """
    scopes = {id(state.scope): state.scope for part in module.modules() if (state := state_of(part)) is not None}
    for scope in scopes.values():
        for one in scope.models:
            one.meet(call)


def _unsharded_on_first(value: Tensor, spec: ParamSpec | None, first: bool) -> Tensor | None:
    """Return an unsharded copy of a tensor on rank 0's CPU; None on other ranks."""
    if spec is None:
        plain = value.full_tensor() if isinstance(value, DTensor) else value
        return plain.to("cpu", copy=True) if first else None
    split = spec.split
    sent_on = split is not None and split.dim is not None
    sharded = cast(DTensor, value)
    # GPU process groups cannot send from the host, where parameters may be stored.
    device_type = sharded.device_mesh.device_type
    part = _gathered_part(sharded, spec.layout, torch.device(device_type if sent_on else "cpu"))
    if part is None or split is None or split.dim is None:
        return part.to("cpu", copy=not spec.layout.is_sharded) if part is not None and first else None
    pieces = [torch.empty_like(part) for _ in range(split.size)] if split.mesh.get_local_rank() == 0 else None
    dist.gather(part.contiguous(), pieces, group=split.mesh.get_group(), group_dst=0)
    return torch.cat([piece.cpu() for piece in pieces], split.dim) if pieces is not None and first else None


def _gathered_part(value: DTensor, layout: ShardLayout, device: torch.device) -> Tensor | None:
    """Gather a parameter, or one rank's part of a tensor-parallel parameter, on the first rank of its group.

    Returns the gathered tensor on `device`; None on all other ranks.
    """
    if layout.replica > 0 or (layout.rank > 0 and not layout.is_sharded):
        return None  # the first rank, or its group, has the same values
    local = value.to_local().to(value.device_mesh.device_type)
    if not layout.is_sharded:
        return local
    chunk = pad_rows(local, layout.chunk_rows)
    pieces = [torch.empty_like(chunk) for _ in range(layout.world)] if layout.rank == 0 else None
    dist.gather(chunk, pieces, group=resolve_group(layout.gather_group), group_dst=0)
    if pieces is None:
        return None
    unsharded = torch.empty(layout.shape, dtype=value.dtype, device=device)
    parts = unsharded.split([layout.rows_of(rank) for rank in range(layout.world)])
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece[: len(part)])
    return unsharded
