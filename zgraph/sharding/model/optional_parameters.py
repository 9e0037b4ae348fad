"""Parameters that a rank may skip in a step, such as a vision tower of which only ranks with images run the forward.

Such a parameter is kept whole on every rank, so forward needs no collective that a skipping rank would miss. Its marker
is at stage 0 with an open window: a backward leaves this rank's gradient in `.grad`, in compiled graphs, too. At the end
of the backward, ranks exchange which parameters have got a gradient anywhere, and reduce these, to which a rank that
skipped one adds zeros. A parameter that all ranks skipped has no gradient, and costs one byte.

The end of a backward is seen by hooks on all parameters of the model, so a rank takes part if its backward reaches any.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.dialect.markers import reduce_grad
from zgraph.errors import ZgraphError
from zgraph.runtime.exchanges.collectives import all_gather
from zgraph.runtime.exchanges.identity import Exchanges, identify
from zgraph.runtime.groups import group_size
from zgraph.runtime.handle import make_handle
from zgraph.runtime.window_state import ALONE, OPEN, attach_state_of
from zgraph.torch_compat.autograd import at_end_of_backward, hooks_of, is_in_backward, running_backward
from zgraph.torch_compat.dtensor import dtensor_like, gradients_of, local_of

if TYPE_CHECKING:
    from zgraph.sharding.scope import Scope, ShardedParam


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
        scope: Scope,
        params: Sequence[ShardedParam],
        group_names: Sequence[str],
        exchanges: Exchanges | None,
    ) -> None:
        self.join(scope)
        self._params = tuple(params)
        self._group_names = tuple(group_names)
        self._exchanges = exchanges
        self._backward = -1
        self._waits = True  # gradients may wait, as no backward since the last step has reduced them; on all ranks alike
        # The parameters' own handles have no identity: graphs that only some ranks call must not count as exchanges.
        self._handles = [make_handle(param.name) for param in params]
        for param, handle in zip(params, self._handles, strict=True):
            attach_state_of(handle, param.handle)
            param.state.is_optional = True
            identify(handle, exchanges)

    def join(self, scope: Scope) -> None:
        """Follow the windows of a scope: that of the model around, if `zgraph.shard` is called on it later."""
        self._scope = weakref.ref(scope)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Reduce at the end of each backward that reaches any of these parameters."""
        given = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter, hooks in zip(given, hooks_of(given)[1], strict=True):
            if self._reached not in (hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(self._reached)

    def _reached(self, parameter: Tensor) -> None:
        if is_in_backward() and self._backward != running_backward():
            self._backward = running_backward()
            at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self._backward = -1
        scope = self._scope()
        if scope is None:
            return
        self._waits = scope.last == OPEN  # until the backward that closes the window
        if self._waits:
            return
        self._check_hooks()
        every = self._ran_anywhere("the end of a backward, with optional parameters")
        for param, handle, ran in zip(self._params, self._handles, every, strict=True):
            if ran:
                self._reduce(param, handle, is_window=scope.last != ALONE)

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
        every = self._ran_anywhere("optimizer.step() without a backward that reduces") if waited else ()
        name = next((param.name for param, waits in zip(self._params, every, strict=False) if waits), None)
        if name is not None:
            raise ZgraphError(
                f"zgraph.no_sync: optimizer.step() on {name}, which is optional, and whose gradients from forwards under "
                "no_sync are not reduced. Run the last micro-batch outside of no_sync; or clear the gradients by "
                "zero_grad()."
            )

    def _check_hooks(self) -> None:
        """Refuse gradient hooks, which run on gradients of this rank, before they are reduced.

        Raises:
            ZgraphError: a parameter has such a hook; the message names it.
        """
        for param, *found in zip(self._params, *hooks_of(param.sharded for param in self._params), strict=True):
            hooks = [hook for each in found for hook in (each or {}).values()]
            if any(getattr(hook, "__func__", None) is not OptionalParameters._reached for hook in hooks):
                raise ZgraphError(
                    f"zgraph.shard: {param.name} is optional and has a gradient hook, which runs before the gradient "
                    "is reduced, and only on ranks that computed one; change .grad after backward instead."
                )

    def _ran_anywhere(self, call: str) -> list[bool]:
        """Return, for each parameter, whether any rank has a gradient that is not reduced yet.

        Args:
            call: description of the caller, the same on all ranks.

        Raises:
            AgreementError: a rank has made another call.
        """
        device = self._params[0].spec.device_type
        ran = torch.tensor([param.state.has_waiting_gradients for param in self._params], dtype=torch.uint8).to(device)
        about = None if self._exchanges is None else self._exchanges.meeting(call)
        for place, name in enumerate(self._group_names):
            if (world := group_size(name)) > 1:
                here = None if about is None else about._replace(key=hash((about.key, place)))
                ran = all_gather(ran, world, name, about=here).view(world, -1).amax(0)
        return [bool(one) for one in ran.tolist()]

    def _reduce(self, param: ShardedParam, handle: Tensor, *, is_window: bool) -> None:
        spec, layout = param.spec, param.spec.layout
        parameter, state = param.sharded, param.state
        (grad,) = gradients_of([parameter])
        if state.has_waiting_gradients:
            own, earlier = local_of(cast(DTensor, grad)), cast("DTensor | None", state.earlier)
        else:
            own, earlier = torch.zeros_like(local_of(parameter)), cast("DTensor | None", grad)
        state.forget()
        if not is_window:
            own = own.to(spec.compute_dtype)  # as autograd computed it: no rounding
        policy = (spec.dtype, spec.wire_dtype, spec.mean_dtype, 0, spec.reduction, ALONE)
        with torch.no_grad():
            mean = reduce_grad(own, handle, *policy, layout.replica_group, layout.gather_group)
            if earlier is not None:
                local_of(earlier).add_(mean)
        parameter.grad = dtensor_like(mean, parameter) if earlier is None else earlier


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
                f"zgraph.shard: optional names {'the model itself' if part is module else kind}, and all ranks call the "
                "model; name modules inside of it that a rank may skip."
            )
        if any(id(parameter) not in trained for parameter in part.parameters()):
            raise ValueError(
                f"zgraph.shard: optional names {names[part]} ({kind}), of which parameters are ignored, or were sharded "
                "by an earlier call; leave them out of ignored, or name the module in that call."
            )
        unit = next((one for one in unit_names if f"{names[part]}.".startswith(f"{one}." if one else "")), None)
        if unit is not None:
            raise ValueError(
                f"zgraph.shard: optional names {names[part]}, which lies inside the unit {unit or 'of all modules'}: a "
                "unit gets gradients on all ranks; name it in units or in optional, not in both."
            )
