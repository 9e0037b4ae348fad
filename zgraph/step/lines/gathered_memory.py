"""Refuse writes to gathered parameters in a captured forward: the parameters themselves would not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.step.lines.refusals import refusal
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import fake_storage_key
from zgraph.torch_compat.operators import OpOverload


class GatheredMemory:
    """Memory of the parameters that a trace has gathered.

    Attributes:
        names: names of parameters, by the ids of the traced tensors that are their handles.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._gathered: dict[int, tuple[Tensor, str]] = {}  # keeps the tensors, so that their memory is not reused

    def follow(self, func: OpOverload, args: Sequence[object], result: object) -> None:
        """Record the result of an operator that has run, if it is a gathered parameter."""
        if func is torch.ops.zgraph.unshard.default and isinstance(result, Tensor):
            self._gathered[fake_storage_key(result)] = result, self.names.get(id(args[1]), "a parameter")

    def check(self, func: OpOverload, written: Sequence[Tensor]) -> None:
        """Refuse an operator that writes to a gathered copy: the parameter itself would keep its values.

        Raises:
            ZgraphError: gathered memory is written to; the message names the line and the parameter.
        """
        for one in written if self._gathered else ():
            found = self._gathered.get(fake_storage_key(local_of(one) if isinstance(one, DTensor) else one))
            if found is not None:
                raise refusal(
                    f"writes to the parameter {found[1]} inside a forward ({func}), where it reads as a copy",
                    "write to it before or after the forward, in the step's own lines (torch.no_grad(), copy_, "
                    "clamp_), or compute with a changed value instead",
                )
