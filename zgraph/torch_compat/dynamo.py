"""Dynamo: which frames it compiles, what it has recorded about them, and how errors pass through it unwrapped."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import fx, nn

# Names of operators whose bodies run zero, one or more times, depending on data (2.11 - 2.13).
CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl"})

P = ParamSpec("P")


R = TypeVar("R")


def never_a_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo trace the function as part of its caller, and run it uncompiled if the caller is not traced.

    If Dynamo compiles a function as a separate frame, integers become symbols as soon as two calls differ in them.
    2.11 - 2.15: `torch._dynamo.eval_frame.skip_code` does the same, but loads Dynamo at import.
    """
    from torch._C._dynamo.eval_frame import _FrameAction

    return _skip_frames(function, inside=_FrameAction.DEFAULT)


def no_frames_inside(function: Callable[P, R]) -> Callable[P, R]:
    """Do as `never_a_frame`, and also run the function's callees, such as `DTensor.to_local`, uncompiled."""
    from torch._C._dynamo.eval_frame import _FrameAction

    return _skip_frames(function, inside=_FrameAction.SKIP)


def _skip_frames(function: Callable[P, R], inside: Any) -> Callable[P, R]:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    strategy = _FrameExecStrategy(_FrameAction.SKIP, inside)
    set_code_exec_strategy(function.__code__, strategy)  # pyright: ignore[reportFunctionMemberAccess]
    return function


@never_a_frame
def compiles_frames() -> bool:
    """Whether Dynamo compiles a frame that is called now: whether a function given to torch.compile is running.

    False inside `torch.compiler.disable` or anything else that switches Dynamo off (2.11 - 2.13).
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return callable(get_eval_frame_callback())


def register_late(name: str, module: str) -> None:
    """Register a backend with Dynamo if Dynamo has already searched the entry points, and so may have missed it.

    Otherwise Dynamo finds the backend by its entry point, and a second registration under the same name is an error.
    Dynamo's `_lazy_import` searches the entry points once (2.11 - 2.13).

    Args:
        name: name of the backend and of the function in the module.
        module: module to import when something is compiled.
    """
    registry: Any = sys.modules.get("torch._dynamo.backends.registry")
    if registry is None or not registry._lazy_import.cache_info().currsize:
        return
    if name not in registry.list_backends(exclude_tags=()):

        def backend(*arguments: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*arguments, **options)

        registry.register_backend(backend, name=name)


def checkpoint_operator() -> object:
    """Operator of checkpointed regions in Dynamo graphs: `(body, *operands, **options of checkpoint)`; 2.11 - 2.15."""
    return torch.ops.higher_order.tag_activation_checkpoint


@torch.compiler.assume_constant_result
def traced_body() -> str:
    """Kind of the higher-order operator whose body Dynamo is tracing; a body may not write to tensors from outside it.

    "checkpoint": only checkpointed regions, perhaps nested. "control_flow": `torch.cond` or the like, perhaps around
    others. "other": any other operator. "": none. Read from the chain of tracers (`current_tracer`, `parent`,
    `source_target`, 2.11 - 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    operators: list[object] = []
    while tracer.parent is not None:
        operators.append(tracer.source_target)
        tracer = tracer.parent
    if not operators:
        return ""
    if any(str(operator) in CONTROL_FLOW for operator in operators):
        return "control_flow"
    return "checkpoint" if all(operator is checkpoint_operator() for operator in operators) else "other"


def break_graph(message: str) -> None:
    """Make Dynamo break the graph at this call, if it is tracing (`torch._dynamo.graph_break`, 2.11 - 2.13)."""
    torch._dynamo.graph_break(message)


def is_inlining(function: Callable[..., Any]) -> bool:
    """Whether Dynamo is tracing inside a call of this function (`output.current_tx` and `parent`, 2.11 - 2.13)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    frame: Any = InstructionTranslator.current_tx().output.current_tx
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.parent
    return frame is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether the module is torch.compile's wrapper around another module (2.11 - 2.15)."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def without_compile(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, or else the module itself (`_orig_mod`, 2.11 - 2.15)."""
    return cast(nn.Module, module._orig_mod) if is_compiled_wrapper(module) else module


def inline_compiled() -> AbstractContextManager[Any]:
    """Run compiled modules uncompiled inside a `with` block, so that `make_fx` can trace them (2.11 - 2.15).

    With `error_on_nested_fx_trace` off, a compiled function that is called during a trace calls the original function.
    """
    from torch._dynamo import config

    return config.patch(error_on_nested_fx_trace=False)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a text to torch's structured trace of this compile; `payload` makes it if TORCH_TRACE is on (2.11 - 2.15)."""
    from torch._logging import trace_structured

    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def is_to_local(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph is a call of `DTensor.to_local()` without arguments.

    2.12 - 2.15: the node calls the method. 2.11: the node calls a function made by Dynamo, in whose closure the
    arguments are hidden (`to_local_fn_with_prim_types`).
    """
    if node.op == "call_method":
        return node.target == "to_local" and len(node.args) == 1 and not node.kwargs
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "prim_to_local":
        return False
    hidden = inspect.getclosurevars(cast(Any, node.target)).nonlocals
    return not hidden["args_as_value"] and not hidden["kwargs_as_value"]


def dynamo_example(node: fx.Node) -> object:
    """The real value for a placeholder of a Dynamo graph; None once Dynamo has dropped the value (2.11 - 2.15)."""
    return getattr(node.meta.get("grapharg"), "_example", None) and node.meta["grapharg"].example


def dynamo_fake(node: fx.Node) -> object:
    """The fake value of a placeholder of a Dynamo graph (2.11 - 2.15)."""
    return node.meta.get("example_value")


def compile_id() -> str:
    """Dynamo's "frame/recompile" id of this compile, such as "0/1"; "manual" outside of a compile (2.11 - 2.15)."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "manual" if current is None else str(current)


def recompile_reason() -> str:
    """The guard whose failure made Dynamo compile the current frame again, as text; "" if there is none.

    Dynamo's metrics record the guard failure of the first compiled variant that was checked (`get_metrics_context`,
    2.11 - 2.15). "" also if Dynamo has recorded nothing. The wording is Dynamo's.
    """
    from torch._dynamo.utils import get_metrics_context

    noted = get_metrics_context()._metrics.get("recompile_reason")
    # "0/1: guard    # source line of the guard", followed by lines of a stack; 0/1 is the variant.
    return "" if noted is None else str(noted).partition("\n")[0].partition(": ")[2].partition(" # ")[0].strip()


def graph_break_reasons() -> dict[str, int]:
    """Graph breaks that Dynamo has met in this process, by reason (`counters`, 2.11 - 2.15).

    The first sentence of Dynamo's "Explanation: ..." is appended to each reason. A break counts each time Dynamo traces
    up to it: once for the outermost frame, and again for each inner frame that Dynamo then compiles separately.
    """
    from torch._dynamo.utils import counters

    found: dict[str, int] = {}
    for text, count in counters["graph_break"].items():
        reason, _, rest = text.partition("\n")
        explained = [line.partition("Explanation: ")[2] for line in rest.splitlines() if "Explanation: " in line]
        explained = [line.partition(". ")[0].removesuffix(".") for line in explained]
        reason = ": ".join([reason, *explained[:1]])
        found[reason] = found.get(reason, 0) + count
    return found


def raise_through_dynamo(message: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise an error during tracing or compiling in such a way that Dynamo passes it to the user unwrapped.

    Dynamo wraps errors of backends in BackendCompilerFailed, and errors of traced functions in
    InternalTorchDynamoError. 2.11 - 2.15: an error that is a ShortenTraceback passes unwrapped. Dynamo only removes its
    frames from the traceback, and adds a hint for Dynamo's developers to the error's arguments.

    Args:
        message: text of the error, which its `str` returns.
        kind: class of the error; the raised error is of a subclass with the same name.
    """
    from torch._dynamo.exc import ShortenTraceback

    def text(self: Exception) -> str:
        return message

    passing = type(kind.__name__, (ShortenTraceback, kind), {"__str__": text, "__module__": kind.__module__})
    raise passing(message, first_useful_frame=inspect.currentframe()) from None
