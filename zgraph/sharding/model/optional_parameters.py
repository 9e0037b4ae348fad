"""Parameters that a rank may skip in a step, such as a vision tower of which only ranks with images run the forward.

Such a parameter is kept whole on every rank, so forward needs no collective that a skipping rank would miss. Its marker
is at stage 0 with an open window: a backward leaves this rank's gradient in `.grad`, also from a compiled graph. At the
end of the backward, ranks exchange which parameters have a gradient on any rank, and reduce these; a rank that skipped
one adds zeros. A parameter that all ranks skipped keeps its `.grad`, such as None, and costs one byte.

Hooks on all parameters of the model see the backward, so a rank takes part if its backward reaches any of them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.dialect.markers import reduce_grad
from zgraph.errors import ZgraphError
from zgraph.runtime.exchanges.collectives import all_gather
from zgraph.runtime.exchanges.identity import Exchanges, identify
from zgraph.runtime.groups import group_size
from zgraph.runtime.handle import make_handle
from zgraph.runtime.window_state import ALONE, OPEN, Accumulation, ParameterState, attach_state_of
from zgraph.sharding.context.axis import ContextAxis
from zgraph.sharding.model.optional_in_steps import Reached, TracedReductions, policy_of
from zgraph.sharding.model.param_spec import ParamSpec
from zgraph.torch_compat.autograd import at_end_of_backward, hooks_of, is_nested, running_backward
from zgraph.torch_compat.dtensor import dtensor_like, gradients_of, local_of

_BUCKET_BYTES = 2**25  # of one reduction
_MOST = 255  # calls of backward() in a step that are counted
_IN_STEPS = " with optional modules"
_EDITED = 2  # instead of 0 or 1, where a rank has a gradient or none


class Windows(Protocol):
    """The position of the last forward in its window, and the gradients that wait: a `Scope`."""

    last: str
    accumulation: Accumulation
    context: ContextAxis | None


class Param(Protocol):
    """A `ShardedParam`."""

    name: str
    spec: ParamSpec
    handle: Tensor

    @property
    def state(self) -> ParameterState: ...

    @property
    def sharded(self) -> DTensor: ...


class OptionalParameters:
    """The optional parameters of one call of `zgraph.shard`.

    Args:
        scope: scope of the model.
        params: the parameters.
        group_names: names of the process groups of the mesh's axes.
        exchanges: counter of the model's exchanges; None for a single rank.
    """

    def __init__(
        self,
        scope: Windows,
        params: Sequence[Param],
        group_names: Sequence[str],
        exchanges: Exchanges | None,
    ) -> None:
        self.join(scope)
        self._params = tuple(params)
        self._group_names = tuple(group_names)
        self._exchanges = exchanges
        self._reached_in: set[int] = set()  # numbers of running backwards that reach a parameter of the model
        # Gradients may wait: no backward since the last step has reduced them. Equal on all ranks.
        self._waits = True
        self._traced: TracedReductions | None = None  # while a whole step is traced
        # The parameters' own handles have no identity: graphs that only some ranks call must not count as exchanges.
        self._handles = [make_handle(param.name) for param in params]
        for param, handle in zip(params, self._handles, strict=True):
            attach_state_of(handle, param.handle)
            param.state.is_optional = True
            identify(handle, exchanges)

    def join(self, scope: Windows) -> None:
        """Follow the windows of a scope: that of the model around, if `zgraph.shard` is called on it later."""
        self._scope = weakref.ref(scope)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Reduce at the end of each backward that reaches any of these parameters."""
        given = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter, hooks in zip(given, hooks_of(given)[1], strict=True):
            if self._reached not in (hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(self._reached)

    @contextlib.contextmanager
    def traced(self, handle_of: Callable[[Any], Tensor], united: Reached | None) -> Generator[TracedReductions]:
        """Reduce in the graph of a whole step while it is traced; arguments as for `TracedReductions`."""
        self._traced = found = TracedReductions(self._params, handle_of, united)
        hooks = found.watch()
        try:
            yield found
        finally:
            self._traced = None
            for hook in hooks:
                hook.remove()

    def united(self, reached: Reached | None, *, is_full: bool) -> tuple[Reached, bool]:
        """Tell the other ranks which parameters the backwards of a step reach.

        Args:
            reached: None if this rank has refused the step.
            is_full: whether this rank may make no further graph.

        Returns:
            What any rank reaches, and whether any rank may make no further graph.

        Raises:
            AgreementError: a rank has made another call.
            ZgraphError: a rank has refused the step, or ranks call backward() in different numbers; on all ranks.
        """
        own = reached or ()
        first, *others = own or ((False,) * len(self._params),)
        count = min(len(own), _MOST)
        head = [int(reached is None), count, _MOST - count, int(is_full)]
        found = self._most("training_step", [*head, *map(int, first)], detail=_IN_STEPS)
        refuses, highest, lowest, full, *flags = found
        if refuses:
            raise ZgraphError("zgraph.training_step: another rank has refused this step; its error says why.")
        if highest != _MOST - lowest:
            raise ZgraphError(
                f"zgraph.training_step: ranks call backward() in different numbers in one step, {_MOST - lowest} to "
                f"{highest} times; call it equally often on each rank."
            )
        if (scope := self._scope()) is not None:
            self._check_alike(scope, own)
        if others:
            rest = [int(one) for backward in others for one in backward]
            flags += self._most("training_step", rest, number=len(others), detail=_IN_STEPS)
        each = iter(map(bool, flags))
        return tuple(tuple(next(each) for _ in backward) for backward in own), bool(full)

    def any_lacks(self, lacks: bool) -> bool:
        """Return whether any rank lacks a graph for this step; for ranks of which one may make no further graph."""
        return bool(self._most("training_step", [int(lacks)], number=-1, detail=_IN_STEPS)[0])

    def _reached(self, parameter: Tensor) -> None:
        number = running_backward()
        if number not in self._reached_in:
            self._reached_in.add(number)
            at_end_of_backward(functools.partial(self._backward_ends, number))

    def _backward_ends(self, number: int) -> None:
        self._reached_in.discard(number)
        scope = self._scope()
        if scope is None or is_nested():
            return  # of a region that checkpoints with use_reentrant=True: the backward around it goes on
        self._reached_in.clear()  # a backward that failed did not end
        if self._traced is not None:
            self._traced.backward_ends(scope.last)
            return
        self._waits = scope.last == OPEN  # until the backward that closes the window
        if self._waits:
            return
        self.check_hooks()
        every, is_window = self._agreed("the end of a backward", is_window=scope.last != ALONE)
        self._check_alike(scope, [tuple(param.state.has_waiting_gradients for param in self._params)])
        taken = [
            _Taken.of(param, handle, is_window=is_window)
            for param, handle, waits in zip(self._params, self._handles, every, strict=True)
            if waits
        ]
        scope.accumulation.settle()  # on ranks without a gradient, too, or their next forward would be another one
        for bucket in _buckets(taken):
            _reduce(bucket)

    def _check_alike(self, scope: Windows, reached: Sequence[Sequence[bool]]) -> None:
        """Check that the ranks of a context group have run the same modules, as they compute each sequence together.

        Args:
            reached: for each backward, whether it reaches each of the parameters on this rank.

        Raises:
            AgreementError: a rank of the group has run others.
        """
        if scope.context is not None:
            names = [[one.name for one, is_in in zip(self._params, here, strict=True) if is_in] for here in reached]
            scope.context.check_alike(f"optional modules with the parameters {names}", [])

    def check_step(self, stepping: Mapping[int, Tensor]) -> None:
        """Check that no gradient of the parameters that an optimizer steps waits on any rank.

        Args:
            stepping: the optimizer's parameters by id.

        Raises:
            ZgraphError: a gradient waits; raised on all ranks.
        """
        if not any(param.state.is_among(stepping) for param in self._params):
            return
        waited, self._waits = self._waits, True
        every = self._agreed("optimizer.step() without a backward that reduces")[0] if waited else ()
        name = next((param.name for param, waits in zip(self._params, every, strict=False) if waits), None)
        if name is not None:
            raise ZgraphError(
                f"zgraph.no_sync: optimizer.step() on {name}, which is optional, and whose gradients from forwards "
                "under no_sync are not reduced. Run the last micro-batch outside of no_sync; or clear the gradients "
                "by zero_grad()."
            )

    def check_hooks(self) -> None:
        """Refuse gradient hooks, which run on gradients of this rank, before they are reduced.

        Raises:
            ZgraphError: a parameter has such a hook; the message names it.
        """
        for param, *found in zip(self._params, *hooks_of(param.sharded for param in self._params), strict=True):
            hooks = [hook for each in found for hook in (each or {}).values()]
            if not all(map(is_own_hook, hooks)):
                raise ZgraphError(
                    f"zgraph.shard: {param.name} is optional and has a gradient hook, which runs before the gradient "
                    "is reduced, and only on ranks that computed one; change .grad after backward instead."
                )

    def _agreed(self, call: str, *, is_window: bool = False) -> tuple[list[bool], bool]:
        """Exchange which gradients wait to be reduced.

        Args:
            call: description of the caller, the same on all ranks.
            is_window: whether this rank closes an accumulation window.

        Returns:
            Whether any rank has a waiting gradient of each parameter, and whether any rank closes a window.

        Raises:
            AgreementError: a rank has made another call.
            ZgraphError: a rank has changed a waiting gradient in place; raised on all ranks.
        """
        flags, refusal = [int(is_window)], None
        for param in self._params:
            try:
                param.state.follow_edits()
                flags.append(int(param.state.has_waiting_gradients))
            except ZgraphError as error:
                flags.append(_EDITED)
                refusal = error
        advice = ", which each rank needs, and which must reach a trained parameter of the model"
        closes, *every = self._most(call, flags, detail=advice)
        if refusal is not None:
            raise refusal
        if _EDITED in every:
            name = self._params[every.index(_EDITED)].name
            raise ZgraphError(
                f"zgraph.no_sync: another rank has changed the .grad of {name} in place between the forwards of a "
                "window. Change it after the backward of a forward outside of no_sync, when it has been reduced."
            )
        return [bool(one) for one in every], bool(closes)

    def _most(self, call: str, flags: Sequence[int], *, number: int = 0, detail: str = "") -> list[int]:
        """Return the largest of all ranks' flags at each place; arguments as for `Exchanges.meeting`."""
        found = torch.tensor(flags, dtype=torch.uint8, device=self._params[0].spec.device_type)
        about = None if self._exchanges is None else self._exchanges.meeting(call, number=number, detail=detail)
        for place, name in enumerate(self._group_names):
            if (world := group_size(name)) > 1:
                here = None if about is None else about._replace(key=hash((about.key, place)))
                found = all_gather(found, world, name, about=here).view(world, -1).amax(0)
        return found.tolist()


def is_own_hook(hook: object) -> bool:
    """Return whether a hook on a parameter is one by which optional parameters are reduced."""
    return getattr(hook, "__func__", None) is OptionalParameters._reached  # pyright: ignore[reportPrivateUsage]


class _Taken(NamedTuple):
    """This rank's gradient of a parameter, which no longer waits in `.grad`.

    Attributes:
        param: the parameter.
        handle: handle with the parameter's identity.
        grad: [*shape], zeros if this rank has skipped the parameter.
        earlier: `.grad` from before the window, reduced; None if there was none.
        policy: arguments of the reduction; parameters with equal policies are reduced together.
    """

    param: Param
    handle: Tensor
    grad: Tensor
    earlier: DTensor | None
    policy: tuple[Any, ...]

    @classmethod
    def of(cls, param: Param, handle: Tensor, *, is_window: bool) -> _Taken:
        spec = param.spec
        parameter, state = param.sharded, param.state
        (found,) = gradients_of([parameter])
        if state.has_waiting_gradients:
            own, earlier = local_of(cast(DTensor, found)), state.earlier
        else:
            own, earlier = torch.zeros_like(local_of(parameter)), found
        state.forget()
        if not is_window:
            own = own.to(spec.compute_dtype)  # the dtype in which autograd computed it, so nothing is rounded
        return cls(param, handle, own, cast("DTensor | None", earlier), policy_of(spec))


def _buckets(taken: Iterable[_Taken]) -> Iterator[list[_Taken]]:
    """Group gradients that one collective can reduce, in an order that is the same on all ranks."""
    groups: dict[object, list[_Taken]] = {}
    for one in taken:
        groups.setdefault((one.grad.dtype, one.policy), []).append(one)
    for members in groups.values():
        bucket: list[_Taken] = []
        size = 0
        for one in members:
            size += one.grad.nbytes
            if bucket and size > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], one.grad.nbytes
            bucket.append(one)
        yield bucket


@torch.no_grad()
def _reduce(bucket: Sequence[_Taken]) -> None:
    """Reduce gradients in one collective, which changes no bit: sums are by element. Put the means into `.grad`."""
    flat = torch.cat([one.grad.reshape(-1) for one in bucket])
    means = reduce_grad(flat, bucket[0].handle, *bucket[0].policy).split([one.grad.numel() for one in bucket])
    for one, mean in zip(bucket, means, strict=True):
        parameter = one.param.sharded
        if one.earlier is None:
            parameter.grad = dtensor_like(mean.view(one.grad.shape), parameter)
        else:
            local_of(one.earlier).add_(mean.view(one.grad.shape))
            parameter.grad = one.earlier


def check_optional(
    module: nn.Module, optional: Sequence[nn.Module], trained: Container[int], unit_names: Sequence[str]
) -> None:
    """Check the modules that the user passed as `optional`.

    Args:
        trained: ids of the parameters that this call shards, without those in `ignored`.
        unit_names: qualified names of the modules in `units`.

    Raises:
        ValueError: one cannot be optional; the message says why, and what to do.
    """
    names = {part: name for name, part in module.named_modules()}
    for part in optional:
        kind = type(part).__name__
        if part is module or part not in names:
            raise ValueError(
                f"zgraph.shard: optional names {'the model itself' if part is module else kind}; name modules inside "
                "of the model that a rank may skip."
            )
        if any(id(parameter) not in trained for parameter in part.parameters()):
            raise ValueError(
                f"zgraph.shard: optional names {names[part]} ({kind}), of which parameters are ignored, or were "
                "sharded by an earlier call; leave them out of ignored, or name the module in that call."
            )
        unit = next((one for one in unit_names if f"{names[part]}.".startswith(f"{one}." if one else "")), None)
        if unit is not None:
            raise ValueError(
                f"zgraph.shard: optional names {names[part]}, which lies inside the unit {unit or 'of all modules'}: a "
                "unit gets gradients on all ranks; name it in units or in optional, not in both."
            )
