"""Private attributes and functions of modules, optimizers, pytrees and checkpoints."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


@functools.cache
def _gone() -> list[RemovableHandle]:
    """Handles of step hooks whose owners are gone."""
    return []


def hook_steps(
    owner: object, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """Run functions before and after each step of every optimizer, as long as `owner` is alive.

    torch iterates over its hooks during a step, in which Python may collect an owner. So the hooks of collected owners
    are removed later, when the next ones are registered; until then they must do nothing.
    """
    while _gone():
        _gone().pop().remove()
    if before is not None:
        weakref.finalize(owner, _gone().append, register_optimizer_step_pre_hook(cast(Any, before)))
    if after is not None:
        weakref.finalize(owner, _gone().append, register_optimizer_step_post_hook(cast(Any, after)))


@contextlib.contextmanager
def before_steps(check: Callable[..., None]) -> Generator[None]:
    """Run a function before each step of every optimizer, and before all other hooks, inside a `with`.

    2.11 - 2.15: `_global_optimizer_pre_hooks`, ordered by the ids of their handles.
    """
    handle = register_optimizer_step_pre_hook(cast(Any, check))
    cast(Any, _global_optimizer_pre_hooks).move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()


def tree_flatten(tree: object) -> tuple[list[Any], Any]:
    """Flatten a tree to its leaves and spec by torch's pytree, which knows Hugging Face's ModelOutput (2.11 - 2.15)."""
    from torch.utils._pytree import tree_flatten as flatten

    return flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils._pytree import tree_unflatten as unflatten

    return unflatten(leaves, spec)


def tree_leaves_with_paths(tree: object) -> list[tuple[str, Any]]:
    """Leaves of a tree, each with its path, such as "['loss']" or "[0]" (`tree_flatten_with_path`, 2.11 - 2.13)."""
    from torch.utils._pytree import keystr, tree_flatten_with_path

    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def lazy_graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Make a graph module whose code is generated only when it is called or shown (`_LazyGraphModule`, 2.11 - 2.15)."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def generate_code(gm: fx.GraphModule) -> Callable[..., Any]:
    """Generate a graph module's code from its graph now and return `forward` (`_LazyGraphModule`, 2.11 - 2.15)."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
    return type(gm).forward


def replace_parameter(owner: torch.nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter `name` of the module `owner` to `value` (`_parameters`, all versions).

    `setattr` is not used, because some modules intercept (`nn.RNNBase`) or forbid it.
    """
    owner._parameters[name] = cast(torch.nn.Parameter, value)


def local_parameters(owner: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters of a module, without those of submodules, by name (`_parameters`, all versions)."""
    return owner._parameters


def local_buffers(owner: torch.nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module, without those of submodules, by name, persistent or not (`_buffers`, all versions)."""
    return owner._buffers


def reset_method(module: torch.nn.Module) -> Callable[[], object] | None:
    """A module's `reset_parameters`, else its `_reset_parameters` (nn.Transformer), else None (2.11 - 2.15)."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer's class, unwrapped from profiling and hooks (`profile_hook_step`, 2.11 - 2.15)."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Hooks before and after this optimizer's step (`_optimizer_step_pre_hooks`, 2.11 - 2.15)."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped (`_opt_called`, 2.11 - 2.15)."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def storage_info(name: str, offset: int, length: int) -> Any:
    """Location of an entry in a DCP checkpoint (`_StorageInfo`, 2.11 - 2.15); torch's reader expects this class."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def apply_keeping(base: type[nn.Module], attribute: str) -> Callable[..., Any]:
    """Wrap a module class's `_apply` so that parameters keep their attribute named `attribute`.

    `_apply` (2.11 - 2.13), which `module.to` calls, swaps DTensors together with their attributes.
    """

    @functools.wraps(base._apply)
    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = {name: vars(one).get(attribute) for name, one in local_parameters(self).items() if one is not None}
        result = base._apply(self, *args, **kwargs)
        for name, value in held.items():
            if value is not None:
                vars(local_parameters(self)[name])[attribute] = value
        return result

    return apply
