"""A long sequence on one rank, and shared by two ranks over a shaped link: time of a step, memory, bytes.

    sudo python examples/benchmarks/context_parallel.py --rate 10gbit --json FILE       # ten minutes

One rank computes the whole sequence while the other waits, then both compute their parts: with a context axis, and by
the parts of torch that a user would put together, FSDP2 and attention with an all_to_all written by hand; or with
DeepSpeed's Ulysses, if DeepSpeed is installed, uncompiled: compiled, its exchange has no gradient. A second
model has one head of keys for all queries, which pass by the ranks. Memory is the rise of the heap during forward and
backward, above parameters and optimizer state.
"""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from builders import shard_fully
from heap import Heap, HeapPeak
from netns import ShapedNetwork, transmitted_bytes
from ranks import as_rank, on_all_ranks, run_ranks, slowest_ms
from record import about, parser_of, quartiles, save, table
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

import zgraph

RANKS, VOCABULARY = 2, 512
WHOLE, SHARED, BY_HAND = (
    "one rank, whole sequence",
    "two ranks, context axis",
    "two ranks, FSDP2 and all_to_all by hand",
)
ULYSSES = "two ranks, FSDP2 and DeepSpeed's Ulysses"


class Block(nn.Module):
    """Causal attention and a feed-forward layer; `exchange` computes attention of parts, if it is by hand."""

    def __init__(self, width: int, heads: int, key_heads: int, exchange: Callable[..., Tensor]) -> None:
        super().__init__()
        self.features, self.exchange = width // heads, exchange
        self.sizes = [width, key_heads * self.features, key_heads * self.features]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.project(self.norms[0](hidden)).split(self.sizes, -1)
        query, key, value = (one.unflatten(2, (-1, self.features)).transpose(1, 2) for one in projected)
        mixed = self.exchange(query, key, value)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class Language(nn.Module):
    def __init__(self, plan: dict[str, Any], exchange: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = plan["width"]
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(plan["sequence"], width)
        sizes = (width, plan["heads"], plan["key_heads"], exchange)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(plan["layers"]))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        where = torch.arange(tokens.shape[1]) if positions is None else positions
        hidden = self.embed(tokens) + self.positions(where)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def attend_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Exchange tokens for heads and back; the parts are consecutive halves of the sequence."""
    group = dist.group.WORLD
    assert group is not None

    def exchanged(parts: Tensor) -> Tensor:
        ones = [1] * RANKS
        return all_to_all_single_autograd(parts.contiguous(), ones, ones, group)

    packed = torch.cat([one.unflatten(1, (RANKS, -1)).movedim(1, 0) for one in (query, key, value)], 2)
    whole = exchanged(packed).movedim(0, 2).flatten(2, 3)
    mixed = attend(*whole.chunk(3, 1))
    return exchanged(mixed.unflatten(2, (RANKS, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2)


def ulysses() -> Callable[..., Tensor]:
    """DeepSpeed's attention of parts, of [batch, tokens, heads, features] as it wants them."""
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

    def local(*parts: Tensor) -> Tensor:
        return attend(*(one.transpose(1, 2) for one in parts)).transpose(1, 2)

    exchange = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend_parts(*parts: Tensor) -> Tensor:
        return exchange(*(one.transpose(1, 2).contiguous() for one in parts), batch_dim_idx=0).transpose(1, 2)

    return cast("Callable[..., Tensor]", torch.compiler.disable(attend_parts))


def steps_of(way: str, plan: dict[str, Any], rank: int) -> tuple[nn.Module, Callable[[], None]]:
    tokens = torch.randint(VOCABULARY, (1, plan["sequence"] + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    model = Language(plan, ulysses() if way == ULYSSES else {BY_HAND: attend_by_hand}.get(way, attend))
    run: Any = model
    if way == SHARED:
        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
        zgraph.shard(model, mesh, context="cp")
        run = torch.compile(model, backend="zgraph", options={"lowering": plan["lowering"]})
        batch = zgraph.context_batch(model, batch)
    elif way in (BY_HAND, ULYSSES):
        compiler = "aot_eager" if plan["lowering"] == "fx" else "inductor"
        for block in model.blocks if way == ULYSSES else ():  # with a graph break at its exchange
            block.compile(backend=compiler)
        shard_fully(model, model.blocks, compiler if way == BY_HAND else None)
        half = slice(rank * plan["sequence"] // RANKS, (rank + 1) * plan["sequence"] // RANKS)
        batch = {name: one[:, half] for name, one in batch.items()}
        batch["positions"] = torch.arange(plan["sequence"])[half]
    else:
        run = torch.compile(model, backend="aot_eager" if plan["lowering"] == "fx" else "inductor")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        run(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def measure(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each step, the rise of the heap (and what zgraph predicted), and the bytes sent, by the way."""
    ways = [WHOLE, SHARED]
    if plan["key_heads"] == plan["heads"]:
        ways += [BY_HAND, *([ULYSSES] if find_spec("deepspeed") else [])]
    models, steps = {}, {}
    for way in ways:
        models[way], steps[way] = steps_of(way, plan, rank)
    heap = Heap()
    taken: dict[str, list[float]] = {way: [] for way in ways}
    rises: dict[str, list[int]] = {way: [] for way in ways}
    sent: dict[str, list[int]] = {way: [] for way in ways}
    for number in range(plan["rounds"] + 2):
        for way, step in steps.items():
            dist.barrier()
            begun, before = time.perf_counter(), transmitted_bytes()
            with HeapPeak(heap) as peak:
                if way != WHOLE or rank == 0:  # one rank, with the machine's memory to itself
                    step()
            if number > 1:
                taken[way].append(time.perf_counter() - begun)
                rises[way].append(peak.rise_bytes)
                sent[way].append(transmitted_bytes() - before)
    peaks = [graph.peak.bytes for graph in zgraph.summary(models[SHARED]).graphs if graph.peak is not None]
    return {
        way: {
            "predicted_mib": max(peaks) / 2**20 if way == SHARED else None,
            "step_ms": slowest_ms(taken[way]),
            "rise_mib": [max(one) / 2**20 for one in zip(*on_all_ranks(rises[way]), strict=True)],
            "sent_mb": [one / 1e6 for one in sent[way]],
        }
        for way in ways
    }


def main() -> None:
    parser = parser_of(__doc__, width=256, layers=4, sequence=8192, rounds=5, lowering="inductor", rate="10gbit")
    args = parser.parse_args()
    found: dict[str, Any] = {"options": {key: value for key, value in vars(args).items() if key != "json"}, **about()}
    rows = []
    for key_heads in (4, 1):
        plan = {**found["options"], "heads": 4, "key_heads": key_heads}
        with ShapedNetwork(RANKS, args.rate) as network:
            ways = run_ranks(__file__, plan, range(RANKS), network, range(RANKS))
        found[f"key_heads_{key_heads}"] = ways
        for way, row in ways.items():
            pairs = [zip(row[key], ways[WHOLE][key], strict=True) for key in ("step_ms", "rise_mib")]
            row["of_whole"], row["rise_of_whole"] = (quartiles([one / whole for one, whole in pair]) for pair in pairs)
            predicted = "" if row["predicted_mib"] is None else f"{row['predicted_mib']:.0f}"
            figures = [f"{quartiles(row[key])[1]:.0f}" for key in ("step_ms", "rise_mib", "sent_mb")]
            rows.append(
                (key_heads, way, *figures, predicted, f"{row['of_whole'][1]:.2f}", f"{row['rise_of_whole'][1]:.2f}")
            )
    print(
        table(
            (
                "heads of keys",
                "way",
                "step ms",
                "memory MiB",
                "sent MB",
                "predicted MiB",
                "time / whole",
                "memory / whole",
            ),
            rows,
        )
    )
    save(args.json, found)


if __name__ == "__main__":
    as_rank(measure)
    main()
