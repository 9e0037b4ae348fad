"""Memory that operators allocate in addition to their results, while they run or while a collective is in flight.

The figures are for CPU kernels in torch 2.13, each verified by a test; CUDA's are in `cuda_workspace.py`. Operators
that are not in the table count as having no workspace.

Buffers of a fixed size of a few KiB are not counted, nor are buffers that depend on the processor: oneDNN repacks
operands of narrow matrix products, and bf16 attention repacks keys and values on processors with AMX (in backward also
with AVX512-BF16). Such a buffer is at most as large as an operand: 0.1 to 0.4 MiB at a width of 512, which matters
only for small models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.analysis.cuda_workspace import workspace_on_cuda
from zgraph.dialect.wire_dtypes import accumulate_dtype
from zgraph.graph import meta, nodes
from zgraph.graph.operator_arguments import OwnersArgs
from zgraph.runtime.groups import group_backend
from zgraph.runtime.owned_matrices import ORTHOGONAL_DTYPE
from zgraph.tiers.staging import staging_bytes as pinned_bytes
from zgraph.torch_compat.fake_values import hint_of
from zgraph.torch_compat.operators import OpOverload, is_binary, written_arguments

aten = torch.ops.aten
AT_ONCE = 2  # concurrent collectives of a gloo group; a third waits for a thread (torch 2.11 - 2.13)


def workspace_bytes(node: fx.Node, *, threads: int = 1, device_type: str | None = None) -> int:
    """Return the peak bytes that a call allocates in addition to its results, and frees before it returns.

    Args:
        node: call with fake values for itself and its arguments.
        threads: number of threads of CPU kernels, some of which need a buffer for each thread.
        device_type: device on which the call will run, such as "cuda" in a plan for a GPU with fake CPU tensors. None:
            the device of the call's values.
    """
    if not isinstance(node.target, OpOverload):
        return 0
    device_type = device_type or _device(node)
    if device_type == "cuda":
        return workspace_on_cuda(str(node.target.overloadpacket), node)
    if device_type != "cpu":
        return 0
    estimate = _TABLE.get(str(node.target.overloadpacket))
    if estimate is not None:
        return estimate(node, threads)
    return _promotion(node) if is_binary(node.target) else 0


def staging_bytes(started: fx.Node) -> int:
    """Return the bytes that the backend allocates for a collective in flight, in addition to its result.

    gloo's reduce_scatter copies its input; point-to-point transfers (`zgraph.runtime.exchanges`) copy nothing.

    Args:
        started: the start of the collective, or one of its results if it has several.
    """
    start = cast(fx.Node, started.args[0]) if nodes.is_getitem(started) else started
    if not nodes.is_reduce_scatter(start):
        return 0
    given = _tensor(start, 0)
    return _bytes(given) if group_backend(nodes.group_of(start), given.device) == "gloo" else 0


def disk_staging_bytes(order: Iterable[fx.Node], device_type: str | None = None) -> int:
    """Return the bytes of pinned host memory for copies between a disk and a GPU, on the rank that needs most.

    The first copies allocate this memory, and it is never freed.

    Args:
        order: nodes of a graph, or of a step's graphs.
        device_type: device on which they will run; None: the device of their values.
    """
    sizes: dict[bool, list[int]] = {True: [], False: []}  # of reads, and of writes
    for start in order:
        transit = meta.transit(start)
        if transit is None or not transit.tier.is_staged or not nodes.is_copy_start(start):
            continue
        is_read = nodes.is_reload(start)
        on_device = start if is_read else cast(fx.Node, start.args[0])
        if (device_type or meta.tensor_value(on_device).device.type) == "cpu":
            continue
        at_rest = start if nodes.is_spill(start) else cast(fx.Node, start.args[0 if is_read else 1])
        size = meta.longest_bytes(at_rest) or hint_of(meta.tensor_value(at_rest).nbytes) or 0
        sizes[is_read].append(size)
    return pinned_bytes(sizes[True], sizes[False])


def computes_elsewhere(order: Iterable[fx.Node], device_type: str | None) -> bool:
    """Return whether the device is not a CPU, so that tensors on the host are pinned.

    Args:
        order: nodes of a graph, or of a step's graphs.
        device_type: type of the device; None: the device of the nodes' values.
    """
    values = [meta.value(node) for node in order] if device_type is None else []
    return (device_type or "cpu") != "cpu" or any(
        isinstance(value, Tensor) and value.device.type != "cpu" for value in values
    )


def remaining_bytes(node: fx.Node) -> int:
    """Return the bytes that a call leaves in a parameter's state: at stage 1 the accumulated gradient, otherwise 0."""
    if node.target is not torch.ops.zgraph.accumulate_grad.default:
        return 0
    _, _, dtype, zero_stage, _ = cast("tuple[Any, ...]", node.args)
    return _bytes(_tensor(node, 0), dtype) if zero_stage == 1 else 0


def transient_bytes(
    graph: fx.Graph,
    allocated_bytes: Callable[[int], int],
    *,
    threads: int = 1,
    device_type: str | None = None,
) -> Iterator[int]:
    """Yield for each node the bytes of its workspace and of its collective's staging buffers.

    Args:
        graph: graph with fake values.
        allocated_bytes: function that rounds a request as the allocator does.
        threads, device_type: as for `workspace_bytes`.
    """
    for node in graph.nodes:
        taken = 0
        if node.op == "call_function" and not nodes.is_wait(node):
            taken = allocated_bytes(workspace_bytes(node, threads=threads, device_type=device_type))
            if nodes.is_collective(node):
                staged = [allocated_bytes(staging_bytes(one)) for one in nodes.started_by(node)]
                taken += sum(sorted(staged)[-AT_ONCE:])
        yield taken


# --- CPU kernels ----------------------------------------------------------------------------------------------------


def _attention(node: fx.Node, threads: int) -> int:
    """Return the bytes of two fp32 blocks for each thread: one of scores, and one of results.

    Narrow inputs need another block of scores in their own dtype.
    """
    query = _tensor(node, 0)
    rows, columns = _attention_block(node, 0)
    wide = rows * columns + 2 * rows + rows * (hint_of(query.shape[3]) or 0)
    narrow = rows * columns if query.dtype.itemsize < 4 else 0
    return threads * (wide * accumulate_dtype(query.dtype).itemsize + narrow * query.dtype.itemsize)


def _attention_backward(node: fx.Node, threads: int) -> int:
    """Return the bytes of two blocks of scores for each thread, and of a copy of the gradient if the kernel needs one.

    The gradient is copied unless its layout is [batch, sequence, heads, channels].
    """
    grad, query = _tensor(node, 0), _tensor(node, 1)
    rows, columns = _attention_block(node, 1)
    wide = 2 * rows * columns + rows
    narrow = 2 * rows * columns if query.dtype.itemsize < 4 else 0
    blocks = threads * (wide * accumulate_dtype(query.dtype).itemsize + narrow * query.dtype.itemsize)
    return blocks + (0 if grad.transpose(1, 2).is_contiguous() else _bytes(grad))


def _attention_block(node: fx.Node, query: int) -> tuple[int, int]:
    length, keys = (hint_of(_tensor(node, position).shape[2]) or 0 for position in (query, query + 1))
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, keys)


def _convolution(node: fx.Node, threads: int) -> int:
    """Return the bytes of copies in oneDNN's layout: input and weight together, or the result if it is larger."""
    if not _is_relaid(node, 0):
        return 0
    return max(_bytes(_tensor(node, 0)) + _bytes(_tensor(node, 1)), _bytes(meta.tensor_value(node)))


def _convolution_backward(node: fx.Node, threads: int) -> int:
    if not _is_relaid(node, 1):
        return 0
    grad, source, weight = (_bytes(_tensor(node, position)) for position in range(3))
    strided = any(step != 1 for step in cast("Sequence[int]", node.args[4]))
    return max(grad + source, 2 * source - weight if strided else 0)


def _is_relaid(node: fx.Node, source: int) -> bool:
    value, weight = _tensor(node, source), _tensor(node, source + 1)
    transposed = node.args[source + 6]  # torch turns it into another convolution
    return value.is_contiguous() and any(hint_of(size) != 1 for size in weight.shape[2:]) and not transposed


def _first_argument(node: fx.Node, threads: int) -> int:
    return _bytes(_tensor(node, 0))


def _reduction(node: fx.Node, threads: int) -> int:
    """Return the bytes of a copy of the input in the dtype of the sum; 0 if the input already has that dtype."""
    source, result = _tensor(node, 0), meta.tensor_value(node)
    # The mean of everything sums narrow numbers in fp32.
    wide = accumulate_dtype(result.dtype) if node.target is aten.mean.default else result.dtype
    return _bytes(source, wide) if source.dtype != wide else 0


def _sum_ranks(node: fx.Node, threads: int) -> int:
    """Return the bytes of the sum over ranks, and of one rank's piece in the sum's dtype.

    The sum needs no extra memory if the result has the same dtype; the piece needs none unless it has to be widened.
    """
    received, result = _tensor(node, 0), meta.tensor_value(node)
    wide = accumulate_dtype(received.dtype)
    total, own = _bytes(result, wide), _bytes(result)
    piece = total if received.dtype != wide else 0
    return max(total + piece, total + (own if result.dtype != wide else 0)) - own


def _low_rank_left(node: fx.Node, threads: int) -> int:
    """Return the bytes of the largest gradient converted to fp32; gradients are converted one at a time."""
    grads = [meta.tensor_value(grad) for grad in cast("list[fx.Node]", node.args[0])]
    return max((_bytes(grad, torch.float32) for grad in grads if grad.dtype != torch.float32), default=0)


def _orthogonalize_owned(node: fx.Node, threads: int) -> int:
    """Return the bytes of the largest matrix before and after an iteration, and of the two square products."""
    layout = OwnersArgs.of(node).layout
    shapes = zip(layout.rows, layout.columns, strict=True)
    return max(2 * rows * columns + 2 * min(rows, columns) ** 2 for rows, columns in shapes) * ORTHOGONAL_DTYPE.itemsize


def _promotion(node: fx.Node) -> int:
    """Return the bytes of operands converted to their common dtype.

    An in-place result of another dtype needs one more copy.
    """
    operands = [meta.value(given) for given in node.args[:2] if isinstance(given, fx.Node)]
    values = [value for value in operands if isinstance(value, Tensor)]  # a symbolic size is a number
    if len(values) < 2:
        return 0
    common = torch.result_type(*values)
    converted = [value for value in values if value.ndim and value.dtype != common]
    if written_arguments(node) and values[0].dtype != common:
        converted.append(values[0])
    return sum(_bytes(value, common) for value in converted)


_TABLE: Mapping[str, Callable[[fx.Node, int], int]] = MappingProxyType(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "aten.convolution": _convolution,
        "aten.convolution_backward": _convolution_backward,
        "aten.native_batch_norm_backward": _first_argument,
        "aten.native_dropout": _first_argument,  # the mask in the input's dtype
        "aten.native_dropout_backward": _first_argument,
        "aten.logsumexp": _first_argument,
        "aten.mean": _reduction,
        "aten.sum": _reduction,
        "aten.linalg_vector_norm": _reduction,
        "zgraph.low_rank_left": _low_rank_left,
        "zgraph.orthogonalize_owned": _orthogonalize_owned,
        "zgraph.orthogonalize_whole": _orthogonalize_owned,
        "zgraph.sum_ranks": _sum_ranks,
    }
)


def _tensor(node: fx.Node, position: int) -> Tensor:
    return meta.tensor_value(cast(fx.Node, node.args[position]))


def _device(node: fx.Node) -> str:
    value: Any = meta.value(node)
    first = value[0] if isinstance(value, tuple | list) and value else value
    return first.device.type if isinstance(first, Tensor) else ""


def _bytes(value: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor's elements, in `dtype` if given; 0 if their number depends on data."""
    return (hint_of(value.numel()) or 0) * (dtype or value.dtype).itemsize
