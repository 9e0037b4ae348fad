"""Workspace of CUDA kernels, and memory that CUDA libraries hold outside of the allocator, according to their sources.

Nothing here was measured on a GPU. Kernels that are not listed count as having no workspace. Convolutions are not
listed, because their workspace depends on the algorithm that cuDNN chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, fx

from zgraph.dialect.wire_dtypes import accumulate_dtype
from zgraph.graph import meta
from zgraph.torch_compat.fake_values import hint_of

_F32 = 4  # bytes
_I64 = 8


def workspace_on_cuda(operator: str, node: fx.Node) -> int:
    """Return the bytes that a call allocates and frees again before it returns; 0 for an unknown operator.

    Args:
        operator: name without overload, such as "aten.sort".
        node: the call, with fake values. In a plan for a GPU made on CPU tensors, CPU attention counts as CUDA's.
    """
    estimate = _TABLE.get(operator)
    return 0 if estimate is None else estimate(node)


def _flash_backward(node: fx.Node) -> int:
    """Return the total bytes of the query's gradient in fp32 and of one fp32 number per row of the query, both padded.

    If keys have fewer heads than the query, gradients of key and value with the query's number of heads are added.

    Source: Dao 2023, arXiv 2307.08691; torch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd:
    dq_accum [batch, rows to 128, heads, channels to 32], softmax_d [batch, heads, rows to 128], dk_ and dv_expanded.
    """
    query, key = _tensor(node, 1), _tensor(node, 2)
    batch, heads, rows, channels = map(_size, query.shape)
    rows = _up(rows, 128)
    padded = _up(channels, 32) if channels <= 192 else 256
    found = batch * heads * rows * (padded + 1) * _F32
    if _size(key.shape[1]) != heads:
        found += 2 * batch * heads * _size(key.shape[2]) * channels * query.dtype.itemsize
    return found


def _efficient_backward(node: fx.Node) -> int:
    """Return the total bytes of one fp32 number per row of the query and of fp32 gradients.

    Such a gradient is needed for each of query, key and value whose own dtype is narrower than fp32.

    Source: torch/aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h (workspace_size: gk, gv and
    gq are accumulated in fp32 if the output type is narrower), attention_backward.cu (delta).
    """
    query, key, value = (_tensor(node, place) for place in (1, 2, 3))
    batch, heads, rows = map(_size, query.shape[:3])
    narrow = [each for each in (query, key, value) if each.dtype.itemsize < _F32]
    return batch * heads * rows * _F32 + sum(_numel(each) for each in narrow) * _F32


def _sort(node: fx.Node) -> int:
    """Return the bytes of the second buffers for keys and positions that radix sort needs (cub::DeviceRadixSort)."""
    source = _tensor(node, 0)
    return _numel(source) * (source.dtype.itemsize + _I64)


def _embedding_backward(node: fx.Node) -> int:
    """Return the bytes of four sort buffers: token indices, their original positions, and a second buffer for each.

    Source: EmbeddingBackwardKernel.cu. The kernel for few tokens needs no buffers, but counts the same here.
    """
    return 4 * _numel(_tensor(node, 1)) * _I64


def _sum_ranks(node: fx.Node) -> int:
    """Return the bytes of the tensor in which a sum over ranks accumulates; 0 if the result has the same dtype."""
    received, result = _tensor(node, 0), meta.tensor_value(node)
    wide = accumulate_dtype(received.dtype)
    return _numel(result) * wide.itemsize if result.dtype != wide else 0


_TABLE: Mapping[str, Callable[[fx.Node], int]] = MappingProxyType(
    {
        "aten._scaled_dot_product_flash_attention_backward": _flash_backward,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
        # cuDNN keeps the same two (cudnn-frontend, scaled dot product attention backward: dQ_accum, softmax_sum).
        "aten._scaled_dot_product_cudnn_attention_backward": _flash_backward,
        "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "aten.sort": _sort,
        "aten.embedding_dense_backward": _embedding_backward,
        "zgraph.sum_ranks": _sum_ranks,
    }
)


def _tensor(node: fx.Node, position: int) -> Tensor:
    return meta.tensor_value(cast(fx.Node, node.args[position]))


def _size(size: object) -> int:
    return hint_of(size) or 0


def _numel(value: Tensor) -> int:
    return hint_of(value.numel()) or 0


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# --- outside of graphs ----------------------------------------------------------------------------------------------

# cuBLAS workspace of each handle and stream, from its first product on, inside the allocator: 4096 KiB x 8 on sm_90,
# else :4096:2:16:8 (torch/aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
CUBLAS_BYTES_HOPPER = 32 * 2**20
CUBLAS_BYTES = (2 * 4096 + 8 * 16) * 2**10
# A ring of one communicator, outside the allocator: on each of its channels a buffer for each protocol (NCCL's
# device.h: Simple 4 MiB, which NCCL_BUFFSIZE documents; LL128 8 x 120 x 640 x 8, LL 8 x 512 x 8 x 16 bytes). Assumes
# 16 channels, as usual over NVLink. Other algorithms connect, and allocate, when they first run (NCCL_RUNTIME_CONNECT).
COMMUNICATOR_BYTES = 16 * (4 * 2**20 + 8 * 120 * 640 * 8 + 8 * 512 * 8 * 16)


def resting_bytes(backend: str, dtypes: Mapping[torch.dtype, float], communicators: int) -> tuple[int, int]:
    """Return the bytes of cuBLAS workspaces, and the bytes of NCCL communicators, that one rank always holds.

    Args:
        backend: backend of the groups. For any but NCCL, both results are 0.
        dtypes: peak flops per microsecond by dtype; if 8-bit floats are listed, the GPU is a Hopper or newer.
        communicators: number of this rank's communicators, without those of a single rank.
    """
    if backend != "nccl":
        return 0, 0
    cublas = CUBLAS_BYTES_HOPPER if torch.float8_e4m3fn in dtypes else CUBLAS_BYTES
    return 2 * cublas, communicators * COMMUNICATOR_BYTES  # forward's stream and the backward thread's handle
