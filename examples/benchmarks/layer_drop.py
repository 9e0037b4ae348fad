"""Time that `zgraph.LayerDrop` saves in a step of a GPT of 12 layers, and its effect on the loss.

    python examples/benchmarks/layer_drop.py --part times --json FILE     # minutes with fx
    python examples/benchmarks/layer_drop.py --part losses --json FILE    # an hour on one core

Times: two ranks train the model with masks that keep 12, 9, 6, 3 and 0 blocks, in turns. Embedding and head are never
dropped, so the time in proportion to the blocks is a line from the step without blocks to the step with all of them.
"one graph" is the same model without LayerDrop, compiled as a whole.

Losses: the GPT of examples/train_gpt.py on bytes of the standard library, on one process. FLOPs are counted by torch,
and differ between masks only in the number of blocks. The shorter plain run has the FLOPs of the run with LayerDrop,
and the same schedule in fewer steps. Held-out losses are of all blocks, at each fifth of the steps.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import as_rank, run_ranks, slowest_ms
from record import about, parser_of, quartiles, save, spread, table
from torch.utils.flop_counter import FlopCounterMode
from workload import SEED, LanguageModel, ModelConfig, make_batch

import zgraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT, cut, evaluate, lr_factor, make_optimizer, read_sources

RANKS, STEPS = 2, 2
LAYERS = 12
KEPT = (12, 9, 6, 3, 0)
WHOLE = "one graph"
HEADS = 4
WINDOWS = 256  # held out, in batches of 32
RATES = 5  # evaluations of a run


# --- times ------------------------------------------------------------------------------------------------------------


def steps_that_keep(drop: zgraph.LayerDrop) -> dict[int, int]:
    """The first step of the mask's stream that keeps each number of blocks."""
    found: dict[int, int] = {}
    while not set(KEPT) <= set(found):
        found.setdefault(sum(drop.kept), drop.step)
        drop.step += 1
    return found


def measure(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of steps by number of kept blocks, on the slower rank, and bytes that rank 0 sends in one."""
    config = ModelConfig(**plan["model"])
    options = {"lowering": plan["lowering"]}

    def made(*, drops: bool) -> tuple[Any, torch.optim.Optimizer, zgraph.LayerDrop | None, zgraph.Metrics]:
        torch.manual_seed(SEED)
        model = LanguageModel(config)
        zgraph.shard(model, zero_stage=plan["stage"])
        drop = zgraph.LayerDrop(model.blocks, theta=0.1, gamma=1.0) if drops else None
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return torch.compile(model, backend="zgraph", options=options), optimizer, drop, zgraph.Metrics(model)

    tokens = make_batch(config, 0, rank)
    dropped, whole = made(drops=True), made(drops=False)
    assert dropped[2] is not None
    places = steps_that_keep(dropped[2])
    sent: dict[str, int] = {}

    def step(name: str) -> None:
        model, optimizer, drop, metrics = whole if name == WHOLE else dropped
        if drop is not None:
            drop.step = places[int(name)]
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.step()
        sent[name] = (metrics.last and metrics.last.sent_bytes) or 0

    names = [WHOLE, *map(str, KEPT)]
    for name in [*names, *names]:
        step(name)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(plan["rounds"]):
        for name in names:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step(name)
            taken[name].append((time.perf_counter() - begun) / STEPS)
    graphs = [len(zgraph.summary(one[0]).graphs) for one in (whole, dropped)]
    return {
        "graphs": dict(zip((WHOLE, "LayerDrop"), graphs, strict=True)),
        "rows": {name: {"step_ms": slowest_ms(taken[name]), "sent_bytes": sent[name]} for name in names},
    }


def flops_of_step(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def flops_by_kept(config: ModelConfig) -> dict[str, int]:
    """FLOPs of matrix products and attention in a forward and backward of the uncompiled model, by kept blocks."""
    model = LanguageModel(config)
    drop = zgraph.LayerDrop(model.blocks, theta=0.1, gamma=1.0)
    tokens = make_batch(config, 0, 0)
    model(tokens)  # step 0 keeps all
    found: dict[str, int] = {}
    for kept, place in steps_that_keep(drop).items():
        drop.step = place
        found[str(kept)] = flops_of_step(lambda: model(tokens).backward())
        model.zero_grad()
    return {**{name: found[name] for name in map(str, KEPT)}, WHOLE: found[str(LAYERS)]}


def times(args: Any) -> dict[str, Any]:
    sizes = {"width": args.width, "layers": LAYERS, "sequence": args.sequence, "batch": args.batch}
    found: dict[str, Any] = {"lowering": args.lowering, "stage": args.stage, **sizes, **about()}
    plan = {"model": sizes, "lowering": args.lowering, "stage": args.stage, "rounds": args.rounds}
    found |= run_ranks(__file__, plan, range(RANKS))
    flops = flops_by_kept(ModelConfig(**sizes))
    rows, all_kept, none = found["rows"], found["rows"][str(LAYERS)], found["rows"]["0"]
    shown: list[list[str]] = []
    for name, row in rows.items():
        row["flops"] = flops[name]
        share = LAYERS if name == WHOLE else int(name)
        pairs = list(zip(row["step_ms"], all_kept["step_ms"], none["step_ms"], strict=True))
        row["of_all"] = quartiles([one / whole for one, whole, _ in pairs])
        lines = [one / (nothing + share / LAYERS * (whole - nothing)) for one, whole, nothing in pairs]
        row["of_proportional"] = quartiles(lines)
        exact = {
            key: none[key] + share * (all_kept[key] - none[key]) / LAYERS
            for key in ("sent_bytes", "flops")
            if "flops" in none or key != "flops"
        }
        row["counts_are_proportional"] = all(row[key] == value for key, value in exact.items())
        shown.append(
            [
                name,
                spread(row["step_ms"]),
                f"{row['of_all'][1]:.2f}",
                f"{row['of_proportional'][1]:.3f}",
                f"{row['sent_bytes'] / 1e6:.2f}",
                f"{row['flops'] / 1e9:.2f}",
            ]
        )
    print(f"graphs: {found['graphs']}")
    print(table(("kept blocks", "step ms", "of all", "of proportional", "sent MB", "GFLOPs"), shown))
    return found


# --- losses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the trained GPT and its runs."""

    steps: int = 1500
    batch: int = 8
    sequence: int = 64
    width: int = 64
    lr: float = 1.5e-3
    clip: float = 1.0
    theta: float = 0.5


@dataclass
class Run:
    """A training run.

    Attributes:
        held_out: (FLOPs so far, held-out loss in nats per byte) at each evaluation.
    """

    method: str
    seed: int
    steps: int
    held_out: list[tuple[float, float]]
    seconds: float


def flops_of_gpt(sizes: Sizes) -> tuple[float, float]:
    """FLOPs of a training step outside of the blocks, and of each block."""
    counts: list[int] = []
    for layers in (1, 2):
        model = GPT(layers, sizes.width, HEADS, sizes.sequence)
        tokens = torch.zeros(sizes.batch, sizes.sequence, dtype=torch.long)
        counts.append(flops_of_step(lambda model=model, tokens=tokens: model(tokens, tokens).backward()))
    return 2 * counts[0] - counts[1], counts[1] - counts[0]


def train(method: str, seed: int, steps: int, sizes: Sizes) -> Run:
    begun = time.perf_counter()
    text, held_out_text = read_sources()
    windows = torch.linspace(0, len(held_out_text) - sizes.sequence - 1, WINDOWS).long().view(-1, 32)
    outside, of_block = flops_of_gpt(sizes)
    torch.manual_seed(seed)
    model = GPT(LAYERS, sizes.width, HEADS, sizes.sequence)
    optimizer = make_optimizer(model, sizes.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
    # gamma of the paper: 100 / steps.
    theta = sizes.theta if method.startswith("LayerDrop") else 1.0
    drop = zgraph.LayerDrop(model.blocks, theta=theta, gamma=100 / steps, seed=seed)
    batches = torch.Generator().manual_seed(1000 * seed)
    flops, found = 0.0, list[tuple[float, float]]()
    for step in range(1, steps + 1):
        flops += outside + of_block * sum(drop.kept)
        starts = torch.randint(len(text) - sizes.sequence, (sizes.batch,), generator=batches)
        model(*cut(text, starts, sizes.sequence)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), sizes.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % (steps // RATES) == 0 or step == steps:
            found.append((flops, evaluate(model, held_out_text, windows, sizes.sequence)))
    return Run(method, seed, steps, found, time.perf_counter() - begun)


def flops_to(run: Run, loss: float) -> float | None:
    """FLOPs after which a run is first at a loss, on straight lines between evaluations; None: it never is."""
    before = run.held_out[0]
    for at in run.held_out:
        if at[1] <= loss:
            share = 1.0 if before[1] <= loss else (before[1] - loss) / (before[1] - at[1])
            return before[0] + share * (at[0] - before[0])
        before = at
    return None


def losses(args: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes = Sizes(steps=args.steps, theta=args.theta)
    outside, of_block = flops_of_gpt(sizes)
    found: dict[str, Any] = {"sizes": asdict(sizes), **about()}
    runs: list[Run] = []
    for seed in range(args.seeds):
        plain = train("plain", seed, sizes.steps, sizes)
        dropped = train(f"LayerDrop, theta {sizes.theta}", seed, sizes.steps, sizes)
        # As many steps as these FLOPs pay for.
        fewer = round(dropped.held_out[-1][0] / (outside + LAYERS * of_block))
        runs += [plain, dropped, train("plain, as many FLOPs", seed, fewer, sizes)]
        for run in runs[-3:]:
            print(f"{run.method:<24} seed {seed}: {run.held_out[-1][1]:.4f}, {run.seconds:.0f} s", flush=True)
        found["runs"] = [asdict(run) for run in runs]
        if args.json:
            args.json.write_text(json.dumps(found))
    by_seed = {seed: {run.method: run for run in runs if run.seed == seed} for seed in range(args.seeds)}
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(run.method for run in runs):
        mine = [(of_seed[method], of_seed["plain"]) for of_seed in by_seed.values()]
        to_loss = [flops_to(run, plain.held_out[-1][1]) for run, plain in mine]
        reached = [
            one / plain.held_out[-1][0] for one, (_, plain) in zip(to_loss, mine, strict=True) if one is not None
        ]
        rows.append(
            {
                "method": method,
                "steps": statistics.fmean(run.steps for run, _ in mine),
                "held_out": [run.held_out[-1][1] for run, _ in mine],
                "relative": [run.held_out[-1][1] / plain.held_out[-1][1] - 1 for run, plain in mine],
                "flops_of_plain": statistics.fmean(run.held_out[-1][0] / plain.held_out[-1][0] for run, plain in mine),
                "reached": len(reached),
                "flops_to_its_loss": statistics.fmean(reached) if reached else None,
            }
        )
    found["rows"] = rows
    heads = ("", "steps", "held out", "relative to plain %", "FLOPs of plain", "FLOPs to plain's loss", "seeds there")
    shown: list[list[str]] = []
    for row in rows:
        each = " ".join(f"{100 * one:+.2f}" for one in row["relative"])
        to_loss = "never" if row["flops_to_its_loss"] is None else f"{row['flops_to_its_loss']:.2f}"
        values = f"{statistics.fmean(row['held_out']):.4f}", f"{100 * statistics.fmean(row['relative']):+.2f} [{each}]"
        shown.append(
            [
                row["method"],
                f"{row['steps']:.0f}",
                *values,
                f"{row['flops_of_plain']:.2f}",
                to_loss,
                str(row["reached"]),
            ]
        )
    print(table(heads, shown))
    return found


def main() -> None:
    defaults: dict[str, Any] = {"width": 256, "sequence": 64, "batch": 4, "lowering": "fx", "rounds": 9}
    parser = parser_of(__doc__, **defaults, steps=Sizes.steps, theta=Sizes.theta, seeds=3)
    parser.add_argument("--part", choices=("times", "losses"), default="times")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    args = parser.parse_args()
    save(args.json, times(args) if args.part == "times" else losses(args))


if __name__ == "__main__":
    as_rank(measure)
    main()
