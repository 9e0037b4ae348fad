"""How many times batches of many shapes are compiled, what that takes, and whether each gradient is right.

    python examples/benchmarks/many_shapes.py --json FILE        # ten minutes with fx

Two ranks train a language model on batches whose lengths are drawn from 1 to 512, each rank its own, and then on such
that are padded to eight lengths; or a U-Net on eight sizes of images in turn, evaluated after every step. Each way has
processes of its own, of which the processor seconds of steps that compile are counted. `torch.compile` compiles the
same model without sharding, by the backend that does as much as zgraph's lowering: aot_eager as much as fx. Every
gradient is compared with that of the uncompiled, replicated model, averaged over the ranks.
"""

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import as_rank, on_all_ranks, run_ranks, say
from record import about, parser_of, save, table
from torch import Tensor, nn
from torch._dynamo.decorators import mark_dynamic
from torch._dynamo.utils import counters
from workload import SEED, LanguageModel, ModelConfig

import zgraph

RANKS, LONGEST, BUCKETS, SIZES = 2, 512, 8, range(16, 48, 4)
PLAIN, AUTO, MARKED, DYNAMIC, STATIC, STEP = (
    "torch.compile",
    "zgraph",
    "zgraph, mark_dynamic",
    "zgraph, dynamic=True",
    "zgraph, dynamic=False",
    "zgraph, whole step",
)
WAYS = (PLAIN, AUTO, MARKED, DYNAMIC, STATIC, STEP)
LOOPS = ("lengths", "buckets", "images")
Batch = tuple[Tensor, bool]


class UNet(nn.Module):
    """One level down, one up, and a skip between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width)
        self.down, self.inner = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(2, 2 * width)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up, self.out = nn.Conv2d(3 * width, width, 3, padding=1), nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, height, width] -> the mean square of an image of that size."""
        above = F.silu(self.norm(self.enter(image)))
        below = F.silu(self.inner(self.down(above)))
        below = below + self.middle(below)
        raised = F.interpolate(below, size=above.shape[-2:], mode="nearest")
        return self.out(F.silu(self.up(torch.cat([raised, above], 1)))).square().mean()


def model_of(loop: str) -> nn.Module:
    torch.manual_seed(SEED)
    small = ModelConfig(vocabulary=128, width=64, layers=2, sequence=LONGEST)
    return UNet() if loop == "images" else LanguageModel(small)


def batches_of(loop: str, rank: int, steps: int) -> Iterator[Batch]:
    """Inputs, and whether to train on them; each rank has other sizes, but for images."""
    drawn = random.Random(SEED + rank)
    made = torch.Generator().manual_seed(SEED + rank)
    for number in range(steps):
        if loop == "images":
            size = SIZES[number % len(SIZES)]
            yield torch.randn(2, 3, size, size, generator=made), True
            yield torch.randn(2, 3, size, size, generator=made), False
        else:
            length = LONGEST // BUCKETS * drawn.randint(1, BUCKETS) if loop == "buckets" else drawn.randint(1, LONGEST)
            yield torch.randint(128, (2, length + 1), generator=made), True


def step_of(way: str, lowering: str, model: nn.Module) -> tuple[Any, Callable[[Tensor], Any]]:
    """The function to evaluate with, and a function that runs one step."""
    dynamic = {DYNAMIC: True, STATIC: False}.get(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # gradients stay comparable
    call: Any = model
    if way == PLAIN:
        call = torch.compile(model, backend="aot_eager" if lowering == "fx" else "inductor")
    elif way != STEP:
        call = torch.compile(model, backend="zgraph", dynamic=dynamic, options={"lowering": lowering})

    def lines(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = call(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return call, zgraph.training_step(model, optimizer, options={"lowering": lowering})(lines) if way == STEP else lines


def resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def compiled(way: str, model: nn.Module) -> int:
    """Frames that were compiled so far: a forward with its backward, or an evaluation."""
    return len(zgraph.summary(model).graphs) if way == STEP else counters["stats"]["unique_graphs"]


def off(model: nn.Module, plain: nn.Module, is_sharded: bool) -> float:
    """The largest difference of a gradient from the mean over the ranks, relative to its largest entry."""
    worst = 0.0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        mean, found = other.grad.clone(), one.grad
        if is_sharded:
            dist.all_reduce(mean)
            mean, found = mean / RANKS, found.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        worst = max(worst, ((found - mean).abs().max() / mean.abs().max()).item())
    return worst


def measure(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Figures of one way to run one loop; the larger of both ranks'."""
    way, loop = plan["way"], plan["loop"]
    torch.compiler.config.recompile_limit = 8  # what users have
    torch.compiler.config.fail_on_recompile_limit_hit = False
    model, plain = model_of(loop), model_of(loop)
    if way != PLAIN:
        zgraph.shard(model)
    call, step = step_of(way, plan["lowering"], model)
    compiling = running = worst = 0.0
    frames, last, base, refused, text = 0, 0, 0.0, 0, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zgraph.ZgraphWarning)
        for number, (batch, trains) in enumerate(batches_of(loop, rank, plan["steps"])):
            if way == STEP and not trains:
                continue
            if way == MARKED:
                for dim in (2, 3) if loop == "images" else (1,):
                    mark_dynamic(batch, dim)
            begun = time.process_time()
            try:
                if trains:
                    step(batch)
                else:
                    model.eval()
                    with torch.no_grad():
                        call(batch)
                    model.train()
            except zgraph.ZgraphError as error:
                refused, text = number, str(error)
                break
            taken = time.process_time() - begun
            frames = compiled(way, model)
            compiling, running = (compiling + taken, running) if frames > last else (compiling, running + taken)
            last = frames
            base = base or resident_mib()
            if trains:
                plain.zero_grad()
                plain(batch).backward()
                worst = max(worst, off(model, plain, way != PLAIN))
    found = {
        "compiled": frames,
        "compiling_s": compiling,
        "running_s": running,
        "grown_mib": resident_mib() - base,
        "off": worst,
        "refused_at": refused,
        "refusal": text,
        "gave_up": any("limit of recompiles" in str(one.message) for one in caught),
    }
    every = on_all_ranks(found)
    return {key: max(one[key] for one in every) for key in found}


def main() -> None:
    args = parser_of(__doc__, steps=40, lowering="fx").parse_args()
    found: dict[str, Any] = {"lowering": args.lowering, "steps": args.steps, **about(), "rows": {}}
    rows = []
    for loop in LOOPS:
        for way in WAYS:
            plan = {"way": way, "loop": loop, "lowering": args.lowering, "steps": args.steps}
            row = found["rows"][f"{loop}, {way}"] = run_ranks(__file__, plan, range(RANKS))
            more = row["grown_mib"] / max(1, row["compiled"] - 1)
            end = " ".join(
                (["uncompiled"] if row["gave_up"] else [])
                + ([f"refused at step {row['refused_at']}"] if row["refusal"] else [])
            )
            figures = f"{row['compiling_s']:.1f}", f"{more:.1f}", f"{row['off']:.0e}"
            rows.append((f"{loop}, {way}", row["compiled"], *figures, end))
            say(0, f"{loop}, {way}: {row}")
    print(table(("way", "compiled", "processor s", "MiB for each", "largest error", "at the limit"), rows))
    save(args.json, found)


if __name__ == "__main__":
    as_rank(measure)
    main()
