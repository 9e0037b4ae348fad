"""Graphs as text, the same in every run. Printing adds no guards, and never raises, even for malformed graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from zgraph.graph import meta
from zgraph.torch_compat.operators import OpOverload

# Types whose repr() is the same in every run.
_SYMBOLS = torch.SymInt | torch.SymFloat | torch.SymBool
_PLAIN = bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format


def graph_text(graph: fx.Graph) -> str:
    """Return a graph as text with one line per node: `name: f32[4, 8] = target(args)`, then the node's parameters."""
    return "\n".join(_node_text(node) for node in list(graph.nodes))


def neighbourhood(node: fx.Node) -> str:
    """Return a node's line of text, marked by an arrow, between up to ten lines of the graph before and after it."""
    around = list(node.graph.nodes)
    if node not in around:
        return f"    {_node_text(node)}  (erased)"
    here = around.index(node)
    return "\n".join(
        f"{'--> ' if other is node else '    '}{_node_text(other)}" for other in around[max(0, here - 10) : here + 11]
    )


def _node_text(node: fx.Node) -> str:
    return str(line_of(node))


@dataclass(frozen=True, slots=True)
class Line:
    """Parts of the line of text that describes a node; `str` joins them.

    Attributes:
        name: name of the node.
        value: description of the node's value; "" for the output node.
        call: the call that computes the value.
        parameters: names of the parameters that the node works for; "" if there are none.
    """

    name: str
    value: str
    call: str
    parameters: str

    def __str__(self) -> str:
        if not self.value:
            return self.call
        return f"{self.name}: {self.value} = {self.call}" + (f"  # {self.parameters}" if self.parameters else "")


def line_of(node: fx.Node) -> Line:
    """Return the parts of a node's line of text; parts that raise an exception are replaced by `unprintable`."""
    name = shown(lambda: str(node.name), node)
    if getattr(node, "op", None) == "output":
        return Line(name, "", shown(lambda: f"return {_argument_text(node.args[0])}", node), "")
    value = shown(lambda: value_text(meta.value(node)), node)
    if getattr(node, "op", None) == "placeholder":
        return Line(name, value, "input", "")
    return Line(name, value, shown(lambda: _call_text(node), node), parameters_text(node))


def _call_text(node: fx.Node) -> str:
    args = [_argument_text(argument) for argument in node.args]
    args += [f"{key}={_argument_text(value)}" for key, value in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(args)})"


def parameters_text(node: fx.Node) -> str:
    """Return the names of the parameters that a node works for, joined by ", "."""
    try:
        names = meta.parameters(node)
    except Exception:  # a node without meta
        return unprintable(node)
    return shown(lambda: ", ".join(names), names)


def value_text(value: object) -> str:
    """Return a description of a fake value, such as `f32[4, 8]`.

    Strides are added if the tensor is not contiguous, and the device if it is not the CPU.
    """
    return _value_text(value, ())


def _value_text(value: object, around: tuple[int, ...]) -> str:
    """Return a description of a fake value, also for lists that contain themselves.

    Args:
        value: fake value.
        around: ids of the lists around the value.
    """
    if isinstance(value, torch.Tensor):
        return shown(lambda: _tensor_text(value), value)
    if isinstance(value, tuple | list) and id(value) not in around:
        items = cast("Sequence[object]", value)
        inside = (*around, id(items))
        return shown(lambda: f"({', '.join(_value_text(item, inside) for item in items)})", value)
    if value is None:
        return "?"
    return type(value).__name__ if isinstance(value, _PLAIN | _SYMBOLS) else unprintable(value)


def _tensor_text(value: torch.Tensor) -> str:
    # str() of a symbolic size shows its expression; comparing or hashing it would add a guard.
    text = f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if strides := stride_text(value):
        text += f" strides {strides}"
    return text if value.device.type == "cpu" else f"{text} {value.device}"


def stride_text(value: torch.Tensor) -> str:
    """Return a tensor's strides as text, such as `(1, 8)`; "" if the tensor is contiguous."""
    strides = [str(stride) for stride in value.stride()]
    return "" if strides == _contiguous_strides([str(size) for size in value.shape]) else f"({', '.join(strides)})"


def dtype_text(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: torch.bfloat16 -> bf16."""
    name = str(dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789_")
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    return short.get(kind, kind) + name[len(kind) :]


def _contiguous_strides(sizes: list[str]) -> list[str] | None:
    if not all(size.isdigit() for size in sizes):
        return None
    strides: list[str] = []
    step = 1
    for size in reversed(sizes):
        strides.append(str(step))
        step *= max(1, int(size))
    return strides[::-1]


def target_text(target: object) -> str:
    """Return the name of a call's target, such as `aten.mm` for an operator."""
    if isinstance(target, OpOverload):  # shown as torch prints it, without the default overload
        return str(target).removesuffix(".default")
    # Not str() of an object: it may contain an address, which would differ from run to run.
    return target if isinstance(target, str) else getattr(target, "__name__", None) or unprintable(target)


def _argument_text(argument: Any, around: tuple[int, ...] = ()) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, tuple | list | dict) and id(cast(object, argument)) not in around:
        return shown(lambda: _container_text(argument, (*around, id(cast(object, argument)))), argument)
    if isinstance(argument, _SYMBOLS):
        return shown(lambda: str(argument), argument)
    if argument is None or isinstance(argument, _PLAIN):
        return shown(lambda: repr(argument), argument)
    # Any other object: its repr may contain an address, which would differ from run to run, or raise.
    return unprintable(argument)


def _container_text(argument: Any, around: tuple[int, ...]) -> str:
    if isinstance(argument, dict):
        pairs = cast("dict[Any, Any]", argument).items()
        items = [f"{_argument_text(key, around)}: {_argument_text(value, around)}" for key, value in pairs]
        return f"{{{', '.join(items)}}}"
    inner = ", ".join(_argument_text(item, around) for item in cast("Sequence[Any]", argument))
    return f"({inner})" if isinstance(argument, tuple) else f"[{inner}]"


def unprintable(thing: object) -> str:
    """Return the placeholder for an object whose text raises an exception or may differ between runs."""
    return f"<unprintable {type(thing).__name__}>"


def shown(show: Callable[[], str], thing: object) -> str:
    """Return the text that `show` returns; if `show` raises, `unprintable(thing)`."""
    return safely(show, unprintable(thing))


def safely(show: Callable[[], str], fallback: str) -> str:
    """Return the text that `show` returns; if `show` raises, `fallback`."""
    try:
        return show()
    except Exception:
        return fallback
