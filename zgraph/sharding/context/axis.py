"""The context axis of a sharded model, and the calls of torch in its forward that need tokens of other ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from zgraph.errors import ZgraphError
from zgraph.sharding.context.attention import attention, check_attention
from zgraph.sharding.context.follow import EXCHANGED, FollowTokens
from zgraph.sharding.context.hugging_face import register_attention
from zgraph.sharding.context.mean_loss import mean_cross_entropy
from zgraph.sharding.context.positions import token_positions
from zgraph.sharding.meshes.same_batch import SameBatch
from zgraph.torch_compat.dynamo import constant_in_graphs, let_into_graphs, raise_through_dynamo
from zgraph.torch_compat.modules import tree_flatten


class ContextAxis:
    """Axis of a mesh whose ranks share each sequence.

    Attributes:
        mesh: the axis, a mesh of N ranks.
        group_name, size: its process group, and N.
        length: number of tokens that each rank has of a sequence; 0 before the first `zgraph.context_batch`.
        same_batch: check that the ranks of the axis cut the same sequences.
        inside: names of targets of which the ranks have different numbers, then the number of tensors of the batch;
            empty if there are no such targets.
        followed: for each module, signatures of forwards whose tokens have been followed, see
            `zgraph.sharding.context.follow`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group_name, self.size = mesh.get_group().group_name, mesh.size()
        self.same_batch = SameBatch(mesh, "context", "")
        self.length = 0
        self.inside: tuple[Any, ...] = ()
        self.followed: MutableMapping[nn.Module, set[str]] = weakref.WeakKeyDictionary()

    @constant_in_graphs
    def check_targets(self, given: int) -> None:
        """Check that a model is called with all tensors of the batch if the ranks have different numbers of targets.

        Args:
            given: number of tensors among the arguments of the model.

        Raises:
            ZgraphError: its loss is computed outside, where a mean would weigh targets wrongly.
        """
        if given < self.inside[-1]:
            names = ", ".join(self.inside[:-1])
            raise_through_dynamo(
                f"zgraph.context_batch: the ranks have different numbers of targets in {names}, and the model is "
                "called without them. A mean loss over each rank's targets would weigh them wrongly: pass them to the "
                "model and compute cross_entropy in its forward; or divide the sum of the losses by 1/N of all ranks' "
                "targets, and write zgraph.context_batch(..., uneven=True).",
                ZgraphError,
            )

    def calls(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which the forward of a module runs or is traced.

        Raises:
            ZgraphError: `zgraph.context_batch` has not been called.
        """
        self._check_called()
        if torch.compiler.is_compiling():
            _enter_graphs()
            return ContextCalls(self)
        return self._calls_followed(module, tree_flatten((args, kwargs))[0])

    @constant_in_graphs
    def _check_called(self) -> None:
        if self.length == 0:
            raise_through_dynamo(
                "zgraph.shard(context=...): each rank computes a part of each sequence; cut the batch first: batch = "
                "zgraph.context_batch(model, batch), and call model(**batch).",
                ZgraphError,
            )

    @contextlib.contextmanager
    def _calls_followed(self, module: nn.Module, inputs: Sequence[Any]) -> Generator[None]:
        shapes = [(list(one.shape), one.dtype) if isinstance(one, Tensor) else one for one in inputs]
        signature = str((shapes, self.length, module.training, torch.is_grad_enabled()))
        followed = self.followed.setdefault(module, set())
        if signature in followed:
            with ContextCalls(self):
                yield
            return
        follow = FollowTokens(self.length)
        follow.begin(inputs)
        with follow, ContextCalls(self, follow):
            yield
        followed.add(signature)


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
            return self._positions(**given)
        if func is F.multi_head_attention_forward:
            _refuse_inside("nn.MultiheadAttention")
        if func is Tensor.unflatten:  # Dynamo cannot trace its call of super() (torch 2.11 - 2.15)
            return torch.unflatten(*args, **given)
        return func(*args, **given)

    def _exchanged(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        return function(*args) if self.follow is None else self.follow.exchanged(function, *args)

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
        options = (dropout_p, is_causal, scale, enable_gqa, self.axis.group_name, self.axis.size)
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
        if reduction != "mean" or size_average is not None or reduce is not None or target.is_floating_point():
            return F.cross_entropy(
                input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        options = (ignore_index, label_smoothing, self.axis.group_name, self.axis.size)
        return self._exchanged(mean_cross_entropy, input, target, weight, *options)

    def _positions(self, *args: Any, **kwargs: Any) -> Tensor:
        device = torch.device(kwargs.get("device") or torch.empty(0).device)
        found = token_positions(self.axis.length, self.axis.group_name, self.axis.size, device)
        return found.to(kwargs.get("dtype") or torch.int64)


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


@constant_in_graphs
def _refuse_inside(name: str) -> None:
    raise_through_dynamo(
        f"zgraph.shard(context=...): {name} computes attention inside, where tokens of other ranks cannot be added; "
        "call torch.nn.functional.scaled_dot_product_attention instead.",
        ZgraphError,
    )
