"""Find the parameters that `zgraph.shard` must shard, each with all modules and attributes that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.sharding.scope import state_of
from zgraph.torch_compat.modules import local_parameters

Ignored = nn.Parameter | nn.Module


@dataclass(frozen=True)
class Found:
    """A parameter, and all (name of a module, module, attribute) that hold it, such as ("h.0", block, "weight")."""

    name: str
    parameter: nn.Parameter
    sites: tuple[tuple[str, nn.Module, str], ...]


def find_parameters(module: nn.Module, mesh: DeviceMesh) -> list[Found]:
    """Return all parameters of a model that are not sharded yet, in the order of `named_parameters`.

    Raises:
        ValueError: a parameter cannot be sharded; the message names it and says what to do.
    """
    sites: dict[int, list[tuple[str, nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for attribute, parameter in local_parameters(part).items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            state = state_of(part)
            if isinstance(parameter, DTensor) and state is not None and attribute in state.by_attribute:
                _check_sharded_before(name, parameter, mesh)
                spec = state.by_attribute[attribute].spec
                if spec.split is not None:
                    spec.split.check_divisor(name, spec.reduction, mesh)
                continue
            if parameter.is_complex():
                raise ValueError(
                    f"zgraph.shard: {name} is complex, and gradients are summed as real numbers; store its real and "
                    f"imaginary parts, self.{attribute} = nn.Parameter(torch.view_as_real(values)), and join them in "
                    f"forward: torch.view_as_complex(self.{attribute})."
                )
            if "forward" in part.__dict__ and isinstance(parameter, DTensor) and part is module:
                raise ValueError(
                    f"zgraph.shard: the module of {name} is tensor-parallel, and its forward is an attribute of the "
                    "instance, which computes on parts of parameters; call zgraph.shard on a module around it."
                )
            if parameter.device.type != mesh.device_type and not parameter.is_meta:
                raise ValueError(
                    f"zgraph.shard: {name} is on {parameter.device.type}, the mesh on {mesh.device_type}; move the "
                    f'model first: model.to("{mesh.device_type}").'
                )
            parameters[id(parameter)] = parameter
            sites.setdefault(id(parameter), []).append((prefix, part, attribute))
    found = [
        Found(".".join(filter(None, (places[0][0], places[0][2]))), parameters[key], tuple(places))
        for key, places in sites.items()
    ]
    _check_untied(found, module)
    return found


def _check_sharded_before(name: str, parameter: DTensor, mesh: DeviceMesh) -> None:
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"zgraph.shard: {name} was sharded on {parameter.device_mesh}, not on {mesh}; one model needs one mesh, or "
            "clipping and fused optimizers cannot work on it. Shard a tensor-parallel model as a whole, or by parts "
            "that each contain a tensor-parallel parameter."
        )


def _check_untied(found: Sequence[Found], module: nn.Module) -> None:
    """Refuse a parameter that is tied to a parameter which an earlier `zgraph.shard` call has sharded.

    Raises:
        ValueError: there is such a parameter; the message names both.
    """
    scopes = {id(state.scope): state.scope for part in module.modules() if (state := state_of(part)) is not None}
    replaced = {id(old): name for scope in scopes.values() for name, old in scope.replaced.alive()}
    for entry in found:
        if id(entry.parameter) in replaced:
            raise ValueError(
                f"zgraph.shard: {entry.name} is tied to {replaced[id(entry.parameter)]}, which an earlier call has "
                "sharded; shard both in one call, or the tie is lost."
            )


def on_other_axes(module: nn.Module, mesh: DeviceMesh) -> Iterator[tuple[str, DeviceMesh]]:
    """Yield (name, mesh) of each parameter that is a DTensor on mesh axes other than those of `mesh`.

    For a parameter that zgraph has sharded, the mesh is its tensor-parallel axis.
    """
    for prefix, part in module.named_modules():
        state = state_of(part)
        for attribute, parameter in local_parameters(part).items():
            known = None if state is None else state.by_attribute.get(attribute)
            name = f"{prefix}.{attribute}" if prefix else attribute
            if known is not None and known.spec.split is not None and not known.spec.split.lies_on(mesh):
                yield name, known.spec.split.mesh
            elif known is None and isinstance(parameter, DTensor):
                yield name, parameter.device_mesh


def ids_of(ignored: Iterable[Ignored]) -> dict[int, None]:
    """Return ids of the parameters in `ignored`, and of all parameters of the modules in `ignored`."""
    ids: dict[int, None] = {}
    for entry in ignored:
        for parameter in entry.parameters() if isinstance(entry, nn.Module) else (entry,):
            ids[id(parameter)] = None
    return ids
