"""Steps of Adam and AdamW with bf16 moments, for `zgraph.Offload(moments_dtype=torch.bfloat16)`.

Unlike in torch.optim, the moments of fp32 parameters are bf16, rounded stochastically. Groups and state entries
("step", "exp_avg", "exp_avg_sq") are those of torch.optim.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, optim

from zgraph.dialect.adam import fused_adam_op
from zgraph.errors import ZgraphError
from zgraph.optimizers.local_step import shards_of, take_over
from zgraph.tiers.offload import MOMENTS
from zgraph.torch_compat.modules import step_hooks

aten = torch.ops.aten
KINDS = (optim.Adam, optim.AdamW)
State = MutableMapping[Tensor, dict[str, Any]]
Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Drawn:
    """Seed of the random numbers that round one parameter's moments. Each step also uses the step's number.

    Attributes:
        salt: CRC-32 of the parameter's name.
        first: index of this rank's first element in the unsharded parameter.
    """

    salt: int
    first: int

    @classmethod
    def of(cls, name: str, first: int) -> Drawn:
        return cls(zlib.crc32(name.encode()), first)


def check_rounded(optimizer: optim.Optimizer) -> None:
    """Check that an optimizer can have rounded bf16 moments.

    Raises:
        ValueError: the optimizer cannot; the message gives the reason.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    what, instead = "", ""
    if kind not in KINDS:
        what, instead = f"the optimizer is {kind.__name__}", "use torch.optim.AdamW(..., fused=True), or Adam"
    elif not all(group.get("fused") for group in groups):
        what, instead = f"{kind.__name__} is not fused", f"write {kind.__name__}(..., fused=True)"
    elif any(group.get("amsgrad") for group in groups):
        what, instead = f"{kind.__name__} keeps a third moment, amsgrad=True", "leave amsgrad out"
    elif any(isinstance(beta, Tensor) for group in groups for beta in group["betas"]):
        what, instead = "betas are tensors", "write them as numbers"
    else:
        stepped = [one for group in groups for one in group["params"] if one.requires_grad]
        other = next((one for one in stepped if one.dtype != torch.float32), None)
        if other is not None:
            what = f"a parameter of shape {list(other.shape)} is {other.dtype}"
            instead = "keep parameters in float32, and compute with zgraph.shard(param_dtype=torch.bfloat16)"
    if what:
        raise ValueError(
            f"zgraph.Offload: moments_dtype=torch.bfloat16, but {what}; {instead}, or leave moments_dtype out."
        )


def rounded_step(
    optimizer: Any, groups: Sequence[Mapping[str, Any]], state: State, drawn: Mapping[Tensor, Drawn], call: Call
) -> None:
    """Take an optimizer step on local shards, whose gradients are in their `.grad`.

    Args:
        optimizer: the optimizer, with the attributes `grad_scale` and `found_inf` if a GradScaler has set them.
        groups: the optimizer's groups, with local shards in place of parameters.
        state: state of each shard. Missing entries are created, with bf16 moments.
        drawn: seeds of the random numbers, by shard.
        call: function that calls an operator with given arguments and options.
    """
    grad_scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    for group in groups:
        shards = [shard for shard in group["params"] if shard.grad is not None]
        if not shards:
            continue
        for shard in shards:
            _begin(state, shard)
        steps = [state[shard]["step"] for shard in shards]
        aten._foreach_add_.Scalar(steps, 1)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        lr = float(lr) if isinstance(lr, int) else lr
        lists = [
            shards,
            [shard.grad for shard in shards],
            *([state[shard][key] for shard in shards] for key in MOMENTS),
            steps,
            [drawn[shard].salt for shard in shards],
            [drawn[shard].first for shard in shards],
        ]
        options = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "decoupled": group["decoupled_weight_decay"],
            "maximize": group["maximize"],
            "grad_scale": grad_scale,
            "found_inf": found_inf,
        }
        call(fused_adam_op(lr), lists, options)
        if found_inf is not None:
            aten._foreach_sub_.List(steps, [found_inf] * len(steps))


def _begin(state: State, shard: Tensor) -> None:
    """Create the state entries of a shard that has none."""
    entries = state[shard]
    if "step" not in entries:
        entries["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
        for key in MOMENTS:
            entries[key] = torch.zeros_like(shard, dtype=torch.bfloat16)


@dataclass(frozen=True, eq=False)
class _PlainSteps:
    """Optimizer hook that takes the step with rounded moments, in place of `step()` itself.

    Attributes:
        drawn: returns the seeds of the random numbers, by parameter id.
    """

    drawn: Callable[[], Mapping[int, Drawn]]

    def __call__(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the step; return arguments with which `step()` then does nothing.

        Raises:
            ZgraphError: the step has a closure, or gradients or state have other placements than their parameters.
            ValueError: the optimizer's moments can no longer be rounded.
        """
        return cast(Any, torch.compiler.disable)(self._take)(optimizer, args, kwargs)

    @torch.no_grad()
    def _take(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_rounded(optimizer)
        found = shards_of(optimizer)
        if len(args) > 1 or kwargs or found is None:
            what = "gradients or state placed unlike their parameters" if found is None else "a closure"
            raise ZgraphError(
                f"zgraph.Offload: a step of {type(optimizer).__name__} with {what}, and moments_dtype; compute the "
                "loss before the step and leave gradients as backward makes them, or leave moments_dtype out."
            )
        shards, state = found
        known = self.drawn()
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        drawn = {
            shard: known[id(parameter)]
            for parameter, shard in zip(parameters, chain.from_iterable(shards), strict=True)
        }
        groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, shards, strict=True)]
        rounded_step(optimizer, groups, state, drawn, lambda operator, lists, options: operator(*lists, **options))
        take_over(optimizer, shards, state)
        idle: optim.Optimizer = object.__new__(type(optimizer))
        idle.__dict__ = {**optimizer.__dict__, "param_groups": []}
        return (idle,), kwargs


def round_plain_steps(optimizer: optim.Optimizer, drawn: Callable[[], Mapping[int, Drawn]]) -> None:
    """Make `optimizer.step()` round moments in steps outside of `zgraph.training_step`.

    Args:
        optimizer: the optimizer, to which a hook is added.
        drawn: returns the seeds of the random numbers, by parameter id.
    """
    if not any(isinstance(hook, _PlainSteps) for hook in step_hooks(optimizer)):
        optimizer.register_step_pre_hook(_PlainSteps(drawn))
