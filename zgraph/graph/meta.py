"""Typed access to `node.meta`; other files do not use its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from zgraph.tiers.lanes import Lane
from zgraph.tiers.tier import DEVICE, Tier, Transit
from zgraph.torch_compat.fake_values import fake_mode_of, replay

if TYPE_CHECKING:
    from zgraph.runtime.chunks import Chunk

_VALUE = "val"
_PARAMETERS = "zgraph_parameters"
_HANDLES = "zgraph_handles"
_RECOMPUTE = "recompute"
_REGION = "ac_graph_id"
_SAVED = "zgraph_saved"
_PLANNED = "zgraph_planned"
_CHUNKS = "zgraph_chunks"
_TRANSIT = "zgraph_transit"
_SPACE = "zgraph_space"
_RESTS = "zgraph_rests"
_LONGEST = "zgraph_longest"
_KEPT = "zgraph_kept"
_BESIDE = "zgraph_beside"
_AT_USE = "zgraph_at_use"
_AWAITED = "zgraph_awaited"
_PART = "zgraph_part"
_SKIPPED = "zgraph_skipped"
_OFFLOAD = "zgraph_offload"
_AT_REST = "zgraph_at_rest"
_EVALUATED = "zgraph_evaluated"
# Keys of torch's that final graphs need, besides those of the partitioner: "desc" says which input a placeholder is.
_OF_TORCH = (_VALUE, "desc", "stack_trace", "saved_tensor_with_no_vc_check")
# Above the numbers of all activation-checkpointing regions, so that the partitioner never treats a gather as a border
# between two regions (it saves the values at such borders).
_GATHER_REGION = 1 << 30

Kept = Literal["parameters", "state"]  # buffers count as parameters; state belongs to optimizers


def value(node: fx.Node) -> Any:
    """Return a node's fake value; None if it has none."""
    return node.meta.get(_VALUE)


def tensor_value(node: fx.Node) -> Tensor:
    """Return a node's fake value, which must be a tensor."""
    found = value(node)
    assert isinstance(found, Tensor), f"{node.name} has no tensor in its meta"
    return found


def set_value(node: fx.Node, new: object) -> None:
    node.meta[_VALUE] = new


def parameters(node: fx.Node) -> tuple[str, ...]:
    """Return the qualified names of the parameters that a node gathers, reduces or copies; () if there are none."""
    return cast("tuple[str, ...]", node.meta.get(_PARAMETERS, ()))


def handles(node: fx.Node) -> tuple[str, ...]:
    """Return, for each of a node's `parameters`, the name of the graph input that identifies it (its handle)."""
    return cast("tuple[str, ...]", node.meta.get(_HANDLES, ()))


def set_parameters(node: fx.Node, names: Sequence[str], handle_names: Sequence[str]) -> None:
    node.meta[_PARAMETERS] = tuple(names)
    node.meta[_HANDLES] = tuple(handle_names)


def chunks(node: fx.Node) -> tuple[Chunk, ...]:
    """Return the chunks that this rank contributes to a collective; () if none are recorded."""
    return cast("tuple[Chunk, ...]", node.meta.get(_CHUNKS, ()))


def set_chunks(start: fx.Node, found: Sequence[Chunk]) -> None:
    """Record the chunks that each rank contributes to a collective, to compute its bytes for any number of ranks."""
    start.meta[_CHUNKS] = tuple(found)


def transit(node: fx.Node) -> Transit | None:
    """Return the recorded memory space and direction of a copy; None if they follow from devices and operator."""
    return cast("Transit | None", node.meta.get(_TRANSIT))


def set_transit(node: fx.Node, tier: Tier, *, to_device: bool) -> None:
    """Record that a node copies between the device and another memory space.

    Needed where devices of fake tensors do not tell: in a plan for a GPU, all fake tensors are on the CPU.
    """
    node.meta[_TRANSIT] = Transit(tier, to_device)


def lane(node: fx.Node) -> Lane | None:
    """Return the lane (hardware resource) recorded for a copy; None if it follows from devices and operator."""
    found = transit(node)
    return None if found is None else found.lane


def space(node: fx.Node) -> Tier | None:
    """Return the recorded memory space of a node's value; None if it follows from devices and `transit`."""
    return cast("Tier | None", node.meta.get(_SPACE))


def set_space(node: fx.Node, found: Tier) -> None:
    """Record the memory space of a node's value; the record stays when the value becomes another graph's input."""
    node.meta[_SPACE] = found


def rests_in(node: fx.Node) -> Tier:
    """Return the memory space in which a node's new storage is kept after the step."""
    return cast("Tier", node.meta.get(_RESTS, DEVICE))


def set_rest(node: fx.Node, tier: Tier) -> None:
    """Record the memory space in which a node's new storage, such as optimizer state, is kept after the step."""
    node.meta[_RESTS] = tier


def kept_as(node: fx.Node) -> Kept | None:
    """Return "parameters" or "state" for a value that is kept between steps; None for values of a single step."""
    return cast("Kept | None", node.meta.get(_KEPT))


def set_kept(node: fx.Node, kind: Kept) -> None:
    """Record that a value is kept between steps: a graph input, or optimizer state that the first step creates."""
    node.meta[_KEPT] = kind


def longest_bytes(node: fx.Node) -> int | None:
    """Return the recorded size of a value on the rank with the most rows; None if it is this rank's size."""
    return cast("int | None", node.meta.get(_LONGEST))


def set_longest_bytes(node: fx.Node, size: int) -> None:
    """Record the size of a value on the rank with the most rows, so that all ranks make the same plan."""
    node.meta[_LONGEST] = size


def beside(node: fx.Node) -> int | None:
    """Return the number that an asynchronous update shares with its wait; None for other nodes."""
    return cast("int | None", node.meta.get(_BESIDE))


def set_beside(node: fx.Node, number: int) -> None:
    """Make an update asynchronous: it runs concurrently with compute until the wait with the same number."""
    node.meta[_BESIDE] = number


def module_path(node: fx.Node) -> str:
    """Return the path of the module whose forward contains the node; "" if unknown.

    For a node of backward, it is the module of the corresponding node of forward.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    # L['self'].blocks[0].up, L['fn'].blocks.0.up: the compiled object, and the path from there
    names = re.sub(r"\['?(\w+)'?\]", r".\1", re.sub(r"^L\['\w+'\]", "", path)).split(".")
    return ".".join(name for name in names if name not in ("", "_modules"))


def source_line(node: fx.Node) -> str:
    """Return the innermost line of user code that a node comes from: "train.py:12 in forward", or "" if unknown."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)] or frames
    return "{}:{} in {}".format(*own[-1]) if own else ""


def set_origin(node: fx.Node, module: str, file: str, line: int, function: str) -> None:
    """Record the module and the line of code that a node comes from, as read by `module_path` and `source_line`."""
    node.meta["nn_module_stack"] = {"": (module, None)}
    node.meta["stack_trace"] = f'File "{file}", line {line}, in {function}'


def copy_origin(node: fx.Node, source: fx.Node) -> None:
    """Give a node the module and the line of code that `source` comes from."""
    node.meta |= {key: source.meta[key] for key in ("nn_module_stack", "stack_trace") if key in source.meta}


_FRAME = re.compile(r'File "([^"]*)", line (\d+), in (\S+)')
_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")


def tags(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node that passes and the partitioner read, without its fake value and its origin."""
    kept = {key: found for key, found in node.meta.items() if key.startswith("zgraph_") and key != _EVALUATED}
    return kept | {key: node.meta[key] for key in (_RECOMPUTE, _REGION) if key in node.meta}


def portable(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node of a final graph that lowering and reports read, without objects of this process.

    The node's fake value is included.
    """
    kept = tags(node) | {key: node.meta[key] for key in _OF_TORCH if key in node.meta}
    if stack := node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"):
        kept["nn_module_stack"] = {"": (str([*stack.values()][-1][0]), None)}
    return kept


def label(node: fx.Node) -> str:
    """Return the name of a node's first parameter as an identifier: "h.0.mlp.weight" -> "h_0_mlp_weight".

    For a node without parameters, return the node's name.
    """
    names = parameters(node)
    return re.sub(r"\W", "_", names[0]) if names else node.name


def tag_recompute(node: fx.Node) -> None:
    """Make the partitioner recompute a gather in backward instead of saving its result."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[_REGION] = _GATHER_REGION


def lifetime(node: fx.Node) -> object:
    """Return whether the partitioner must save or recompute a node, as a `CheckpointPolicy`; None if it may choose."""
    return node.meta.get(_RECOMPUTE)


def inherit_lifetime(node: fx.Node, source: fx.Node) -> None:
    """Make the partitioner save or recompute `node` as it does `source`."""
    for key in (_RECOMPUTE, _REGION, _PLANNED):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def is_tagged_by_others(node: fx.Node) -> bool:
    """Return whether activation checkpointing outside of zgraph has decided if a node is saved or recomputed."""
    return _RECOMPUTE in node.meta and _PLANNED not in node.meta and not is_tagged_recompute(node)


def tag_recomputed_activation(node: fx.Node) -> None:
    """Make the partitioner recompute an activation in backward instead of saving it."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[_PLANNED] = True


def tag_must_save(node: fx.Node) -> None:
    """Make the partitioner save a node's value for backward."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    node.meta[_PLANNED] = True


def is_tagged_recompute(node: fx.Node) -> bool:
    return node.meta.get(_RECOMPUTE) is CheckpointPolicy.MUST_RECOMPUTE and node.meta.get(_REGION) == _GATHER_REGION


def tag_saved(node: fx.Node) -> None:
    """Allow forward to save a gathered parameter for backward; nodes that replace the gather inherit this tag."""
    node.meta[_SAVED] = True


def is_tagged_saved(node: fx.Node) -> bool:
    return _SAVED in node.meta


def tag_at_use(node: fx.Node) -> None:
    """Pin a collective's start or wait next to the use of its result, to save memory: passes must not move it."""
    node.meta[_AT_USE] = True


def is_tagged_at_use(node: fx.Node) -> bool:
    return _AT_USE in node.meta


def tag_awaited(node: fx.Node) -> None:
    """Record that compute waits for a reduction, so that no later reduction joins its bucket and delays it."""
    node.meta[_AWAITED] = True


def is_tagged_awaited(node: fx.Node) -> bool:
    return _AWAITED in node.meta


def tag_skipped(node: fx.Node) -> None:
    """Record that a rank may have skipped the parameter whose gradient a node reduces, and then adds zeros.

    Zeros are known earlier than gradients. So that ranks have equal buckets, such reductions share none with others.
    """
    node.meta[_SKIPPED] = True


def is_tagged_skipped(node: fx.Node) -> bool:
    return _SKIPPED in node.meta


def tag_offload(node: fx.Node) -> None:
    """Record that a saved value should be kept on the host from forward to backward."""
    node.meta[_OFFLOAD] = True


def is_tagged_offload(node: fx.Node) -> bool:
    return _OFFLOAD in node.meta


def set_part(node: fx.Node, number: int) -> None:
    """Record which part of a whole step a node belongs to: 0 is the first forward, 1 its backward, and so on."""
    node.meta[_PART] = number


def part(node: fx.Node) -> int | None:
    """Return the part recorded by `set_part`; None outside of whole steps."""
    return cast("int | None", node.meta.get(_PART))


def tag_at_rest(node: fx.Node) -> None:
    """Record that a node's new storage outlives the step, like new optimizer state.

    Such memory does not count in budgets.
    """
    node.meta[_AT_REST] = True


def clear_at_rest(node: fx.Node) -> None:
    """Undo `tag_at_rest` and `set_kept`, for a storage that the graph copies elsewhere and frees."""
    node.meta.pop(_AT_REST, None)
    node.meta.pop(_KEPT, None)


def is_tagged_at_rest(node: fx.Node) -> bool:
    return _AT_REST in node.meta


def evaluate(node: fx.Node) -> object:
    """Run a node on the fake values of its arguments, and return the result.

    Raises:
        KeyError: an argument has no fake value.
    """

    def load(argument: fx.Node) -> Any:
        if _VALUE not in argument.meta:
            raise KeyError(argument.name)
        return argument.meta[_VALUE]

    args = map_arg(node.args, load)
    kwargs = map_arg(node.kwargs, load)
    # A node without inputs, such as one that draws random numbers, has a value of its own that tells the mode.
    mode = fake_mode_of([one.meta.get(_VALUE) for one in (*node.all_input_nodes, node)])
    target = cast(Any, node.target)
    if mode is None:
        return target(*args, **kwargs)
    return replay(mode, target, args, kwargs)


def create(
    graph: fx.Graph,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
    name: str | None = None,
) -> fx.Node:
    """Create a call at the graph's insertion point and compute its fake value.

    Args:
        graph: graph of the new node.
        target, args, kwargs: operator of the call, and its arguments.
        like: node whose parameters and origin the new node gets.
        name: name of the new node.
    """
    node = graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name=name)
    if like is not None:
        for key in (_PARAMETERS, _HANDLES, _SAVED, _AWAITED, _SKIPPED, _PART, "nn_module_stack", "stack_trace"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
    set_value(node, evaluate(node))
    node.meta[_EVALUATED] = _call_and_values(node)
    return node


def take_evaluation(node: fx.Node) -> bool:
    """Return whether `create` has computed a node's fake value from the call and inputs that the node has now.

    Verification then need not compute the value again. The record of `create` is dropped: a second call returns False.
    """
    (target, args, kwargs), values = node.meta.pop(_EVALUATED, ((None, (), {}), []))
    if target is None:
        return False
    call, now = _call_and_values(node)
    same = len(now) == len(values) and all(found is known for found, known in zip(now, values, strict=True))
    return same and call == (target, args, kwargs)


def _call_and_values(node: fx.Node) -> tuple[tuple[Any, Any, Any], list[Any]]:
    """Return a node's target and arguments, then the fake values of the node and of its inputs."""
    return (node.target, node.args, node.kwargs), [value(known) for known in (node, *node.all_input_nodes)]


def create_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, *, like: fx.Node | None = None) -> fx.Node:
    """Create a node that casts `node` to `dtype`; return `node` itself if it has that dtype.

    The cast is `prims.convert_element_type`, because Inductor cannot lower eager torch's `aten._to_copy`.
    """
    if tensor_value(node).dtype == dtype:
        return node
    return create(graph, torch.ops.prims.convert_element_type.default, (node, dtype), like=like)


def same_layout(expected: object, found: object) -> bool:
    """Return whether two fake values have the same structure, shapes, strides, dtypes and devices."""
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
