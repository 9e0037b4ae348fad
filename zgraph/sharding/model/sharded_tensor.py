"""Sharded parameters and gradients that behave in a training loop like those of the plain model.

A view of a DTensor along a sharded axis is a copy, gathered from all ranks. DTensor silently loses writes to the copy,
and refuses in-place operators that need other placements or plain tensors. Here such a write, as in
`embedding.weight.grad[:old] = 0`, is made to the whole tensor, of which each rank keeps its part.

A number read from a DTensor describes this rank's part only: `p.grad.norm().item()`, `if torch.isnan(p.grad).any()`.
Here the number describes the whole tensor, on every rank. All ranks must make such writes and reads: if only some ranks
do, every rank gets an error.

Random numbers are also drawn for the whole tensor. On CPUs DTensor does not manage generators and draws each shard from
the rank's generator: equal seeds repeat rows on every rank, and different seeds let replicas drift apart.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from zgraph.errors import AgreementError, ZgraphError
from zgraph.runtime.exchanges.changes import checksum, origin_of
from zgraph.runtime.exchanges.steps import Model
from zgraph.torch_compat.dtensor import allow_lists_of, dtensor_like, local_of, put_local, put_whole
from zgraph.torch_compat.fake_values import fake_storage_key, is_fake
from zgraph.torch_compat.memory import DispatchMode
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten
from zgraph.torch_compat.operators import (
    OpOverload,
    assigns_data,
    communicates,
    is_elementwise_over_lists,
    is_mutable,
    is_tagged_random,
    written_tensors,
)

aten = torch.ops.aten
_READ = aten._local_scalar_dense.default
# Operators that raise, or give another result, on ranks whose shard has no elements.
_OF_NOTHING = frozenset(
    {aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin, aten.median, aten.nanmedian}
)
_UNSCALES = aten._amp_foreach_non_finite_check_and_unscale_.default
_COPIES = zlib.crc32(b"copy.deepcopy")
_NORMS = frozenset({aten.linalg_vector_norm, aten._foreach_norm})  # likewise for infinite order
_SAME = frozenset({aten.detach.default, aten.alias.default})
# Position of the dim argument of operators that take a part along it; DTensor gathers if that dim is sharded.
_DIMENSIONS = MappingProxyType(
    {aten.select.int: 1, aten.slice.Tensor: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2}
)


class View(NamedTuple):
    """Origin of a view: the viewed tensor, and the operators that make the view from the whole viewed tensor."""

    whole: Sharded
    steps: tuple[Callable[[Tensor], Any], ...]
    number: int = 0  # hash of the operators and their arguments; 0 for the whole tensor


class Sharded(DTensor):
    """A DTensor that knows which tensor it is a view of. Operators on a `Sharded` return `Sharded` tensors.

    Attributes:
        viewed: origin of the view; None if this tensor is not a view.
        of_model: model whose ranks must all write to this tensor, and read numbers from it, alike; None: unknown.
        of_parameter: name of this parameter, or of the parameter of this gradient; else of the first parameter used.
        origin: number, equal on all ranks, for the parameter or for the inputs and operators of a result.
        writes: number of writes since the first copy of the tensor's rows was gathered; None before that.
        seen: for a gathered copy, the number of writes whose values the copy includes.
        digest: digest of the numbers that the tensor was computed from: see `zgraph.runtime.exchanges.changes`.
    """

    viewed: View | None = None
    of_model: weakref.ref[Model] | None = None  # weak: a stored gradient must not keep the model alive
    of_parameter = ""
    origin = 0
    writes: int | None = None
    seen = 0
    digest = 0

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values()) if kwargs else args
        if torch.is_grad_enabled():
            _refuse_plain_gradients(func, given)
        traits = _traits_of(func)
        sharded = _sharded_among(given)
        if traits.communicates and any(_is_split(one) for one in sharded):
            raise ZgraphError(COLLECTED.format(func=func))
        if func is _UNSCALES:
            # torch takes the flag's maximum over the axes along which the first gradient is split.
            args = (sorted(args[0], key=_split_axes, reverse=True), *args[1:])
        result = _run(func, traits, args, kwargs, sharded)
        model = None if func.is_view else _model_of(sharded[0])
        if model is not None and model.changes.are_noted:
            if traits.writes:
                model.changes.of_write(traits.number, func, given, written_tensors(func, args, kwargs))
            else:
                results = result if isinstance(result, list | tuple) else (result,)
                model.changes.of_read(traits.number, func, given, _sharded_among(results))
        return result

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Call DTensor's `redistribute` once all ranks have arrived here; `full_tensor()` calls this method, too."""
        if not all(placement.is_replicate() for placement in self.placements):
            _meet(self, "full_tensor() or redistribute()")
        made = super().redistribute(*args, **kwargs)
        if type(made) is DTensor:
            as_sharded(made, self)
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor's values, read-only because writes would be lost."""
        _meet(self, "numpy()")
        array = _gathered(self).requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise ZgraphError("zgraph: a sharded tensor has no memory to share; write parameter.full_tensor() first.")

    def __format__(self, format_spec: str) -> str:
        """Format a 0-d tensor as a number, like a plain tensor: f"{norm:.3f}"."""
        return format(self.item(), format_spec) if self.ndim == 0 else super().__format__(format_spec)

    def tolist(self) -> Any:
        """Return the whole tensor's values."""
        _meet(self, "tolist()")
        return _gathered(self).tolist()

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return cast(Any, Tensor.data).__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        own = local_of(self)
        if is_fake(own):
            cast(Any, Tensor.data).__set__(self, value)  # a captured step sees the assignment, and writes the values
        elif not (isinstance(value, DTensor) and local_of(value).is_set_to(own)):  # p.data += 1 has written already
            raise ZgraphError(ASSIGNED)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        """Make a `Sharded` from inner tensors, when torch.compile traces a graph or wraps a graph's results."""
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        as_sharded(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain DTensor, which can be loaded without zgraph."""
        saved = self.__copy__()
        saved.__class__ = DTensor
        return DTensor.__reduce_ex__(saved, protocol)

    def __copy__(self) -> DTensor:
        made = dtensor_like(local_of(self), self)
        made.requires_grad_(self.requires_grad)
        vars(made).update({name: value for name, value in vars(self).items() if name not in _OWN})
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        if self.viewed is not None:
            return self.detach().clone()
        made = cast(Sharded, super().__deepcopy__(memo))
        if self.of_model is not None and (model := self.of_model()) is not None:
            model.changes.of_read(_COPIES, "copy.deepcopy", (self,), (made,))
        return made


ASSIGNED = (
    "zgraph: something was assigned to the .data of a sharded tensor, which would be lost: torch keeps the values of a "
    "DTensor elsewhere. Write into it, outside forward: with torch.no_grad(): parameter.copy_(value)."
)
COLLECTED = (
    "zgraph: {func} of a sharded tensor would mix different rows of it. Gradients are averaged over the ranks already, "
    "and weights are equal on all of them: delete the line. To communicate other tensors, pass parameter.full_tensor() "
    "or parameter.to_local()."
)
RESHAPED = (
    "zgraph: {func} changes the shape of a sharded tensor in place; write view = view.t(), and the like, without the "
    "underscore. Where torch calls it, as in torch.quantile(parameter, numbers), pass parameter.full_tensor()."
)
_READ_WHOLE = "A loss reads parameter.full_tensor(), whose gradient is averaged over the ranks."
_OWN = frozenset({"viewed", "of_model", "of_parameter", "origin", "writes", "seen", "digest"})
DTENSORS = frozenset({DTensor, Sharded})
allow_lists_of(Sharded)


def as_sharded(tensor: DTensor, like: DTensor | None = None) -> None:
    """Turn a DTensor into a Sharded one in place, and give it the model and origin of `like`."""
    tensor.__class__ = Sharded
    if isinstance(like, Sharded) and like.of_model is not None:
        made = cast(Sharded, tensor)
        made.of_model, made.of_parameter, made.origin = like.of_model, like.of_parameter, like.origin


def put_in_model(parameter: Sharded, model: Model, name: str) -> None:
    """Record a parameter's model and name; the model's ranks must all run the same lines of the training loop."""
    parameter.of_model, parameter.of_parameter = weakref.ref(model), name
    parameter.origin = zlib.crc32(name.encode())


def sharded_like(local: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor from a `local` part, with the layout, the model and the parameter of `like`."""
    made = dtensor_like(local, like)
    if type(made) is Sharded:
        as_sharded(made, like)
    return made


def note_change(tensors: Iterable[Tensor], name: str, numbers: Sequence[float]) -> None:
    """Record a change of tensors' local parts by `numbers`, as if an operator had changed the whole tensors."""
    for tensor in tensors:
        model = _model_of(tensor) if isinstance(tensor, Sharded) else None
        if model is not None and model.changes.are_noted:
            model.changes.of_write(zlib.crc32(name.encode()), name, numbers, [tensor])


class _Traits(NamedTuple):
    writes: bool
    is_random: bool
    reshapes: bool  # in place: `t_`, `squeeze_`
    assigns: bool  # `.data`
    dimension: int | None
    communicates: bool
    number: int  # the same in each process


@cache
def _traits_of(func: OpOverload) -> _Traits:
    reshapes = torch.Tag.inplace_view in func.tags
    number, dimension = zlib.crc32(str(func).encode()), _DIMENSIONS.get(func)
    facts = is_mutable(func), is_tagged_random(func), reshapes, assigns_data(func), dimension, communicates(func)
    return _Traits(*facts, number)


def _sharded_among(args: Sequence[Any]) -> list[Sharded]:
    found: list[Sharded] = []
    for arg in args:
        kind = type(arg)
        if kind is Sharded:
            found.append(arg)
        elif kind is list or kind is tuple:
            found += [one for one in arg if type(one) is Sharded]
    return found


def _is_split(tensor: DTensor) -> bool:
    return _split_axes(tensor) > 0


def _split_axes(tensor: Any) -> int:
    """Return the number of mesh axes along which ranks have different parts of a tensor."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return sum(not one.is_replicate() and tensor.device_mesh.size(axis) > 1 for axis, one in enumerate(placements))


def _plain_among(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if type(arg) in (list, tuple):
            yield from _plain_among(arg)
        elif isinstance(arg, Tensor) and not isinstance(arg, DTensor):
            yield arg


def _run(
    func: OpOverload,
    traits: _Traits,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharded: Sequence[Sharded],
) -> Any:
    for one in sharded:
        if one.viewed is not None:
            _renew(one)
    if traits.writes:
        return _write(func, traits, args, kwargs, sharded)
    if func is _READ and not all(placement.is_replicate() for placement in args[0].placements):
        _meet(args[0], "reading a number (item(), float(), bool(), `if`)")
        return func(_gathered(args[0]))
    if traits.is_random and (drawn := _drawn(func, args, kwargs, sharded)) is not None:
        return drawn
    if traits.dimension is not None:
        _meet_for_rows(args[0], args[traits.dimension] if len(args) > traits.dimension else 0, func)
    packet = func.overloadpacket
    needs_elements = packet in _OF_NOTHING or (
        packet in _NORMS and any(isinstance(arg, float) and math.isinf(arg) for arg in args)
    )
    if needs_elements and any(map(_may_be_empty, sharded)):
        return _as_sharded(_of_whole(func, args, kwargs, sharded[0]), func, args, kwargs, sharded[0])
    try:
        result = _on_dtensors(func, args, kwargs, sharded)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, ZgraphError | torch.OutOfMemoryError):
            raise
        result = _of_whole(func, args, kwargs, sharded[0])
    return _as_sharded(result, func, args, kwargs, sharded[0])


def _refuse_plain_gradients(func: OpOverload, args: Sequence[Any]) -> None:
    """Refuse to combine a sharded tensor with a plain one that needs a gradient: that gradient would be sharded.

    Raises:
        ZgraphError: a plain tensor among the arguments requires a gradient.
    """
    if any(plain.requires_grad for plain in _plain_among(args)):
        raise ZgraphError(
            f"zgraph: {func} of a sharded tensor and of a plain one that requires a gradient, as in loss + "
            "parameter.norm(): outside forward a parameter is a DTensor. Write parameter.full_tensor(), whose "
            "gradient is averaged over the ranks."
        )


def _on_dtensors(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: Sequence[Sharded]) -> Any:
    """Call an operator with `sharded` tensors as plain DTensors, since C++ dispatch accepts no subclass of DTensor."""
    model = _model_of(sharded[0])
    meeting: Any = nullcontext()
    if model is not None and model.changes.are_noted:
        meeting = _Meeting(model, sharded[0], func)
    for one in cast("Sequence[Tensor]", sharded):
        one.__class__ = DTensor
    try:
        with meeting:
            return func(*args, **kwargs)
    finally:
        for one in sharded:
            one.__class__ = Sharded


# --- views --------------------------------------------------------------------------------------------------------


def _as_sharded(result: Any, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: Sharded) -> Any:
    parts = result if isinstance(result, list | tuple) else (result,)
    for place, part in enumerate(parts):
        if type(part) is DTensor:
            as_sharded(part, like)
        if func.is_view and type(part) is Sharded:
            _note_view(part, func, args, kwargs, None if part is result else place)
    return result


def _note_view(
    view: Sharded, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], index: int | None
) -> None:
    whole, steps, number = args[0].viewed or View(args[0], ())

    def step(tensor: Tensor) -> Tensor:
        result = func(tensor, *args[1:], **kwargs)
        return result if index is None else result[index]

    if func in _SAME:
        view.viewed = View(whole, steps, number)
    else:
        numbers = (arg for arg in tree_flatten((args[1:], kwargs))[0] if isinstance(arg, int))
        view.viewed = View(whole, (*steps, step), hash((_traits_of(func).number, number, index or 0, *numbers)))
    if _is_copy(view):
        whole.writes = view.seen = whole.writes or 0


def _is_copy(view: Sharded) -> bool:
    """Return whether a view is a gathered copy, with storage of its own."""
    return view.viewed is not None and (
        fake_storage_key(local_of(view)) != fake_storage_key(local_of(view.viewed.whole))
    )


@torch.no_grad()
def _renew(view: Sharded) -> None:
    """Gather a copy again if the viewed tensor has been written to since."""
    assert view.viewed is not None
    whole, steps, _ = view.viewed
    if whole.writes is None or view.seen == whole.writes or not _is_copy(view):
        return
    _meet(view, "reading rows that were written to")
    put_local(view, _shown(_gathered(whole), steps))
    view.seen = whole.writes


def _note_write(written: Iterable[Any]) -> None:
    for one in written:
        if isinstance(one, Sharded):
            whole = one
            if one.viewed is not None:
                whole = one.viewed.whole
                if not whole.is_inference():
                    torch.autograd.graph.increment_version(whole)  # `.data` has a version counter of its own
            if whole.writes is not None:
                whole.writes += 1


# --- writes -------------------------------------------------------------------------------------------------------


def _write(
    func: OpOverload, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: Sequence[Sharded]
) -> Any:
    """Call an operator that writes, by its schema, to its first argument, to lists, or to `out=`."""
    if traits.assigns:  # only traced by Dynamo, whose graph is refused later
        func, traits = aten.copy_.default, _traits_of(aten.copy_.default)
    outputs = written_tensors(func, args, kwargs)
    written = [one for one in outputs if isinstance(one, Sharded)]
    if not any(isinstance(one, DTensor) for one in outputs):
        return _write_to_plain(func, args, kwargs, sharded[0])
    target = written[0] if len(written) == 1 and any(one is written[0] for one in (*args, *kwargs.values())) else None
    if traits.reshapes and any(one.viewed is not None for one in written):
        raise ZgraphError(RESHAPED.format(func=func))
    if target is None and any(map(_is_copy, written)):
        raise ZgraphError(
            f"zgraph: {func} writes to several views of sharded rows in one call, and these are copies. Write to one "
            "after another: for rows in ...: rows.mul_(2)."
        )
    is_for_whole = (
        target is not None
        and (
            _is_copy(target)
            or target is not args[0]  # DTensor may leave `out=` with wrong placements
            or (traits.is_random and _draws_here(target))
            or any(plain.ndim > 0 for plain in _plain_among((*args[1:], *kwargs.values())))
        )
    )
    if target is None or not is_for_whole:
        try:
            result = _on_dtensors(func, args, kwargs, sharded)
        except (NotImplementedError, RuntimeError) as error:
            # DTensor determines placements before it runs anything, so nothing has been written yet.
            if isinstance(error, ZgraphError):
                raise
            if traits.reshapes:
                raise ZgraphError(RESHAPED.format(func=func)) from error
            if target is not None:
                return _write_to_whole(target, func, args, kwargs)
            if partial := [one for one in sharded if _is_partial(one)]:  # norms that are not summed yet
                for one in partial:
                    _meet(one, f"writing to a number ({func})")
                    put_whole(one, _gathered(one))
                return _write(func, traits, args, kwargs, sharded)
            if not _lie_alike(func, args, kwargs):
                raise
            result = func(*_with_local_parts(args), **kwargs)
        _note_write(written)
        return result
    return _write_to_whole(target, func, args, kwargs)


@torch.no_grad()
def _write_to_plain(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: Sharded) -> Any:
    """Call an operator that writes to plain tensors, as in `teacher.lerp_(p, 0.1)`; gather its sharded arguments."""
    _meet(like, f"writing to a plain tensor ({func})")
    given, named = _all_gathered(args, kwargs)
    return func(*given, **named)


def _lie_alike(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator over lists may run on shards: elementwise, on equal layouts, without plain tensors."""
    lists = [[one for one in arg if isinstance(one, DTensor)] for arg in args if type(arg) in (list, tuple)]
    lists = [one for one in lists if one]
    return (
        is_elementwise_over_lists(func)
        and len({len(one) for one in lists}) == 1
        and not any(isinstance(arg, DTensor) for arg in (*args, *kwargs.values()))
        and not any(plain.ndim for plain in _plain_among((*args, *kwargs.values())))  # not compared across ranks
        and all(
            len({(one.shape, one.placements, one.device_mesh) for one in alike}) == 1 and not _is_partial(alike[0])
            for alike in zip(*lists, strict=True)
        )
    )


def _with_local_parts(args: Sequence[Any]) -> list[Any]:
    return [
        [local_of(one) if isinstance(one, DTensor) else one for one in arg] if type(arg) in (list, tuple) else arg
        for arg in args
    ]


@torch.no_grad()
def _write_to_whole(target: Sharded, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sharded:
    """Run `func`, which writes to `target`, on the whole tensor behind `target`; each rank then keeps its part.

    Raises:
        AgreementError: ranks pass different plain tensors.
        ZgraphError: a captured step passes a plain tensor, which cannot be compared.
    """
    sharded, steps, _ = target.viewed or View(target, ())
    _meet(target, f"writing to parts ({func})")
    _check_equal([*_plain_among((*args, *kwargs.values()))], sharded.device_mesh, func)
    whole = _gathered(sharded)
    shown = _shown(whole, steps)
    given, named = _all_gathered(args, kwargs, {id(target): shown})
    result = func(*given, **named)
    if is_tagged_random(func):
        whole = _of_first(whole, sharded.device_mesh)
    if _is_partial(sharded):
        put_whole(sharded, whole)
    else:
        local_of(sharded).copy_(local_of(_laid_out(whole, sharded)))
    _note_write((target,))
    if _is_copy(target):
        put_local(target, _shown(whole, steps))
        target.seen = sharded.writes or 0
    # `rrelu` writes its noise to an argument and returns another tensor.
    return _laid_out(result, sharded) if isinstance(result, Tensor) and result is not shown else target


def _shown(whole: Tensor, steps: Sequence[Callable[[Tensor], Any]]) -> Tensor:
    for step in steps:
        whole = step(whole)
    return whole


def _check_equal(tensors: Sequence[Tensor], mesh: DeviceMesh, func: OpOverload) -> None:
    """Check that plain `tensors`, which `func` reads, are equal on all ranks of a mesh."""
    what = f"{func} reads or writes a sharded tensor by the values of a plain tensor"
    if any(is_fake(tensor) and tensor.ndim for tensor in tensors):
        raise ZgraphError(
            f"zgraph.training_step: {what}, which may differ from rank to rank. If it does not, make it a DTensor "
            "before the step, mask = distribute_tensor(mask, p.device_mesh, p.placements), and write p.grad.mul_(mask)."
            f" {_READ_WHOLE}"
        )
    values = [tensor for tensor in tensors if not is_fake(tensor)]
    if not values:
        return
    number = checksum(values)
    largest = torch.tensor([number, -number], device=mesh.device_type)
    for axis in range(mesh.ndim):  # one by one: DTensor warns if two are reduced together
        placements = [Partial("max") if one == axis else Replicate() for one in range(mesh.ndim)]
        largest = _gathered(DTensor.from_local(largest, mesh, placements, run_check=False))
    if largest.sum():
        raise AgreementError(
            f"zgraph: {what} that differs between ranks, so that each would have another result. Average or broadcast "
            f"it first (torch.distributed.broadcast(values, 0)). {_READ_WHOLE}"
        )


def _is_partial(tensor: DTensor) -> bool:
    """Return whether the ranks' values still have to be summed or otherwise reduced."""
    return any(placement.is_partial() for placement in tensor.placements)


def _may_be_empty(tensor: DTensor) -> bool:
    """Return whether any rank may have an empty shard; all ranks get the same answer."""
    split: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            split[dim] = split.get(dim, 1) * tensor.device_mesh.size(axis)
    return any(-(-tensor.shape[dim] // parts) * (parts - 1) >= tensor.shape[dim] for dim, parts in split.items())


def _of_whole(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: Sharded) -> Any:
    """Gather the arguments of an operator that DTensor refuses, and call it; the result is the same on all ranks."""
    _meet(like, f"reading all parts ({func})")
    _check_equal([*_plain_among((*args, *kwargs.values()))], like.device_mesh, func)
    with torch.no_grad():
        whole, named = _all_gathered(args, kwargs)
        results, tree = tree_flatten(func(*whole, **named))
        return tree_unflatten([_laid_out(one, like) if isinstance(one, Tensor) else one for one in results], tree)


# --- random numbers -----------------------------------------------------------------------------------------------


def _draws_here(tensor: DTensor) -> bool:
    """Return whether zgraph has to draw a tensor's random numbers, because DTensor manages no generators on CPUs."""
    return tensor.device_mesh.device_type == "cpu"


@torch.no_grad()
def _drawn(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: Sequence[Sharded]) -> Any:
    """Call a random operator on the whole tensor; None if DTensor itself draws consistently."""
    like = sharded[0]
    if not _draws_here(like):
        return None
    _meet(like, f"drawing random numbers ({func})")
    whole, named = _all_gathered(args, kwargs)
    results, tree = tree_flatten(func(*whole, **named))
    return tree_unflatten([_laid_out(_of_first(result, like.device_mesh), like) for result in results], tree)


def _of_first(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the first rank's `whole` on all ranks of a mesh."""
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            mine = whole if mesh.get_local_rank(axis) == 0 else torch.zeros_like(whole)
            placements = [Partial() if one == axis else Replicate() for one in range(mesh.ndim)]
            whole = _gathered(DTensor.from_local(mine, mesh, placements, run_check=False))
    return whole


def _laid_out(whole: Tensor, like: DTensor) -> Sharded:
    """Distribute `whole`, which all ranks hold, as `like` is. If shapes differ or `like` is partial, replicate it."""
    everywhere = [Replicate()] * like.device_mesh.ndim
    laid_out = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    if whole.shape == like.shape and not _is_partial(like):
        laid_out = laid_out.redistribute(placements=like.placements)
    as_sharded(laid_out, like)
    return cast(Sharded, laid_out)


# --- all ranks together -------------------------------------------------------------------------------------------


def _meet_for_rows(tensor: DTensor, dim: int, func: OpOverload) -> None:
    dim %= max(tensor.ndim, 1)  # torch itself refuses 0-d tensors
    if any(getattr(placement, "dim", None) == dim for placement in tensor.placements):
        _meet(tensor, f"taking rows ({func})")


def _model_of(tensor: DTensor) -> Model | None:
    if isinstance(tensor, Sharded) and tensor.of_model is not None and not is_fake(local_of(tensor)):
        return tensor.of_model()
    return None


def _meet(tensor: DTensor, call: str) -> None:
    model = _model_of(tensor)
    if model is not None:
        _meet_in(model, tensor, call)


def _meet_in(model: Model, tensor: DTensor, call: str) -> None:
    of = f" of {getattr(tensor, 'of_parameter', '')}, its gradient, or a result"
    last = f", after {model.changes.last}" if model.changes.last else ""
    model.meet(call, number=origin_of(tensor), detail=of + last)


class _Meeting(DispatchMode):
    """Makes all ranks meet before a DTensor operator's first collective, in case only some ranks call the operator."""

    def __init__(self, model: Model, tensor: DTensor, func: OpOverload) -> None:
        super().__init__()
        self.model, self.tensor, self.func, self.have_met = model, tensor, func, False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; this mode then sees its operators on local parts
        if not self.have_met and communicates(func):
            self.have_met = True
            _meet_in(self.model, self.tensor, f"{self.func}")
        return func(*args, **kwargs or {})


def _all_gathered(
    args: Sequence[Any], kwargs: Mapping[str, Any], known: Mapping[int, Tensor] = MappingProxyType({})
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with DTensors gathered, except those whose ids have a whole tensor in `known`."""
    leaves, tree = tree_flatten((args, dict(kwargs)))
    whole = [
        known[id(leaf)] if id(leaf) in known else _gathered(leaf) if isinstance(leaf, DTensor) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(whole, tree)


def _gathered(tensor: DTensor) -> Tensor:
    alias = cast(DTensor, tensor.detach())
    alias.__class__ = DTensor  # ranks have met
    local, device_type = local_of(alias), alias.device_mesh.device_type
    if local.device.type != device_type:  # kept in host memory, from which NCCL cannot send
        whole = dtensor_like(local.to(device_type), alias).full_tensor().to(local.device)
    else:
        whole = alias.full_tensor()
    if whole.stride() != alias.stride() and 0 not in alias.stride():  # channels last: views and random numbers show it
        whole = torch.empty_strided(alias.shape, alias.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
    return whole
