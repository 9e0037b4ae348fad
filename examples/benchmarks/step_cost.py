"""What a training step costs beside its arithmetic: Python and dispatch of 300 tiny parameters, by way of running it.

    python examples/benchmarks/step_cost.py                           # ten minutes on two cores
    python examples/benchmarks/step_cost.py --ranks 2 --stages 3 --turns 10

A chain of 150 linear layers of width 8, whose arithmetic takes next to nothing, trained with fused AdamW:

floor         torch.compile(model) without sharding, each rank for itself; opt.step(), opt.zero_grad()
three calls   zgraph.shard, torch.compile(model, backend="zgraph"); opt.step(), opt.zero_grad()
on shards     the same, with zgraph.step_on_shards(opt)
whole step    zgraph.training_step of the same lines

All of them live side by side on each rank and take turns of a few steps. *host* is the processor time of the rank's
main thread, which is Python, dispatch and the tiny arithmetic, without waiting for the other rank; *wall* is the time
that the step takes. On one rank the collectives are there too, and nothing travels. Printed are medians with quartiles
over the turns, and the medians of the ratios of each turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import commit, processor
from torch import Tensor, nn

import zgraph

LAYERS, WIDTH, ROWS = 150, 8, 4
WARM_UP_STEPS = 4
STEPS_A_TURN = 4
FLOOR = "floor"
WAYS = ("three calls", "on shards", "whole step")


class Chain(nn.Module):
    """Linear layers, nearly without arithmetic for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def chain(name: str) -> nn.Module:
    """A chain whose forward is code of its own: Dynamo would search the graphs of all the others at each call."""
    code = Chain.forward.__code__.replace(co_name=f"forward_{''.join(filter(str.isalnum, name))}")
    torch.manual_seed(0)
    return type("Chain", (Chain,), {"forward": types.FunctionType(code, globals())})()


def floor() -> Callable[[Tensor], Any]:
    model = chain(FLOOR)
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return loop(compiled, optimizer)


def sharded(way: str, stage: int, lowering: str) -> Any:
    model = zgraph.shard(chain(f"{way} {stage} {lowering}"), zero_stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options: dict[str, Any] = {"lowering": lowering}
    if way == "whole step":
        return zgraph.training_step(model, optimizer, options=options)(loop(model, optimizer))
    if way == "on shards":
        zgraph.step_on_shards(optimizer)
    compiled = torch.compile(model, backend="zgraph", dynamic=False, options=options)
    return loop(compiled, optimizer)


def loop(model: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def take_turns(rank: int, options: argparse.Namespace, folder: str) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step in each turn, by side: of the host and in all."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.world)
    sides = {FLOOR: floor()}
    for lowering in options.lowerings:
        for stage in options.stages:
            sides |= {f"{way}, stage {stage}, {lowering}": sharded(way, stage, lowering) for way in options.ways}
    x = torch.rand(ROWS, WIDTH)
    taken: dict[str, dict[str, list[float]]] = {name: {"host": [], "wall": []} for name in sides}
    for name, step in sides.items():
        started = time.perf_counter()
        for _ in range(WARM_UP_STEPS):
            step(x)
        if rank == 0:
            print(f"  {name}: compiled in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    for turn in range(options.turns):
        for name in sides if turn % 2 else reversed(sides):
            step = sides[name]
            step(x)  # fills the processor's caches again
            dist.barrier()
            began, host_began = time.perf_counter(), time.thread_time()
            for _ in range(STEPS_A_TURN):
                step(x)
            taken[name]["host"].append(1e3 * (time.thread_time() - host_began) / STEPS_A_TURN)
            taken[name]["wall"].append(1e3 * (time.perf_counter() - began) / STEPS_A_TURN)
    dist.destroy_process_group()
    return taken


def in_processes(world: int, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Run a world of ranks; what its first one has measured."""
    asked = json.dumps({**vars(options), "world": world, "json": None})
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(rank), folder, asked],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(world)
        ]
        printed = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("step_cost: a rank failed; what it said is above")
    return json.loads(printed[0].splitlines()[-1])


def table(taken: dict[str, dict[str, list[float]]]) -> list[str]:
    """Milliseconds of each side, and its ratios to the floor and to the three calls of its stage and lowering."""
    rows = ["| side | host, ms | wall, ms | host / floor | host / three calls |", "| --- | --- | --- | --- | --- |"]
    for name, times in taken.items():
        _, _, about = name.partition(", ")
        against = taken.get(f"three calls, {about}")
        of_floor = f"{ratio(times, taken[FLOOR]):.2f}"
        of_calls = "" if against is None else f"{ratio(times, against):.2f}"
        rows.append(f"| {name} | {quartiles(times['host'])} | {quartiles(times['wall'])} | {of_floor} | {of_calls} |")
    return rows


def ratio(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    return statistics.median(one / other for one, other in zip(ours["host"], theirs["host"], strict=True))


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        rank, folder, asked = sys.argv[2:]
        print(json.dumps(take_turns(int(rank), argparse.Namespace(**json.loads(asked)), folder)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], help="worlds, one after the other")
    add("--stages", type=int, nargs="+", default=[0, 2, 3], help="stages of ZeRO")
    add("--lowerings", nargs="+", default=["fx", "inductor"], choices=("fx", "inductor"))
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--turns", type=int, default=40, help=f"turns of {STEPS_A_TURN} steps for each side")
    add("--json", type=Path, help="file for all samples")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    where = {"processor": processor(), "cores": os.cpu_count(), "commit": commit(), "torch": torch.__version__}
    print(f"{2 * LAYERS} parameters of width {WIDTH}, {where['processor']}, commit {where['commit']}")
    for world in options.ranks:
        load = os.getloadavg()[0]
        found[str(world)] = in_processes(world, options)
        print(f"\n{world} ranks, load before {load:.1f}\n", flush=True)
        print("\n".join(table(found[str(world)])), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**where, "layers": LAYERS, "width": WIDTH, "worlds": found}) + "\n")


if __name__ == "__main__":
    main()
