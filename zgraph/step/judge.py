"""Check of captured steps: run the undecorated function on the same state and data, and compare all bits."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.runtime.shared_rng import random_state, set_random_state
from zgraph.step.capture.lifted import Lifted, local
from zgraph.step.capture.stand_ins import WINDOW
from zgraph.step.outside.variables import Outside
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.modules import local_buffers, replace_parameter, tree_leaves_with_paths

FIRST_CALLS = 2  # always checked: a call that creates the optimizer's state, and one that finds it


@dataclass(frozen=True)
class _Optimizer:
    """Copy of an optimizer's state, param_groups and other attributes; the tensors themselves are not copied."""

    state: list[tuple[Tensor, dict[str, Any]]]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: optim.Optimizer) -> _Optimizer:
        return cls(
            [(parameter, dict(entries)) for parameter, entries in optimizer.state.items()],
            [dict(group) for group in optimizer.param_groups],
            {key: value for key, value in optimizer.__dict__.items() if key not in ("state", "param_groups")},
        )

    def restore(self, optimizer: optim.Optimizer) -> None:
        optimizer.__dict__.update(self.attributes)
        for group, before in zip(optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        for parameter, entries in self.state:
            optimizer.state[parameter] = dict(entries)


class Before:
    """Snapshot, taken before a step, of everything that the step may change.

    Args:
        lifted: model and optimizers.
        outside: other variables that the function reads and writes.
        device: device of the random numbers.
    """

    def __init__(self, lifted: Lifted, outside: Outside, device: torch.device) -> None:
        self._lifted, self._outside, self._device = lifted, outside, device
        self._optimizers = [_Optimizer.of(one.optimizer) for one in lifted.optimizers]
        self._grads = [one.grad for one in lifted.held]
        self._scalers = [_attributes(scaler) for scaler in outside.scalers]
        self._windows = [{name: getattr(scope, name) for name in WINDOW} for scope in lifted.scopes()]
        self._states = [_attributes(param.state) for param in lifted.handles.values()]
        self._random = random_state(device.type), random.getstate(), _numpy_state()
        places = [*lifted.held, *(one.tensor for one in lifted.buffers), *outside.tensors.values()]
        places += [grad for grad in self._grads if grad is not None]
        places += [value for *_, value in lifted.state_entries() if isinstance(value, Tensor)]
        places += [value for group in _groups(lifted) for value in group.values() if isinstance(value, Tensor)]
        self._values = [(tensor, local(tensor).detach().clone()) for tensor in places]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values of the snapshot."""
        lifted = self._lifted
        for one in lifted.parameters:
            for part, attribute in one.sites:
                replace_parameter(part, attribute, one.tensor)
        for one in lifted.buffers:
            for part, attribute in one.sites:
                local_buffers(part)[attribute] = one.tensor
        for tensor, value in self._values:
            local(tensor).detach().copy_(value)
        for parameter, grad in zip(lifted.held, self._grads, strict=True):
            parameter.grad = grad
        for one, before in zip(lifted.optimizers, self._optimizers, strict=True):
            before.restore(one.optimizer)
        for scaler, attributes in zip(self._outside.scalers, self._scalers, strict=True):
            scaler.__dict__.update(attributes)
        for scope, window in zip(lifted.scopes(), self._windows, strict=True):
            for name, value in window.items():
                setattr(scope, name, value)
        for param, state in zip(lifted.handles.values(), self._states, strict=True):
            vars(param.state).update(state)
        numbers, pythons, numpys = self._random
        set_random_state(self._device.type, numbers)
        random.setstate(pythons)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)


class After:
    """All results of a step, by readable names.

    Args:
        lifted: model and optimizers.
        outside: other variables that the function reads and writes.
        result: return value of the function.
        device: device of the random numbers.
    """

    def __init__(self, lifted: Lifted, outside: Outside, result: Any, device: torch.device) -> None:
        self.values: dict[str, Any] = {f"return value{path}": leaf for path, leaf in tree_leaves_with_paths(result)}
        for one in lifted.parameters:
            self.values[f"parameter {one.name}"] = one.tensor
            self.values[f"gradient of {one.name}"] = one.tensor.grad
        self.values |= {f"buffer {one.name}": one.tensor for one in lifted.buffers}
        for number, one in enumerate(lifted.optimizers):
            for position, key, value in one.state_entries():
                self.values[f"state {key!r} of {lifted.parameters[position].name} in optimizer {number}"] = value
        self.values |= {f"tensor {name}": value for name, value in outside.tensors.items()}
        for place, state in enumerate(random_state(device.type)):
            self.values[f"state of random generator {place}"] = state
        self.values = {name: _copied(value) for name, value in self.values.items()}

    def difference(self, expected: After) -> str:
        """Describe the first value that differs from the expected one, and by how much; "" if all are equal."""
        names = dict.fromkeys([*expected.values, *self.values])
        found = [
            (name, text)
            for name in names
            if (text := _difference(self.values.get(name, _MISSING), expected.values.get(name, _MISSING)))
        ]
        return f"{found[0][0]} {found[0][1]}; {len(found)} of {len(names)} values differ" if found else ""


_MISSING = "not there"


def tell(found: str, lifted: Lifted, function: Callable[..., Any], call: int) -> None:
    """Raise an error on every rank if any rank has found a difference.

    Args:
        found: difference that this rank has found; "" for none.
        lifted: the model and its optimizers; the ranks of all axes of its meshes exchange their findings.
        function: the undecorated function.
        call: number of the compared call.

    Raises:
        ZgraphError: a rank has found a difference; the message quotes it.
    """
    texts = {dist.get_rank(): found} if found and dist.is_initialized() else {}
    meshes = dict.fromkeys(one.device_mesh for one in lifted.held if isinstance(one, DTensor))
    for mesh in meshes:
        for group in mesh.get_all_groups():  # axis by axis, so that every rank hears from all
            heard: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(heard, texts, group=group)
            for one in heard:
                texts |= one
    if found and not texts:
        texts = {0: found}
    if texts:
        first = min(texts)
        raise ZgraphError(
            f"zgraph.training_step: captured, {function.__name__} differs from its plain lines, which ran on the same "
            f"state and data (options check, call {call}): on rank {first} {texts[first]}"
            f"{f' (and on ranks {sorted(texts)[1:]})' if len(texts) > 1 else ''}. It reads or writes something that a "
            "graph does not follow: pass values that change between calls as arguments, and change Python objects "
            "outside the step."
        )


def _attributes(holder: object) -> dict[str, Any]:
    """Return an object's attributes, with copies of dicts and lists."""
    return {key: copy(value) if isinstance(value, dict | list) else value for key, value in vars(holder).items()}


def _groups(lifted: Lifted) -> Iterator[dict[str, Any]]:
    return (group for one in lifted.optimizers for group in one.optimizer.param_groups)


def _copied(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.placements, local_of(value).detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _difference(found: Any, expected: Any) -> str:
    """Describe how `found` differs from `expected`; "" if they are equal."""
    if isinstance(found, tuple) and isinstance(expected, tuple) and isinstance(found[-1], Tensor):
        placements, part = cast("tuple[Any, Tensor]", found)
        wanted, other = cast("tuple[Any, Any]", expected)
        return _difference(part, other) if placements == wanted else f"is placed as {placements}, not as {wanted}"
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        if isinstance(found, Tensor | tuple) or isinstance(expected, Tensor | tuple):
            return "" if found is expected else f"is {_kind(found)}, and {_kind(expected)} by its lines"
        same = type(found) is type(expected) and (found == expected or (found != found and expected != expected))
        return "" if same else f"is {found!r}, and {expected!r} by its lines"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return (
            f"has shape {list(found.shape)} and {found.dtype}, and {list(expected.shape)} and {expected.dtype} by its "
            "lines"
        )
    same = (found == expected) | ((found != found) & (expected != expected))
    if bool(same.all()):
        return ""
    off = (found[~same].double() - expected[~same].double()).abs().max().item()
    return f"differs in {int((~same).sum())} of {same.numel()} elements, by up to {off:.1e}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor | tuple):
        return "a tensor"
    return "nothing" if value is None or value is _MISSING else f"a {type(value).__name__}"


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()
