"""Training over a slow link: outer steps, methods that compress each gradient, and compute without a network.

    sudo .venv/bin/python examples/benchmarks/slow_links.py --rate 100mbit --json results.json

Two ranks, each a site, with links as in shaped_link.py. The ranks of rows with outer steps, or without a network, enter
only the first step of a turn together. Such a turn has as many steps as fragments need for a round each, or for two,
and its mean counts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import shaped_link
import torch
from builders import Build, Setting, Trainer, adamw
from links import Strategy, choose, options_of, parsed, run_as_command, train_in_turns
from ranks import as_rank
from workload import ModelConfig

import zgraph

OUTER = MappingProxyType({"outer-30": {"every": 30}, "outer-60": {"every": 60, "delay": 6}})
SHARED = ("ddp", "ddp-bf16", "ddp-powersgd-1", "zgraph-0-loco-means4", "zgraph-0-lowrank1")

_EPILOG = """\
strategies, in the order in which a repetition runs them:
  alone             each rank trains by itself, compiled by Inductor
  outer-30, -60     zgraph.OuterSteps with a round of each fragment every 30 steps, or every 60 steps, and then with a
                    delay of 6 steps; otherwise with its defaults
  the others        those of shaped_link.py: DDP, with hooks, and zgraph at stage 0 with compressed gradients
"""


def main() -> int:
    as_rank(
        lambda rank, plan: train_in_turns(
            rank, plan, strategies(), partial(shaped_link.set_up, rank, plan, strategies())
        )
    )
    model = ModelConfig(width=512, layers=10)
    parser = options_of((__doc__ or "").partition("\n\n")[0], _EPILOG, model, steps=2)
    parser.add_argument("--lowering", choices=["fx", "inductor"], default="inductor", help="default: %(default)s")
    arguments = parsed(parser)
    chosen = choose(parser, arguments.strategies, strategies())
    return run_as_command(__file__, arguments, chosen, hosts=[0, 1], tolerance=0.0)


def strategies() -> dict[str, Strategy]:
    """Every row by name, in the order in which a repetition runs them."""
    outer = [
        Strategy(name, build_outer(options), ("alone", *SHARED), "zgraph", steps=60) for name, options in OUTER.items()
    ]
    others = [shaped_link.strategies()[name] for name in SHARED]
    return {row.name: row for row in (Strategy("alone", build_alone, steps=60), *outer, *others)}


def build_alone(setting: Setting) -> Trainer:
    model = setting.new_model()
    return Trainer(torch.compile(model) if setting.lowering == "inductor" else model, adamw(model))


def build_outer(options: Mapping[str, Any]) -> Build:
    def build(setting: Setting) -> Trainer:
        model = setting.new_model()
        optimizer = _Stepping(adamw(model), zgraph.OuterSteps(model, setting.mesh, **options))
        return Trainer(torch.compile(model) if setting.lowering == "inductor" else model, optimizer)

    return build


@dataclass(frozen=True)
class _Stepping:
    """An optimizer, each of whose steps an outer step follows."""

    optimizer: torch.optim.Optimizer
    outer: zgraph.OuterSteps

    def step(self) -> None:
        self.optimizer.step()
        self.outer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
