"""The context axis of a sharded model, and the calls of torch in its forward that need tokens of other ranks."""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from zgraph.errors import AgreementError, ZgraphError
from zgraph.sharding.context.attention import attention, check_attention, exchange
from zgraph.sharding.context.follow import EXCHANGED, FollowTokens
from zgraph.sharding.context.hugging_face import register_attention
from zgraph.sharding.context.mean_loss import mean_cross_entropy, sum_cross_entropy
from zgraph.sharding.context.positions import token_positions
from zgraph.sharding.meshes.same_batch import SameBatch
from zgraph.torch_compat.dynamo import (
    constant_in_graphs,
    is_compiled_in_place,
    is_compiled_wrapper,
    let_into_graphs,
    raise_through_dynamo,
)
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.groups import is_fake_world
from zgraph.torch_compat.modules import tree_flatten

FRONT_ENDS = (  # sentence of an error
    " With Accelerate, leave this DataLoader out of prepare; in a Trainer, return it from get_train_dataloader, and "
    "cut batches in _prepare_inputs."
)


class ContextAxis:
    """Axis of a mesh whose ranks share each sequence.

    Attributes:
        mesh: the axis, a mesh of N ranks.
        group_name, size: its process group, and N.
        length: number of tokens that each rank has of a sequence; 0 before the first `zgraph.context_batch`.
        has_ring: whether attention may go by a ring, as on CPUs; a plan for GPUs is made on CPUs, and sets False.
        same_batch: check that the ranks of the axis cut the same sequences.
        inside: names of targets of which the ranks have different numbers, then the number of tensors of the batch;
            empty if there are no such targets. For forwards with gradients; `inside_eval`: for those without.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group_name, self.size = mesh.get_group().group_name, mesh.size()
        self.same_batch = SameBatch(mesh, "context", FRONT_ENDS)
        self.has_ring = mesh.device_type == "cpu"
        self.length = 0
        self.inside: tuple[Any, ...] = ()
        self.inside_eval: tuple[Any, ...] = ()

    @constant_in_graphs
    def check_targets(self, inside: tuple[Any, ...], given: int) -> None:
        """Check that a model is called with all tensors of the batch if the ranks have different numbers of targets.

        Args:
            inside: `inside` or `inside_eval`.
            given: number of tensors among the arguments of the model.

        Raises:
            ZgraphError: its loss is computed outside, where a mean would weigh targets wrongly.
        """
        if given < inside[-1]:
            names = ", ".join(inside[:-1])
            raise_through_dynamo(
                f"zgraph.context_batch: the ranks have different numbers of targets in {names}, and the model is "
                "called without them. A mean loss over each rank's targets would weigh them wrongly: pass them to the "
                "model and compute cross_entropy in its forward; or divide N times the sum of the losses by the number "
                "of targets (the sum of weights) of all ranks, and write zgraph.context_batch(..., uneven=True). Write "
                "that also without a loss, or if they are neither targets nor weights.",
                ZgraphError,
            )

    def calls(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which the forward of a module runs or is traced.

        Raises:
            ZgraphError: `zgraph.context_batch` has not been called, or only parts of the module are compiled.
        """
        self._check_called()
        if torch.compiler.is_compiling():
            _enter_graphs()
            return ContextCalls(self)
        self.check_parts(module)
        return self._calls_followed(tree_flatten((args, kwargs))[0])

    @constant_in_graphs
    def _check_called(self) -> None:
        if self.length == 0:
            raise_through_dynamo(
                "zgraph.shard(context=...): each rank computes a part of each sequence; cut the batch first: batch = "
                "zgraph.context_batch(model, batch), and call model(**batch).",
                ZgraphError,
            )

    def check_alike(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Check that all ranks of the axis make the same uncompiled call; compiled graphs are compared when compiled.

        Raises:
            AgreementError: a rank makes another call; raised on all ranks.
        """
        if is_fake_world() or any(is_fake(one) for one in tensors):
            return
        call = f"{name} {[(list(one.shape), str(one.dtype)) for one in tensors]}"
        own = torch.full((self.size,), zlib.crc32(call.encode()), device=self.mesh.device_type)
        with torch.no_grad():
            every = exchange(own, self.group_name)
        if bool((every != own).any()):
            raise AgreementError(
                f"zgraph.shard(context=...): this rank calls {call}, and another rank of its context group something "
                "else. All of them compute each sequence together, so they need to run the same lines: decide by "
                "values that are equal on all, such as the number of the step."
            )

    def check_parts(self, module: nn.Module) -> None:
        """Refuse a model that runs uncompiled while parts of it are compiled, which would then run uncompiled, too.

        Raises:
            ZgraphError: there are such parts.
        """
        for name, part in module.named_modules():
            if part is not module and (is_compiled_in_place(part) or is_compiled_wrapper(part)):
                raise ZgraphError(
                    f"zgraph.shard(context=...): {name} is compiled by itself, and the lines between such parts are "
                    'not. Compile the model as a whole: torch.compile(model, backend="zgraph").'
                )

    @contextlib.contextmanager
    def _calls_followed(self, inputs: Sequence[Any]) -> Generator[None]:
        follow = FollowTokens(self.length)
        follow.begin(inputs)
        with follow, ContextCalls(self, follow):
            yield


def context_axis(mesh: DeviceMesh | None, name: str) -> ContextAxis:
    """Return the axis of a mesh whose ranks share each sequence.

    Raises:
        ValueError: the mesh has no such axis.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or name not in names:
        raise ValueError(
            f"zgraph.shard: context={name!r} is not among the mesh's axes {names}; write mesh = "
            f'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", {name!r})) and zgraph.shard(model, mesh, '
            f"context={name!r})."
        )
    register_attention()
    return ContextAxis(mesh[name])


class ContextCalls(TorchFunctionMode):
    """Answers calls of torch that need tokens of other ranks, while a model's forward runs or is traced.

    Attention sees all tokens of a sequence, `arange` over this rank's tokens returns their positions in the sequence,
    and the mean of a cross entropy is over the targets of all ranks.
    """

    def __init__(self, axis: ContextAxis, follow: FollowTokens | None = None) -> None:
        super().__init__()
        self.axis, self.follow = axis, follow

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **given)
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **given)
        if func is torch.arange and self.axis.length and _counts(args, given) == self.axis.length:
            return self._positions(*args, **given)
        if func is F.multi_head_attention_forward:
            _refuse_inside("nn.MultiheadAttention")
        if func is Tensor.unflatten:  # Dynamo cannot trace its call of super() (torch 2.13)
            return torch.unflatten(*args, **given)
        return func(*args, **given)

    def _exchanged(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        if self.follow is None:
            return function(*args)
        _check_recomputed(function.__name__)
        self.axis.check_alike(function.__name__, [one for one in args if isinstance(one, Tensor)])
        return self.follow.exchanged(function, *args)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        check_attention(query, key, value, attn_mask, is_causal, self.axis.length, self.axis.size)
        options = (dropout_p, is_causal, scale, enable_gqa, self.axis.group_name, self.axis.size, self.axis.has_ring)
        return self._exchanged(attention, query, key, value, attn_mask, *options)

    def _cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        is_plain = size_average is None and reduce is None and not target.is_floating_point()
        if reduction == "sum" and is_plain:
            options = (weight, ignore_index, label_smoothing, self.axis.size)
            return self._exchanged(sum_cross_entropy, input, target, *options)
        if reduction != "mean" or not is_plain:
            return F.cross_entropy(
                input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        options = (ignore_index, label_smoothing, self.axis.group_name, self.axis.size)
        return self._exchanged(mean_cross_entropy, input, target, weight, *options)

    def _positions(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.follow is not None:
            _check_recomputed("arange")
        is_float = any(isinstance(one, float) for one in (*args, *kwargs.values()))
        dtype = torch.get_default_dtype() if is_float else torch.int64
        device = torch.device(kwargs.get("device") or torch.empty(0).device)
        found = token_positions(self.axis.length, self.axis.group_name, self.axis.size, device)
        return found.to(kwargs.get("dtype") or dtype)


def _counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return n if these are the arguments of `arange(n)`, `arange(0, n)` or `arange(0, n, 1)`, else None."""
    start, end, step = (*args, *[None] * 3)[:3]
    if end is None:
        start, end = 0, kwargs.get("end", start)
    return end if kwargs.get("start", start) == 0 and kwargs.get("step", step) in (None, 1) else None


@constant_in_graphs
def _enter_graphs() -> None:
    for function in EXCHANGED:
        let_into_graphs(function)


def _check_recomputed(name: str) -> None:
    """Refuse a call in a checkpointed function outside of modules, which backward would repeat without `ContextCalls`.

    Raises:
        ZgraphError: the call is in such a function.
    """
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.endswith("zgraph/sharding/unit.py"):  # a module's forward
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            raise ZgraphError(
                f"zgraph.shard(context=...): torch.utils.checkpoint of a function that calls {name} itself; when it is "
                "computed again, tokens of other ranks would be missing. Checkpoint a module, or a function whose "
                "modules make this call: checkpoint(module, x, use_reentrant=False)."
            )
        frame = frame.f_back


@constant_in_graphs
def _refuse_inside(name: str) -> None:
    raise_through_dynamo(
        f"zgraph.shard(context=...): {name} computes attention inside, where tokens of other ranks cannot be added; "
        "call torch.nn.functional.scaled_dot_product_attention instead.",
        ZgraphError,
    )
