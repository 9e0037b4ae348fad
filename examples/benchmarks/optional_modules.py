"""The cost of a vision tower for a rank without images, compared with running the tower and adding zeros.

    python examples/benchmarks/optional_modules.py --json FILE        # two minutes with fx

Two ranks train a language model; rank 0 also has images in every step, where a tower runs. The ways take turns in
the same processes. Processor seconds are those of rank 1, which has no image: they leave out its waits.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from builders import shard_fully
from ranks import as_rank, on_all_ranks, run_ranks, slowest_ms
from record import about, parser_of, quartiles, save, table
from torch import Tensor, nn
from workload import SEED, Block, LanguageModel, ModelConfig, make_batch

import zgraph

RANKS, STEPS = 2, 4
PATCHES, PATCH = 64, 192
TEXT, NOBODY, SKIPPED, ZEROS, FSDP2 = (
    "text alone, without a tower",
    "optional tower that no rank runs",
    "optional tower that rank 0 runs",
    "tower that rank 0 runs, and rank 1 multiplies by zero",
    "the same with FSDP2",
)
WAYS = (TEXT, NOBODY, SKIPPED, ZEROS, FSDP2)


class Tower(nn.Module):
    """Blocks over the patches of an image."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.enter = nn.Linear(PATCH, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, image: Tensor) -> Tensor:
        """[batch, patches, patch] -> the summary of each image, [batch, 1, width]."""
        hidden = self.enter(image)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.mean(1, keepdim=True)


class Seeing(nn.Module):
    """A language model, and a tower whose features have a loss of their own."""

    def __init__(self, config: ModelConfig, *, sees: bool) -> None:
        super().__init__()
        self.tower = Tower(config) if sees else None
        self.text = LanguageModel(config)

    def forward(self, tokens: Tensor, image: Tensor | None, share: Tensor | None) -> Tensor:
        """The loss."""
        loss = self.text(tokens)
        if self.tower is not None and image is not None:
            seen = self.tower(image)
            loss = loss + (seen if share is None else seen * share).square().mean()
        return loss


def steps_of(way: str, rank: int, config: ModelConfig, lowering: str) -> Callable[[], None]:
    torch.manual_seed(SEED)
    model = Seeing(config, sees=way != TEXT)
    if way == FSDP2:
        backend = "aot_eager" if lowering == "fx" else "inductor"
        assert model.tower is not None
        shard_fully(model, [*model.text.blocks, *model.tower.blocks], backend)
        run: Any = model
    else:
        optional = [model.tower] if way in (NOBODY, SKIPPED) and model.tower is not None else []
        zgraph.shard(model, optional=optional)
        run = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, image = make_batch(config, 0, rank), torch.randn(config.batch, PATCHES, PATCH)
    runs = way in (ZEROS, FSDP2) or (way == SKIPPED and rank == 0)
    share = torch.tensor(float(rank == 0)) if way in (ZEROS, FSDP2) else None

    def step() -> None:
        run(tokens, image if runs else None, share).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each step on the slower rank, and processor milliseconds of rank 1."""
    config = ModelConfig(**plan["model"])
    steps = {way: steps_of(way, rank, config, plan["lowering"]) for way in WAYS}
    for step in steps.values():
        step()
        step()
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    busy: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(plan["rounds"]):
        for way, step in steps.items():
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                step()
            taken[way].append((time.perf_counter() - begun) / STEPS)
            busy[way].append((time.process_time() - used) / STEPS)
    return {
        way: {"step_ms": slowest_ms(taken[way]), "busy_ms": [1e3 * one for one in on_all_ranks(busy[way])[1]]}
        for way in WAYS
    }


def main() -> None:
    args = parser_of(__doc__, width=384, layers=6, rounds=9, lowering="fx").parse_args()
    found: dict[str, Any] = {"lowering": args.lowering, "width": args.width, "layers": args.layers, **about()}
    plan = {"model": {"width": args.width, "layers": args.layers}, "lowering": args.lowering, "rounds": args.rounds}
    found["rows"] = run_ranks(__file__, plan, range(RANKS))
    rows = []
    for way, row in found["rows"].items():
        for key in ("step_ms", "busy_ms"):
            pairs = zip(row[key], found["rows"][TEXT][key], strict=True)
            row[f"{key}_of_text"] = quartiles([one / text for one, text in pairs])
        figures = [f"{quartiles(row[key])[1]:.0f}" for key in ("step_ms", "busy_ms")]
        rows.append((way, *figures, *(f"{row[f'{key}_of_text'][1]:.2f}" for key in ("step_ms", "busy_ms"))))
    heads = ("way", "step ms", "rank 1's processor ms", "step / text", "processor / text")
    print(table(heads, rows))
    save(args.json, found)


if __name__ == "__main__":
    as_rank(measure)
    main()
