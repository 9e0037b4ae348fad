"""`zgraph.shard`: shards a model's parameters as DTensors, and gathers them for forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.runtime.exchanges.identity import Exchanges, identify
from zgraph.runtime.exchanges.steps import Model
from zgraph.runtime.groups import separate_reductions
from zgraph.runtime.handle import make_handle
from zgraph.runtime.shard_layout import ShardLayout
from zgraph.runtime.window_state import attach_state
from zgraph.sharding.context.axis import context_axis
from zgraph.sharding.find_parameters import Found, Ignored, find_parameters, ids_of, on_other_axes
from zgraph.sharding.meshes.check_mesh import check_mesh
from zgraph.sharding.meshes.same_batch import SameBatch
from zgraph.sharding.meshes.same_gradients import SameGradients
from zgraph.sharding.meshes.same_machine import agreed_machine
from zgraph.sharding.meshes.tensor_split import TensorSplit, mesh_at_rest, placements_at_rest, tensor_axis
from zgraph.sharding.model.buffers import broadcast_buffers
from zgraph.sharding.model.check_model import check_model
from zgraph.sharding.model.codes import Codes
from zgraph.sharding.model.optional_parameters import OptionalParameters, check_optional
from zgraph.sharding.model.param_spec import ParamSpec
from zgraph.sharding.scope import STATE, ModuleState, Scope, ShardedParam, state_of
from zgraph.sharding.state_dict import follow_compiled_modules, follow_state_dicts
from zgraph.sharding.tensors.sharded_tensor import Sharded, as_sharded, put_in_model
from zgraph.sharding.unit import container_class, lies_inside, outermost_units, unit_class
from zgraph.sharding.whole_read import attach_read
from zgraph.tiers.devices import kind_of_backend
from zgraph.tiers.offload import Offload
from zgraph.tiers.placement.resting import Resting
from zgraph.tiers.placement.step_hooks import follow_steps
from zgraph.torch_compat.autograd import share_hooks
from zgraph.torch_compat.dtensor import call_dispatch_of, flattened, local_of
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.groups import backend_of, keep_gloo_from_preempting
from zgraph.torch_compat.modules import forget_flat_weights, replace_parameter

Unit = nn.Module | type[nn.Module]
ZERO_STAGES = (0, 1, 2, 3)


def shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    zero_stage: int = 3,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    mean_dtype: torch.dtype | None = None,
    reduction: Literal["mean", "sum"] | int = "mean",
    units: Iterable[Unit] | None = None,
    optional: Iterable[nn.Module] = (),
    ignored: Iterable[Ignored] = (),
    offload: Offload | None = None,
    check_batch: bool = True,
    context: str | None = None,
) -> nn.Module:
    """Shard a module's parameters over a mesh, in place, so that `forward` gathers the parameters it reads.

    All ranks get rank 0's values of parameters and buffers. Between forwards each parameter is a DTensor: `Shard(0)` at
    stages 1 to 3, `Replicate` at stage 0 and for 0-d parameters. Inside forward, the attribute returns the unsharded
    tensor in `param_dtype`. The gradient is averaged over the ranks, in rank order, and arrives in `.grad`, sharded.
    All this holds with and without `torch.compile`. Create the optimizer afterwards. The first call that gathers over a
    process group makes a second group of the same ranks, for reductions.

    Parameters may already be DTensors on a tensor-parallel axis (torch's `parallelize_module`). They are then further
    sharded over `mesh`, another axis of the same mesh. Between forwards all parameters of such a model are DTensors on
    both axes; in forward, the tensor-parallel parameters are DTensors on their own axis, as before this call.

    To use other options for parts of a model, call `shard` on these parts first; a call on the model leaves them as is.

    Args:
        module: any module. Parameters on the meta device are sharded without storage; `zgraph.materialize` then
            gives them values.
        mesh: one axis to shard over. Or two axes for hybrid sharding: the first replicates and the second shards
            (gathers stay within a replica; gradients are reduced within, then across replicas). None: all ranks of the
            default group.
        zero_stage: 0 keeps every parameter unsharded on every rank; 1 to 3 keep 1/N of each parameter, gradient and
            optimizer state on each rank (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054). Stage 3 gathers for every
            forward and again for every backward, and reduces in every backward. The other stages differ in an
            accumulation window, see `no_sync`: 2 gathers once, 1 gathers and reduces once, 0 reduces once and never
            gathers.
        param_dtype: dtype in which parameters are gathered and computed with; floating-point inputs of `module` are
            cast to it. None: the parameter's own.
        reduce_dtype: dtype in which gradients are sent, unless a gradient's own dtype is narrower. Sums are computed in
            fp32 (fp64 for fp64). None: the gradient's own.
        mean_dtype: dtype in which mean gradients are gathered if each rank computes a part of the mean: at stage 0, for
            0-d parameters, and across the replicas of hybrid sharding. The mean is rounded once, to the same value on
            all ranks, and never wider than the parameter. None: `reduce_dtype`, or the gradient's own dtype if
            `reduce_dtype` is None. torch.float32 keeps the precision of the sum, for more bytes.
        reduction: "mean" divides the summed gradient by the number of ranks, "sum" does not. A number is the divisor:
            for experts that receive tokens from all ranks but are sharded over the ranks that hold the same expert,
            pass the number of all ranks.
        units: modules, or classes of modules, that gather all their parameters when their forward starts. Name a
            module whose reads depend on the data, such as a mixture-of-experts block: all its parameters then receive
            a gradient (zeros where no rank read them). None: each module gathers what it owns.
        optional: modules that a rank may skip in a forward, such as a vision tower that only ranks with images run.
            Their parameters are kept whole on every rank, as at stage 0. At the end of a backward, their gradients are
            averaged over all ranks; ranks that skipped a module add zeros. If all ranks skipped it, `.grad` stays None.
        ignored: parameters, or modules with all their parameters, that are neither sharded nor synchronised: every rank
            keeps its own values, and their gradients are not reduced.
        offload: where shards and optimizer state are stored between uses, see `zgraph.Offload`; the same for all parts
            of a model. None: on the device.
        check_batch: whether the first forward of a tensor-parallel model compares a checksum of the inputs over each
            tensor-parallel group, whose ranks compute one batch together. False: for ranks that each get a part of the
            batch as input.
        context: name of an axis of `mesh` whose ranks share each sequence; parameters are sharded over all axes of the
            mesh as over one. Cut the sequences by `zgraph.context_batch`. Attention
            (`torch.nn.functional.scaled_dot_product_attention`) sees all tokens; other operations on several tokens
            are refused. None: each rank has whole sequences.

    Returns:
        `module`.

    Raises:
        ValueError: an option or the model is not supported; the message says which and what to do.
    """
    shared = None if context is None else context_axis(mesh, context)
    mesh = check_mesh(mesh if shared is None or mesh is None else flattened(mesh), module)
    _check_options(zero_stage, reduction, param_dtype=param_dtype, reduce_dtype=reduce_dtype, mean_dtype=mean_dtype)
    if not isinstance(offload, Offload | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f'zgraph.shard: offload={offload!r} is not a zgraph.Offload; write offload=zgraph.Offload(params="host", '
            'optimizer="host"), or one of the two.'
        )
    ignored_ids, optional = ids_of(ignored), tuple(optional)
    axis = tensor_axis(on_other_axes(module, mesh), mesh)
    if shared is not None and axis is not None:
        raise ValueError(
            f"zgraph.shard: context={context!r} with a model that is tensor-parallel on {axis} is not supported; leave "
            "context or parallelize_module out."
        )
    at_rest = mesh_at_rest(mesh, axis)
    found = find_parameters(module, at_rest)
    unit_names = outermost_units(module, units)
    optional_ids = ids_of(optional)
    check_optional(module, optional, {id(entry.parameter) for entry in found} - {*ignored_ids}, unit_names)
    resting = _resting(module, mesh, offload) if offload is None else None  # of parts that were sharded before
    at_rest_on = offload or (resting.options if resting is not None else None)
    if optional and (axis is not None or (at_rest_on is not None and at_rest_on.params)):
        raise ValueError(
            "zgraph.shard: optional modules of a tensor-parallel model, or with offloaded parameters, are not "
            "supported; leave optional out and run the modules on all ranks, or leave out parallelize_module or "
            "Offload(params=...)."
        )

    check_model(module, {entry.name: entry.parameter for entry in found}, ignored_ids)

    follow_compiled_modules()
    call_dispatch_of(Sharded)  # in each call: operators may have been defined since the last one
    scope = Scope()
    scope.machine = agreed_machine(mesh)
    scope.resting = _resting(module, mesh, offload)
    if scope.resting is not None:
        scope.resting.roots.add(module)
        if axis is not None and scope.resting.options.param_bits is not None:
            raise ValueError(
                f"zgraph.shard: param_bits={scope.resting.options.param_bits} and parameters that are tensor-parallel "
                f"on {axis}: only whole weights are stored as codes; leave param_bits or parallelize_module out."
            )
    scope.context = shared
    scope.same_batch = SameBatch(axis) if axis is not None and check_batch else None
    for part in module.modules():
        known = state_of(part)
        if known is not None:
            if known.scope is not scope:
                scope.replaced.take_over(known.scope.replaced)
                scope.same_gradients += known.scope.same_gradients
                scope.models += known.scope.models
                for reduction_of in known.scope.optional:
                    reduction_of.join(scope)
                scope.optional += known.scope.optional
                known.scope.models, known.scope.optional = [], []
            scope.has_windows = scope.has_windows or known.scope.has_windows
            known.scope = scope  # parts sharded before now share the root's scope
            for param in known.by_attribute.values():
                param.state.accumulation = scope.accumulation
                scope.accumulation.note(param.state)
            continue
        object.__setattr__(part, STATE, ModuleState(scope, part))
        follow_state_dicts(part)
    gather_group = mesh.get_group(mesh.ndim - 1).group_name
    if zero_stage > 0 and found:
        gather_group = _separate_reductions(mesh)
    replica_group = mesh.get_group(0).group_name if mesh.ndim > 1 else ""
    keep_gloo_from_preempting()
    exchanges = Exchanges.of(gather_group) if found and mesh.size() > 1 else None
    params: list[ShardedParam] = []
    replicated: list[tuple[str, nn.Module, str]] = []
    for entry in found:
        is_ignored = id(entry.parameter) in ignored_ids
        is_optional = id(entry.parameter) in optional_ids
        stage = 0 if is_ignored or is_optional or entry.parameter.ndim == 0 else zero_stage
        split = None if axis is None else TensorSplit.of(entry.name, entry.parameter, axis)
        shape = tuple(entry.parameter.shape) if split is None else split.part_shape
        layout = ShardLayout(shape, stage, replica_group, gather_group)
        options = None if scope.resting is None or is_ignored else scope.resting.options
        codes = Codes.of(options, entry.name, entry.parameter, layout)
        spec = ParamSpec(
            layout=layout if codes is None else codes.layout,
            split=split,
            dtype=entry.parameter.dtype if codes is None else torch.uint8,
            device_type=mesh.device_type,
            rests_on=_rests_on(scope.resting, mesh, entry.parameter),
            compute_dtype=(
                param_dtype if param_dtype and entry.parameter.is_floating_point() else entry.parameter.dtype
            ),
            wire_dtype=reduce_dtype,
            # At stages 1 to 3 a sharded parameter's mean is not gathered, so it is not rounded.
            mean_dtype=entry.parameter.dtype if is_optional and zero_stage and not replica_group else mean_dtype,
            reduction=str(reduction if shared is None else _divisor_with(shared.size, reduction)),
            ignored=is_ignored,
            codes=codes,
            is_optional=is_optional,
        )
        scope.has_windows = scope.has_windows or (stage < 3 and not is_ignored)
        _place(entry, spec, mesh, at_rest, scope.resting)
        scope.replaced.note(entry.name, entry.parameter)
        params.append(_assign_to_unit(entry, spec, module, unit_names, exchanges))
        if split is not None and split.dim is None and not is_ignored:
            replicated.append((entry.name, *entry.sites[0][1:]))
    if exchanges is not None:
        names = tuple(group.group_name for group in mesh.get_all_groups())
        divisor = mesh.size() if reduction == "mean" else 1 if reduction == "sum" else reduction
        if shared is not None and reduction != "mean":
            divisor *= shared.size
        model = Model(exchanges, names, tuple(param.state for param in params if not param.spec.ignored), divisor)
        scope.models.append(model)
        for param in params:
            put_in_model(cast(Sharded, param.sharded), model, param.name)
    skippable = [param for param in params if param.spec.is_optional]
    if skippable:
        names = [group.group_name for group in mesh.get_all_groups()]
        scope.optional.append(OptionalParameters(scope, skippable, names, exchanges))
    for reduction_of in scope.optional:
        reduction_of.watch(module.parameters())
    if axis is not None:
        scope.same_gradients.append(SameGradients.watching(axis, replicated))
    for name, part in module.named_modules():
        state = _state(part)
        state.reduces_all_params = state.reduces_all_params or name in unit_names
        if part is module and param_dtype is not None:
            state.input_dtype = param_dtype
        own = tuple(dict.fromkeys([*getattr(type(part), "_zgraph_attributes", ()), *state.by_attribute]))
        has_own_forward = "forward" in part.__dict__ and not _is_tensor_parallel(part)
        # With a context axis, any module may be checkpointed, and its attention is exchanged when it is run again.
        if own or state.params or part is module or has_own_forward or scope.context is not None:
            base = getattr(type(part), "_zgraph_base", type(part))
            part.__class__ = unit_class(base, own)
        elif not hasattr(type(part), "_zgraph_base") and next(part.parameters(), None) is not None:
            part.__class__ = container_class(type(part))
        if has_own_forward:
            part.forward = part.__dict__["forward"]  # assigned again, so that the new class wraps it
    broadcast_buffers(module, at_rest)
    return module


def _check_options(zero_stage: int, reduction: str | int, **dtypes: torch.dtype | None) -> None:
    if zero_stage not in ZERO_STAGES:
        raise ValueError(f"zgraph.shard: zero_stage={zero_stage!r} is not available; write zero_stage=0, 1, 2 or 3.")
    is_divisor = isinstance(reduction, int) and not isinstance(reduction, bool) and reduction > 0
    if not is_divisor and reduction not in ("mean", "sum"):
        raise ValueError(
            f'zgraph.shard: reduction={reduction!r} is unknown; write "mean", "sum", or a positive number to divide by.'
        )
    for name, dtype in dtypes.items():
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"zgraph.shard: {name}={dtype!r} is not a torch.dtype; write torch.bfloat16, for example.")
        if not dtype.is_floating_point:
            raise ValueError(
                f"zgraph.shard: {name}={dtype} is not a floating-point dtype; write torch.bfloat16, for example."
            )


def _divisor_with(context: int, reduction: str | int) -> str | int:
    """Return the reduction of gradients if `context` ranks share each sequence: of their losses, always the mean."""
    return reduction if reduction == "mean" else context if reduction == "sum" else int(reduction) * context


def _resting(module: nn.Module, mesh: DeviceMesh, offload: Offload | None) -> Resting | None:
    """Return the memory for offloaded tensors; all parts of a model share it. None without offload."""
    known = next(
        (state.scope.resting for part in module.modules() if (state := state_of(part)) and state.scope.resting), None
    )
    if known is None or offload is None:
        if known is not None or offload is None:
            return known
        # A plan's tensors have no values, and its CPU tensors may represent a GPU's.
        is_planned = mesh.device_type == "cpu" and any(is_fake(parameter) for parameter in module.parameters())
        if is_planned:
            return Resting.on_paper(offload)
        opened = Resting.of(offload, mesh)
        follow_steps(opened)
        return opened
    if known.options != offload:
        raise ValueError(
            f"zgraph.shard: offload={offload}, but a part of the model was sharded with {known.options}; all parts of "
            "a model must be offloaded alike: write the same for each."
        )
    return known


def _rests_on(resting: Resting | None, mesh: DeviceMesh, parameter: nn.Parameter) -> str:
    """Return the device type on which a parameter is stored between forwards: "cpu" if offloaded, else the mesh's."""
    return "cpu" if resting is not None and resting.options.params and parameter.ndim else mesh.device_type


def _place(entry: Found, spec: ParamSpec, mesh: DeviceMesh, at_rest: DeviceMesh, resting: Resting | None) -> None:
    """Shard a parameter, and replace it by its DTensor in all modules that hold it."""
    placements = placements_at_rest(spec.layout, mesh.ndim, spec.split)
    shape, part, stride = entry.parameter.shape, entry.parameter.detach(), entry.parameter.stride()
    is_coded = spec.codes is not None and not entry.parameter.is_meta  # meta tensors have no values yet
    if isinstance(part, DTensor):
        part = local_of(part)
    with torch.no_grad():
        if not spec.ignored and spec.split is not None and spec.split.dim is not None:
            # Each rank of the tensor-parallel axis has its own part, with the values of the first rank along `mesh`.
            part = local_of(distribute_tensor(part, mesh, spec.layout.placements(mesh.ndim)))
        elif not spec.ignored:
            part = local_of(distribute_tensor(part, at_rest, placements))
        distributed = DTensor.from_local(part, at_rest, placements, run_check=False, shape=shape, stride=stride)
    if spec.codes is not None and is_coded:
        distributed = spec.codes.encoded(distributed)
    if resting is not None and (spec.codes is None or is_coded):
        distributed = resting.place_parameter(distributed, entry.name)
    sharded = nn.Parameter(distributed, requires_grad=entry.parameter.requires_grad and not is_coded)
    for mark, value in vars(entry.parameter).items():  # attributes by which users group parameters, for instance
        setattr(sharded, mark, value)
    share_hooks(entry.parameter, sharded)
    as_sharded(cast(DTensor, sharded))
    attach_read(cast(DTensor, sharded), *entry.sites[0][1:])
    for _, part, attribute in entry.sites:
        replace_parameter(part, attribute, sharded)
        forget_flat_weights(part)


def _assign_to_unit(
    entry: Found, spec: ParamSpec, root: nn.Module, unit_names: tuple[str, ...], exchanges: Exchanges | None
) -> ShardedParam:
    """Choose the module that gathers a parameter: the unit around all its readers, else their closest common parent."""
    sites = tuple((part, attribute) for _, part, attribute in entry.sites)
    handle = make_handle(entry.name)
    attach_state(handle, *sites[0], _state(root).scope.accumulation)
    if not spec.is_optional:
        identify(handle, exchanges)
    param = ShardedParam(entry.name, spec, handle, sites)
    prefixes = [prefix for prefix, _, _ in entry.sites]
    unit = next((name for name in unit_names if all(lies_inside(prefix, name) for prefix in prefixes)), None)
    if unit is None:
        unit = _common_parent(prefixes)
        # Hugging Face's tensor parallelism replaces a layer's forward in the instance; the layer's caller must gather.
        while unit and _is_tensor_parallel(root.get_submodule(unit)) and "forward" in root.get_submodule(unit).__dict__:
            unit = unit.rpartition(".")[0]
    owner = _state(root.get_submodule(unit))
    owner.add(param)
    for _, part, attribute in entry.sites:
        _state(part).by_attribute[attribute] = param
    return param


def _is_tensor_parallel(part: nn.Module) -> bool:
    """Return whether any of the module's own parameters is tensor-parallel."""
    state = state_of(part)
    return state is not None and any(one.spec.split is not None for one in state.by_attribute.values())


def _common_parent(prefixes: Sequence[str]) -> str:
    shared = prefixes[0].split(".") if prefixes[0] else []
    for prefix in prefixes[1:]:
        parts = prefix.split(".") if prefix else []
        same = [a == b for a, b in zip(shared, parts, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return ".".join(shared)


def _state(module: nn.Module) -> ModuleState:
    return cast(ModuleState, state_of(module))


def _separate_reductions(mesh: DeviceMesh) -> str:
    """Create a second process group of the sharding axis, so that gathers and reductions use different groups.

    Returns the name of the group for gathers.
    """
    group = mesh.get_group(mesh.ndim - 1)
    device = torch.device(mesh.device_type)
    # NCCL may split the new group off the default one, which takes every rank of the world.
    if kind_of_backend(backend_of(group, device)).is_gpu and mesh.size() != dist.get_world_size():
        return group.group_name
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return separate_reductions(group, device)
