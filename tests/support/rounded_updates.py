"""The oracle of rounded moments: plain lines whose optimizer steps by the reference of the kernel, shard by shard."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.memory.live_tensors import local
from zgraph.codegen.kernels import adam_reference
from zgraph.torch_compat.dtensor import dtensor_like


class RoundedSteps:
    """Takes the place of `step` of a fused Adam or AdamW in plain lines.

    Args:
        model: whose parameters are split over all ranks, or held whole by each.
        optimizer: of torch.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        optimizer.__dict__["step"] = self.step

    @torch.no_grad()
    def step(self) -> None:
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        skips = found_inf is not None and bool(found_inf)
        for group in self.optimizer.param_groups:
            options = adam_reference.AdamOptions(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                decoupled=isinstance(self.optimizer, torch.optim.AdamW),
                maximize=group["maximize"],
            )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._state_of(parameter)
                    if not skips:
                        self._update(parameter, state, options, None if scale is None else scale.item())

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.optimizer.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
        for key in ("exp_avg", "exp_avg_sq"):
            part = local(state[key]) if key in state else torch.zeros_like(local(parameter))
            part = part.to(torch.bfloat16)  # a load makes fp32 of it
            state[key] = dtensor_like(part, parameter) if isinstance(parameter, DTensor) else part
        return state

    def _update(self, parameter: Tensor, state: dict[str, Any], options: Any, scale: float | None) -> None:
        state["step"] += 1
        shard, name = local(parameter), self.names[id(parameter)]
        before = 0
        if shard.shape != parameter.shape:
            rows = -(-parameter.shape[0] // dist.get_world_size())
            before = min(dist.get_rank() * rows, parameter.shape[0]) * math.prod(parameter.shape[1:])
        assert parameter.grad is not None
        adam_reference.update(
            [shard],
            [local(parameter.grad)],
            [local(state["exp_avg"])],
            [local(state["exp_avg_sq"])],
            [state["step"].item()],
            [zlib.crc32(name.encode())],
            [before],
            options,
            scale,
        )
