"""Seconds from `zgraph.shard` to the end of the first step, compared with plain torch.compile on as many processes.

    python examples/benchmarks/first_step.py --json FILE        # five minutes with fx, longer with Inductor

Each rank has a core, and each way processes of its own, a few times in turns. `torch.compile` compiles the same model
without sharding, by the backend that does as much as zgraph's lowering: aot_eager as much as fx. Caches on disk are
empty; a second run finds what the first one has left there. A whole step is planned for H100s; its second call is
timed, too, which may compile again.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ranks import as_rank, run_ranks, say, slowest_ms
from record import about, parser_of, quartiles, save, table
from torch import Tensor, nn
from workload import SEED, LanguageModel, ModelConfig, make_batch

import zgraph
from zgraph.passes import presets

RANKS = 2
WAYS = ("torch.compile", "zgraph", "zgraph, whole step")
IMPORTS = {
    "import torch": "import torch",
    "import zgraph": "import torch, zgraph",
    "shard a linear layer": "import torch, torch.distributed as dist, zgraph; "
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); "
    "zgraph.shard(torch.nn.Linear(8, 8))",
}


def steps_of(way: str, lowering: str, model: nn.Module) -> Callable[[Tensor], Any]:
    """A function that runs one step; what is compiled is compiled by its calls."""
    if way == "torch.compile":
        run = torch.compile(model, backend="aot_eager" if lowering == "fx" else "inductor")
        return plain_lines(run, torch.optim.AdamW(model.parameters(), fused=True))
    zgraph.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if way == "zgraph":
        return plain_lines(torch.compile(model, backend="zgraph", options={"lowering": lowering}), optimizer)
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"))
    options = {"lowering": lowering, "passes": zgraph.PassList(presets.planned(), target=target)}
    return zgraph.training_step(model, optimizer, options=options)(plain_lines(model, optimizer))


def plain_lines(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(tokens: Tensor) -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the first two steps on the slower rank, and zgraph's seconds by phase and by pass on this one."""
    config = ModelConfig(**plan["model"])
    torch.manual_seed(SEED)
    model, batch = LanguageModel(config), make_batch(config, 0, rank)
    begun = time.perf_counter()
    step = steps_of(plan["way"], plan["lowering"], model)
    seconds: list[float] = []
    for _ in range(2):
        step(batch)
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    found: dict[str, Any] = {"seconds": [ms / 1e3 for ms in slowest_ms(seconds)]}
    if plan["way"] != "torch.compile":
        report = zgraph.summary(model)
        found["phases"] = dict(report.seconds)
        found["passes"] = {entry.name: entry.seconds for entry in report.passes}
    return found


def seconds_of_imports(rounds: int) -> dict[str, list[float]]:
    """Seconds of a process that imports, from start to end."""
    found: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(rounds):
        for name, code in IMPORTS.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env={**os.environ})
            found[name].append(time.perf_counter() - begun)
    return found


def main() -> None:
    parser = parser_of(__doc__, width=64, rounds=3, lowering="fx")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    args = parser.parse_args()
    found: dict[str, Any] = {"lowering": args.lowering, "width": args.width, **about(), "rows": {}}
    found["imports_s"] = seconds_of_imports(args.rounds)
    for _ in range(args.rounds):
        for layers in args.layers:
            for way in WAYS:
                plan = {"model": {"width": args.width, "layers": layers}, "way": way, "lowering": args.lowering}
                row = found["rows"].setdefault(f"{layers} layers, {way}", {"first_s": [], "second_s": [], "warm_s": []})
                with tempfile.TemporaryDirectory() as cache:
                    run = partial(run_ranks, __file__, plan, range(RANKS))
                    measured = run(environment={"TORCHINDUCTOR_CACHE_DIR": cache})
                    warm = run(environment={"TORCHINDUCTOR_CACHE_DIR": cache})
                    row["warm_s"].append(warm["seconds"][0])
                row["first_s"].append(measured["seconds"][0])
                row["second_s"].append(measured["seconds"][1])
                row |= {key: measured[key] for key in ("phases", "passes") if key in measured}
                say(0, f"{layers} layers, {way}: " + ", ".join(f"{one:.1f} s" for one in measured["seconds"]))
    rows = []
    for name, row in found["rows"].items():
        layers, _, way = name.partition(", ")
        plain = quartiles(found["rows"][f"{layers}, {WAYS[0]}"]["first_s"])[1]
        first, second = (quartiles(row[key])[1] for key in ("first_s", "second_s"))
        row["of_torch_compile"] = first / plain
        share = row["phases"]["passes"] / sum(row["phases"].values()) if "phases" in row else 0.0
        warm = f"{quartiles(row['warm_s'])[1]:.1f}"
        cells = (f"{first:.1f}", f"{first / plain:.2f}", f"{second:.1f}", warm, f"{share:.0%}" if share else "-")
        rows.append((name, *cells))
    print(table(("way", "first step, s", "of torch.compile", "second, s", "first, cached, s", "passes"), rows))
    print(table(("process", "s"), [(one, f"{quartiles(s)[1]:.2f}") for one, s in found["imports_s"].items()]))
    save(args.json, found)


if __name__ == "__main__":
    as_rank(measure)
    main()
