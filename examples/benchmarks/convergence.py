"""What compressing gradients does to the loss of a trained GPT, method by method.

    python examples/benchmarks/convergence.py --json runs.json                 # the table: all methods, all seeds
    python examples/benchmarks/convergence.py --steps 100 --seeds 2            # does it run?
    python examples/benchmarks/convergence.py --read runs.json --plot loss.png # draw it: needs zgraph[benchmarks]

The model and data of examples/train_gpt.py, smaller. N data-parallel ranks live in one process: each computes the
gradient of its own batch; those of matrices are quantized, exchanged and summed as a compiled step does it, those of
vectors and of small tensors are summed as they are. Methods see equal weights, batches and learning rates for each
seed, and differ in nothing but the mean gradient.

Noise of any kind leads to another loss, at times to a better one, by some tenths of a percent. So what counts is the
mean over seeds of the difference to none, and its 95 % interval; a tenth of a percent takes more seeds than methods
that differ by much: `--methods none "LoCo()" --seeds 16`. "bf16" rounds gradients to bfloat16 and compresses nothing;
"PowerSGD hook" is PyTorch's, which differs from LowRank by where it keeps the ranks' differences. "Muon" compresses
nothing, and steps the matrices of the blocks by torch.optim.Muon, whose updates are as large as AdamW's, with MUON_LR
times the learning rate. "AdamW8bit" compresses nothing either: it has moments of 8 bits, and with "bf16 weights" rounds
weights and mean gradients to bfloat16, of which it keeps 8 further bits; torchao's is there if it is installed. With
betas of 0.9 and 0.999 second moments change by less than a code in most steps: --beta2 0.999.
"OuterSteps" has sites that train by themselves on their ranks' batches, with the defaults of zgraph.OuterSteps.
"SignMomentum" is AdamW for that many steps, or until its second moments are stable, and then 1-bit Adam.
"DiLoCo" is the same as published, in fp32, without fragments and delay, and that of torchft is there if torchft is
installed; "averages" only averages parameters as often, as torch's PostLocalSGDOptimizer does after its warm-up.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from record import about, parser_of, table
from simulated import CompressedMean, HookMean, LowRankMean, Mean, OuterSites, SignMean
from torch import Tensor
from torchft_sites import train_with_torchft

import zgraph
from zgraph.codegen.kernels import reference
from zgraph.compression.low_rank import LowRank
from zgraph.compression.methods import BlockMethod, CompressionMethod, ErrorFeedback, LoCo, NoFeedback, TwoHop
from zgraph.compression.sign_momentum import SignMomentum, is_stable
from zgraph.step.outer.outer_steps import CODEC
from zgraph.step.outer.rounds import OuterOptimizer
from zgraph.step.outer.turns import Timetable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT, cut, evaluate, lr_factor, make_optimizer, read_sources

MUON_LR = (1, 2)
EIGHT_BIT = ("AdamW8bit", "AdamW8bit, bf16 weights")
TORCHAO = "torchao's AdamW8bit"
SIGNS = MappingProxyType({f"SignMomentum({warmup!r})": SignMomentum(warmup=warmup) for warmup in ("auto", 300, 450)})
EVERY = 30  # steps between two rounds of sites
SMALLEST = 4096  # elements of a tensor that is compressed
FINAL_SHARE = 0.05  # of the steps, over which the final loss is a mean
WINDOWS = 1024  # held out
# Student's t, 95 % within, for 1, 2, ... degrees of freedom; from here on 2.1 is close.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True)
class Outer:
    """Sites that train by themselves, and options of their outer steps."""

    sites: int
    lr: float = 0.8
    momentum: float = 0.7
    codec: BlockMethod | None = CODEC
    fragments: int = 6  # the model has no more than seven matrices and vectors
    delay: int = 1
    torchft: bool = False  # steps by torchft


OUTER = MappingProxyType(
    {
        "OuterSteps, 1 site": Outer(1, delay=0),
        "OuterSteps, 2 sites": Outer(2),
        "OuterSteps, 4 sites": Outer(4),
        "DiLoCo, 2 sites": Outer(2, 0.6, 0.9, None, 1, 0),
        "DiLoCo, 4 sites": Outer(4, 0.6, 0.9, None, 1, 0),
        **(
            {f"torchft's DiLoCo, {sites} sites": Outer(sites, 0.6, 0.9, None, 1, 0, torchft=True) for sites in (2, 4)}
            if find_spec("torchft")
            else {}
        ),
        "averages, 2 sites": Outer(2, 1.0, 0.0, None, 1, 0),
        "averages, 4 sites": Outer(4, 1.0, 0.0, None, 1, 0),
    }
)


def methods(ranks_per_host: int) -> dict[str, Callable[[Sequence[int], int], Mean] | None]:
    """Means by name, made for the elements of each gradient and a number of ranks; None sends what it has."""

    def codes(method: CompressionMethod | TwoHop) -> Callable[[Sequence[int], int], Mean]:
        return lambda numels, world: CompressedMean(method, numels, world, load_kernels())

    return {
        "none": None,
        "bf16": None,
        **{_muon(factor): None for factor in MUON_LR},
        **dict.fromkeys(EIGHT_BIT),
        **({TORCHAO: None} if find_spec("torchao") else {}),
        "NoFeedback()": codes(NoFeedback()),
        "ErrorFeedback()": codes(ErrorFeedback()),
        "LoCo(rotate=False)": codes(LoCo(rotate=False)),
        "LoCo()": codes(LoCo()),
        "TwoHop()": codes(TwoHop(ranks_per_host=ranks_per_host)),
        **{f"LowRank(rank={rank})": lambda _, world, rank=rank: LowRankMean(world, method=LowRank(rank=rank))
           for rank in (1, 2, 4)},
        **{f"PowerSGD hook, {rank}": lambda _, world, rank=rank: HookMean(world, rank=rank) for rank in (1, 4)},
        **{name: lambda _, world, method=method: SignMean(method, world) for name, method in SIGNS.items()},
        **dict.fromkeys(OUTER),
    }  # fmt: skip


def _muon(factor: int) -> str:
    return f"Muon, {factor} x lr"


def optimizers_of(name: str, model: GPT, lr: float, beta2: float) -> list[torch.optim.Optimizer]:
    """The optimizers of a method: AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""
    adamw = make_optimizer(model, lr)
    for group in adamw.param_groups:
        group["betas"] = (group["betas"][0], beta2)
    if name in (*EIGHT_BIT, TORCHAO):
        groups = [{key: group[key] for key in ("params", "weight_decay", "betas")} for group in adamw.param_groups]
        if name in EIGHT_BIT:
            return [zgraph.AdamW8bit(groups, lr=lr)]
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

        return [AdamW8bit(groups, lr=lr)]
    factor = next((factor for factor in MUON_LR if name == _muon(factor)), None)
    if factor is None:
        return [adamw]
    hidden = {id(one): one for one in model.blocks.parameters() if one.ndim == 2}
    for group in adamw.param_groups:
        group["params"] = [one for one in group["params"] if id(one) not in hidden]
    muon = torch.optim.Muon(hidden.values(), lr=factor * lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What all runs of a table share."""

    steps: int = 3000
    ranks: int = 4
    ranks_per_host: int = 2
    batch: int = 2
    sequence: int = 64
    layers: int = 1
    width: int = 128  # as long as a group: rows of small gradients, as those of rare bytes, have scales of their own
    heads: int = 4
    lr: float = 1.5e-3
    clip: float = 1.0
    beta2: float = 0.95  # of AdamW


@dataclass
class Run:
    """Losses of one method and seed, in nats per byte.

    Attributes:
        losses: of each step, over all ranks' batches, before its update.
        held_out: after the last step.
    """

    method: str
    seed: int
    losses: list[float]
    held_out: float
    seconds: float

    @property
    def final(self) -> float:
        count = max(1, round(FINAL_SHARE * len(self.losses)))
        return statistics.fmean(self.losses[-count:])


def load_kernels() -> ModuleType:
    """The CPU kernels where there are any; they equal the reference bit for bit."""
    try:
        from zgraph.codegen.kernels.cpu import blocks as cpu_blocks  # pyright: ignore
    except ImportError:
        return reference
    return cpu_blocks  # pyright: ignore


def train(name: str, seed: int, sizes: Sizes) -> Run:
    """One run, from the first step to the held-out loss."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    text, held_out_text = read_sources()
    if name in OUTER:
        model, losses = train_sites(OUTER[name], seed, sizes, text)
    else:
        model, losses = train_together(name, seed, sizes, text)
    windows = torch.linspace(0, len(held_out_text) - sizes.sequence - 1, WINDOWS).long().view(-1, 32)
    held_out = evaluate(model, held_out_text, windows, sizes.sequence)
    return Run(name, seed, losses, held_out, time.perf_counter() - started)


def train_sites(outer: Outer, seed: int, sizes: Sizes, text: Tensor) -> tuple[GPT, list[float]]:
    """Train sites by themselves, each on the batches of its ranks; the model at the end, and mean losses."""
    torch.manual_seed(seed)
    model = GPT(sizes.layers, sizes.width, sizes.heads, sizes.sequence)
    models = [model, *(copy.deepcopy(model) for _ in range(1, outer.sites))]
    optimizers = [optimizers_of("none", one, sizes.lr, sizes.beta2)[0] for one in models]
    factor = partial(lr_factor, steps=sizes.steps)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, factor) for one in optimizers]
    batches = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(sizes.ranks)]

    def step(site: int) -> float:
        own = batches[site * sizes.ranks // outer.sites : (site + 1) * sizes.ranks // outer.sites]
        draws = [torch.randint(len(text) - sizes.sequence, (sizes.batch,), generator=random) for random in own]
        loss = models[site](*cut(text, torch.cat(draws), sizes.sequence))
        loss.backward()
        if sizes.clip:
            torch.nn.utils.clip_grad_norm_(models[site].parameters(), sizes.clip)
        optimizers[site].step()
        schedulers[site].step()
        optimizers[site].zero_grad()
        return loss.item()

    if outer.torchft:
        return model, train_with_torchft(models, optimizers, outer.lr, outer.momentum, EVERY, sizes.steps, step)
    table = Timetable(EVERY, outer.delay, outer.fragments)
    sites = OuterSites(models, OuterOptimizer(outer.lr, outer.momentum), table, outer.codec)
    losses: list[float] = []
    for _ in range(sizes.steps):
        losses.append(statistics.fmean(map(step, range(outer.sites))))
        sites.step()
    sites.finish()
    return model, losses


def train_together(name: str, seed: int, sizes: Sizes, text: Tensor) -> tuple[GPT, list[float]]:
    """Train with one mean gradient a step; the model at the end, and mean losses."""
    torch.manual_seed(seed)
    model = GPT(sizes.layers, sizes.width, sizes.heads, sizes.sequence)
    parameters = list(model.parameters())
    stepped = model
    if name == EIGHT_BIT[1]:
        stepped = copy.deepcopy(model).bfloat16()
    optimizers = optimizers_of(name, stepped, sizes.lr, sizes.beta2)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: lr_factor(step, sizes.steps)) for one in optimizers
    ]
    batches = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(sizes.ranks)]

    compressed = [place for place, one in enumerate(parameters) if one.ndim >= 2 and one.numel() >= SMALLEST]
    make = methods(sizes.ranks_per_host)[name]
    mean_of = None if make is None else make([parameters[place].numel() for place in compressed], sizes.ranks)

    losses: list[float] = []
    signs = OneBit(SIGNS[name], optimizers[0], [parameters[place] for place in compressed]) if name in SIGNS else None
    for step in range(sizes.steps):
        grads: list[list[Tensor]] = []
        total = 0.0
        for random in batches:
            model.zero_grad()
            starts = torch.randint(len(text) - sizes.sequence, (sizes.batch,), generator=random)
            loss = model(*cut(text, starts, sizes.sequence))
            loss.backward()
            total += loss.item()
            grads.append([_grad_of(one) for one in parameters])
        losses.append(total / sizes.ranks)
        if name == "bf16":
            grads = [[grad.bfloat16().float() for grad in rank] for rank in grads]
        means = [torch.stack(parts).mean(0) for parts in zip(*grads, strict=True)]
        if mean_of is not None and (signs is None or signs.began):
            found = mean_of([[rank[place] for place in compressed] for rank in grads], step)
            for place, mean in zip(compressed, found, strict=True):
                means[place] = mean
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean
        if sizes.clip:
            torch.nn.utils.clip_grad_norm_(parameters, sizes.clip)
        if stepped is not model:
            for half, parameter in zip(stepped.parameters(), parameters, strict=True):
                half.grad = _grad_of(parameter).bfloat16()
        if signs is not None and signs.began:
            signs.update()
        for one in (*optimizers, *schedulers):
            one.step()
        if signs is not None and not signs.began:
            signs.look()
        if stepped is not model:
            model.load_state_dict(stepped.state_dict())
    return model, losses


class OneBit:
    """1-bit Adam of the compressed parameters: when the warm-up ends, and the updates after it.

    Args:
        method: with the length of the warm-up.
        adamw: steps these parameters in the warm-up, and all others always.
        parameters: all in its first group.
    """

    def __init__(self, method: SignMomentum, adamw: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self.method, self.adamw, self.parameters = method, adamw, parameters
        self.began, self.last = False, None

    def look(self) -> None:
        """After a step of the warm-up: has it been the last one?"""
        states = [self.adamw.state[one] for one in self.parameters]
        steps, beta2 = int(states[0]["step"]), self.adamw.param_groups[0]["betas"][1]
        if self.method.warmup != "auto":
            self.began = steps >= self.method.warmup
        elif steps % round(1 / (1 - beta2)) == 0:
            total = sum(state["exp_avg_sq"].double().sum().item() for state in states)
            now = total / (1 - beta2**steps), self.adamw.param_groups[0]["lr"]
            self.began, self.last = is_stable(self.last, now), now

    def update(self) -> None:
        """Update by the mean momenta in `.grad`, then set these to None, so that AdamW skips the parameters."""
        group, states = self.adamw.param_groups[0], [self.adamw.state[one] for one in self.parameters]
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        torch.ops.zgraph.momentum_adamw_(
            [one.detach() for one in self.parameters],
            [_grad_of(one) for one in self.parameters],
            *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
            **{key: group[key] for key in ("lr", "weight_decay", "eps", "maximize")},
            **{"beta1": beta1, "beta2": beta2, "momentum_beta1": self.method.beta1},
        )
        for one in self.parameters:
            one.grad = None


def _grad_of(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None, "each parameter of the example's GPT takes part in its loss"
    return grad.contiguous()


# --- what was found -------------------------------------------------------------------------------------------------


def differences(runs: Sequence[Run], name: str, other: str, *, held_out: bool = False) -> list[float]:
    """Of each seed that both have run, by which share the first method's loss is above the second's."""
    values = {(run.method, run.seed): run.held_out if held_out else run.final for run in runs}
    seeds = [seed for method, seed in values if method == name and (other, seed) in values]
    return [values[name, seed] / values[other, seed] - 1 for seed in seeds]


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval; infinite for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 2.1
    return statistics.fmean(values), t * statistics.stdev(values) / len(values) ** 0.5


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Final and held-out losses of each method: means over the seeds, and shares above none."""
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(run.method for run in runs):
        mine = [run for run in runs if run.method == name]
        shares, held_out = (differences(runs, name, "none", held_out=choice) for choice in (False, True))
        compared = bool(shares) and name != "none"
        found.append(
            {
                "method": name,
                "loss": statistics.fmean(run.final for run in mine),
                "relative": statistics.fmean(shares) if compared else None,
                "relative_by_seed": shares if compared else [],
                "held_out_loss": statistics.fmean(run.held_out for run in mine),
                "held_out_relative": statistics.fmean(held_out) if compared else None,
            }
        )
    return found


def show(runs: Sequence[Run], names: Sequence[str]) -> None:
    seeds = len({run.seed for run in runs})
    print(f"\n{seeds} seeds; nats per byte; relative to none in %: mean +- half of its 95 % interval [each seed]")
    rows: list[list[str]] = []
    for name in names:
        rows.append([name])
        for held_out in (False, True):
            mine = [run.held_out if held_out else run.final for run in runs if run.method == name]
            shares = [100 * share for share in differences(runs, name, "none", held_out=held_out)]
            middle, half = mean_and_half(shares)
            each = " ".join(f"{share:+.3f}" for share in shares)
            relative = f"{middle:+.3f} +- {half:.3f} [{each}]" if name != "none" else ""
            rows[-1] += [f"{statistics.fmean(mine):.4f}", relative]
    print(table(("", "final", "relative to none", "held out", "relative to none"), rows))


def plot(runs: Sequence[Run], names: Sequence[str], path: str) -> None:
    """Losses over steps, and their difference to none, smoothed; a mean over the seeds that all methods have run."""
    import matplotlib  # pyright: ignore

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore

    shared = set.intersection(*({run.seed for run in runs if run.method == name} for name in names))
    runs = [run for run in runs if run.seed in shared]
    window = max(1, len(runs[0].losses) // 40)

    def smooth(name: str) -> Tensor:
        curves = torch.tensor([run.losses for run in runs if run.method == name], dtype=torch.float64)
        return torch.nn.functional.avg_pool1d(curves.mean(0)[None], window, stride=max(1, window // 4))[0]

    base = smooth("none")
    at = torch.arange(len(base)) * max(1, window // 4) + window / 2
    figure: Any
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(1, 1))
    for name in names:
        curve = smooth(name)
        style = {"color": "black"} if name == "none" else {"color": "gray"} if name == "bf16" else {}
        upper.plot(at, curve, label=name, linewidth=1.2, **style)
        lower.plot(at, 100 * (curve / base - 1), label=name, linewidth=1.2, **style)
    upper.set_ylabel("training loss, nats per byte")
    upper.legend(frameon=False, fontsize=8)
    lower.set_ylabel("above none, %")
    lower.set_xlabel(f"optimizer step (means over {window} steps and {len(shared)} seeds)")
    tail = torch.cat([100 * (smooth(name) / base - 1)[len(base) // 10 :] for name in names])
    lower.set_ylim(min(-0.5, tail.min().item()), max(0.5, tail.max().item()))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def load(path: Path) -> tuple[Sizes, list[Run]]:
    found = json.loads(path.read_text())
    return Sizes(**found["sizes"]), [Run(**run) for run in found["runs"]]


def save(path: Path, sizes: Sizes, runs: Sequence[Run]) -> None:
    """All or nothing: whoever stops the program loses no run."""
    written = path.with_suffix(".writing")
    ordered = sorted(runs, key=lambda run: run.seed)
    content = about() | {"sizes": asdict(sizes), "rows": rows(ordered), "runs": [asdict(run) for run in runs]}
    written.write_text(json.dumps(content))
    written.replace(path)


def all_runs(names: Sequence[str], seeds: int, sizes: Sizes, processes: int, path: Path | None) -> list[Run]:
    """Train what the file does not have yet, and keep each run there."""
    runs: list[Run] = []
    if path is not None and path.exists():
        found, runs = load(path)
        if found != sizes:
            raise SystemExit(f"--json {path} holds runs of {found}, not of {sizes}; name another file")
    done = {(run.method, run.seed) for run in runs}
    print(f"{sizes}, kernels of {load_kernels().__name__}; {len(done)} runs are there", flush=True)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        wanted = [(name, seed) for seed in range(seeds) for name in names if (name, seed) not in done]
        for future in as_completed([pool.submit(train, name, seed, sizes) for name, seed in wanted]):
            run = future.result()
            runs.append(run)
            found = f"final {run.final:.4f}, held out {run.held_out:.4f}, {run.seconds:.0f} s"
            print(f"{run.method:<20} seed {run.seed}: {found}", flush=True)
            if path is not None:
                save(path, sizes, runs)
    return sorted(runs, key=lambda run: run.seed)


def main() -> None:
    known = list(methods(Sizes.ranks_per_host))
    parser = parser_of(__doc__, **asdict(Sizes()), seeds=3, processes=1)  # --json: goes on with the runs that it has
    parser.add_argument("--methods", nargs="+", choices=known, default=known)
    parser.add_argument("--read", type=Path, metavar="FILE", help="train nothing; show the runs of this file")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses (needs matplotlib)")
    options = parser.parse_args()
    if options.ranks % options.ranks_per_host:
        parser.error(f"--ranks {options.ranks} do not fill hosts of {options.ranks_per_host}")
    names = list(dict.fromkeys(["none", *options.methods]))  # all others are compared with none
    if options.read:
        _, runs = load(options.read)
        names = list(dict.fromkeys(run.method for run in runs))
    else:
        sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
        runs = all_runs(names, options.seeds, sizes, options.processes, options.json)
    show(runs, names)
    if options.plot:
        plot(runs, names, options.plot)


if __name__ == "__main__":
    main()
