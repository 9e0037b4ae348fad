"""Fake tensors and symbolic sizes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor


def fake_mode() -> Any:
    """Make a mode whose tensors have shapes but no values; it accepts real tensors (FakeTensorMode, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def size_expression(size: Any) -> Any:
    """The sympy expression of a symbolic size; any other size unchanged (`node.expr`, 2.11 - 2.15)."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def fake_storage_key(value: Tensor) -> int:
    """A key shared by all fake tensors on one storage, valid while they are alive (`_cdata`, 2.11 - 2.15).

    A sparse tensor has no storage, and so has a key that it shares with no other tensor.
    """
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def hint_of(size: object) -> int | None:
    """A size as a number, without adding a guard; None if the size depends on data (`SymNode.hint`, 2.11 - 2.15)."""
    if not isinstance(size, torch.SymInt):
        return cast(int, size)
    try:
        hint = size.node.hint
    except Exception:  # 2.11 - 2.15 raise the shape environment's own errors for data-dependent sizes
        return None
    return hint if isinstance(hint, int) else None


@contextlib.contextmanager
def replaying(mode: Any) -> Generator[None]:
    """Enter a fake mode to run an operator again without adding guards or symbols.

    2.11 - 2.15: `ShapeEnv.suppress_guards` and `ignore_fresh_unbacked_symbols`.
    """
    env = mode.shape_env
    if env is None:
        with mode:
            yield
        return
    with env.suppress_guards(), env.ignore_fresh_unbacked_symbols(), mode:
        yield


def without_fake_mode() -> AbstractContextManager[Any]:
    """Leave the fake mode in a `with` block, to compute with real tensors (`unset_fake_temporarily`, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Sequence[object]) -> Any:
    """The FakeTensorMode that made these values, or None (2.11 - 2.15)."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is fake, that is, has no values (FakeTensor, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def step_mode() -> Any:
    """Make a fake mode with static shapes; numbers read from its tensors are symbols (FakeTensorMode, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=ShapeEnv(), static_shapes=True)


def fake_of(mode: Any, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Make a fake tensor like `tensor` in shape, strides and dtype, without gradient (`from_tensor`, 2.11 - 2.15).

    Args:
        mode: fake mode of the new tensor.
        tensor: a real tensor, or a fake one of any mode.
        device: device of the new tensor; None for the device of `tensor`.
    """
    if is_fake(tensor) or device is not None:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def fake_on_cpu(mode: Any, tensor: Tensor) -> Tensor:
    """Make a fake leaf on the CPU with the tensor's shape, strides, dtype and `requires_grad`."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """The errors raised when Python reads a value that is known only at run time (2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException


def fake_number(mode: Any, value: float, name: str) -> Any:
    """Make a symbolic number for a graph input; branches on it add guards (`create_symfloatnode`, 2.11 - 2.15).

    Args:
        mode: the mode from `step_mode`.
        value: the number's value while tracing, which decides branches in Python.
        name: a name that is unique in the trace.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source, env = ConstantSource(name), mode.shape_env
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def unknown_number(number: torch.SymFloat) -> Any:
    """Make a symbolic number of unknown value, in the shape environment of `number` (2.11 - 2.15)."""
    env = number.node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        return env.create_unbacked_symfloat()


def number_hint(number: torch.SymFloat) -> float:
    """The value that a number from `fake_number` has during the trace (`SymNode.hint`, 2.11 - 2.15)."""
    return float(number.node.hint)


class NumberGuards:
    """Guards on numbers of `fake_number`, from branches in Python and compilers (`ShapeEnv.guards`, 2.11 - 2.15).

    If a guard says that a number equals a constant, `SymNode.expr` is the constant, but `_expr` is still the symbol.

    Args:
        mode: the mode from `step_mode`.
        numbers: numbers made by `fake_number` in this mode, by name.
    """

    def __init__(self, mode: Any, numbers: Mapping[str, torch.SymFloat]) -> None:
        self._symbols = {name: number.node._expr for name, number in numbers.items()}
        self._decided: list[Any] = mode.shape_env.guards
        self._seen, self._guards = 0, list[Any]()

    def current(self) -> int:
        """Update the guards from the shape environment, and return their number so far."""
        if len(self._decided) != self._seen:
            known = set(self._symbols.values())
            every = dict.fromkeys(decided.expr for decided in self._decided)
            self._guards = [_anonymous(guard) for guard in every if guard.free_symbols and guard.free_symbols <= known]
            self._seen = len(self._decided)
        return len(self._guards)

    def broken(self, values: Mapping[str, float]) -> str:
        """The first guard that does not hold for these values, as text; "" if all hold."""
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
    """Return a guard, its text with placeholders for its symbols, and the symbols in the placeholders' order."""
    symbols = sorted(guard.free_symbols, key=str)
    text = str(guard)
    for place, symbol in enumerate(symbols):
        text = text.replace(str(symbol), f"<{place}>")
    return guard, text, symbols
