"""Private parts of torch's autograd engine and loss scaling."""

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
    """Whether this thread is running a backward (`_current_graph_task_id`, 2.11 - 2.15)."""
    return torch._C._current_graph_task_id() != -1


def inside_functional_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is running (`peek_interpreter_stack`, 2.11 - 2.13)."""
    from torch._C._functorch import peek_interpreter_stack

    return cast(object, peek_interpreter_stack()) is not None  # declared as never None


def running_backward() -> int:
    """Number of the backward that this thread is running; -1: none (`_current_graph_task_id`, 2.11 - 2.15)."""
    return torch._C._current_graph_task_id()


def leaves_below(node: torch.autograd.graph.Node) -> dict[int, torch.autograd.graph.Node]:
    """AccumulateGrad nodes at most four edges from `node`, by the id of their leaf (`variable`, 2.11 - 2.15)."""
    found: dict[int, torch.autograd.graph.Node] = {}
    level = [node]
    for _ in range(4):
        level = list(dict.fromkeys(one for each in level for one, _ in each.next_functions if one is not None))
        found |= {id(cast(Any, one).variable): one for one in level if is_leaf(one)}
    return found


def use_of(leaf: torch.autograd.graph.Node) -> str:
    """How this thread's running backward pass uses the gradient of a leaf; `leaf` is its AccumulateGrad node.

    `_will_engine_execute_node` (2.11 - 2.15) raises for a leaf whose gradient `torch.autograd.grad` returns.

    Returns:
        "added": to `.grad`; "returned": by `torch.autograd.grad`; "unused": only other gradients were requested.
    """
    try:
        return "added" if torch._C._will_engine_execute_node(leaf) else "unused"  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:
        return "returned"


def forward_number() -> int:
    """Sequence number of the operator that this thread is recording for backward (`_get_sequence_nr`, 2.11 - 2.15).

    Call this while the operator runs. For an operator that records nothing, this is the number of the last recorded
    operator.
    """
    return torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]


def backward_number() -> int:
    """`forward_number` of the operator whose backward runs now, or -1 (`_current_autograd_node`, 2.11 - 2.15)."""
    node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
    return -1 if node is None else node._sequence_nr()


def is_compiled(node: torch.autograd.graph.Node) -> bool:
    """Whether a node of autograd's graph is the backward of a compiled function (AOTAutograd's class, 2.11 - 2.15)."""
    return node.name() == "CompiledFunctionBackward"


def is_leaf(node: torch.autograd.graph.Node) -> bool:
    """Whether a node of autograd's graph adds to the `.grad` of a leaf (by its name, 2.11 - 2.15)."""
    return node.name() == "torch::autograd::AccumulateGrad"


def current_node() -> torch.autograd.graph.Node:
    """The node of autograd's graph whose backward this thread is running (`_current_autograd_node`, 2.11 - 2.15).

    The node of a Python `autograd.Function` has one entry in `next_functions` per tensor argument, in order.
    """
    return torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]


def drop_graph(value: Tensor) -> None:
    """Detach a tensor in place unless it is a view, which cannot be detached (`_is_view`, 2.11 - 2.15)."""
    if not value._is_view():
        value.detach_()


def hooks_of(tensors: Iterable[Tensor]) -> tuple[list[dict[int, Any] | None], list[dict[int, Any] | None]]:
    """Gradient hooks and post-accumulate hooks of each tensor, by handle id.

    `_backward_hooks` and `_post_accumulate_grad_hooks` (2.11 - 2.13), read without the `__torch_function__` lookup.
    """
    given = list(tensors)
    with torch._C.DisableTorchFunctionSubclass():
        on_grad = list(map(attrgetter("_backward_hooks"), given))
        return on_grad, list(map(attrgetter("_post_accumulate_grad_hooks"), given))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that this thread is running (2.11 - 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


def second_derivatives_vanish() -> bool:
    """Whether the gradient that `DTensor.to_local` passes to its DTensor is detached from autograd's graph.

    2.11: `_ToTorchTensor.backward` constructs a DTensor without autograd, so that with `create_graph=True` the gradient
    is a leaf, and second derivatives through it are silently zero. From 2.12 on it calls `DTensor.from_local`.
    """
    return release_of(torch.__version__) < (2, 12)


class AgreeingGradScaler(torch.amp.GradScaler):
    """A GradScaler that passes its overflow flags to `agree`, which may change them, before it acts on them.

    `_unscale_grads_` (2.11 - 2.15) makes all flags: for `unscale_`, for a step without `unscale_`, and for fused
    optimizers, which unscale by themselves.
    """

    def agree(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Tensor]) -> None:
        """Change the flags in place, so that all ranks agree; a flag is 0-d, and 1.0 if an inf or a NaN was found."""
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = flags or {found_inf.device: found_inf}  # a rank without gradients participates, too
        self.agree(optimizer, flags)
        return flags


def scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    """The state tensors of a scaler by name; empty before they exist (`_scale`, `_growth_tracker`, 2.11 - 2.15)."""
    if not scaler.is_enabled() or scaler._scale is None or scaler._growth_tracker is None:
        return {}
    return {"scale": scaler._scale, "growth_tracker": scaler._growth_tracker}


def begin_scaling(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Make an enabled scaler's tensors, as its first `scale()` does (2.11 - 2.15)."""
    if scaler.is_enabled() and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)


@contextlib.contextmanager
def steps_decided_by(
    scaler: torch.amp.GradScaler, decide: Callable[[torch.optim.Optimizer, Tensor], None]
) -> Generator[None]:
    """Replace a scaler's steps in the `with` block by `decide(optimizer, sum of overflow flags)`.

    `decide` must skip the step if the sum is not 0. 2.11 - 2.15: this replaces `_maybe_opt_step`, which reads the flags
    on the host.

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
    """Let the leaf `other` run the hooks of the leaf `tensor`, too; removing a hook removes it from both.

    Shares `_backward_hooks` and `_post_accumulate_grad_hooks` (2.11 - 2.13), dicts that `register_hook` and the handles
    it returns modify.
    """
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(other, hooks, getattr(tensor, hooks))


def refuse_gradients(leaf: Tensor, refuse: Callable[[], NoReturn]) -> None:
    """Replace a leaf's hooks by `refuse`, a function that raises an error when a backward reaches the leaf.

    Sets `_backward_hooks` (2.11 - 2.13), which the leaf may have shared with another one, see `share_hooks`.
    """
    if leaf.requires_grad and leaf.is_leaf:
        cast(Any, leaf)._backward_hooks = OrderedDict([(0, lambda grad: refuse())])
