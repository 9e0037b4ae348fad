"""Muon and AdamW in several ways over links of a known rate, side by side.

    sudo .venv/bin/python examples/benchmarks/muon.py --rate 1gbit --json results.json

Muon steps the matrices of the blocks, AdamW the rest. A micro-batch is two sequences of the batch. Ranks and links are
those of shaped_link.py. The updates of Muon are rounded to bf16, so losses differ a little.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from builders import Build, Setting, Trainer, adamw, planned, shard_fully
from links import Strategy, choose, options_of, parsed, run_as_command, train_in_turns
from micro_batches import in_turn_of, trainer_of
from ranks import as_rank
from shaped_link import LOSS_TOLERANCE, set_up
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from workload import ModelConfig

SEQUENCES = 2  # of a micro-batch

_EPILOG = """\
strategies, in the order in which a repetition runs them; -muon steps matrices by torch.optim.Muon, the others by AdamW:
  ddp               DistributedDataParallel, no_sync for all but the last micro-batch; every rank computes all of Muon
  fsdp2             fully_shard of each block and of the rest; Muon computes on its DTensors
  zgraph-0, -2, -3  the whole step as one graph, planned for the measured machine; each matrix has an owner
  zgraph-3-muon-everywhere
                    the same, but every rank gathers and computes all matrices
"""


def main() -> int:
    as_rank(lambda rank, plan: train_in_turns(rank, plan, strategies(), partial(set_up, rank, plan, strategies())))
    sizes = replace(ModelConfig(), batch=SEQUENCES)
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
    rows: list[Strategy] = []
    for suffix, optimizers in (("", adamw), ("-muon", muon_and_adamw)):
        rows += [
            Strategy(f"ddp{suffix}", _ddp(optimizers)),
            Strategy(f"fsdp2{suffix}", _fsdp2(optimizers)),
            *(
                Strategy(
                    f"zgraph-{stage}{suffix}",
                    _zgraph(stage, optimizers),
                    ("ddp-muon", "fsdp2-muon", f"zgraph-{stage}") if suffix else (),
                    "zgraph",
                )
                for stage in (0, 2, 3)
            ),
        ]
    rows.append(Strategy("zgraph-3-muon-everywhere", _zgraph(3, muon_and_adamw, owners=False), needs="zgraph"))
    return {row.name: row for row in rows}


@dataclass(frozen=True)
class Both:
    """Two optimizers that step together."""

    of_matrices: optim.Optimizer
    of_others: optim.Optimizer

    def step(self) -> None:
        self.of_matrices.step()
        self.of_others.step()

    def zero_grad(self) -> None:
        self.of_matrices.zero_grad()
        self.of_others.zero_grad()


def muon_and_adamw(model: nn.Module) -> Both:
    """Muon for the matrices of the blocks, AdamW for all other parameters."""
    hidden = {name for name, one in model.named_parameters() if one.ndim == 2 and "blocks." in name}
    matrices = [one for name, one in model.named_parameters() if name in hidden]
    others = [one for name, one in model.named_parameters() if name not in hidden]
    return Both(optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=1e-3, fused=True))


Optimizers = Callable[[Any], Any]


def _ddp(optimizers: Optimizers) -> Build:
    def build(setting: Setting) -> Trainer:
        group = setting.mesh.get_group()
        model = DistributedDataParallel(setting.new_model(), process_group=group, gradient_as_bucket_view=True)
        called: Any = torch.compile(model) if setting.lowering == "inductor" else model
        return trainer_of(in_turn_of(called, optimizers(model), model.no_sync))

    return build


def _fsdp2(optimizers: Optimizers) -> Build:
    def build(setting: Setting) -> Trainer:
        model: Any = setting.new_model()
        shard_fully(model, model.blocks, "inductor" if setting.lowering == "inductor" else None, mesh=setting.mesh)
        return trainer_of(in_turn_of(model, optimizers(model), nullcontext))

    return build


def _zgraph(zero_stage: int, optimizers: Optimizers, *, owners: bool = True) -> Build:
    def build(setting: Setting) -> Trainer:
        import zgraph
        from zgraph.passes import OrthogonalizeOnOwners

        assert setting.hardware is not None, "set_up measures it for zgraph's rows"
        model: Any = zgraph.shard(setting.new_model(), setting.mesh, zero_stage=zero_stage)
        optimizer = optimizers(model)
        stepped: Any = [optimizer.of_matrices, optimizer.of_others] if isinstance(optimizer, Both) else optimizer
        passes = [one for one in planned() if owners or not isinstance(one, OrthogonalizeOnOwners)]
        target = zgraph.Target(hardware=setting.hardware, time_kernels=True)
        options = {"lowering": setting.lowering, "passes": zgraph.PassList(passes, target=target)}
        step = in_turn_of(model, optimizer, partial(zgraph.no_sync, model))
        return trainer_of(zgraph.training_step(model, stepped, options=options)(step))

    return build


if __name__ == "__main__":
    sys.exit(main())
