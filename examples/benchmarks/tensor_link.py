"""Train a model whose layers are split inside of each of two hosts, over a link of a known rate.

    sudo .venv/bin/python examples/benchmarks/tensor_link.py --rate 1gbit --json results.json

Four ranks on two hosts: torch's tensor parallelism between the two ranks of a host, which one core computes, and data
parallelism across the link, by FSDP2 or by zgraph. Exits with 1 when losses that should be equal differ.
"""

import sys
from functools import partial
from typing import Any

import torch
from builders import Setting, build_fsdp2, build_zgraph, by_rules, loco
from links import Strategy, choose, options_of, parsed, run_as_command, train_in_turns
from ranks import as_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workload import Block, LanguageModel, ModelConfig

HOST_OF = (0, 0, 1, 1)  # of each rank
COLUMNS, ROWS = ("query", "key", "value", "up"), ("attention_out", "down")


class SplitBlock(Block):
    """A block whose queries, keys and values come from a layer each; it counts the heads that it is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.query_key_value
        self.query, self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(3))

    def heads_of(self, normed: Tensor) -> list[Tensor]:
        return [
            layer(normed).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]


def split_model(mesh: DeviceMesh, config: ModelConfig) -> LanguageModel:
    """The usual model with attention and feed-forward layers of its blocks split over the mesh."""
    model = LanguageModel(config)
    model.blocks = nn.ModuleList(SplitBlock(config) for _ in range(config.layers))
    ways: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in model.blocks:
        parallelize_module(block, mesh, ways)
    return model


def strategies() -> dict[str, Strategy]:
    """By name; all of zgraph's are scheduled by rules."""
    codes = partial(loco, preset=by_rules)
    bf16 = torch.bfloat16
    builds = {
        "fsdp2": build_fsdp2(),
        "fsdp2-zero2": build_fsdp2(gathers_again=False),
        "fsdp2-zero2-reduce-bf16": build_fsdp2(reduce_dtype=bf16, gathers_again=False),
        "zgraph-3": build_zgraph(by_rules, zero_stage=3),
        "zgraph-2": build_zgraph(by_rules, zero_stage=2),
        "zgraph-2-reduce-bf16": build_zgraph(by_rules, zero_stage=2, reduce_dtype=bf16),
        "zgraph-0": build_zgraph(by_rules, zero_stage=0),
        "zgraph-0-loco": build_zgraph(codes, zero_stage=0),
        "zgraph-0-loco-means4": build_zgraph(partial(codes, 4), zero_stage=0),
    }
    gathered_once = ("fsdp2-zero2", "fsdp2-zero2-reduce-bf16")
    peers = {"zgraph-3": ("fsdp2",), "zgraph-2": gathered_once[:1], "zgraph-0": gathered_once[:1]}
    lossy = [name for name in builds if "bf16" in name or "loco" in name]
    return {
        name: Strategy(
            name,
            build,
            peers=() if name.startswith("fsdp2") else peers.get(name, gathered_once),
            needs="zgraph" if name.startswith("zgraph") else "torch",
            equal_loss=None if name in lossy else "fsdp2",
        )
        for name, build in builds.items()
    }


def set_up(config: ModelConfig) -> Setting:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return Setting(config, mesh["dp"], "inductor", make_model=partial(split_model, mesh["tp"]))


def main() -> int:
    as_rank(lambda rank, plan: train_in_turns(rank, plan, strategies(), set_up))
    epilog = f"strategies: {', '.join(strategies())}"
    parser = options_of((__doc__ or "").partition("\n\n")[0], epilog, ModelConfig(width=512, layers=10), steps=2)
    arguments = parsed(parser)
    arguments.lowering = "inductor"
    chosen = choose(parser, arguments.strategies, strategies())
    # Inductor orders sums otherwise where collectives are part of a graph.
    return run_as_command(__file__, arguments, chosen, HOST_OF, cores=HOST_OF, tolerance=1e-5)


if __name__ == "__main__":
    sys.exit(main())
