"""Train a model whose layers are split inside of each of two hosts, over a link of a known rate.

    sudo .venv/bin/python examples/benchmarks/tensor_link.py --rate 1gbit --json results.json

Four ranks on two hosts: torch's tensor parallelism between the two ranks of a host, which one core computes, and data
parallelism across the link, by FSDP2 or by zgraph. Exits with 1 when losses that should be equal differ.
"""

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from builders import Setting, build_fsdp2, build_zgraph, by_rules, loco
from links import Strategy, options_of, parsed, run_as_command, train_in_turns
from ranks import as_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workload import LanguageModel, ModelConfig

HOST_OF = (0, 0, 1, 1)  # of each rank
COLUMNS, ROWS = ("query", "key", "value", "up"), ("attention_out", "down")


class Block(nn.Module):
    """Causal attention and a feed-forward layer; counts its heads by what it is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.attention_out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, _ = hidden.shape
        normed = self.attention_norm(hidden)
        query, key, value = (
            layer(normed).view(batch, sequence, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return hidden + self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))


def split_model(mesh: DeviceMesh, config: ModelConfig) -> LanguageModel:
    """The usual model with attention and feed-forward layers of its blocks split over the mesh."""
    model = LanguageModel(config)
    model.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
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
    table = strategies()
    parser = options_of(
        (__doc__ or "").partition("\n\n")[0],
        f"strategies: {', '.join(table)}",
        ModelConfig(width=512, layers=10),
        steps=2,
    )
    arguments = parsed(parser)
    arguments.lowering = "inductor"
    names = arguments.strategies or list(table)
    for name in names:
        if name not in table:
            parser.error(f"strategy {name!r} is unknown; choose from {', '.join(table)}")
    # Inductor orders sums otherwise where collectives are part of a graph.
    return run_as_command(__file__, arguments, [table[name] for name in names], HOST_OF, cores=HOST_OF, tolerance=1e-5)


if __name__ == "__main__":
    sys.exit(main())
