"""Fake tensors and symbolic sizes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor


def fake_mode() -> Any:
    """A mode whose tensors have shapes and no values; real ones may be beside them (FakeTensorMode, 2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def size_expression(size: Any) -> Any:
    """An integer as it is, a symbolic one (or a product of some) as its sympy expression (`node.expr`, 2.11 - 2.13)."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def fake_storage_key(value: Tensor) -> int:
    """One number for all fake tensors that share storage, good while they are alive (`_cdata`, 2.11 - 2.13).

    Sparse tensors, which have no storage of their own, share none.
    """
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def hint_of(size: object) -> int | None:
    """A size as a number, without a guard; None for one that only the data will tell (`SymNode.hint`, 2.11 - 2.13)."""
    if not isinstance(size, torch.SymInt):
        return cast(int, size)
    try:
        hint = size.node.hint
    except Exception:  # 2.11 - 2.13 raise errors of their own, of the shape environment, for data-dependent sizes
        return None
    return hint if isinstance(hint, int) else None


def without_fake_mode() -> AbstractContextManager[Any]:
    """Real tensors in the middle of a compile: torch._subclasses.fake_tensor.unset_fake_temporarily (2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Sequence[object]) -> Any:
    """The FakeTensorMode that made these values, or None (2.11 - 2.13)."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values (FakeTensor, 2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def step_mode() -> Any:
    """A fake mode with static shapes, in which numbers read from tensors are symbols (FakeTensorMode, 2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=ShapeEnv(), static_shapes=True)


def fake_of(mode: Any, tensor: Tensor) -> Tensor:
    """A leaf without gradient that looks like the tensor (`from_tensor`, 2.11 - 2.13)."""
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What is raised where Python asks for a value that only the run will know (2.11 - 2.13)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException
