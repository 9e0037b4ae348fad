"""Compression methods: the bytes that ranks send instead of a gradient, and the error-feedback state that they keep."""

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
    """Key of the random numbers in one reduction; the numbers may also depend on the rank.

    Attributes:
        step: number of earlier reductions of the parameter.
        salt: number that distinguishes process groups whose ranks have the same numbers.
    """

    step: int
    salt: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressionMethod(ABC):
    """Base class of compression methods: defines how many bytes a method sends, and which state it keeps.

    A gradient is cut into equal chunks, one for each rank of the group. Each chunk is encoded as bytes, and one
    all_to_all exchanges the bytes of many gradients. Each rank then decodes and sums the chunks that it has received.
    Chunks of a `BlockMethod` are encoded and decoded by kernels, chunks of a `TensorMethod` by its own methods. Each
    subclass is a frozen dataclass whose fields are numbers, strings, bools or dtypes.

    Attributes:
        name: identifier of the class in graphs and checkpoints, independent of class and module names. Each subclass
            must define a different one.
    """

    name: ClassVar[str]

    @property
    def reset_interval(self) -> int:
        """Number of optimizer steps after which the error-feedback state is reset to zeros; 0 for never."""
        return 0

    @abstractmethod
    def sections(self, numel: int) -> tuple[int, ...]:
        """Return the bytes of each section of an encoded chunk of `numel` elements, for example codes, then scales.

        In a bucket, the first sections of all gradients are stored together, then the second sections, and so on.
        """

    def state(self, numel: int, chunks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {name: (shape, dtype)} of the tensors kept for a gradient of `chunks` chunks; all start as zeros."""
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
            state: the tensors described by the method `state`, updated in place.
            draw, rank: seeds, from which all random numbers must come.

        Returns:
            [chunks, bytes] uint8 for each section.
        """

    @abstractmethod
    def dequantize_sum(self, sections: Sequence[Tensor], numel: int, draw: RngKey) -> Tensor:
        """Decode the chunks that this rank has received from all ranks, and return their sum.

        Args:
            sections: [ranks, bytes] uint8 for each section, by rank.
            numel: number of elements of the chunk.
            draw: key of random numbers that every sender's `quantize` received.

        Returns:
            [numel] fp32.
        """


@dataclass(frozen=True, kw_only=True)
class BlockMethod(CompressionMethod):
    """Base class of the built-in methods: integer codes, and one bf16 scale for each group of elements.

    Attributes:
        bits: bits of a code: 2, 4 or 8.
        group: number of elements that share a scale.
        rotate: whether to Hadamard-transform blocks of 32 elements, with random signs that differ between ranks and
            steps. This spreads outliers, and lets the quantization errors of equal gradients cancel in the mean.
        clip_search: whether to try a few clipping levels and use the one that loses least.
        error_dtype: dtype of the error-feedback state: torch.int8, with a scale for each group, or torch.float32.
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
        """Weight of the old error in the new error, from 0 to 1; None if no error is kept."""
        return None

    @property
    def levels(self) -> int:
        """Number of values of a code, for example 16 with 4 bits."""
        return 2**self.bits

    @property
    def clips(self) -> tuple[float, ...]:
        """Clipping levels to try, as shares of a group's largest magnitude."""
        if not self.clip_search:
            return (1.0,)
        return {2: (0.85, 0.7, 0.55), 4: (1.0, 0.87), 8: (1.0,)}[self.bits]

    def groups(self, numel: int) -> int:
        """Return the number of groups in a chunk of `numel` elements; the last group is padded with zeros."""
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
    """Low-bit codes with error feedback: a moving average of quantization errors is added to the next gradient.

    Attributes:
        beta: weight of the old error in the moving average.
        reset_every: number of optimizer steps after which the error is reset to zero; 0 for never.
        hops: number of exchanges.
            1: codes are sent directly to the rank that sums them, so that each of a host's P ranks sends the whole
            gradient across hosts.
            2: ranks of a host first sum their gradients, see `TwoHop`, so that each rank sends only 1/P of the gradient
            across hosts.
            "auto": 2 if the mesh replicates shards across hosts (hybrid sharding), or if the pipeline's hardware has
            several ranks on each of several hosts; otherwise 1.

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
    """Low-bit codes with classic error feedback: the whole quantization error is added to the next gradient.

    The noise of a single step is twice the noise without error feedback. With LoCo, it is 2 / (1 + beta) times the
    noise without error feedback.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv 1901.09847.
    """

    name: ClassVar[str] = "ErrorFeedback"
    rotate: bool = False

    @property
    def residual_decay(self) -> float | None:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class NoFeedback(BlockMethod):
    """Low-bit codes without error feedback."""

    name: ClassVar[str] = "NoFeedback"
    rotate: bool = False
    clip_search: bool = False


@dataclass(frozen=True, kw_only=True)
class TwoHop:
    """Two compressed exchanges: 8-bit codes inside a host, and smaller codes across hosts, where links are slow.

    First the P ranks of a host sum their gradients, each rank 1/P of the elements. Then ranks at the same position in
    their hosts sum these parts over the hosts. Each rank sends only 1/P of the gradient across hosts, and keeps an
    error for that part only.

    Attributes:
        intra_host, inter_host: compression method inside a host, and across hosts.
        ranks_per_host: number of consecutive ranks that share a host. None: with hybrid sharding, the number of ranks
            that share one replica; otherwise the number in the pipeline's hardware. Required if both are missing.

    Source: Jia et al. 2024, "SDP4Bit", arXiv 2410.15526, section 3.2, which keeps no error.
    """

    intra_host: BlockMethod = NoFeedback(bits=8, group=512)
    inter_host: BlockMethod = LoCo(hops=1)
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None:
            check_least("zgraph.passes.TwoHop", 1, "the number of ranks on a host", ranks_per_host=self.ranks_per_host)
