"""Train a diffusion transformer on scikit-learn's digits over two pipeline stages of two chunks each.

    torchrun --nproc-per-node 2 examples/train_dit.py              # CPU with gloo; with 4 processes two pipelines
    torchrun --nproc-per-node 2 examples/train_dit.py --no-sync    # what becomes of embedders that nobody keeps equal
    torchrun --nproc-per-node 2 examples/train_dit.py --quick      # a short check

Every block depends on embeddings of the timestep and of the label, so that each of the four chunks has its own
embedders: `zgraph.Replicas` gives all of them the sum of their gradients, and they stay equal bit for bit. The 1797
digits of 8 x 8 pixels come with scikit-learn: nothing is downloaded. The defaults take about three minutes on two
CPU cores, and end with a picture of samples, 10 of each digit. The lines that make it a pipeline are in `main`, under
"zgraph".
"""

import argparse
import contextlib
import math
import os
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

import zgraph

STAGES, CHUNKS = 2, 2  # ranks of a pipeline, and chunks of each
SIDE, PATCH, DIGITS = 8, 2, 10
TOKENS, PIXELS = (SIDE // PATCH) ** 2, PATCH**2  # of an image, of a patch
NOTHING = DIGITS  # label of images whose label is hidden, for guidance
HELD_OUT_EVERY = 5  # images
LOG_EVERY = 10  # steps


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), default=1, help="over the data-parallel ranks of each stage")
    add("--steps", type=int, default=1500, help="optimizer steps")
    add("--batch", type=int, default=64, help="images per pipeline and step")
    add("--micro-batches", type=int, default=4, help="of a batch; they divide it, and are a multiple of 2")
    add("--blocks", type=int, default=1, help="transformer blocks in each of the 4 chunks")
    add("--width", type=int, default=64, help="channels of the residual path")
    add("--heads", type=int, default=4, help="attention heads; they divide the width")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the initial weights, the batches and the samples")
    add("--sample-steps", type=int, default=25, help="steps from noise to an image")
    add("--guidance", type=float, default=1.5, help="how far a sample follows its label; 1 is no guidance")
    add("--eval-every", type=int, default=500, help="steps between samples that are judged; 0 judges the last only")
    add(
        "--lowering", default="fx", help="inductor computes faster, and compiles for some minutes before the first step"
    )
    add("--no-compile", dest="compile", action="store_false", help="run eagerly, without any pass")
    add("--no-sync", dest="sync", action="store_false", help="leave each embedder with its own gradient")
    add("--picture", type=Path, default=Path("out/digits.png"), help="where the samples are written")
    add("--quick", action="store_true", help="a run of half a minute: smaller defaults")
    if parser.parse_args().quick:
        parser.set_defaults(steps=150, batch=32, width=32, sample_steps=10, eval_every=0)
    options = parser.parse_args()
    for name in ("steps", "batch", "micro_batches", "blocks", "width", "heads", "sample_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.batch % options.micro_batches or options.micro_batches % STAGES:
        parser.error(
            f"--micro-batches {options.micro_batches} must be a multiple of {STAGES} and divide --batch {options.batch}"
        )
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} must be a multiple of {2 * options.heads}, twice the --heads")
    return options


# Model: blocks whose scales and shifts depend on timestep and label (Peebles and Xie 2023, arXiv 2212.09748).


class Timestep(nn.Module):
    """[N] times between 0 and 1 -> [N, width]."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0.0, math.log(500.0), width // 2)))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=1))


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on a residual path that begins as the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = self.modulation(condition)[:, None].chunk(6, dim=-1)
        batch, tokens, width = x.shape
        mixed = self.qkv(self.norm(x) * (1 + scale_a) + shift_a)
        q, k, v = mixed.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + gate_a * self.attention_out(mixed)
        return x + gate_b * self.mlp(self.norm(x) * (1 + scale_b) + shift_b)


class Chunk(nn.Module):
    """Part of the model: patches in front, or what is predicted behind, and embedders of its own."""

    positions: nn.Parameter

    def __init__(self, number: int, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.timestep = Timestep(width)
        self.label = nn.Embedding(DIGITS + 1, width)
        self.patches = nn.Linear(PIXELS, width) if number == 0 else None
        if self.patches is not None:
            self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, PIXELS) if number == STAGES * CHUNKS - 1 else None

    def forward(self, x: Tensor, *, time: Tensor, label: Tensor) -> Tensor:
        """[N, TOKENS, PIXELS] or [N, TOKENS, width] -> likewise."""
        condition = F.silu(self.timestep(time) + self.label(label))
        if self.patches is not None:
            x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return x if self.head is None else self.head(F.layer_norm(x, x.shape[-1:]))


# Data: [images, TOKENS, PIXELS] between -1 and 1, the same on every rank.


def to_patches(images: Tensor) -> Tensor:
    rows = SIDE // PATCH
    return images.view(-1, rows, PATCH, rows, PATCH).transpose(2, 3).reshape(-1, TOKENS, PIXELS)


def to_images(patches: Tensor) -> Tensor:
    rows = SIDE // PATCH
    return patches.view(-1, rows, rows, PATCH, PATCH).transpose(2, 3).reshape(-1, SIDE, SIDE)


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, then those held out."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images = to_patches(torch.tensor(digits.images, dtype=torch.float32) / 8 - 1)
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


class Judge:
    """Says how far samples are from images that were held out.

    The Fréchet distance compares means and covariances, as FID does (Heusel et al. 2017, arXiv 1706.08500), of pixels
    instead of a network's features. The classifier is a support vector machine that was trained on true digits.
    """

    def __init__(self, images: Tensor, labels: Tensor, held_out: Tensor) -> None:
        from sklearn.svm import SVC

        self.classifier = SVC(C=10.0).fit(images.flatten(1).numpy(), labels.numpy())
        self.mean, self.covariance = self._moments(held_out)

    def distance(self, samples: Tensor) -> float:
        mean, covariance = self._moments(samples)
        values, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T
        shared = torch.linalg.eigvalsh(root @ covariance @ root).clamp(min=0).sqrt().sum()
        both = covariance.trace() + self.covariance.trace() - 2 * shared
        return ((mean - self.mean).square().sum() + both).item()

    def accuracy(self, samples: Tensor, labels: Tensor) -> float:
        """Share of the samples that the classifier takes for what they are to be."""
        return float((torch.as_tensor(self.classifier.predict(samples.flatten(1).numpy())) == labels).float().mean())

    @staticmethod
    def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = images.flatten(1).double()
        return pixels.mean(dim=0), torch.cov(pixels.T)


def write_png(images: Tensor, path: Path, *, columns: int, scale: int = 4) -> None:
    """Write [N, SIDE, SIDE] images between -1 and 1 as rows of a grey picture."""
    rows = images.view(-1, columns, SIDE, SIDE)
    grid = F.pad(rows, (1, 1, 1, 1), value=-1.0).permute(0, 2, 1, 3).reshape(len(rows) * (SIDE + 2), -1)
    grey = ((1 - grid.clamp(-1, 1)) * 127.5).round().to(torch.uint8)  # dark on light
    grey = grey.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    height, width = grey.shape

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(row.tolist()) for row in grey)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(lines)) + part(b"IEND", b"")
    )


# Sampling: forward only, chunk by chunk.


@torch.no_grad()
def predict(chunks: list[Chunk], mesh: DeviceMesh, x: Tensor, time: Tensor, label: Tensor, width: int) -> Tensor:
    """Run all chunks one after another, each on its rank, and give every rank the result."""
    group = mesh.get_group("pp")
    for number in range(STAGES * CHUNKS):
        owner = number % STAGES
        if mesh.get_local_rank("pp") == owner:
            x = chunks[number // STAGES](x, time=time, label=label)
        else:
            x = x.new_empty(*x.shape[:2], PIXELS if number == STAGES * CHUNKS - 1 else width)
        dist.broadcast(x, group=group, group_src=owner)
    return x


def sample(chunks: list[Chunk], mesh: DeviceMesh, labels: Tensor, options: argparse.Namespace) -> Tensor:
    """Follow the predicted velocity from noise, at time 1, to images, at time 0; the same on every rank."""
    x = torch.randn(len(labels), TOKENS, PIXELS, generator=torch.Generator().manual_seed(options.seed))
    both = torch.cat((labels, torch.full_like(labels, NOTHING)))
    for step in range(options.sample_steps):
        time = torch.full((len(both),), 1 - step / options.sample_steps)
        given, free = predict(chunks, mesh, torch.cat((x, x)), time, both, options.width).chunk(2)
        x = x - (free + options.guidance * (given - free)) / options.sample_steps
    return x.clamp(-1, 1)


# Training.


class Progress:
    """Rank 0's figures: a tqdm bar on a terminal, plain lines elsewhere so that logs stay readable."""

    def __init__(self, steps: int, *, enabled: bool) -> None:
        self.steps = steps
        self.enabled = enabled
        self.bar: Any = None
        if enabled and sys.stderr.isatty():
            with contextlib.suppress(ImportError):  # tqdm comes with zgraph[examples]
                from tqdm import tqdm

                shape = "{n_fmt}/{total_fmt} |{bar:10}| {remaining} left  {desc}"
                self.bar = tqdm(total=steps, dynamic_ncols=True, bar_format=shape)

    def show(self, step: int, figures: str) -> None:
        if self.bar is not None:
            self.bar.set_description_str(figures, refresh=False)
            self.bar.update(step - self.bar.n)
        else:
            self.write(f"step {step:>{len(str(self.steps))}}/{self.steps}  {figures}")

    def write(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        elif self.enabled:
            print(line, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def lr_factor(step: int, steps: int) -> float:
    """Warm up over the first twentieth of the steps, then fall along a cosine to nearly zero."""
    warm_up = max(1, steps // 20)
    return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm_up) / steps))


def largest_difference(chunks: list[Chunk], mesh: DeviceMesh) -> float:
    """How far any replica of an embedder's parameter is from the first one."""
    furthest = 0.0
    for name, parameter in chunks[0].named_parameters():
        if not name.startswith(("timestep.", "label.")):
            continue
        reference = local(parameter).clone()
        dist.broadcast(reference, group=mesh.get_group("pp"), group_src=0)
        for chunk in chunks:
            furthest = max(furthest, (local(chunk.get_parameter(name)) - reference).abs().max().item())
    found = torch.tensor(furthest)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def local(parameter: Tensor) -> Tensor:
    """This rank's part."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def main() -> int:
    options = parse_options()
    started = time.perf_counter()
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) % STAGES:
        sys.exit(f"a pipeline of {STAGES} stages needs torchrun --nproc-per-node {STAGES}, or a multiple of it")
    dist.init_process_group("gloo")
    world, device = dist.get_world_size(), torch.device("cpu")
    progress = Progress(options.steps, enabled=dist.get_rank() == world - 1)  # the last stage knows the loss
    images, labels, held_out, _ = read_digits()
    judge = Judge(images, labels, held_out)

    # zgraph: the chunks of this rank are sharded over the other pipelines' ranks of the stage, and compiled.
    mesh = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("pp", "dp"))
    rank = mesh.get_local_rank("pp")
    chunks: list[Chunk] = []
    stages: list[Any] = []  # torch names its list's type for its own class alone
    for number in range(rank, STAGES * CHUNKS, STAGES):
        torch.manual_seed(options.seed + number)
        chunk = Chunk(number, options.blocks, options.width, options.heads)
        zgraph.shard(chunk, mesh["dp"], zero_stage=options.zero_stage)
        runs: Any = chunk
        if options.compile:
            runs = torch.compile(chunk, backend="zgraph", dynamic=False, options={"lowering": options.lowering})
        chunks.append(chunk)
        stages.append(zgraph.PipelineStage(runs, number, STAGES * CHUNKS, device, group=mesh.get_group("pp")))
    schedule = ScheduleInterleaved1F1B(stages, options.micro_batches, loss_fn=F.mse_loss)
    embedders = {"timestep": [chunk.timestep for chunk in chunks], "label": [chunk.label for chunk in chunks]}
    replicas = zgraph.Replicas(mesh["pp"], embedders, copy_first=True)
    # From here on it is torch's pipeline and a plain optimizer.
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))

    progress.write(
        f"{len(images)} digits to train on, {len(held_out)} held out; {world // STAGES} pipeline(s) of {STAGES}"
    )
    draws = torch.Generator().manual_seed(options.seed + 1 + mesh.get_local_rank("dp"))  # alike in all of a pipeline
    asked = torch.arange(DIGITS).repeat_interleave(20)
    last_stage = rank == STAGES - 1
    distance = judge.distance(
        torch.randn(len(asked), TOKENS, PIXELS, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    )
    progress.write(f"Fréchet distance of noise {distance:.2f}, of digits to train on {judge.distance(images):.2f}")
    samples = images
    clock, timed = time.perf_counter(), 0
    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(images), (options.batch,), generator=draws)
        noise = torch.randn(options.batch, TOKENS, PIXELS, generator=draws)
        time_of = torch.rand(options.batch, generator=draws)
        hidden = torch.rand(options.batch, generator=draws) < 0.1
        condition: dict[str, Any] = {"time": time_of, "label": labels[chosen].masked_fill(hidden, NOTHING)}
        share = time_of[:, None, None]
        x = (1 - share) * images[chosen] + share * noise

        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x, **condition)
        else:
            schedule.step(target=noise - images[chosen], losses=losses, return_outputs=False, **condition)
        if options.sync:
            replicas.all_reduce_grads()
        replicas.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        timed += 1
        if last_stage and (step == 1 or step % LOG_EVERY == 0):
            loss = torch.stack(losses).mean().item()
            progress.show(step, f"loss {loss:.3f}  {(time.perf_counter() - clock) / timed * 1e3:.0f} ms per step")
            clock, timed = time.perf_counter(), 0
        if step == options.steps or (options.eval_every and step % options.eval_every == 0):
            samples = sample(chunks, mesh, asked, options)
            distance = judge.distance(samples)
            seen = f"{judge.accuracy(samples, asked):.0%} of the samples are seen as what they are to be"
            progress.write(f"step {step}: Fréchet distance {distance:.2f}, {seen}")
            clock, timed = time.perf_counter(), 0
    progress.close()

    if progress.enabled:
        write_png(
            to_images(samples.view(DIGITS, -1, TOKENS, PIXELS)[:, :10].reshape(-1, TOKENS, PIXELS)),
            options.picture,
            columns=10,
        )
    progress.write(f"samples in {options.picture}, {time.perf_counter() - started:.0f} s in all")
    difference = largest_difference(chunks, mesh)
    progress.write(f"{STAGES * CHUNKS} replicas of each embedder, the furthest apart by {difference:.3g}")
    if options.sync:
        replicas.check_equal()  # the same bits
    dist.barrier()  # torchrun stops all ranks when the first one ends in an error
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
