"""Load all of a state dict or nothing: a dry run raises every error of the load before any parameter changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

COMPILED = "_orig_mod."  # prefix that torch.compile adds to the keys of the module it wraps


def load_all_or_nothing(
    module: nn.Module, load: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """Call `load(module, state_dict, strict, assign)`; the module is unchanged if this raises.

    torch alone would copy one parameter after another, and raise at the end.

    Raises:
        RuntimeError: torch's own error, from `load`.
    """
    if isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        load(module, dry_run_of(module, state_dict, assign), strict, assign)
    return load(module, state_dict, strict, assign)


def dry_run_of(module: nn.Module, state_dict: Mapping[str, Any], assign: bool) -> OrderedDict[str, Any]:
    """Return a copy of a state dict in which every value that fits is replaced by the module's present value.

    Loading the copy changes nothing, but raises the same errors.
    """
    own = module.state_dict()
    dry_run = OrderedDict(
        (
            key,
            held if (held := own.get(key.replace(COMPILED, ""))) is not None and _fits(held, value, assign) else value,
        )
        for key, value in state_dict.items()
    )
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Copies: torch notes `assign` in it.
        setattr(dry_run, "_metadata", OrderedDict((key, dict(entry)) for key, entry in metadata.items()))  # noqa: B010
    return dry_run


def _fits(held: object, value: object, assign: bool) -> bool:
    if not isinstance(held, Tensor) or not isinstance(value, Tensor):
        return not isinstance(held, Tensor) and not isinstance(value, Tensor)  # extra state
    if isinstance(held, DTensor) and isinstance(value, DTensor) and held.device_mesh != value.device_mesh:
        return False
    return held.shape == value.shape and (held.dtype == value.dtype or not assign)
