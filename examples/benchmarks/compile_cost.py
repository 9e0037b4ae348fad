"""What the compiler itself costs: seconds to compile, by phase, and milliseconds per step beside plain torch.compile.

    python examples/benchmarks/compile_cost.py                        # everything, a quarter of an hour on two cores
    python examples/benchmarks/compile_cost.py --only step            # one of: compile, planned, step, parameters

compile     the first step on two ranks at stage 3, with an empty compile cache and then from it, for the GPT of
            examples/train_gpt.py and for a Llama of 24 layers
planned     the first step of a GPT of 12 layers in bf16 on one rank, each with an empty cache: torch.compile, zgraph by
            its rules, and zgraph by measured kernels (`time_kernels`)
step        the GPT on one rank: zgraph against torch.compile(model), in turns; the ratio's 95 % interval comes from the
            turns
parameters  a chain of 300 vectors, where nearly all time is what each parameter costs: forward and backward, and the
            optimizer's step, on plain tensors and on DTensors
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT

TURNS = 15
STEPS_A_TURN = 8
PARAMETERS = 300


def gpt(layers: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The example's model, by default at its default sizes, with one batch of tokens and targets."""
    tokens = torch.randint(256, (8, 129))
    return GPT(layers=layers, width=192, heads=6, sequence=128), (tokens[:, :-1], tokens[:, 1:])


class Llama(nn.Module):
    """24 narrow layers of Hugging Face's Llama, returning the loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=24)
        config.num_attention_heads, config.num_key_value_heads, config.use_cache = 4, 4, False
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(), (torch.randint(512, (2, 64)),)


class Chain(nn.Module):
    """Many vectors, each scaling its input: nearly no arithmetic for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x.mean()


def chain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Chain(), (torch.rand(4, 64),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {"gpt": gpt, "llama": llama, "chain": chain}


def join(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def compile_once(model_name: str, rank: int, ranks: int, store: str) -> dict[str, Any]:
    """The first step of a new process, and where its time went."""
    if ranks > 1:
        join(rank, ranks, store)
    torch.manual_seed(0)
    model, inputs = MODELS[model_name]()
    if ranks > 1:
        zgraph.shard(model)
        compiled = torch.compile(model, backend="zgraph")
    else:
        torch.set_num_threads(1)
        compiled = torch.compile(model)
    started = time.perf_counter()
    compiled(*inputs).backward()
    first_s = time.perf_counter() - started
    if ranks == 1:
        return {"first_s": first_s}
    report = zgraph.summary(model)
    dist.barrier()
    by_pass: dict[str, float] = {}
    for run in report.passes:
        by_pass[run.name] = by_pass.get(run.name, 0.0) + run.seconds
    dist.destroy_process_group()
    return {
        "first_s": first_s,
        "phases": report.seconds,
        "passes": by_pass,
        "islands": report.islands,
        "distinct_islands": report.distinct_islands,
    }


def in_new_processes(*arguments: str, ranks: int, cache: str) -> list[dict[str, Any]]:
    """Run this script's `--worker` once per rank; the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", *arguments, str(rank), str(ranks), f"{folder}/store"],
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(ranks)
        ]
        printed = [worker.communicate()[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError(f"compile_cost: {arguments} failed on a rank; what it said is above")
        return [json.loads(text.splitlines()[-1]) for text in printed]


def show_compile() -> None:
    for name in ("gpt", "llama"):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as plain_cache:
            for temperature in ("cold", "warm"):
                plain = in_new_processes("compile", name, ranks=1, cache=plain_cache)[0]
                found = in_new_processes("compile", name, ranks=2, cache=cache)[0]
                phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in found["phases"].items())
                share = found["phases"]["passes"] / sum(found["phases"].values())
                print(
                    f"{name} {temperature}: first step {found['first_s']:.1f} s, plain torch.compile on one rank "
                    f"{plain['first_s']:.1f} s; {phases}; passes {share:.1%} of compiling; {found['islands']} islands, "
                    f"{found['distinct_islands']} distinct",
                    flush=True,
                )
                if temperature == "cold":
                    print("  " + ", ".join(f"{key} {seconds:.2f} s" for key, seconds in found["passes"].items()))


def compile_planned(kind: str, rank: int, ranks: int, store: str) -> dict[str, Any]:
    """The first step of twelve bf16 layers in a new process: "plain", by "rules" or by "measured" kernels."""
    join(rank, ranks, store)
    torch.manual_seed(0)
    model, inputs = gpt(layers=12)
    options: dict[str, Any] = {}
    if kind == "plain":
        compiled = torch.compile(model.bfloat16())
    else:
        zgraph.shard(model, param_dtype=torch.bfloat16)
        if kind == "measured":
            target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), time_kernels=True)
            options["pipeline"] = zgraph.Pipeline(zgraph.passes.presets.planned(), target=target)
        compiled = torch.compile(model, backend="zgraph", options=options)
    started = time.perf_counter()
    compiled(*inputs).backward()
    first_s = time.perf_counter() - started
    if kind == "plain":
        found: dict[str, Any] = {}
    else:
        report = zgraph.summary(model)
        found = {"phases": report.seconds, "islands": report.islands, "distinct_islands": report.distinct_islands}
    dist.destroy_process_group()
    return {"first_s": first_s, **found}


def show_planned() -> None:
    plain_s = math.nan
    for kind in ("plain", "rules", "measured"):
        with tempfile.TemporaryDirectory() as cache:
            found = in_new_processes("planned", kind, ranks=1, cache=cache)[0]
        if kind == "plain":
            plain_s = found["first_s"]
        print(
            f"gpt of 12 layers, {kind}: first step {found['first_s']:.1f} s, x {found['first_s'] / plain_s:.2f}",
            flush=True,
        )
        if kind != "plain":
            phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found["phases"].items())
            print(f"  {phases}; {found['islands']} islands, {found['distinct_islands']} distinct", flush=True)


class Contender:
    """One way to run a model, with the times of its turns."""

    def __init__(self, name: str, model: nn.Module, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.name, self.call, self.inputs = name, call, inputs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.step_ms: list[float] = []
        self.optimizer_ms: list[float] = []
        for _ in range(3):
            self.turn(1)
        self.step_ms.clear()
        self.optimizer_ms.clear()

    def turn(self, steps: int) -> None:
        spent = in_optimizer = 0.0
        for _ in range(steps):
            started = time.perf_counter()
            self.call(*self.inputs).backward()
            computed = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ended = time.perf_counter()
            spent += computed - started
            in_optimizer += ended - computed
        self.step_ms.append(1e3 * spent / steps)
        self.optimizer_ms.append(1e3 * in_optimizer / steps)


def contend(model_name: str, rank: int, ranks: int, store: str) -> dict[str, Any]:
    """Plain torch.compile, zgraph on plain tensors, and zgraph on DTensors of one rank, in turns."""
    join(rank, ranks, store)
    contenders: list[Contender] = []
    for name, sharded, backend in (
        ("torch.compile", False, "inductor"),
        ("zgraph, not sharded", False, "zgraph"),
        ("zgraph, stage 0", True, "zgraph"),
        ("zgraph, stage 3", True, "zgraph"),
    ):
        torch.manual_seed(0)
        model, inputs = MODELS[model_name]()
        if sharded:
            zgraph.shard(model, zero_stage=int(name[-1]))
        call = cast("Callable[..., Tensor]", torch.compile(model, backend=backend, dynamic=False))
        contenders.append(Contender(name, model, call, inputs))
    for _ in range(TURNS):
        for contender in contenders:
            contender.turn(STEPS_A_TURN)
    dist.destroy_process_group()
    return {entry.name: {"step_ms": entry.step_ms, "optimizer_ms": entry.optimizer_ms} for entry in contenders}


def show_contest(model_name: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        found = in_new_processes("contend", model_name, ranks=1, cache=cache)[0]
    base = found["torch.compile"]
    print(f"{model_name}, one rank, {TURNS} turns of {STEPS_A_TURN} steps: median ms, ratio to torch.compile")
    for name, times in found.items():
        ratios = [mine / theirs for mine, theirs in zip(times["step_ms"], base["step_ms"], strict=True)]
        middle = statistics.mean(ratios)
        half = 2.145 * statistics.stdev(ratios) / math.sqrt(len(ratios))  # Student's t, 14 degrees of freedom
        print(
            f"  {name:<20} forward and backward {statistics.median(times['step_ms']):7.2f}, x {middle:.3f} "
            f"[{middle - half:.3f}, {middle + half:.3f}]; fused AdamW {statistics.median(times['optimizer_ms']):6.2f}",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        kind, model_name, rank, ranks, store = sys.argv[2:]
        work = {"compile": compile_once, "planned": compile_planned, "contend": contend}[kind]
        print(json.dumps(work(model_name, int(rank), int(ranks), store)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("compile", "planned", "step", "parameters"))
    only = parser.parse_args().only
    if only in (None, "step"):
        show_contest("gpt")
    if only in (None, "parameters"):
        show_contest("chain")
    if only in (None, "compile"):
        show_compile()
    if only in (None, "planned"):
        show_planned()


if __name__ == "__main__":
    main()
