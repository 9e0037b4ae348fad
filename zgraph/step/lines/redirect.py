"""Replace real tensors and numbers by traced ones in calls of torch, while a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zgraph.step.lines.refusals import refusal
from zgraph.step.lines.watch import Watch
from zgraph.torch_compat.aot import newest_node, node_of_number, nodes_after
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import fake_storage_key, number_hint
from zgraph.torch_compat.operators import is_fused_update


class Redirect(TorchFunctionMode):
    """Pass traced tensors instead of the real ones to each call of torch, including reads and writes of `.grad`.

    The user's code may therefore reach a parameter in any way: through the model, a list or an attribute.

    Args:
        watch: watch of the trace; `watch.stand_ins` has the traced tensors, by ids of the real ones.
        on_gradient: called with each tensor whose `.grad` is read.
    """

    def __init__(self, watch: Watch, on_gradient: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._watch, self._stand_ins, self._on_gradient = watch, watch.stand_ins, on_gradient
        self._assigned: dict[int, Tensor] = {}  # by memory; kept alive, so that the memory is not reused

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = args
        args, kwargs = (
            [self._instead(arg) for arg in args],
            {key: self._instead(arg) for key, arg in (kwargs or {}).items()},
        )
        if getattr(func, "__self__", None) is Tensor.grad and len(args) == 1:
            self._on_gradient(args[0])
        if getattr(func, "__self__", None) is Tensor.data and len(args) == 2:
            return self._set_data(args[0], args[1])
        name = getattr(func, "__name__", "")
        if name.startswith("_fused_") or is_fused_update(func):
            return with_numbers(func, args, kwargs)
        if func in (torch.as_tensor, torch.tensor) and args and isinstance(args[0], torch.SymFloat):
            return torch.ones((), **kwargs) * cast(float, args[0])  # these two would make a constant
        if name == "_foreach_lerp_" and len(args) == 3 and isinstance(args[2], Tensor):
            with self._watch.reading_values(func):  # the call itself would read it
                args[2] = args[2].item()
        if func is Tensor.__setitem__ and _is_mask(args[1]) and isinstance(args[2], int | float | torch.SymFloat):
            # Equivalent, without counting the selected elements.
            return args[0].masked_fill_(args[1], args[2])
        result = func(*args, **kwargs)
        if args and result is args[0] and isinstance(result, Tensor):
            return given[0]  # `self.count += 1` binds the result to the attribute, which outlives the trace
        return result

    def _set_data(self, tensor: Any, value: Any) -> None:
        """Run `tensor.data = value` as a copy of values into `tensor`, which keeps its memory."""
        if not any(tensor is one for one in self._stand_ins.values()):
            raise refusal("assigns the .data of a tensor that the step has made", "write in place, with copy_")
        ours, theirs = _layout_of(tensor), _layout_of(value)
        if ours != theirs:
            raise refusal(
                f"assigns .data of another kind ({theirs}) to a tensor ({ours})",
                "assign a tensor of the same shape, dtype and placement, or write in place, with copy_",
            )
        memory = _memory_of(value)
        if memory in self._assigned or memory in map(_memory_of, self._stand_ins.values()):
            raise refusal(
                "assigns .data that another tensor has as well, so later writes to one would change both",
                "write in place, with copy_, or assign a clone()",
            )
        self._assigned[memory] = value
        with torch.no_grad():
            tensor.detach().copy_(value.detach())

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._stand_ins.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._instead, value))
        return value


def _memory_of(tensor: Tensor) -> int:
    return fake_storage_key(local_of(tensor) if isinstance(tensor, DTensor) else tensor)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return (list(tensor.shape), tensor.dtype, *(tensor.placements if isinstance(tensor, DTensor) else ()))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def with_numbers(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a fused optimizer update so that its graph node reads the symbolic numbers in `kwargs`.

    The call itself gets plain floats: `float` arguments would turn symbolic numbers into constants of the graph.
    """
    numbers = {key: value for key, value in kwargs.items() if isinstance(value, torch.SymFloat)}
    before = newest_node()
    inputs = {key: node_of_number(value) for key, value in numbers.items()}
    present = {key: number_hint(value) for key, value in numbers.items()}
    result = func(*args, **{**kwargs, **present})
    for node in nodes_after(before):
        if is_fused_update(node.target):
            node.kwargs = {key: inputs.get(key, value) for key, value in node.kwargs.items()}
    return result
