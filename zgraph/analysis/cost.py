"""Predicts bytes, flops and microseconds of every node of a graph on given hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zgraph.analysis.hardware import Hardware
from zgraph.compression.low_rank import FACTOR_DTYPE, orthonormalize_work
from zgraph.compression.method_text import from_text
from zgraph.dialect.wire_dtypes import accumulate_dtype
from zgraph.graph import meta, nodes, operator_arguments, traits
from zgraph.graph.sizes import size_hint, tensors_of
from zgraph.graph.traffic import transfers_of
from zgraph.runtime.chunks import payload_bytes
from zgraph.runtime.groups import group_stride
from zgraph.runtime.owned_matrices import ORTHOGONAL_DTYPE, newton_schulz_flops
from zgraph.tiers.devices import kind_of_backend
from zgraph.tiers.lanes import COMPUTE, HOST_UPDATES, Lane
from zgraph.tiers.tier import HOST, Transit
from zgraph.torch_compat.fake_values import size_expression
from zgraph.torch_compat.operators import flop_formula, overwritten, written_arguments

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Predicted cost of one node.

    Attributes:
        lane: resource that the node occupies, such as compute or a link; None: the node needs no time.
        us: microseconds on that lane. A collective's start has all of its time, and the wait none.
        flops: floating-point operations of matrix products.
        moved_bytes: bytes of memory traffic, or bytes sent.
    """

    lane: Lane | None
    us: float
    flops: int = 0
    moved_bytes: int = 0


FREE = NodeCost(None, 0.0)


# Operators without an entry in torch's flop registry, and operators whose formulas are used for them.
_COUNTED_LIKE = (
    (aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
    ),
)


class CostModel:
    """Predicts the costs of nodes on given hardware; equal nodes are estimated once.

    Args:
        hardware: hardware of one rank.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.known: dict[Any, NodeCost] = {}
        self.described: dict[fx.Node, Any] = {}
        self.strides: dict[str, int] = {}

    def cost(self, node: fx.Node) -> NodeCost:
        """Return the cost of one node. Never raises: an unknown operator is estimated by its bytes.

        A gather whose result is kept for a `no_sync` window has the cost of its first run. Fusion is not considered:
        fused kernels move fewer bytes.
        """
        if traits.is_free(node) and meta.transit(node) is None:
            return FREE
        if nodes.is_collective(node) or nodes.is_marker(node) or nodes.is_orthogonalize(node):
            return self._communication(node)
        where = meta.transit(node), meta.longest_bytes(node), meta.beside(node) is not None
        key = (node.target, self._key(node), self._key(node.args), self._key(node.kwargs), where)
        try:
            found = self.known.get(key)
        except TypeError:  # an argument that cannot be hashed
            return self._local(node)
        if found is None:
            found = self.known[key] = self._local(node)
        return found

    def _key(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument not in self.described:
                layouts = map(self._layout, tensors_of(argument))
                self.described[argument] = (*layouts, meta.longest_bytes(argument))
            return self.described[argument]
        if isinstance(argument, list | tuple):
            return tuple(map(self._key, cast("tuple[Any, ...]", argument)))
        if isinstance(argument, dict):
            return tuple((name, self._key(value)) for name, value in cast("dict[Any, Any]", argument).items())
        return argument

    def _layout(self, tensor: Tensor) -> Any:
        strides = () if tensor.layout != torch.strided else tuple(map(size_expression, tensor.stride()))
        return tuple(map(size_expression, tensor.shape)), strides, tensor.dtype, tensor.device.type

    # --- collectives

    def _communication(self, node: fx.Node) -> NodeCost:
        us = 0.0
        sent = 0
        found = list(transfers_of(node))
        for transfer in found:
            sent_bytes = size_hint(transfer.sent_bytes)
            stride = self._stride(transfer.group_name)
            us += self.hardware.collective_us(transfer.kind, sent_bytes, transfer.group_size, stride)
            if nodes.is_grouped_gather(node) and not kind_of_backend(self.hardware.backend).groups_launches:
                launch_us = self.hardware.collective_us(transfer.kind, 0, transfer.group_size, stride)
                us += (len(nodes.sent_by(node)) - 1) * launch_us
            sent += sent_bytes
        if not nodes.is_collective(node):  # a marker's kernel also casts, pads and sums, one after another
            local = self._kernel(node)
            if not found:
                return local
            us += local.us
        group_name = found[0].group_name if found else nodes.group_of(node)  # reductions may have a group of their own
        return NodeCost(Lane.of_group(group_name), us, 0, sent)

    def _stride(self, group_name: str) -> int:
        if group_name not in self.strides:
            self.strides[group_name] = group_stride(group_name)
        return self.strides[group_name]

    # --- everything else

    def _local(self, node: fx.Node) -> NodeCost:
        results = tensors_of(node)
        transit = meta.transit(node) or _crossing(node)
        if transit is not None:
            moved = self._copied_bytes(node)
            us = transit.tier.copy_us(self.hardware, moved, to_device=transit.to_device)
            return NodeCost(transit.lane, us, 0, moved)
        if meta.beside(node) is not None:
            moved = self._updated_bytes(node)
            return NodeCost(HOST_UPDATES, self.hardware.host_update_us(moved), 0, moved)
        if not results and not written_arguments(node):
            return FREE
        if nodes.is_sum_ranks(node):
            return self._sum_ranks(node)
        if nodes.is_for_owners(node):
            return self._for_owners(node)
        return self._kernel(node)

    def _copied_bytes(self, node: fx.Node) -> int:
        """Return the bytes of a copy between memory spaces; for shards and state, on the rank with the most rows."""
        if nodes.is_store(node) or nodes.is_return(node):  # these yield nothing
            node = node.all_input_nodes[0]
            while meta.longest_bytes(node) is None and nodes.is_copy_wait(node):
                node = node.all_input_nodes[0]
        return meta.longest_bytes(node) or sum(map(_bytes, tensors_of(node))) or self._read_bytes(node)

    def _updated_bytes(self, node: fx.Node) -> int:
        """Return the bytes that an optimizer update reads and writes.

        If ranks have different numbers of a parameter's rows, the largest number counts.
        """
        written = dict.fromkeys(overwritten(node))
        given = [*node.args, *node.kwargs.values()]
        lists = [cast("list[fx.Node]", one) for one in given if isinstance(one, list | tuple) and one]
        total = 0
        for members in zip(*lists, strict=True):
            whole = [(one, meta.tensor_value(one)) for one in members if isinstance(one, fx.Node)]
            numel = max(
                (longest // value.dtype.itemsize for one, value in whole if (longest := meta.longest_bytes(one))),
                default=0,
            )
            for one, value in whole:
                size = (numel or _numel(value)) * value.dtype.itemsize if value.ndim else value.dtype.itemsize
                total += size * (2 if one in written else 1)
        return total

    def _kernel(self, node: fx.Node) -> NodeCost:
        """Return the cost of a kernel that reads each input once and writes each result once.

        For a call without results, the tensors that it updates count as results.
        """
        results = tensors_of(node) or [value for one in overwritten(node) for value in tensors_of(one)]
        moved = self._read_bytes(node) + sum(map(_bytes, results))
        if nodes.is_cast_shards(node):  # ranks have different numbers of rows: all count the longest shard
            shards = cast("list[fx.Node]", node.args[0])
            wide = [meta.tensor_value(shard).dtype.itemsize for shard in shards]
            pairs = zip(wide, results, strict=True)
            moved = sum(_numel(one) * (size + one.dtype.itemsize) for size, one in pairs)
        if traits.of(node).accumulates:
            # The accumulated sum is read as well, and written if it is not the result.
            grad, dtype = node.all_input_nodes[0], cast(torch.dtype, node.args[2])
            moved += 2 * _numel(meta.tensor_value(grad)) * dtype.itemsize
        if nodes.is_quantize(node):
            moved += 2 * _error_bytes(node)  # the error is read and written
        flops = self._flops(node)
        if nodes.is_low_rank(node):
            passes, products = _LOW_RANK_WORK[nodes.is_low_rank_left(node), nodes.is_low_rank_right(node)]
            args = operator_arguments.LowRankArgs.of(node)
            moved += passes * FACTOR_DTYPE.itemsize * args.numel
            flops = products * 2 * args.rank * args.numel
        dtype = next((value.dtype for source in node.all_input_nodes for value in tensors_of(source)), torch.float32)
        if nodes.is_orthogonalize(node):
            dtype = ORTHOGONAL_DTYPE
        us = self.hardware.compute_us(flops, moved, dtype)
        if nodes.is_low_rank_right(node):  # products, after many small kernels that orthogonalize
            launches, swept = orthonormalize_work(operator_arguments.LowRankArgs.of(node).layout)
            us, moved = us + self.hardware.compute_us(0, swept, FACTOR_DTYPE, launches), moved + swept
        return NodeCost(COMPUTE, us, flops, moved)

    def _for_owners(self, node: fx.Node) -> NodeCost:
        """Return the cost of packing matrices for their owners, or of an owner's work: on the rank with the most."""
        args = operator_arguments.OwnersArgs.of(node)
        layout, sent = args.layout, sum(map(_bytes, tensors_of(node)))
        works = [[layout.work(number, args.steps) for number in layout.owned_by(rank)] for rank in range(layout.world)]
        flops = max(sum(flops for flops, _ in work) for work in works)
        moved = max(sum(numel for _, numel in work) for work in works) * ORTHOGONAL_DTYPE.itemsize
        moved += 3 * sent  # its rows are read in fp32 or, by the owner, copied into matrices
        us = self.hardware.compute_us(flops, moved, ORTHOGONAL_DTYPE)
        return NodeCost(COMPUTE, us, flops, moved)

    def _sum_ranks(self, node: fx.Node) -> NodeCost:
        """Return the cost of `zgraph::sum_ranks`, which adds the pieces of all ranks one after another.

        On a CPU, each addition reads and writes the sum, which starts as a widened copy of the first piece or, without
        widening, as the sum of the first two pieces. On CUDA, a single kernel reads every piece and writes the result.
        """
        if self.hardware.is_gpu:
            return self._kernel(node)
        received, result = node.all_input_nodes[0], meta.tensor_value(node)
        wire = meta.tensor_value(received)
        total_bytes = _numel(result) * accumulate_dtype(wire.dtype).itemsize
        launches = cast(int, node.args[1])
        if wire.dtype == accumulate_dtype(wire.dtype) and launches > 1:
            launches -= 1
        moved = self._read_bytes(node) + (2 * launches - 1) * total_bytes
        if cast(int, node.args[2]) > 1:
            moved, launches = moved + 2 * total_bytes, launches + 1
        if result.dtype != accumulate_dtype(wire.dtype):
            moved, launches = moved + total_bytes + _bytes(result), launches + 1
        return NodeCost(COMPUTE, self.hardware.compute_us(0, moved, wire.dtype, launches), 0, moved)

    def _flops(self, node: fx.Node) -> Any:
        if node.target is torch.ops.zgraph.multiply_codes.default:
            return 2 * _numel(meta.tensor_value(node)) * meta.tensor_value(node.all_input_nodes[0]).shape[1]
        if nodes.is_orthogonalize(node):
            args = operator_arguments.OrthogonalizeArgs.of(node)
            return newton_schulz_flops(*args.shape, args.steps)
        target = next((like for target, like in _COUNTED_LIKE if target is node.target), node.target)
        count = _grouped_flops if target is aten._grouped_mm.default else flop_formula(target)
        if count is None:
            return 0
        try:
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: _shape(meta.value(source)))
            return count(*args, **kwargs, out_val=_shape(meta.value(node)))
        except Exception:  # formulas assert what they support; fall back to an estimate by bytes
            return 0

    def _read_bytes(self, node: fx.Node) -> int:
        sources = node.all_input_nodes[1:] if traits.of(node).overwrites else node.all_input_nodes
        read = [sum(map(_bytes, tensors_of(source))) for source in sources]
        if traits.of(node).reads_rows and read:
            read[0] = _bytes(meta.tensor_value(node))
        return sum(read)


# For each low-rank operator, its passes over the matrices besides reading inputs and writing results, and its products
# of matrices and factors. The left one reads the errors and its own result; the right one subtracts in place.
_LOW_RANK_WORK = MappingProxyType({(True, False): (2, 1), (False, True): (2, 2), (False, False): (0, 1)})


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(map(size_hint, value.shape))
    if isinstance(value, tuple | list):
        return tuple(map(_shape, cast("tuple[Any, ...]", value)))
    return value


def _bytes(tensor: Tensor) -> int:
    return _numel(tensor) * tensor.dtype.itemsize


def _numel(tensor: Tensor) -> int:
    """Return the number of elements that a tensor has in memory: expanded dims count as size 1."""
    sizes = list(map(size_hint, tensor.shape))
    if tensor.layout == torch.strided:
        strides = map(size_expression, tensor.stride())
        sizes = [size for size, stride in zip(sizes, strides, strict=True) if stride != 0]
    return math.prod(sizes)


def _error_bytes(quantize: fx.Node) -> int:
    """Return the bytes of error-feedback state for the gradients of a `quantize_grads` node."""
    args = operator_arguments.QuantizeArgs.of(quantize)
    states = [from_text(args.method).state(numel, args.world * args.stretches) for numel in args.numels]
    return sum(payload_bytes(shape, dtype) for state in states for shape, dtype in state.values())


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> Any:
    """Return the flops of a grouped matrix product, which has one product per expert.

    If a dim is divided among the experts, its size is the total over all experts.
    """
    groups = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _crossing(node: fx.Node) -> Transit | None:
    """Return the memory space and the direction of a copy between GPU and host; None for other operators."""
    if not traits.of(node).crosses_devices:
        return None
    source, result = tensors_of(node.all_input_nodes[-1]), tensors_of(node)
    if not source or not result:
        return None
    kinds = source[0].device.type, result[0].device.type
    if kinds[0] == kinds[1] or "cpu" not in kinds:
        return None
    return Transit(HOST, to_device=kinds[0] == "cpu")
