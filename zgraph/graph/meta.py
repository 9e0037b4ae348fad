"""Typed access to `node.meta`; no other file spells a key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from zgraph.torch_compat.fake_values import fake_mode_of

if TYPE_CHECKING:
    from zgraph.runtime.chunks import Chunk

Lane = Literal["host_to_device", "device_to_host", "disk"]

_VALUE = "val"
_PARAMETERS = "zgraph_parameters"
_HANDLES = "zgraph_handles"
_RECOMPUTE = "recompute"
_REGION = "ac_graph_id"
_SAVED = "zgraph_saved"
_PLANNED = "zgraph_planned"
_CHUNKS = "zgraph_chunks"
_LANE = "zgraph_lane"
_AT_USE = "zgraph_at_use"
_AWAITED = "zgraph_awaited"
# Above every region that activation checkpointing numbers, so that the partitioner never takes a gather for the border
# between two of them (it saves what lies on such a border).
_GATHER_REGION = 1 << 30


def value(node: fx.Node) -> Any:
    """The fake value of a node, or None where nobody has left one."""
    return node.meta.get(_VALUE)


def tensor_value(node: fx.Node) -> Tensor:
    """The fake tensor of a node that is known to have one."""
    found = value(node)
    assert isinstance(found, Tensor), f"{node.name} has no tensor in its meta"
    return found


def set_value(node: fx.Node, new: object) -> None:
    node.meta[_VALUE] = new


def parameters(node: fx.Node) -> tuple[str, ...]:
    """Qualified names of the parameters a node works for; () for everything else."""
    return cast("tuple[str, ...]", node.meta.get(_PARAMETERS, ()))


def handles(node: fx.Node) -> tuple[str, ...]:
    """Placeholder names of the handles of those parameters, in the same order."""
    return cast("tuple[str, ...]", node.meta.get(_HANDLES, ()))


def set_parameters(node: fx.Node, names: Sequence[str], handle_names: Sequence[str]) -> None:
    node.meta[_PARAMETERS] = tuple(names)
    node.meta[_HANDLES] = tuple(handle_names)


def chunks(node: fx.Node) -> tuple[Chunk, ...]:
    """What each rank's part of a collective is made of; () where no pass has said it."""
    return cast("tuple[Chunk, ...]", node.meta.get(_CHUNKS, ()))


def set_chunks(start: fx.Node, found: Sequence[Chunk]) -> None:
    """Say what a collective carries, from which its bytes on any number of ranks follow."""
    start.meta[_CHUNKS] = tuple(found)


def lane(node: fx.Node) -> Lane | None:
    """The copy engine that a node occupies; None where devices and operator tell."""
    return cast("Lane | None", node.meta.get(_LANE))


def set_lane(node: fx.Node, occupied: Lane) -> None:
    """Say that a node copies between device, host and disk: fake CPU tensors of a planned GPU do not show it."""
    node.meta[_LANE] = occupied


def label(node: fx.Node) -> str:
    """The node's first parameter as part of a node name: "h.0.mlp.weight" -> "h_0_mlp_weight"."""
    names = parameters(node)
    return re.sub(r"\W", "_", names[0]) if names else node.name


def tag_recompute(node: fx.Node) -> None:
    """Make the partitioner compute the node again in backward instead of saving it."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[_REGION] = _GATHER_REGION


def lifetime(node: fx.Node) -> object:
    """What the partitioner is told of a node: save it, or compute it again; None where it may choose."""
    return node.meta.get(_RECOMPUTE)


def inherit_lifetime(node: fx.Node, source: fx.Node) -> None:
    """Tell the partitioner of a node what it is told of another."""
    for key in (_RECOMPUTE, _REGION, _PLANNED):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def is_tagged_by_others(node: fx.Node) -> bool:
    """Whether somebody else has decided if the node is saved, such as the user's activation checkpointing."""
    return _RECOMPUTE in node.meta and _PLANNED not in node.meta and not is_tagged_recompute(node)


def tag_computed_again(node: fx.Node) -> None:
    """Make the partitioner compute an activation again in backward; it borders on no region of anybody's."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[_PLANNED] = True


def tag_kept(node: fx.Node) -> None:
    """Make the partitioner save the node for backward."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    node.meta[_PLANNED] = True


def is_tagged_recompute(node: fx.Node) -> bool:
    return node.meta.get(_RECOMPUTE) is CheckpointPolicy.MUST_RECOMPUTE and node.meta.get(_REGION) == _GATHER_REGION


def tag_saved(node: fx.Node) -> None:
    """Say that forward may save this gathered parameter for backward; what replaces the node inherits it."""
    node.meta[_SAVED] = True


def is_tagged_saved(node: fx.Node) -> bool:
    return _SAVED in node.meta


def tag_at_use(node: fx.Node) -> None:
    """Say that this start, or wait, stands where its result is needed to save memory: nobody is to move it."""
    node.meta[_AT_USE] = True


def is_tagged_at_use(node: fx.Node) -> bool:
    return _AT_USE in node.meta


def tag_awaited(node: fx.Node) -> None:
    """Say that compute of this graph waits for the reduction: no later one is to join it and make it late."""
    node.meta[_AWAITED] = True


def is_tagged_awaited(node: fx.Node) -> bool:
    return _AWAITED in node.meta


def evaluate(node: fx.Node) -> object:
    """What the node yields on fake values, from its arguments' fake values.

    Raises:
        KeyError: an argument has no value.
    """

    def load(argument: fx.Node) -> Any:
        if _VALUE not in argument.meta:
            raise KeyError(argument.name)
        return argument.meta[_VALUE]

    args = map_arg(node.args, load)
    kwargs = map_arg(node.kwargs, load)
    mode = fake_mode_of([argument.meta.get(_VALUE) for argument in node.all_input_nodes])
    target = cast(Any, node.target)
    if mode is None:
        return target(*args, **kwargs)
    with mode:
        return target(*args, **kwargs)


def create(
    graph: fx.Graph,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
    name: str | None = None,
) -> fx.Node:
    """A call_function node at the graph's insertion point, with its value, and the parameters of `like`."""
    node = graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name=name)
    if like is not None:
        for key in (_PARAMETERS, _HANDLES, _SAVED, _AWAITED, "nn_module_stack", "stack_trace"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
    set_value(node, evaluate(node))
    return node


def create_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, *, like: fx.Node | None = None) -> fx.Node:
    """The node's value in another dtype; the node itself where it has that dtype.

    A pass runs after decompositions, and Inductor lowers only what they end in: `aten._to_copy`, which eager torch
    records, would be taken for an operator that it does not know.
    """
    if tensor_value(node).dtype == dtype:
        return node
    return create(graph, torch.ops.prims.convert_element_type.default, (node, dtype), like=like)


def same_layout(expected: object, found: object) -> bool:
    """Whether two fake values agree in structure, shape, stride, dtype and device."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return (
            expected.dtype == found.dtype
            and expected.device == found.device
            and _same_sizes(expected.shape, found.shape)
            and (expected.layout != torch.strided or _same_sizes(expected.stride(), found.stride()))
        )
    if isinstance(expected, tuple | list) and isinstance(found, tuple | list):
        left, right = cast("Sequence[object]", expected), cast("Sequence[object]", found)
        return len(left) == len(right) and all(same_layout(a, b) for a, b in zip(left, right, strict=True))
    return isinstance(expected, Tensor) == isinstance(found, Tensor)


def _same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    # Symbolic sizes are compared by their expressions: a comparison of the sizes themselves would add a guard.
    return len(left) == len(right) and all(str(a) == str(b) for a, b in zip(left, right, strict=True))
