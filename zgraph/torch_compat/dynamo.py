"""Access to Dynamo: which frames it compiles, what it knows about them, and how to raise errors through it."""

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

# Names of operators whose bodies run zero, one or more times, depending on data (torch 2.11 - 2.13).
CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl"})

P = ParamSpec("P")


R = TypeVar("R")


def never_a_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo from compiling a function as a frame of its own; it may still trace the function as part of a caller.

    In a separate frame, Dynamo would make integers symbolic as soon as two calls differ in them. torch 2.11 - 2.15:
    `torch._dynamo.eval_frame.skip_code` has the same effect, but its import loads Dynamo.
    """
    from torch._C._dynamo.eval_frame import _FrameAction

    return _skip_frames(function, inside=_FrameAction.DEFAULT)


def no_frames_inside(function: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo from compiling a function, and all functions that it calls, as frames of their own."""
    from torch._C._dynamo.eval_frame import _FrameAction

    return _skip_frames(function, inside=_FrameAction.SKIP)


def _skip_frames(function: Callable[P, R], inside: Any) -> Callable[P, R]:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    strategy = _FrameExecStrategy(_FrameAction.SKIP, inside)
    set_code_exec_strategy(function.__code__, strategy)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo call a function while it traces, and take the result as a constant.

    As `torch.compiler.assume_constant_result`, whose import of Dynamo takes more than a second (torch 2.11 - 2.15: the
    attribute `_dynamo_marked_constant`).
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def let_into_graphs(function: Callable[..., Any]) -> None:
    """Let Dynamo put calls of a function into its graphs instead of tracing the function.

    As `torch.compiler.allow_in_graph`, which imports Dynamo: to be called when it is imported anyway.
    """
    torch.compiler.allow_in_graph(function)


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo from tracing a function and all functions that it calls; a graph that calls it breaks.

    As `torch.compiler.disable`, whose import of Dynamo takes more than a second (torch 2.11 - 2.15: the attribute
    `_torchdynamo_disable`).
    """
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    return no_frames_inside(function)


def breaks_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep Dynamo from tracing a function; a graph that calls it breaks, and what it calls is compiled in other frames.

    As `torch.compiler.disable(recursive=False)`, whose import of Dynamo takes more than a second (torch 2.11 - 2.15:
    the attribute `_torchdynamo_disable`).
    """
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    return never_a_frame(function)


@never_a_frame
def compiles_frames() -> bool:
    """Return whether Dynamo would compile a function called now, because a torch.compile'd function is running.

    False where Dynamo is switched off, for example by `torch.compiler.disable` (torch 2.11 - 2.13).
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return callable(get_eval_frame_callback())


@never_a_frame
def is_at_recompile_limit() -> bool:
    """Return whether the running torch.compile'd function is at its limit of recompiles, so that it runs uncompiled.

    torch 2.11 - 2.13: the callback is False, which it also is under `set_stance("eager_on_recompile")`.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if get_eval_frame_callback() is not False:
        return False
    from torch._dynamo.eval_frame import _stance

    return _stance.stance != "eager_on_recompile"


def register_late(name: str, module: str) -> None:
    """Register a backend with Dynamo if Dynamo has already searched the entry points of packages.

    Before that search, nothing is needed: Dynamo will find the backend by its entry point. torch 2.11 - 2.13:
    `_lazy_import` searches once.

    Args:
        name: name of the backend, and of the function in the module.
        module: module that is imported at the first compile.
    """
    registry: Any = sys.modules.get("torch._dynamo.backends.registry")
    if registry is None or not registry._lazy_import.cache_info().currsize:
        return
    if name not in registry.list_backends(exclude_tags=()):

        def backend(*arguments: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*arguments, **options)

        registry.register_backend(backend, name=name)


def checkpoint_operator() -> object:
    """Return the operator of checkpointed regions in Dynamo graphs (torch 2.11 - 2.15).

    Its arguments are `(body, *operands, **options of checkpoint)`.
    """
    return torch.ops.higher_order.tag_activation_checkpoint


@constant_in_graphs
def traced_body() -> str:
    """Return the kind of the higher-order operator whose body Dynamo is tracing.

    torch 2.11 - 2.13: `current_tracer`, `parent`, `source_target`.

    Returns:
        "" outside of such bodies; "control_flow" in the body of `torch.cond` or the like, at any depth; "checkpoint" if
        all enclosing operators are checkpoints; else "other".
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
    """If Dynamo is tracing, make it break the graph at this call (torch 2.11 - 2.13: `torch._dynamo.graph_break`)."""
    torch._dynamo.graph_break(message)


def no_graph_breaks() -> AbstractContextManager[Any]:
    """Make graph breaks errors in a `with` block that Dynamo traces (torch 2.13: `error_on_graph_break`)."""
    return torch._dynamo.error_on_graph_break(True)


def is_inlining(function: Callable[..., Any]) -> bool:
    """Return whether Dynamo is tracing inside a call of this function (torch 2.11 - 2.13: `current_tx`, `parent`)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    frame: Any = InstructionTranslator.current_tx().output.current_tx
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.parent
    return frame is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether a module is the wrapper that torch.compile puts around another module (torch 2.11 - 2.15)."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called (torch 2.11 - 2.15: `_compiled_call_impl`)."""
    return module._compiled_call_impl is not None


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper; any other module unchanged (torch 2.11 - 2.15: `_orig_mod`)."""
    return cast(nn.Module, module._orig_mod) if is_compiled_wrapper(module) else module


def inline_compiled() -> AbstractContextManager[Any]:
    """Let `make_fx` trace through compiled modules in a `with` block: they run uncompiled there.

    torch 2.11 - 2.15: the option `error_on_nested_fx_trace` is off.
    """
    from torch._dynamo import config

    return config.patch(error_on_nested_fx_trace=False)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (TORCH_TRACE) of the current compile (torch 2.11 - 2.15).

    Args:
        name: name of the text.
        encoding: "string" or "json".
        payload: returns the text; called only if TORCH_TRACE is on.
    """
    from torch._logging import trace_structured

    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def is_to_local(node: fx.Node) -> bool:
    """Return whether a node of a Dynamo graph calls `DTensor.to_local()` without arguments.

    torch 2.12 - 2.15: the node calls the method. 2.11: the node calls a function made by Dynamo, with the arguments in
    its closure (`to_local_fn_with_prim_types`).
    """
    if node.op == "call_method":
        return node.target == "to_local" and len(node.args) == 1 and not node.kwargs
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "prim_to_local":
        return False
    hidden = inspect.getclosurevars(cast(Any, node.target)).nonlocals
    return not hidden["args_as_value"] and not hidden["kwargs_as_value"]


def is_autograd_function(node: fx.Node) -> bool:
    """Return whether a node of a Dynamo graph calls a `torch.autograd.Function` (torch 2.11 - 2.15: by its name)."""
    return node.op == "call_function" and "autograd_function_apply" in str(node.target)


def dynamo_example(node: fx.Node) -> object:
    """Return the real value of a Dynamo graph's placeholder; None after Dynamo has dropped it (torch 2.11 - 2.15)."""
    return getattr(node.meta.get("grapharg"), "_example", None) and node.meta["grapharg"].example


def dynamo_fake(node: fx.Node) -> object:
    """Return the fake value of a Dynamo graph's placeholder (torch 2.11 - 2.15)."""
    return node.meta.get("example_value")


def is_of_module(node: fx.Node) -> bool:
    """Return whether a Dynamo graph's placeholder is a parameter, buffer or other attribute of a module.

    torch 2.13: `GraphArg.source`, whose name is the expression that reads the input.
    """
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    text = str(name() if callable(name) else name)
    return "._" in text or text.startswith("L['self'].")


def compile_id() -> str:
    """Return Dynamo's id of the current compile, "frame/recompile", such as "0/1" (torch 2.11 - 2.15).

    "manual" outside of a compile.
    """
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "manual" if current is None else str(current)


def recompile_reason() -> str:
    """Return the guard whose failure made Dynamo compile the current frame again, as text; "" if there is none.

    torch 2.11 - 2.15: `get_metrics_context`. If several compiled variants of the frame exist, Dynamo records the failed
    guard of the variant checked first.
    """
    from torch._dynamo.utils import get_metrics_context

    noted = get_metrics_context()._metrics.get("recompile_reason")
    # "0/1: guard    # source line of the guard", followed by lines of a stack; 0/1 is the variant.
    return "" if noted is None else str(noted).partition("\n")[0].partition(": ")[2].partition(" # ")[0].strip()


def graph_break_reasons() -> dict[str, int]:
    """Return the number of graph breaks in this process, by reason (torch 2.11 - 2.15: `counters`).

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
    """Raise an error that reaches the user unchanged, although Dynamo is tracing or compiling.

    Dynamo wraps other errors in BackendCompilerFailed or InternalTorchDynamoError. torch 2.11 - 2.15: a
    ShortenTraceback is not wrapped; only Dynamo's frames are removed from its traceback, and a hint is added to its
    arguments.

    Args:
        message: text of the error, returned by its `str`.
        kind: class of the error; the raised error is of a subclass with the same name.
    """
    from torch._dynamo.exc import ShortenTraceback

    def text(self: Exception) -> str:
        return message

    passing = type(kind.__name__, (ShortenTraceback, kind), {"__str__": text, "__module__": kind.__module__})
    raise passing(message, first_useful_frame=inspect.currentframe()) from None
