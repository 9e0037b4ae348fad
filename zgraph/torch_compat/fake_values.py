"""Fake tensors (tensors with shapes but no values) and symbolic sizes and numbers."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor


def fake_mode() -> Any:
    """Create a FakeTensorMode that also accepts real tensors as inputs (torch 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def size_expression(size: Any) -> Any:
    """Return the sympy expression of a symbolic size; any other size unchanged (torch 2.11 - 2.15: `node.expr`)."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def fake_storage_key(value: Tensor) -> int:
    """Return an int that is equal for all living fake tensors on one storage (torch 2.11 - 2.15: `_cdata`).

    Sparse tensors, which have no storage, have different keys.
    """
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def hint_of(size: object) -> int | None:
    """Return a size as a number, without adding a guard; None if the size depends on data.

    torch 2.11 - 2.15: `SymNode.hint`.
    """
    if not isinstance(size, torch.SymInt):
        return cast(int, size)
    try:
        hint = size.node.hint
    except Exception:  # torch 2.11 - 2.15 raise the shape environment's own errors for data-dependent sizes
        return None
    return hint if isinstance(hint, int) else None


@contextlib.contextmanager
def replaying(mode: Any) -> Generator[None]:
    """Enter a fake mode for running an operator again, without new guards or symbols.

    torch 2.11 - 2.15: `ShapeEnv.suppress_guards` and `ignore_fresh_unbacked_symbols`.
    """
    env = mode.shape_env
    if env is None:
        with mode:
            yield
        return
    with env.suppress_guards(), env.ignore_fresh_unbacked_symbols(), mode:
        yield


def replay(mode: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator again in a fake mode, without new guards or symbols, and return its result.

    Views, copies and collectives of tensors with static shapes run their kernels for meta tensors directly, which takes
    a tenth of the time (torch 2.11 - 2.15: `in_kernel_invocation_manager`, `FakeTensor`; the mode ends in the same call
    for these operators).
    """
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    device = _only_device(args) if not kwargs.keys() - {"memory_format"} and _runs_as_meta(target) else None
    if device is None:
        with replaying(mode):
            return target(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        found = target(*args, **kwargs)
    return found if isinstance(found, FakeTensor) else FakeTensor(mode, found, device)


@functools.cache
def _runs_as_meta(target: Any) -> bool:
    """Return whether an operator's kernel for meta tensors computes one output on the device of its inputs."""
    if not isinstance(target, torch._ops.OpOverload) or [str(one.type) for one in target._schema.returns] != ["Tensor"]:
        return False
    copies = (torch.ops.aten.clone.default, torch.ops.aten.cat.default)
    return not target._schema.is_mutable and (
        target.namespace == "_c10d_functional" or (target.namespace == "aten" and (target.is_view or target in copies))
    )


def _only_device(args: Sequence[Any]) -> torch.device | None:
    """Return the device of all tensors in a call; None if there are several, or a symbolic size, or no fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    devices: set[torch.device] = set()
    for argument in args:
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                return None
            if isinstance(value, Tensor):
                if not isinstance(value, FakeTensor) or value._has_symbolic_sizes_strides:
                    return None
                devices.add(value.fake_device)
    return devices.pop() if len(devices) == 1 else None


def without_fake_mode() -> AbstractContextManager[Any]:
    """Compute with real tensors in a `with` block, outside of the fake mode.

    torch 2.11 - 2.15: `unset_fake_temporarily`.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Sequence[object]) -> Any:
    """Return the FakeTensorMode of these values, or None if none is fake (torch 2.11 - 2.15)."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values))


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake, that is, has no values (torch 2.11 - 2.15: FakeTensor)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def step_mode() -> Any:
    """Create a FakeTensorMode with static shapes and symbolic numbers (torch 2.11 - 2.15).

    Numbers read from its tensors, for example by `item()`, are symbols.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=ShapeEnv(), static_shapes=True)


def fake_of(mode: Any, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Create a fake tensor with the shape, strides and dtype of a tensor, without gradient.

    torch 2.11 - 2.15: `from_tensor`.

    Args:
        mode: fake mode of the new tensor.
        tensor: a real tensor, or a fake tensor of any mode.
        device: device of the new tensor; None: the device of `tensor`.
    """
    if is_fake(tensor) or device is not None:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def fake_on_cpu(mode: Any, tensor: Tensor) -> Tensor:
    """Create a fake CPU leaf with the shape, strides, dtype and `requires_grad` of a tensor."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def fake_from_layout(
    mode: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Create a fake tensor on a storage of its own (torch 2.11 - 2.15: `FakeTensor`)."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(mode):
        found = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, found, device)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Return the errors raised when a trace needs a value that is known only at run time (torch 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException


def fake_number(mode: Any, value: float, name: str) -> Any:
    """Create a symbolic number for a graph input; a branch on the number adds a guard.

    torch 2.11 - 2.15: `create_symfloatnode`.

    Args:
        mode: fake mode from `step_mode`.
        value: the number's value during the trace, which decides branches.
        name: unique name in the trace.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source, env = ConstantSource(name), mode.shape_env
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def unknown_number(number: torch.SymFloat) -> Any:
    """Create a symbolic number without a value, in the shape environment of `number` (torch 2.11 - 2.15)."""
    env = number.node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        return env.create_unbacked_symfloat()


def number_parts(number: torch.SymFloat) -> tuple[Any, float | None]:
    """Return the sympy expression of a symbolic number, and its value during the trace; None: it is unknown.

    torch 2.11 - 2.15: `SymNode.expr`, `SymNode.hint`.
    """
    return number.node.expr, None if number.node._hint is None else float(number.node._hint)


def number_of_parts(mode: Any, expression: Any, value: float | None) -> Any:
    """Create a symbolic number from the parts of another one, in a mode that has its symbols.

    Raises:
        LookupError: the mode does not have them.
    """
    from torch.fx.experimental.sym_node import SymNode

    unknown = [str(symbol) for symbol in expression.free_symbols if symbol not in mode.shape_env.var_to_range]
    if unknown:
        raise LookupError(f"no symbol {', '.join(unknown)}")
    return torch.SymFloat(SymNode(expression, mode.shape_env, float, value))


def number_hint(number: torch.SymFloat) -> float:
    """Return the value that a number from `fake_number` has during the trace (torch 2.11 - 2.15: `SymNode.hint`)."""
    return float(number.node.hint)


class NumberGuards:
    """Guards on numbers from `fake_number`: conditions under which a traced graph is valid.

    torch 2.11 - 2.15: `ShapeEnv.guards`. Symbols are read from `_expr`, because a guard for equality replaces
    `SymNode.expr` by a constant.

    Args:
        mode: fake mode from `step_mode`.
        numbers: numbers made by `fake_number` in this mode, by name.
    """

    def __init__(self, mode: Any, numbers: Mapping[str, torch.SymFloat]) -> None:
        self._symbols = {name: number.node._expr for name, number in numbers.items()}
        self._decided: list[Any] = mode.shape_env.guards
        self._seen, self._guards = 0, list[Any]()

    def current(self) -> int:
        """Read the guards added since the last call; return the number of all guards."""
        if len(self._decided) != self._seen:
            known = set(self._symbols.values())
            every = dict.fromkeys(decided.expr for decided in self._decided)
            self._guards = [_anonymous(guard) for guard in every if guard.free_symbols and guard.free_symbols <= known]
            self._seen = len(self._decided)
        return len(self._guards)

    def broken(self, values: Mapping[str, float]) -> str:
        """Return the first guard that does not hold for the given values, as text; "" if all hold.

        Args:
            values: value of each number, by name.
        """
        self.current()
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        given = {self._symbols[name]: value for name, value in values.items()}
        known: dict[Any, bool] = {}  # guards about many parameters are alike, and so are their numbers
        for guard, kind, symbols in self._guards:
            numbers = (kind, *(given[symbol] for symbol in symbols))
            if numbers not in known:
                environment = {symbol: given[symbol] for symbol in symbols}
                known[numbers] = bool(sympy_interp(PythonReferenceAnalysis, environment, guard))
            if not known[numbers]:
                names = {symbol: name for name, symbol in self._symbols.items() if symbol in guard.free_symbols}
                found = ", ".join(f"{name}={given[symbol]}" for symbol, name in names.items())
                text = str(guard)
                for symbol, name in names.items():
                    text = text.replace(str(symbol), name)
                return f"{found}, before {text}"
        return ""


def _anonymous(guard: Any) -> tuple[Any, str, list[Any]]:
    """Return (guard, its text with "<0>", "<1>", ... in place of symbols, list of the replaced symbols)."""
    symbols = sorted(guard.free_symbols, key=str)
    text = str(guard)
    for place, symbol in enumerate(symbols):
        text = text.replace(str(symbol), f"<{place}>")
    return guard, text, symbols


def size_symbols(value: object) -> tuple[set[Any], set[Any]]:
    """Return the symbols that are a size, a stride or a number of a fake value, and all symbols in these expressions.

    torch 2.11 - 2.15: `SymInt.node.expr`, a sympy expression.
    """
    numbers = [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]
    expressions = [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]
    known = {expression for expression in expressions if expression.is_Symbol}
    return known, {symbol for expression in expressions for symbol in expression.free_symbols}


def resolved_size(size: torch.SymInt) -> torch.SymInt:
    """Return a size with the symbols that the sizes of tensors have now; Inductor reads those that it was traced with.

    torch 2.11 - 2.15: `SymNode(expr, shape_env, pytype, hint)`, whose `_expr` is that of the trace.
    """
    from torch.fx.experimental.sym_node import SymNode

    return torch.SymInt(SymNode(size.node.expr, size.node.shape_env, int, size.node._hint))
