"""Loading a state dict whole or not at all: a first load that changes nothing meets every error of the second."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

COMPILED = "_orig_mod."  # what torch.compile puts before the keys of the module it wraps


def load_whole_or_nothing(
    module: nn.Module, load: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """`load(module, state_dict, strict, assign)`, which leaves the module as it was when it raises.

    torch copies parameter after parameter and raises at the end, when the model is half another one.

    Raises:
        RuntimeError: torch's own, of `load`.
    """
    if isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        load(module, dry_run_of(module, state_dict, assign), strict, assign)
    return load(module, state_dict, strict, assign)


def dry_run_of(module: nn.Module, state_dict: Mapping[str, Any], assign: bool) -> OrderedDict[str, Any]:
    """The state dict with each value that fits replaced by the one the module holds: loading it changes nothing."""
    own = module.state_dict()
    rehearsal = OrderedDict(
        (
            key,
            held if (held := own.get(key.replace(COMPILED, ""))) is not None and _fits(held, value, assign) else value,
        )
        for key, value in state_dict.items()
    )
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Copies: torch notes `assign` in it.
        setattr(rehearsal, "_metadata", OrderedDict((key, dict(entry)) for key, entry in metadata.items()))  # noqa: B010
    return rehearsal


def _fits(held: object, value: object, assign: bool) -> bool:
    if not isinstance(held, Tensor) or not isinstance(value, Tensor):
        return not isinstance(held, Tensor) and not isinstance(value, Tensor)  # extra state
    if isinstance(held, DTensor) and isinstance(value, DTensor) and held.device_mesh != value.device_mesh:
        return False
    return held.shape == value.shape and (held.dtype == value.dtype or not assign)
