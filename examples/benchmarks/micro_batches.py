"""Accumulate gradients over several micro-batches in many ways over links of a known rate, side by side.

    sudo .venv/bin/python examples/benchmarks/micro_batches.py --rate 1gbit --batch 16 --json results.json

A micro-batch is two sequences of the batch. Ranks and links are those of shaped_link.py. Exits with 1 when losses that
should be equal differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from builders import (
    ONE_BUCKET_MIB,
    Build,
    Schedule,
    Setting,
    Trainer,
    adamw,
    hook_bf16,
    hook_powersgd,
    planned,
    shard_fully,
)
from links import Strategy, choose, options_of, parsed, run_as_command, train_in_turns
from ranks import as_rank
from shaped_link import LOSS_TOLERANCE, set_up
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from workload import ModelConfig

if TYPE_CHECKING:
    from zgraph import GraphPass

SEQUENCES = 2  # of a micro-batch

_EPILOG = """\
strategies, in the order in which a repetition runs them; all compute the same micro-batches:
  ddp               DistributedDataParallel; no_sync for all but the last micro-batch; -bf16 and -powersgd (of rank 4)
                    with the hook of that name
  fsdp2             fully_shard of each block and of the rest, which gathers and reduces in each micro-batch
  fsdp2-last        the same, with set_requires_gradient_sync(False) for all but the last micro-batch
  fsdp2-kept        the same, and parameters stay gathered in between (stage 2)
  zgraph-2, -3      the whole step as one graph, planned for the measured machine, no_sync for all but the last
                    micro-batch; -by-layer interleaves the micro-batches, and recomputes as little as memory allows;
                    -by-layer-least recomputes every layer, -by-layer-kept nothing; -loco and -lowrank compress
  ...-bf16          gathers bf16 and reduces fp32
"""

Scope = Callable[[], AbstractContextManager[object]]


def main() -> int:
    as_rank(lambda rank, plan: train_in_turns(rank, plan, strategies(), partial(set_up, rank, plan, strategies())))
    sizes = replace(ModelConfig(), batch=8 * SEQUENCES)
    parser = options_of((__doc__ or "").partition("\n\n")[0], _EPILOG, sizes, steps=2)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="default: %(default)s")
    parser.add_argument("--lowering", choices=list(LOSS_TOLERANCE), default="fx", help="default: %(default)s")
    arguments = parsed(parser)
    return run_as_command(
        __file__,
        arguments,
        choose(parser, arguments.strategies, strategies()),
        hosts=range(arguments.ranks),
        tolerance=LOSS_TOLERANCE[arguments.lowering],
    )


def strategies() -> dict[str, Strategy]:
    """Every row by name, in the order in which a repetition runs them."""
    peers = ("fsdp2", "fsdp2-last", "fsdp2-kept", "ddp", "zgraph-2", "zgraph-3")
    in_bf16 = ("fsdp2-bf16", "fsdp2-last-bf16", "fsdp2-kept-bf16", "ddp-bf16", "zgraph-2-bf16", "zgraph-3-bf16")
    in_turn = partial(planned, interleave_micro_batches=False)
    hooks = ("ddp", "ddp-bf16", "ddp-powersgd")
    rows = [
        Strategy("ddp", _ddp()),
        Strategy("ddp-bf16", _ddp(hook_bf16)),
        Strategy("ddp-powersgd", _ddp(partial(hook_powersgd, 4), one_bucket=True)),
        Strategy("zgraph-0-by-layer-loco", _zgraph(0, None, _by_layer(method="LoCo")), hooks, "zgraph"),
        Strategy("zgraph-0-by-layer-lowrank", _zgraph(0, None, _by_layer(method="LowRank")), hooks, "zgraph"),
    ]
    for suffix, dtype, against in (("", None, peers), ("-bf16", torch.bfloat16, in_bf16)):
        rows += [
            Strategy(f"fsdp2{suffix}", _fsdp2(dtype, accumulates=False, kept=False)),
            Strategy(f"fsdp2-last{suffix}", _fsdp2(dtype, accumulates=True, kept=False)),
            Strategy(f"fsdp2-kept{suffix}", _fsdp2(dtype, accumulates=True, kept=True)),
            Strategy(f"zgraph-2{suffix}", _zgraph(2, dtype, in_turn), needs="zgraph"),
            Strategy(f"zgraph-3{suffix}", _zgraph(3, dtype, in_turn), needs="zgraph"),
            Strategy(f"zgraph-0-by-layer{suffix}", _zgraph(0, dtype, _by_layer()), against, "zgraph"),
            Strategy(f"zgraph-3-by-layer{suffix}", _zgraph(3, dtype, _by_layer()), against, "zgraph"),
            Strategy(f"zgraph-3-by-layer-least{suffix}", _zgraph(3, dtype, _by_layer(True)), against, "zgraph"),
            Strategy(f"zgraph-3-by-layer-kept{suffix}", _zgraph(3, dtype, _by_layer(False)), against, "zgraph"),
        ]
    return {row.name: row for row in rows}


def in_turn_of(called: Callable[[Tensor], Tensor], optimizer: Any, accumulating: Scope) -> Callable[[Tensor], Tensor]:
    """A step of several micro-batches, all but the last in the scope `accumulating`; returns the mean loss."""

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        parts = tokens.split(SEQUENCES)
        for number, part in enumerate(parts, 1):
            with accumulating() if number < len(parts) else nullcontext():
                loss = called(part) / len(parts)
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def trainer_of(step: Callable[[Tensor], Tensor]) -> Trainer:
    nothing_left = torch.optim.SGD([torch.zeros(1)])
    return Trainer(step, nothing_left, backward=lambda loss: None)


def _ddp(register: Callable[[DistributedDataParallel], None] | None = None, *, one_bucket: bool = False) -> Build:
    def build(setting: Setting) -> Trainer:
        options: dict[str, Any] = {"bucket_cap_mb": ONE_BUCKET_MIB} if one_bucket else {}
        options |= {"process_group": setting.mesh.get_group(), "gradient_as_bucket_view": True}
        model = DistributedDataParallel(setting.new_model(), **options)
        if register is not None:
            register(model)
        called: Any = torch.compile(model) if setting.lowering == "inductor" else model
        return trainer_of(in_turn_of(called, adamw(model), model.no_sync))

    return build


def _fsdp2(param_dtype: torch.dtype | None, *, accumulates: bool, kept: bool) -> Build:
    def build(setting: Setting) -> Trainer:
        model: Any = setting.new_model()
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        compiler = "inductor" if setting.lowering == "inductor" else None
        shard_fully(model, model.blocks, compiler, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=not kept)
        scope = partial(_FsdpWindow, model, kept) if accumulates else nullcontext
        return trainer_of(in_turn_of(model, adamw(model), scope))

    return build


class _FsdpWindow(AbstractContextManager[None]):
    """A micro-batch of FSDP2 whose gradients are not reduced, and after which parameters stay gathered if `kept`."""

    def __init__(self, model: Any, kept: bool) -> None:
        self.model, self.kept = model, kept

    def __enter__(self) -> None:
        self._synchronize(False)

    def __exit__(self, *error: object) -> None:
        self._synchronize(True)

    def _synchronize(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)
        self.model.set_is_last_backward(on)
        if self.kept:
            self.model.set_reshard_after_backward(on)


def _zgraph(zero_stage: int, param_dtype: torch.dtype | None, schedule: Schedule) -> Build:
    def build(setting: Setting) -> Trainer:
        import zgraph

        assert setting.hardware is not None, "set_up measures it for zgraph's rows"
        model: Any = zgraph.shard(setting.new_model(), setting.mesh, zero_stage=zero_stage, param_dtype=param_dtype)
        optimizer: Any = adamw(model)
        target = zgraph.Target(hardware=setting.hardware, time_kernels=True)
        options = {"lowering": setting.lowering, "passes": zgraph.PassList(schedule(), target=target)}
        scope = partial(zgraph.no_sync, model)
        return trainer_of(zgraph.training_step(model, optimizer, options=options)(in_turn_of(model, optimizer, scope)))

    return build


def _by_layer(recompute: bool | None = None, method: str = "") -> Schedule:
    """Interleaved; costs decide what is recomputed if `recompute` is None. With a compression of gradients or none."""

    def schedule() -> list[GraphPass]:
        from zgraph.passes import InterleaveMicroBatches, LoCo, LowRank

        chosen = InterleaveMicroBatches(recompute=recompute)
        methods = {"": None, "LoCo": LoCo(), "LowRank": LowRank(rank=4)}
        passes = planned(interleave_micro_batches=True, compression=methods[method])
        return [chosen if isinstance(one, InterleaveMicroBatches) else one for one in passes]

    return schedule


if __name__ == "__main__":
    sys.exit(main())
