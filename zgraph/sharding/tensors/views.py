"""Views of sharded tensors along a sharded axis: copies, gathered again after writes to the viewed tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.sharding.tensors.meet import meet
from zgraph.sharding.tensors.tracked import Tracked, View, become_like
from zgraph.sharding.tensors.traits import traits_of
from zgraph.sharding.tensors.whole import gathered
from zgraph.torch_compat.dtensor import local_of, put_local
from zgraph.torch_compat.fake_values import fake_storage_key
from zgraph.torch_compat.modules import tree_flatten
from zgraph.torch_compat.operators import OpOverload

aten = torch.ops.aten
_SAME = frozenset({aten.detach.default, aten.alias.default})


def with_views(result: Any, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: Tracked) -> Any:
    """Give DTensors that an operator has returned the class and model of `like`, and record the origin of views."""
    parts = result if isinstance(result, list | tuple) else (result,)
    for place, part in enumerate(parts):
        if type(part) is DTensor:
            become_like(part, like)
        if func.is_view and isinstance(part, Tracked):
            _note_view(part, func, args, kwargs, None if part is result else place)
    return result


def _note_view(
    view: Tracked, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], index: int | None
) -> None:
    whole, steps, number = args[0].viewed or View(args[0], ())

    def step(tensor: Tensor) -> Tensor:
        result = func(tensor, *args[1:], **kwargs)
        return result if index is None else result[index]

    if func in _SAME:
        view.viewed = View(whole, steps, number)
    else:
        numbers = (arg for arg in tree_flatten((args[1:], kwargs))[0] if isinstance(arg, int))
        view.viewed = View(whole, (*steps, step), hash((traits_of(func).number, number, index or 0, *numbers)))
    if is_copy(view):
        whole.writes = view.seen = whole.writes or 0


def is_copy(view: Tracked) -> bool:
    """Return whether a view is a gathered copy, with storage of its own."""
    return view.viewed is not None and (
        fake_storage_key(local_of(view)) != fake_storage_key(local_of(view.viewed.whole))
    )


def renew(view: Tracked) -> None:
    """Gather a copy again if the viewed tensor has been written to since."""
    assert view.viewed is not None
    whole, steps, _ = view.viewed
    if whole.writes is None or view.seen == whole.writes or not is_copy(view):
        return
    meet(view, "reading rows that were written to")
    with torch.no_grad():
        put_local(view, shown(gathered(whole), steps))
    view.seen = whole.writes


def note_write(written: Iterable[Any]) -> None:
    """Count a write to tensors, so that copies of their rows are gathered again."""
    for one in written:
        if isinstance(one, Tracked):
            whole = one
            if one.viewed is not None:
                whole = one.viewed.whole
                if not whole.is_inference():
                    torch.autograd.graph.increment_version(whole)  # `.data` has a version counter of its own
            if whole.writes is not None:
                whole.writes += 1


def shown(whole: Tensor, steps: Sequence[Callable[[Tensor], Any]]) -> Tensor:
    """Return the view of a whole tensor that these steps make."""
    for step in steps:
        whole = step(whole)
    return whole
