"""Train the GPT of train_gpt.py on two sites with a slow link between them: outer steps, then DDP on the same data.

    sudo .venv/bin/python examples/train_two_sites.py --rate 100mbit    # here: two network namespaces (Linux, iproute2)
    python examples/train_two_sites.py                                  # here: two processes, no limit
    torchrun --nnodes 2 --nproc-per-node 1 ... examples/train_two_sites.py    # on each of two machines
    ... --layers 10 --width 512 --heads 8 --lr 6e-4 --lowering inductor --ways outer    # another model

With outer steps each site trains by itself, and exchanges every few steps what it has learnt, as 4-bit codes, while it
trains on. DDP exchanges every gradient. Prints for both the time of a step, what a rank has sent and waited for, and
the loss on held-out text. The lines that matter are in `train_outer`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, cut, evaluate, lr_factor, make_optimizer, read_sources

import zgraph

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from netns import INTERFACE, ShapedNetwork  # pyright: ignore[reportMissingImports]

PORT = "29511"
SITES = 2
CLIP = 1.0
WINDOWS = 1024  # of held-out text


@dataclass
class Row:
    """Measurements of one way to train.

    Attributes:
        step_ms: time of a step.
        waited_ms: part of this time in which the rank waits for the network.
        sent_bytes: bytes that the rank sends in a step.
        held_out: loss after the last step, in nats per byte.
    """

    step_ms: float
    waited_ms: float
    sent_bytes: float
    held_out: float


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rate", default="none", help="of each link, such as 100mbit; needs root. none: no limit")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each way to train")
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds of a fragment")
    parser.add_argument("--ways", nargs="+", choices=["outer", "ddp"], default=["outer", "ddp"], help="to train")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank in a step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--lowering", choices=["fx", "inductor"], default="fx", help="of the steps with outer steps")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.every = 24, 6
    return options


def new_model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(options.layers, options.width, options.heads, options.sequence)


def train_outer(options: argparse.Namespace, text: Tensor, held_out_text: Tensor) -> Row:
    """Train by outer steps: the mesh has an axis of sites, over which only OuterSteps communicates."""
    mesh = init_device_mesh("cpu", (SITES, dist.get_world_size() // SITES), mesh_dim_names=("site", "dp"))
    model = zgraph.shard(new_model(options), mesh["dp"])
    optimizer = make_optimizer(model, lr=options.lr)
    outer = zgraph.OuterSteps(model, mesh["site"], every=options.every)

    @zgraph.training_step(model, optimizer, options={"lowering": options.lowering})
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def outer_step(tokens: Tensor, targets: Tensor) -> None:
        step(tokens, targets)
        outer.step()

    step_ms, sent_bytes = timed(options, outer_step, optimizer, text)
    waited_ms = 1e3 * outer.waited_s / options.steps
    outer.finish()  # all sites have the same weights
    return Row(step_ms, waited_ms, sent_bytes, held_out_loss(options, model, held_out_text))


def train_ddp(options: argparse.Namespace, text: Tensor, held_out_text: Tensor) -> Row:
    model = DistributedDataParallel(new_model(options))
    optimizer = make_optimizer(model, lr=options.lr)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def compute_only(tokens: Tensor, targets: Tensor) -> None:
        with model.no_sync():
            model(tokens, targets).backward()
        optimizer.zero_grad()

    step_ms, sent_bytes = timed(options, step, optimizer, text)
    held_out = held_out_loss(options, model, held_out_text)
    starts = torch.zeros(options.batch, dtype=torch.long)
    began = time.perf_counter()
    for _ in range(10):
        compute_only(*cut(text, starts, options.sequence))
    waited_ms = step_ms - 1e2 * (time.perf_counter() - began)
    return Row(step_ms, max(0.0, waited_ms), sent_bytes, held_out)


def timed(
    options: argparse.Namespace, step: Callable[[Tensor, Tensor], None], optimizer: torch.optim.Optimizer, text: Tensor
) -> tuple[float, float]:
    """Train; return the milliseconds of a step after the first two, which compile, and the bytes that it has sent."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, options.steps))
    generator = torch.Generator().manual_seed(dist.get_rank())
    began, sent = 0.0, transmitted_bytes()
    for number in range(options.steps):
        if number == 2:
            began = time.perf_counter()
        starts = torch.randint(len(text) - options.sequence, (options.batch,), generator=generator)
        step(*cut(text, starts, options.sequence))
        scheduler.step()
    seconds = time.perf_counter() - began
    return 1e3 * seconds / (options.steps - 2), (transmitted_bytes() - sent) / options.steps


def held_out_loss(options: argparse.Namespace, model: nn.Module, text: Tensor) -> float:
    starts = torch.linspace(0, len(text) - options.sequence - 1, WINDOWS).long().view(-1, 32)
    return evaluate(model, text, starts, options.sequence)


def transmitted_bytes() -> int:
    """Bytes that this rank's network interface has sent, of both ranks if they share it; 0 if that is unknown."""
    counter = Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', '')}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.is_file() else 0


def run(options: argparse.Namespace) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # moments of units that ReLU keeps at zero decay to denormal numbers, which are slow
    dist.init_process_group("gloo")
    text, held_out_text = read_sources()
    ways = {"outer": ("outer steps", train_outer), "ddp": ("DDP", train_ddp)}
    rows = {title: train(options, text, held_out_text) for title, train in (ways[way] for way in options.ways)}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {SITES} sites, link {options.rate}, {options.steps} steps")
        print(f"{'':12} {'step ms':>9} {'waited ms':>10} {'sent MB a step':>15} {'minutes':>8} {'held-out loss':>14}")
        for name, row in rows.items():
            print(
                f"{name:12} {row.step_ms:9.1f} {row.waited_ms:10.1f} {row.sent_bytes / 1e6:15.4f}"
                f" {row.step_ms * options.steps / 6e4:8.1f} {row.held_out:14.4f}"
            )
    dist.barrier()
    dist.destroy_process_group()


def start_here(options: argparse.Namespace) -> int:
    """Start a rank for each site on this machine."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    shared = {"WORLD_SIZE": str(SITES), "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": PORT, "OMP_NUM_THREADS": "1"}
    if options.rate == "none":
        given = {**os.environ, **shared, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen(command, env={**given, "RANK": str(rank)}) for rank in range(SITES)]
        return max(rank.wait() for rank in ranks)
    with ShapedNetwork(SITES, options.rate) as network:
        given = {**shared, "MASTER_ADDR": network.address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
        ranks = [network.popen(rank, command, {**given, "RANK": str(rank)}) for rank in range(SITES)]
        return max(rank.wait() for rank in ranks)


def main() -> int:
    options = parse_options()
    if "RANK" not in os.environ:
        return start_here(options)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
