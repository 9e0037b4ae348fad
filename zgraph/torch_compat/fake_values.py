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
    """A mode whose tensors have shapes and no values; real ones may be beside them (FakeTensorMode, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def size_expression(size: Any) -> Any:
    """An integer as it is, a symbolic one (or a product of some) as its sympy expression (`node.expr`, 2.11 - 2.15)."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def fake_storage_key(value: Tensor) -> int:
    """One number for all fake tensors that share storage, good while they are alive (`_cdata`, 2.11 - 2.15).

    Sparse tensors, which have no storage of their own, share none.
    """
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def hint_of(size: object) -> int | None:
    """A size as a number, without a guard; None for one that only the data will tell (`SymNode.hint`, 2.11 - 2.15)."""
    if not isinstance(size, torch.SymInt):
        return cast(int, size)
    try:
        hint = size.node.hint
    except Exception:  # 2.11 - 2.15 raise errors of their own, of the shape environment, for data-dependent sizes
        return None
    return hint if isinstance(hint, int) else None


@contextlib.contextmanager
def replaying(mode: Any) -> Generator[None]:
    """A fake mode in which an operator runs once more, so that nothing is decided and no symbol is new.

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
    """Real tensors in the middle of a compile: torch._subclasses.fake_tensor.unset_fake_temporarily (2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Sequence[object]) -> Any:
    """The FakeTensorMode that made these values, or None (2.11 - 2.15)."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values (FakeTensor, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def step_mode() -> Any:
    """A fake mode with static shapes, in which numbers read from tensors are symbols (FakeTensorMode, 2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=ShapeEnv(), static_shapes=True)


def fake_of(mode: Any, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A leaf without gradient that looks like the tensor (`from_tensor`, 2.11 - 2.15), which may be another mode's.

    Args:
        mode: in which it is.
        tensor: real, or fake.
        device: on which it is to lie; None: the tensor's.
    """
    if is_fake(tensor) or device is not None:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def fake_on_cpu(mode: Any, tensor: Tensor) -> Tensor:
    """A leaf on the CPU, without values, whose shape, strides, dtype and need of a gradient are the tensor's."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What is raised where Python asks for a value that only the run will know (2.11 - 2.15)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException


def fake_number(mode: Any, value: float, name: str) -> Any:
    """A number that a graph takes as an input; what Python decides by it is noted (`create_symfloatnode`, 2.11 - 2.15).

    Args:
        mode: what `step_mode` returned.
        value: by which Python decides while tracing.
        name: unique in the trace.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source, env = ConstantSource(name), mode.shape_env
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def unknown_number(number: torch.SymFloat) -> Any:
    """Another number, of which nothing is known (`create_unbacked_symfloat`, 2.11 - 2.15)."""
    env = number.node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        return env.create_unbacked_symfloat()


def number_hint(number: torch.SymFloat) -> float:
    """The value that a number of `fake_number` has while tracing (`SymNode.hint`, 2.11 - 2.15)."""
    return float(number.node.hint)


class NumberGuards:
    """What Python, and compilers since, have decided by numbers of `fake_number` (`ShapeEnv.guards`, 2.11 - 2.15).

    A number that was found to equal a constant is this constant to `SymNode.expr`, and still a symbol in `_expr`.

    Args:
        mode: what `step_mode` returned.
        numbers: that it made, by name.
    """

    def __init__(self, mode: Any, numbers: Mapping[str, torch.SymFloat]) -> None:
        self._symbols = {name: number.node._expr for name, number in numbers.items()}
        self._decided: list[Any] = mode.shape_env.guards
        self._seen, self._guards = 0, list[Any]()

    def current(self) -> int:
        """How many there are."""
        if len(self._decided) != self._seen:
            known = set(self._symbols.values())
            every = dict.fromkeys(decided.expr for decided in self._decided)
            self._guards = [_anonymous(guard) for guard in every if guard.free_symbols and guard.free_symbols <= known]
            self._seen = len(self._decided)
        return len(self._guards)

    def broken(self, values: Mapping[str, float]) -> str:
        """The first of the decisions that other values would change, as text; "" if there is none."""
        self.current()
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        given = {self._symbols[name]: value for name, value in values.items()}
        known: dict[Any, bool] = {}  # decisions about many parameters are alike, and so are their numbers
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
    """A guard, its text without the names of its symbols, and these in the order in which they come."""
    symbols = sorted(guard.free_symbols, key=str)
    text = str(guard)
    for place, symbol in enumerate(symbols):
        text = text.replace(str(symbol), f"<{place}>")
    return guard, text, symbols
