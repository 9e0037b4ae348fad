"""Options of a parameter: its layout on the mesh, and the dtypes in which it is read and reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zgraph.runtime.shard_layout import ShardLayout
from zgraph.sharding.meshes.tensor_split import TensorSplit
from zgraph.sharding.model.codes import Codes


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Options of one parameter that its markers need; equal blocks have equal options.

    Attributes:
        layout: layout on the mesh of the parameter, or of this rank's tensor-parallel part.
        dtype: dtype of the sharded parameter.
        device_type: device type of the mesh over which the parameter was sharded.
        rests_on: device type on which the parameter is stored between forwards.
        compute_dtype: dtype in which forward reads the parameter.
        wire_dtype: dtype in which its gradient is sent; None: the gradient's own.
        mean_dtype: dtype in which the gradient's mean is gathered, see `zgraph.dialect.wire_dtypes.mean_dtype_of`.
        reduction: "mean", "sum", or the divisor of the sum.
        split: placement on a tensor-parallel axis; None: there is no such axis.
        ignored: whether the parameter is neither sharded nor synchronised: each rank keeps its own values, and the
            gradient is not reduced.
        codes: encoding of the weight as low-bit codes (`layout` and `dtype` are then the codes'); None: not encoded.
        is_optional: whether a rank may skip the parameter in a step, see `OptionalParameters`.
    """

    layout: ShardLayout
    dtype: torch.dtype
    device_type: str
    rests_on: str
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype | None
    mean_dtype: torch.dtype | None
    reduction: str
    split: TensorSplit | None = None
    ignored: bool = False
    codes: Codes | None = None
    is_optional: bool = False

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which the parameter is gathered."""
        return self.compute_dtype if self.codes is None else self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.layout.shape if self.split is None else self.split.shape
