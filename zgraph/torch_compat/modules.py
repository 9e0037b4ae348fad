"""Access to private parts of modules, optimizers, pytrees and checkpoints."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Sequence
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
    """Return the list of handles of step hooks whose owners no longer exist."""
    return []


def hook_steps(
    owner: object, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """Call functions before and after each step of every optimizer, as long as `owner` exists.

    Hooks of an owner that no longer exists are removed at the next call of this function, because torch may be
    iterating over its hooks when the owner is collected. Until then such hooks must do nothing.

    Args:
        owner: object to which the hooks belong.
        before, after: hooks, as for torch's `register_optimizer_step_pre_hook` and `register_optimizer_step_post_hook`.
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
    """Return the leaves and the spec of a pytree, which may contain Hugging Face's ModelOutput (torch 2.11 - 2.15)."""
    from torch.utils._pytree import tree_flatten as flatten

    return flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils._pytree import tree_unflatten as unflatten

    return unflatten(leaves, spec)


def tree_leaves_with_paths(tree: object) -> list[tuple[str, Any]]:
    """Return each leaf of a pytree with its path, such as "['loss']" (torch 2.11 - 2.13: `tree_flatten_with_path`)."""
    from torch.utils._pytree import keystr, tree_flatten_with_path

    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def lazy_graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Create a graph module that generates its code only when needed (torch 2.11 - 2.15: `_LazyGraphModule`)."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def generate_code(gm: fx.GraphModule) -> Callable[..., Any]:
    """Generate a graph module's code from its graph; return `forward` (torch 2.11 - 2.15: `_LazyGraphModule`)."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
    return type(gm).forward


def replace_parameter(owner: torch.nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter `name` of the module `owner` (all torch versions: `_parameters`).

    `setattr` is not used, because some modules intercept (`nn.RNNBase`) or forbid it.
    """
    owner._parameters[name] = cast(torch.nn.Parameter, value)


def local_parameters(owner: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own parameters by name, without those of submodules (`_parameters`)."""
    return owner._parameters


def local_buffers(owner: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers by name, persistent or not, without those of submodules (`_buffers`)."""
    return owner._buffers


FLAT_WEIGHTS = "_flat_weights"  # attribute of nn.RNNBase: the list of weights that its forward reads


def forget_flat_weights(owner: torch.nn.Module) -> None:
    """Delete the list in which nn.LSTM and its like hold their weights, if a module has it (torch 2.11 - 2.15)."""
    vars(owner).pop(FLAT_WEIGHTS, None)


def flat_weights_by_attribute(base: type[nn.Module]) -> dict[str, Any]:
    """Return attributes for a subclass of `base` whose forward reads weights as attributes: {} unless it is recurrent.

    nn.LSTM, nn.GRU and nn.RNN read a list of their weights, and on CUDA move the weights into one buffer when one has
    been replaced. In the subclass the list is made anew for each read, and weights are not moved: cuDNN copies them.
    (torch 2.11 - 2.15: `_flat_weights`, `_flat_weights_names`, `_weights_have_changed`.)
    """

    def read(module: Any) -> list[Tensor | None]:
        return [getattr(module, name, None) for name in module._flat_weights_names]

    def write(module: Any, value: Any) -> None:
        pass  # nn.RNNBase assigns the list that `read` returns

    def flatten_parameters(module: Any) -> None:
        pass

    def weights_have_changed(module: Any) -> bool:
        return False

    if not issubclass(base, nn.RNNBase):
        return {}
    return {
        FLAT_WEIGHTS: property(read, write),
        "flatten_parameters": flatten_parameters,
        "_weights_have_changed": weights_have_changed,
    }


def reset_method(module: torch.nn.Module) -> Callable[[], object] | None:
    """Return a module's `reset_parameters` or, as in nn.Transformer, `_reset_parameters` (torch 2.11 - 2.15).

    None if the module has neither.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return an optimizer class's `step` without profiling and hooks (torch 2.11 - 2.15: `profile_hook_step`)."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all hooks before and after this optimizer's step (torch 2.11 - 2.15: `_optimizer_step_pre_hooks`)."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped, for learning-rate schedulers (torch 2.11 - 2.15: `_opt_called`)."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def storage_info(name: str, offset: int, length: int) -> Any:
    """Return the location of an entry in a DCP checkpoint, as torch's reader expects it.

    torch 2.11 - 2.15: `_StorageInfo`.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def apply_keeping(base: type[nn.Module], attribute: str) -> Callable[..., Any]:
    """Wrap a module class's `_apply` so that parameters keep a Python attribute, for example in `module.to`.

    torch 2.11 - 2.13: `_apply` loses attributes of parameters that are DTensors.

    Args:
        base: class of the modules.
        attribute: name of the parameters' attribute.
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


def newton_schulz(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Orthogonalize a matrix by the quintic iteration of `torch.optim.Muon`, in bf16; a bf16 matrix is overwritten.

    torch 2.11 - 2.15: `_zeropower_via_newtonschulz`.
    """
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(matrix, cast(Any, tuple(coefficients)), steps, eps)


def muon_rate(lr: Any, adjust: str | None, shape: Sequence[int]) -> Any:
    """Return the learning rate of `torch.optim.Muon` for a matrix of this shape (torch 2.11 - 2.15: `_adjust_lr`)."""
    from torch.optim._muon import _adjust_lr

    return _adjust_lr(lr, adjust, torch.Size(shape))
