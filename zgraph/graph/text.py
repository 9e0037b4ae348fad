"""Graphs as text: deterministic, without guards, and never an exception, whatever a pass has left in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from zgraph.graph import meta
from zgraph.torch_compat.operators import OpOverload

# Values whose repr() is the same in every run.
_PLAIN = bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format


def graph_text(graph: fx.Graph) -> str:
    """One line a node: `name: f32[4, 8] = target(args)`, then the parameters it works for."""
    return "\n".join(_node_text(node) for node in list(graph.nodes))


def neighbourhood(node: fx.Node, distance: int = 10) -> str:
    """The node's line, marked, with up to `distance` lines on either side."""
    around = list(node.graph.nodes)
    if node not in around:
        return f"    {_node_text(node)}  (erased)"
    here = around.index(node)
    return "\n".join(
        f"{'--> ' if other is node else '    '}{_node_text(other)}"
        for other in around[max(0, here - distance) : here + distance + 1]
    )


def _node_text(node: fx.Node) -> str:
    return safely(lambda: _node_text_unsafe(node), "<node that cannot be shown>")


def _node_text_unsafe(node: fx.Node) -> str:
    head = f"{node.name}: {value_text(meta.value(node))}"
    if node.op == "placeholder":
        return f"{head} = input"
    if node.op == "output":
        return f"return {_argument_text(node.args[0])}"
    args = [_argument_text(argument) for argument in node.args]
    args += [f"{key}={_argument_text(value)}" for key, value in node.kwargs.items()]
    about = meta.parameters(node)
    return f"{head} = {_target_text(node.target)}({', '.join(args)})" + (f"  # {', '.join(about)}" if about else "")


def value_text(value: object) -> str:
    """`f32[4, 8]`, with strides where they are not the usual ones and the device where it is not the CPU."""

    def show() -> str:
        if isinstance(value, torch.Tensor):
            # str() of a symbolic size shows its expression; comparing or hashing it would add a guard.
            sizes = [str(size) for size in value.shape]
            text = f"{dtype_text(value.dtype)}[{', '.join(sizes)}]"
            strides = [str(stride) for stride in value.stride()]
            if strides != _contiguous_strides(sizes):
                text += f" strides ({', '.join(strides)})"
            return text if value.device.type == "cpu" else f"{text} {value.device}"
        if isinstance(value, tuple | list):
            return f"({', '.join(value_text(item) for item in cast('Sequence[object]', value))})"
        return "?" if value is None else type(value).__name__

    return safely(show, "?")


def dtype_text(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bf16"""
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


def _target_text(target: object) -> str:
    if isinstance(target, OpOverload):  # shown as torch prints it, without the default overload
        return str(target).removesuffix(".default")
    # Not str() of an object: it may hold an address, which would differ from run to run.
    return target if isinstance(target, str) else getattr(target, "__name__", None) or f"<{type(target).__name__}>"


def _argument_text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, tuple | list):
        inner = ", ".join(_argument_text(item) for item in cast("Sequence[Any]", argument))
        return f"({inner})" if isinstance(argument, tuple) else f"[{inner}]"
    if isinstance(argument, dict):
        pairs = cast("dict[Any, Any]", argument).items()
        return "{" + ", ".join(f"{_argument_text(key)}: {_argument_text(value)}" for key, value in pairs) + "}"
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return safely(lambda: str(argument), "?")
    if argument is None or isinstance(argument, _PLAIN):
        return repr(argument)
    # An object of its own: its repr may hold an address, which would differ from run to run, or raise.
    return f"<{type(argument).__name__}>"


def safely(show: Callable[[], str], fallback: str) -> str:
    """The text, or the fallback: showing a graph must never be what fails."""
    try:
        return show()
    except Exception:
        return fallback
