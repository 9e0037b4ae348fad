"""Checks of the tensors given to compression kernels: contiguity, alignment and device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zgraph.codegen.kernels.triton.constants import dtype_name
from zgraph.compression.methods import BlockMethod
from zgraph.compression.payload import BucketLayout


def block_method(layout: BucketLayout) -> BlockMethod:
    assert isinstance(layout.method, BlockMethod), "kernels know zgraph's own methods"
    return layout.method


def require_contiguous(who: str, tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError for a tensor that is not contiguous."""
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(
                f"zgraph.codegen.{who}: tensor {place} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
                "the kernel reads it as one run of elements: pass tensor.contiguous()."
            )


def require_aligned(who: str, tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError for a tensor that does not begin at a multiple of 16 bytes."""
    for tensor in tensors:
        if address_of(tensor) % 16:
            raise ValueError(
                f"zgraph.codegen.{who}: a {dtype_name(tensor.dtype)} tensor of shape {tuple(tensor.shape)} begins "
                f"{address_of(tensor) % 16} bytes after a multiple of 16, and the kernel reads 16 bytes per load; pass "
                "a tensor at the start of its storage, such as tensor.clone()."
            )


def require_device(who: str, payload: Tensor) -> None:
    """Raise a ValueError for a payload that a compiled kernel cannot access."""
    if payload.device.type == "cpu":
        raise ValueError(
            f"zgraph.codegen.{who}: the payload is on the CPU, and Triton compiles only for GPUs; move the bucket to "
            "a GPU, or call zgraph.codegen.kernels.reference."
        )


def address_of(tensor: Tensor) -> int:
    return tensor.data_ptr()
