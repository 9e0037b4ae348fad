"""A graph that AOTAutograd traces in place of a frame's whose plan is known.

AOTAutograd must see a graph to build the function that calls forward and backward. Of that graph it needs the layouts
of inputs, outputs and gradients; what it traced is then replaced by the saved graphs. So it gets a graph of one
call, which is traced in milliseconds however large the frame is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of an output of a frame; strides are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, value: Tensor, requires_grad: bool) -> Layout:
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device, requires_grad)

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def stand_in(outputs: Sequence[Layout | int], written: Sequence[tuple[int, bool]], inputs: int) -> fx.GraphModule:
    """Return a graph that returns new tensors and inputs.

    Args:
        outputs: layouts of new tensors, and indices of inputs.
        written: inputs that the graph writes to, by index, and whether under `torch.no_grad`.
        inputs: number of inputs.
    """
    graph = fx.Graph()
    given = [graph.placeholder(f"input_{place}") for place in range(inputs)]
    new = [one for one in outputs if isinstance(one, Layout)]
    call = graph.call_function(_call(new, written), tuple(given))
    items = iter([graph.call_function(_item, (call, place)) for place in range(len(new))])
    graph.output(tuple(given[one] if isinstance(one, int) else next(items) for one in outputs))
    return fx.GraphModule({}, graph)


def _call(outputs: Sequence[Layout], written: Sequence[tuple[int, bool]]) -> Callable[..., tuple[Tensor, ...]]:
    def planned(*inputs: Any) -> tuple[Tensor, ...]:
        for place, without_grad in written:
            with torch.no_grad() if without_grad else nullcontext():
                inputs[place].copy_(torch.empty_like(inputs[place]))
        return _Planned.apply(outputs, *inputs)

    return planned


def _item(values: Sequence[Tensor], place: int) -> Tensor:
    return values[place]


class _Planned(torch.autograd.Function):
    """Autograd function whose outputs and gradients have the right layouts, and no values."""

    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Layout], *inputs: Any) -> tuple[Tensor, ...]:
        ctx.shapes = [(tuple(one.shape), one.dtype, one.device) if isinstance(one, Tensor) else None for one in inputs]
        made = tuple(layout.new() for layout in outputs)
        ctx.mark_non_differentiable(
            *(one for one, layout in zip(made, outputs, strict=True) if not layout.requires_grad)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        return None, *(
            torch.empty(shape[0], dtype=shape[1], device=shape[2]) if needs else None for shape, needs in needed
        )
