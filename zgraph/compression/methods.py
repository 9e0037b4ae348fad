"""Compression methods: what travels instead of a gradient, and what each rank remembers of what it did not send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

HADAMARD = 32  # elements that a rotation mixes: five butterfly stages
SCALE_DTYPE = torch.bfloat16  # of fp32's range: in fp16 the scales of gradients around 1e-8 would vanish
BITS = (2, 4, 8)
Hops = Literal[1, 2, "auto"]


@dataclass(frozen=True)
class RngKey:
    """Key of the random numbers of one reduction, which may also depend on the rank that draws them.

    Attributes:
        step: how many reductions of the parameter came before.
        salt: tells apart groups that run side by side, whose members have equal ranks.
    """

    step: int
    salt: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressionMethod(ABC):
    """Interface of all methods to graphs, checkpoints and payloads: how many bytes it sends, and what state it keeps.

    A gradient is cut into equal chunks, one for each rank of the group. They are turned into bytes, which one
    all_to_all exchanges with those of other gradients, and the chunks that all ranks have sent to this one are summed:
    by kernels for a `BlockMethod`, by itself for a `TensorMethod`. Both are frozen dataclasses whose fields are
    numbers, strings, bools or dtypes.

    Attributes:
        name: registers the class: graphs and checkpoints know it by this, whatever the class and its module are called.
            A subclass has one of its own.
    """

    name: ClassVar[str]

    @property
    def reset_interval(self) -> int:
        """Optimizer steps after which what is kept starts as zeros again; 0: never."""
        return 0

    @abstractmethod
    def sections(self, numel: int) -> tuple[int, ...]:
        """Bytes that stand for a chunk of `numel` elements, section by section: codes, then scales, say.

        Sections of equal place in different gradients of a bucket lie side by side.
        """

    def state(self, numel: int, chunks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of what a rank keeps for a gradient of `chunks` chunks; it starts as zeros."""
        return {}


@dataclass(frozen=True, kw_only=True)
class TensorMethod(CompressionMethod):
    """Base class of methods that are written in tensor operations: subclass it for one of your own.

    Neither `quantize` nor `dequantize_sum` may communicate.
    """

    @abstractmethod
    def quantize(self, grad: Tensor, state: dict[str, Tensor], draw: RngKey, rank: int) -> Sequence[Tensor]:
        """The bytes to send.

        Args:
            grad: [chunks, numel] in the gradient's dtype; zeros behind its end.
            state: what is kept, updated in place.
            draw, rank: what random numbers may depend on.

        Returns:
            [chunks, bytes] uint8 for each section.
        """

    @abstractmethod
    def dequantize_sum(self, sections: Sequence[Tensor], numel: int, draw: RngKey) -> Tensor:
        """The sum of what all ranks have sent.

        Args:
            sections: [ranks, bytes] uint8 for each section, by rank.
            numel: elements of the chunk.
            draw: equal to that of all senders.

        Returns:
            [numel] fp32.
        """


@dataclass(frozen=True, kw_only=True)
class BlockMethod(CompressionMethod):
    """Base of zgraph's own methods: integer codes, and a bf16 scale for each group of elements, made by kernels.

    Attributes:
        bits: of a code: 2, 4 or 8.
        group: elements that share a scale.
        rotate: mix blocks of 32 elements, with signs drawn anew by each rank and step, so that outliers spread and the
            quantization errors of equal gradients cancel in the mean.
        clip_search: of a few clipping levels take the one which loses least.
        error_dtype: in which the error is kept: torch.int8, with a scale for each group, or torch.float32.
        error_device: device of the error-feedback state: None for the gradient's, or "cpu".
    """

    bits: int = 4
    group: int = 128
    rotate: bool = True
    clip_search: bool = True
    error_dtype: torch.dtype = torch.int8
    error_device: str | None = None

    @property
    def residual_decay(self) -> float | None:
        """Share of the old error in the new one; None where no error is kept."""
        return None

    @property
    def levels(self) -> int:
        """Number of values of a code: 16 with 4 bits."""
        return 2**self.bits

    @property
    def clips(self) -> tuple[float, ...]:
        """Clipping levels to try, as shares of a group's largest magnitude."""
        if not self.clip_search:
            return (1.0,)
        return {2: (0.85, 0.7, 0.55), 4: (1.0, 0.87), 8: (1.0,)}[self.bits]

    def groups(self, numel: int) -> int:
        """Groups of a chunk; the last is filled up with zeros."""
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
    """Low-bit gradients, and a moving average of what they lost, which is added to the next ones.

    Attributes:
        beta: share of the old error in the new one.
        reset_every: optimizer steps after which the error starts at zero again; 0: never.
        hops: 1 sends straight to where the sum is kept: of each host as many ranks as it has send all their codes to
            other hosts; 2 sums inside each host first, see `TwoHop`, and crosses with 1/P of that. "auto": 2 where the
            mesh replicates shards across hosts (hybrid sharding), and where the pipeline's hardware says that several
            ranks of the group share a host and others do not.

    Source: Xie et al. 2024, "LoCo", arXiv 2407.04480, equations 5 to 8. We differ in what a group is rotated by, how
    it is clipped, and in scaling codes so that they are unbiased along the gradient; see codegen/kernels/reference.py.
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
        if self.reset_every < 0:
            raise ValueError(f"zgraph.passes.LoCo: reset_every={self.reset_every}; write a number of steps, 0: never.")
        if self.hops not in (1, 2, "auto"):
            raise ValueError(f'zgraph.passes.LoCo: hops={self.hops!r}; write 1, 2 or "auto".')


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(BlockMethod):
    """Classic error feedback: whatever was not sent is added to the next gradient, whole.

    Its noise in a single step is twice that without feedback, where LoCo's is 2 / (1 + beta).

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv 1901.09847.
    """

    name: ClassVar[str] = "ErrorFeedback"
    rotate: bool = False

    @property
    def residual_decay(self) -> float | None:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class NoFeedback(BlockMethod):
    """Plain codes; what they lose is lost."""

    name: ClassVar[str] = "NoFeedback"
    rotate: bool = False
    clip_search: bool = False


@dataclass(frozen=True, kw_only=True)
class TwoHop:
    """Codes of 8 bits inside a host, and of fewer across hosts, where links are slow.

    Ranks of a host first sum their gradients, each rank a part of them; then ranks of equal place in their hosts sum
    these sums. Across hosts each rank sends, and keeps an error of, 1/P of the gradient, for P ranks per host.

    Attributes:
        intra_host, inter_host: the method of each hop.
        ranks_per_host: how many neighbouring ranks share a host. None: those that share the shards of hybrid sharding,
            whose replicas are the hosts, else what the pipeline's hardware says; it must be given where there is none.

    Source: Jia et al. 2024, "SDP4Bit", arXiv 2410.15526, section 3.2, which keeps no error.
    """

    intra_host: BlockMethod = NoFeedback(bits=8, group=512)
    inter_host: BlockMethod = LoCo(hops=1)
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise ValueError(
                f"zgraph.passes.TwoHop: ranks_per_host={self.ranks_per_host}; write how many ranks share a host."
            )
