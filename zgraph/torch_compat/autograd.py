"""Access to private parts of torch's autograd engine and gradient scaler."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable
from operator import attrgetter
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from zgraph.torch_compat import release_of


def is_in_backward() -> bool:
    """Return whether this thread is running a backward pass (torch 2.11 - 2.15: `_current_graph_task_id`)."""
    return torch._C._current_graph_task_id() != -1


def inside_functional_transform() -> bool:
    """Return whether a torch.func transform such as vmap is running (torch 2.11 - 2.13: `peek_interpreter_stack`)."""
    from torch._C._functorch import peek_interpreter_stack

    return cast(object, peek_interpreter_stack()) is not None  # declared as never None


def running_backward() -> int:
    """Return the number of this thread's current backward pass, or -1 (torch 2.11 - 2.15: `_current_graph_task_id`)."""
    return torch._C._current_graph_task_id()


def leaves_below(node: torch.autograd.graph.Node) -> dict[int, torch.autograd.graph.Node]:
    """Return the AccumulateGrad nodes at most four edges from a node of autograd's graph, by id of their tensor.

    torch 2.11 - 2.15: `variable`.
    """
    found: dict[int, torch.autograd.graph.Node] = {}
    level = [node]
    for _ in range(4):
        level = list(dict.fromkeys(one for each in level for one, _ in each.next_functions if one is not None))
        found |= {id(cast(Any, one).variable): one for one in level if is_leaf(one)}
    return found


def use_of(leaf: torch.autograd.graph.Node) -> str:
    """Return how this thread's current backward pass uses the gradient of a leaf tensor.

    torch 2.11 - 2.15: `_will_engine_execute_node`, which raises if `torch.autograd.grad` returns the gradient.

    Args:
        leaf: the tensor's AccumulateGrad node.

    Returns:
        "added" to `.grad`; "returned" by `torch.autograd.grad`; or "unused": not requested.
    """
    try:
        return "added" if torch._C._will_engine_execute_node(leaf) else "unused"  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:
        return "returned"


def forward_number() -> int:
    """Return autograd's sequence number of the operator that is running in forward.

    torch 2.11 - 2.15: `_get_sequence_nr`.

    Call this while the operator runs. If autograd does not record the operator, the number is that of the last recorded
    operator.
    """
    return torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]


def backward_number() -> int:
    """Return the `forward_number` of the operator whose backward is running, or -1.

    torch 2.11 - 2.15: `_current_autograd_node`.
    """
    node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
    return -1 if node is None else node._sequence_nr()


def is_compiled(node: torch.autograd.graph.Node) -> bool:
    """Return whether an autograd node is the backward of a compiled function (torch 2.11 - 2.15: by its name)."""
    return node.name() == "CompiledFunctionBackward"


def is_leaf(node: torch.autograd.graph.Node) -> bool:
    """Return whether a node of autograd's graph is an AccumulateGrad node (torch 2.11 - 2.15: by its name)."""
    return node.name() == "torch::autograd::AccumulateGrad"


def current_node() -> torch.autograd.graph.Node:
    """Return the node of autograd's graph whose backward is running (torch 2.11 - 2.15: `_current_autograd_node`).

    `next_functions` of a Python `autograd.Function` has one entry for each tensor argument, in order.
    """
    return torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]


def is_nested() -> bool:
    """Return whether a backward has been run by a node of another one, such as a region of a reentrant checkpoint.

    torch 2.11 - 2.15: `_current_autograd_node`, at the end of a backward the node around it.
    """
    node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
    return node is not None


def drop_graph(value: Tensor) -> None:
    """Detach a tensor in place, unless it is a view, which torch cannot detach in place.

    torch 2.11 - 2.15: `_is_view`.
    """
    if not value._is_view():
        value.detach_()


def hooks_of(tensors: Iterable[Tensor]) -> tuple[list[dict[int, Any] | None], list[dict[int, Any] | None]]:
    """Return two lists: the gradient hooks and the post-accumulate hooks of each tensor, each a dict by handle id.

    torch 2.11 - 2.13: `_backward_hooks` and `_post_accumulate_grad_hooks`, read without the slow `__torch_function__`.
    """
    given = list(tensors)
    with torch._C.DisableTorchFunctionSubclass():
        on_grad = list(map(attrgetter("_backward_hooks"), given))
        return on_grad, list(map(attrgetter("_post_accumulate_grad_hooks"), given))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of this thread's current backward pass (torch 2.11 - 2.15: `queue_callback`)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


def second_derivatives_vanish() -> bool:
    """Return whether second derivatives through `DTensor.to_local` are silently zero, as in torch 2.11.

    There, `_ToTorchTensor.backward` creates a gradient without autograd graph, even with `create_graph=True`.
    """
    return release_of(torch.__version__) < (2, 12)


class AgreeingGradScaler(torch.amp.GradScaler):
    """Base class of GradScalers whose ranks must agree on overflows: calls `agree` before the overflow flags are used.

    torch 2.11 - 2.15: `_unscale_grads_`, which creates all flags.
    """

    def agree(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Tensor]) -> None:
        """Change the overflow flags in place, so that they are equal on all ranks.

        Args:
            optimizer: optimizer that is about to step.
            flags: 0-d flags by device: 1.0 if a gradient has an inf or a NaN, else 0.0.
        """
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = flags or {found_inf.device: found_inf}  # a rank without gradients participates, too
        self.agree(optimizer, flags)
        return flags


def scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    """Return a scaler's state tensors by name; empty before its first use.

    torch 2.11 - 2.15: `_scale`, `_growth_tracker`.
    """
    if not scaler.is_enabled() or scaler._scale is None or scaler._growth_tracker is None:
        return {}
    return {"scale": scaler._scale, "growth_tracker": scaler._growth_tracker}


def begin_scaling(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Create the state tensors of an enabled scaler before its first `scale()` (torch 2.11 - 2.15)."""
    if scaler.is_enabled() and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)


@contextlib.contextmanager
def steps_decided_by(
    scaler: torch.amp.GradScaler, decide: Callable[[torch.optim.Optimizer, Tensor], None]
) -> Generator[None]:
    """Replace the scaler's optimizer steps in the `with` block by calls of `decide`.

    Unlike the scaler, `decide` can skip a step without reading the overflow flags on the host.
    torch 2.11 - 2.15: `_maybe_opt_step`.

    Args:
        scaler: scaler whose `step` is called in the block.
        decide: function of an optimizer and the sum of its overflow flags; must skip the step unless the sum is 0.

    Raises:
        RuntimeError: gradients were unscaled without a following `update()`.
    """

    def step(optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise RuntimeError("scaler.step() accepts only the optimizer here")
        flags = list(state["found_inf_per_device"].values())
        total = flags[0]
        for flag in flags[1:]:
            total = total + flag.to(total.device)
        decide(optimizer, total)

    states: Any = scaler._per_optimizer_states
    scaler._per_optimizer_states = defaultdict(states.default_factory)
    scaler.__dict__["_maybe_opt_step"] = step
    try:
        yield
        if scaler._per_optimizer_states:
            raise RuntimeError("gradients were unscaled, but scaler.update() was not called afterwards")
    finally:
        del scaler.__dict__["_maybe_opt_step"]
        scaler._per_optimizer_states = states


def share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Make the leaf tensor `other` run the hooks of the leaf `tensor`, too; a removed hook is removed from both.

    torch 2.11 - 2.13: `_backward_hooks` and `_post_accumulate_grad_hooks`, the dicts that `register_hook` changes.
    """
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(other, hooks, getattr(tensor, hooks))


def refuse_gradients(leaf: Tensor, refuse: Callable[[], NoReturn]) -> None:
    """Make a leaf tensor raise an error when a backward pass computes its gradient; replaces the tensor's hooks.

    torch 2.11 - 2.13: `_backward_hooks`.

    Args:
        leaf: the tensor.
        refuse: function that raises the error.
    """
    if leaf.requires_grad and leaf.is_leaf:
        cast(Any, leaf)._backward_hooks = OrderedDict([(0, lambda grad: refuse())])
