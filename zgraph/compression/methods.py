"""Compression methods: what is sent instead of a gradient, and the error state that each rank keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zgraph.errors import check_least

HADAMARD = 32  # elements that a rotation mixes: five butterfly stages
SCALE_DTYPE = torch.bfloat16  # has fp32's range: in fp16 the scales of gradients around 1e-8 would vanish
BITS = (2, 4, 8)
Hops = Literal[1, 2, "auto"]


@dataclass(frozen=True)
class RngKey:
    """Key of the random numbers of one reduction; the numbers may also depend on the rank that draws them.

    Attributes:
        step: number of earlier reductions of the parameter.
        salt: number that distinguishes process groups in which ranks are numbered alike.
    """

    step: int
    salt: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressionMethod(ABC):
    """Base class of compression methods: how many bytes a method sends, and which state it keeps.

    A gradient is cut into equal chunks, one for each rank of the group. The chunks are encoded as bytes, which one
    all_to_all exchanges together with the bytes of other gradients. Then the chunks that all ranks have sent to this
    rank are decoded and summed: by kernels for a `BlockMethod`, by methods of the class for a `TensorMethod`. Each
    subclass is a frozen dataclass whose fields are numbers, strings, bools or dtypes.

    Attributes:
        name: identifier of the class in graphs and checkpoints, independent of class and module names. Each subclass
            must define a different one.
    """

    name: ClassVar[str]

    @property
    def reset_interval(self) -> int:
        """Number of optimizer steps after which the kept state is reset to zeros; 0 for never."""
        return 0

    @abstractmethod
    def sections(self, numel: int) -> tuple[int, ...]:
        """Number of bytes of each section that encodes a chunk of `numel` elements: for example codes, then scales.

        In a bucket, the first sections of all gradients are stored together, then the second sections, and so on.
        """

    def state(self, numel: int, chunks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype), by name, of the tensors kept for a gradient of `chunks` chunks; they start as zeros."""
        return {}


@dataclass(frozen=True, kw_only=True)
class TensorMethod(CompressionMethod):
    """Base class of compression methods written in tensor operations; subclass it to write your own.

    Neither `quantize` nor `dequantize_sum` may communicate.
    """

    @abstractmethod
    def quantize(self, grad: Tensor, state: dict[str, Tensor], draw: RngKey, rank: int) -> Sequence[Tensor]:
        """Encode a gradient as the bytes to send.

        Args:
            grad: [chunks, numel] in the gradient's dtype, padded with zeros.
            state: the kept tensors, as described by the method `state`; `quantize` updates them in place.
            draw, rank: random numbers may depend only on this key and this rank.

        Returns:
            [chunks, bytes] uint8 for each section.
        """

    @abstractmethod
    def dequantize_sum(self, sections: Sequence[Tensor], numel: int, draw: RngKey) -> Tensor:
        """Decode the chunks that all ranks have sent to this rank, and return their sum.

        Args:
            sections: [ranks, bytes] uint8 for each section, by rank.
            numel: elements of the chunk.
            draw: key of random numbers, the same that every sender's `quantize` was given.

        Returns:
            [numel] fp32.
        """


@dataclass(frozen=True, kw_only=True)
class BlockMethod(CompressionMethod):
    """Base class of the built-in methods: kernels make integer codes, and a bf16 scale for each group of elements.

    Attributes:
        bits: bits of a code: 2, 4 or 8.
        group: number of elements that share a scale.
        rotate: whether to mix blocks of 32 elements, with signs drawn anew by each rank and step. Then outliers spread,
            and the quantization errors of equal gradients cancel in the mean.
        clip_search: whether to try a few clipping levels and use the one that loses least.
        error_dtype: dtype of the kept error: torch.int8, with a scale for each group, or torch.float32.
        error_device: device of the error-feedback state: None for the gradient's device, or "cpu".
    """

    bits: int = 4
    group: int = 128
    rotate: bool = True
    clip_search: bool = True
    error_dtype: torch.dtype = torch.int8
    error_device: str | None = None

    @property
    def residual_decay(self) -> float | None:
        """Share of the old error in the new error, from 0 to 1; None if no error is kept."""
        return None

    @property
    def levels(self) -> int:
        """Number of different values of a code, for example 16 with 4 bits."""
        return 2**self.bits

    @property
    def clips(self) -> tuple[float, ...]:
        """Clipping levels to try, as shares of a group's largest magnitude."""
        if not self.clip_search:
            return (1.0,)
        return {2: (0.85, 0.7, 0.55), 4: (1.0, 0.87), 8: (1.0,)}[self.bits]

    def groups(self, numel: int) -> int:
        """Number of groups in a chunk of `numel` elements; the last group is padded with zeros."""
        return -(-numel // self.group)

    def sections(self, numel: int) -> tuple[int, ...]:
        groups = self.groups(numel)
        return groups * self.group * self.bits // 8, groups * SCALE_DTYPE.itemsize

    def state(self, numel: int, chunks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if self.residual_decay is None:
            return {}
        groups = self.groups(numel)
        error = {"error": ((chunks, groups, self.group), self.error_dtype)}
        return error if self.error_dtype.is_floating_point else error | {"error_scale": ((chunks, groups), SCALE_DTYPE)}

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.bits not in BITS:
            raise ValueError(f"zgraph.passes.{name}: bits={self.bits} do not fill whole bytes; write 2, 4 or 8.")
        power = self.group > 0 and self.group & (self.group - 1) == 0
        if not (power and 8 <= self.group <= 1024):
            raise ValueError(
                f"zgraph.passes.{name}: group={self.group}; a group is a power of two from 8 to 1024, such as 128."
            )
        if self.rotate and self.group < HADAMARD:
            raise ValueError(
                f"zgraph.passes.{name}: group={self.group} is smaller than the {HADAMARD} elements that a rotation "
                "mixes; write group=32 or more, or rotate=False."
            )
        if self.error_dtype not in (torch.int8, torch.float32):
            raise ValueError(
                f"zgraph.passes.{name}: error_dtype={self.error_dtype}; write torch.int8 or torch.float32."
            )
        if self.error_device not in (None, "cpu"):
            raise ValueError(f'zgraph.passes.{name}: error_device={self.error_device!r}; write None or "cpu".')


@dataclass(frozen=True, kw_only=True)
class LoCo(BlockMethod):
    """Gradients as codes of few bits; a moving average of what the codes lose is added to the next gradients.

    Attributes:
        beta: share of the old error in the new error.
        reset_every: number of optimizer steps after which the error is reset to zero; 0 for never.
        hops: 1: codes are sent directly to the rank that keeps the sum, so that each of a host's P ranks sends codes of
            the whole gradient across hosts. 2: ranks of a host first sum their gradients, see `TwoHop`, so that each
            rank sends codes of only 1/P of the gradient across hosts. "auto": 2 if the mesh replicates shards across
            hosts (hybrid sharding), or if the pipeline's hardware says that the group spans hosts with several ranks
            each; otherwise 1.

    Source: Xie et al. 2024, "LoCo", arXiv 2407.04480, equations 5 to 8. We differ in the rotation of groups, in
    clipping, and in scaling codes so that they are unbiased along the gradient; see codegen/kernels/reference.py.
    """

    name: ClassVar[str] = "LoCo"
    beta: float = 0.8
    reset_every: int = 1024
    hops: Hops = "auto"

    @property
    def residual_decay(self) -> float | None:
        return self.beta

    @property
    def reset_interval(self) -> int:
        return self.reset_every

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise ValueError(f"zgraph.passes.LoCo: beta={self.beta}; write a number from 0 up to, not including, 1.")
        check_least("zgraph.passes.LoCo", 0, "a number of steps, 0: never", reset_every=self.reset_every)
        if self.hops not in (1, 2, "auto"):
            raise ValueError(f'zgraph.passes.LoCo: hops={self.hops!r}; write 1, 2 or "auto".')


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(BlockMethod):
    """Classic error feedback: all that the codes lose of a gradient is added to the next gradient.

    The noise of a single step is twice the noise without feedback. With LoCo it is 2 / (1 + beta) times the noise
    without feedback.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv 1901.09847.
    """

    name: ClassVar[str] = "ErrorFeedback"
    rotate: bool = False

    @property
    def residual_decay(self) -> float | None:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class NoFeedback(BlockMethod):
    """Gradients as codes of few bits, without error feedback."""

    name: ClassVar[str] = "NoFeedback"
    rotate: bool = False
    clip_search: bool = False


@dataclass(frozen=True, kw_only=True)
class TwoHop:
    """8-bit codes inside a host, and smaller codes across hosts, where links are slow.

    First the ranks of a host sum their gradients, each rank one part of 1/P if the host has P ranks. Then ranks at the
    same position in their hosts sum these parts over the hosts. So each rank sends only 1/P of the gradient across
    hosts, and keeps the error of that part only.

    Attributes:
        intra_host, inter_host: compression method inside a host, and across hosts.
        ranks_per_host: number of neighbouring ranks that share a host. None: with hybrid sharding, the number of ranks
            that share one replica; otherwise the number in the pipeline's hardware. Required if there is neither.

    Source: Jia et al. 2024, "SDP4Bit", arXiv 2410.15526, section 3.2, which keeps no error.
    """

    intra_host: BlockMethod = NoFeedback(bits=8, group=512)
    inter_host: BlockMethod = LoCo(hops=1)
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None:
            check_least("zgraph.passes.TwoHop", 1, "the number of ranks on a host", ranks_per_host=self.ranks_per_host)
