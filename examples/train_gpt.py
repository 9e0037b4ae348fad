"""Train a small GPT on the Python standard library's own sources, sharded and compiled by zgraph.

    torchrun --nproc-per-node 2 examples/train_gpt.py                  # CPU with gloo, or CUDA with NCCL
    python examples/train_gpt.py                                       # one device, no process group
    torchrun --nproc-per-node 2 examples/train_gpt.py --quick --min-loss-drop 2.5 # a short check
    torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint DIR --resume   # after every interruption again

The model is plain PyTorch and knows nothing of sharding. The text is on every machine that runs Python: nothing is
downloaded, tokens are bytes, and every 20th file is held out for evaluation. The defaults take about three minutes on
two CPU cores. The lines that make it a sharded run are in `main`, under "zgraph".
"""

import argparse
import contextlib
import math
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph

VOCABULARY = 256  # tokens are bytes
HELD_OUT_EVERY = 20  # files
MAX_TEXT_BYTES = 16 * 2**20  # read at most
LOG_EVERY = 10  # steps
SAMPLE_BYTES = 300


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), default=3, help="0 replicates, 1 to 3 shard")
    add("--param-dtype", choices=("float32", "bfloat16"), default="float32", help="of the gathered parameters")
    add("--steps", type=int, default=550, help="optimizer steps")
    add("--batch", type=int, default=8, help="sequences per rank and step")
    add("--sequence", type=int, default=128, help="bytes per sequence")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=192, help="channels of the residual path")
    add("--heads", type=int, default=6, help="attention heads; they divide the width")
    add("--lr", type=float, default=1.5e-3, help="peak learning rate, reached after the warm-up")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0 does not clip")
    add("--seed", type=int, default=0, help="of the initial weights, the batches and the sample")
    add("--eval-every", type=int, default=100, help="steps between held-out evaluations; 0 evaluates at the end only")
    add("--compress", action="store_true", help="gradients travel as codes of 4 bits, with error feedback (LoCo)")
    add("--lowering", default="fx", help="inductor computes faster, and compiles for a minute before the first step")
    add("--no-compile", dest="compile", action="store_false", help="run eagerly, without any pass")
    add("--three-calls", action="store_true", help="compile forward and backward alone, and call the optimizer outside")
    add("--dump", metavar="DIR", help="write the graph after each pass to this folder")
    add("--checkpoint", metavar="DIR", help="save the run to this folder, and keep the newest two checkpoints")
    add("--checkpoint-every", type=int, default=100, metavar="N", help="steps between checkpoints; one more at the end")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint DIR, if there is one")
    add("--min-loss-drop", type=float, metavar="X", help="exit with 1 unless first loss - held-out loss is at least X")
    add("--quick", action="store_true", help="a run of half a minute: smaller defaults for every size")
    if parser.parse_args().quick:
        parser.set_defaults(steps=120, layers=2, width=128, heads=4, eval_every=0)
    options = parser.parse_args()
    for name in ("steps", "batch", "sequence", "layers", "width", "heads", "checkpoint_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR, the folder to resume from")
    if options.width % (2 * options.heads):
        parser.error(
            f"--width {options.width} does not split into --heads {options.heads} heads of an even size (rotary "
            f"positions turn pairs of channels); use a width that is a multiple of {2 * options.heads}"
        )
    if options.clip < 0 or options.eval_every < 0:
        parser.error(f"--clip {options.clip} and --eval-every {options.eval_every} must not be negative; 0 is off")
    if options.dump is not None and not options.compile:
        parser.error("--dump writes compiled graphs and --no-compile makes none; drop one of the two")
    if options.compress and not options.compile:
        parser.error("--compress is a pass over compiled graphs and --no-compile makes none; drop one of the two")
    return options


# Model: a decoder with rotary positions, pre-norm blocks and tied embeddings.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position; x is [batch, heads, sequence, channels]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each on a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.mlp_out(F.relu(self.mlp_up(self.mlp_norm(x))).square())


class GPT(nn.Module):
    """Predicts the next byte. Returns the mean loss in nats where targets are given, logits otherwise."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds twice to the residual path: scaled so that its variance does not grow with depth.
                scale = (2 * layers) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
        self.head.weight = self.embedding.weight
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(sequence), 10_000 ** (-torch.arange(pairs) / pairs))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Data: [bytes] uint8, the same on every rank.


def read_sources() -> tuple[Tensor, Tensor]:
    """Read the standard library's *.py files and return the training part and the held-out part."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # encodings are generated tables; config-* and _sysconfigdata differ between builds of the same Python.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith("config-")]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and "_sysconfigdata" not in name]
    parts = bytearray(), bytearray()
    for index, path in enumerate(sorted(paths, key=lambda path: path.relative_to(root).parts)):
        parts[index % HELD_OUT_EVERY == 0].extend(path.read_bytes())
        if len(parts[0]) >= MAX_TEXT_BYTES:
            break
    if not parts[0]:
        raise FileNotFoundError(f"no Python sources under {root}; run with a Python that ships its standard library")
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, held_out


def cut(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """Cut one window per start; return tokens and, one byte later, targets: [starts, sequence] int64 each."""
    windows = text[starts.to(text.device)[:, None] + torch.arange(sequence + 1, device=text.device)].long()
    return windows[:, :-1], windows[:, 1:]


# Training.


def lr_factor(step: int, steps: int) -> float:
    """Warm up over the first twentieth of the steps, then fall along a cosine to nearly zero."""
    warm_up = max(1, steps // 20)
    return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm_up) / steps))


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, starts: Tensor, sequence: int) -> float:
    """Return the mean loss over fixed held-out windows, starts [batches, batch]: the same text each time."""
    model.eval()
    losses = [model(*cut(text, batch, sequence)) for batch in starts]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, sequence: int, seed: int, device: torch.device) -> str:
    """Continue the prompt byte by byte, drawn from the 20 likeliest at temperature 0.8.

    The forward gathers parameters, so every rank must call it equally often: all generate, with the same seed and no
    early stop. The window keeps one shape, padded behind the text where causal attention cannot see it: one compile.
    """
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    model.eval()
    for _ in range(length):
        context = list(text[-sequence:])
        tokens = torch.tensor([context + [0] * (sequence - len(context))], device=device)
        logits, likeliest = model(tokens)[0, len(context) - 1].cpu().topk(20)
        choice = torch.multinomial(torch.softmax(logits / 0.8, dim=0), 1, generator=generator)
        text.append(int(likeliest[choice]))
    model.train()
    return text.decode(errors="replace")


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


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
    unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    return f"peak rss {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB"


def start() -> tuple[int, int, torch.device]:
    """Join the process group if torchrun started this process; return rank, world size and device."""
    # One GPU per rank or none at all: NCCL refuses two ranks on one.
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_torchelastic_launched():
        return 0, 1, device
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), device


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def main() -> int:
    options = parse_options()
    started = time.perf_counter()
    rank, world, device = start()
    progress = Progress(options.steps, enabled=rank == 0)
    train_text, held_out_text = (text.to(device) for text in read_sources())
    if len(held_out_text) <= options.sequence:
        raise ValueError(f"--sequence {options.sequence}: the held-out text has only {len(held_out_text)} bytes")

    torch.manual_seed(options.seed)
    model: nn.Module = GPT(options.layers, options.width, options.heads, options.sequence).to(device)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6

    # zgraph: shard, then compile. What follows is plain PyTorch.
    how = "one process, so --zero-stage and --param-dtype have nothing to do"
    if dist.is_initialized():
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
        dtype = torch.bfloat16 if options.param_dtype == "bfloat16" else torch.float32
        model = zgraph.shard(model, mesh, zero_stage=options.zero_stage, param_dtype=dtype, reduce_dtype=torch.float32)
        how = f"{world} ranks on {dist.get_backend()}, ZeRO stage {options.zero_stage}, {options.param_dtype}"
    backend_options: dict[str, Any] = {"lowering": options.lowering}
    if options.compile:
        if options.dump is not None:
            backend_options["dump"] = options.dump
        if options.compress:
            passes = zgraph.passes.presets.default(compression=zgraph.passes.LoCo())
            backend_options["passes"] = zgraph.PassList(passes)
        # Three kinds of call (training, evaluation, generation), each with one shape: nothing to make dynamic.
        model = cast(nn.Module, torch.compile(model, backend="zgraph", dynamic=False, options=backend_options))
    optimizer = make_optimizer(model, options.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))

    progress.write(f"{millions:.2f} M parameters on {device.type}, {how}")
    progress.write(f"{len(train_text) / 1e6:.1f} MB to train on, {len(held_out_text) / 1e6:.1f} MB held out")

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if options.compile and dist.is_initialized() and not options.three_calls:
        train_step = zgraph.training_step(model, optimizer, options=backend_options)(train_step)

    batches = torch.Generator().manual_seed(options.seed + rank)  # each rank draws its own
    eval_starts = torch.linspace(0, len(held_out_text) - options.sequence - 1, 8 * options.batch * world).long()
    eval_starts = eval_starts[rank::world].view(8, options.batch)
    first_loss = held_out_loss = math.nan
    done = 0
    latest = zgraph.latest_checkpoint(options.checkpoint) if options.resume else None
    if latest is not None:
        checkpoint = zgraph.load_checkpoint(latest, model, optimizer)
        done, first_loss = checkpoint.step, checkpoint.extra["first_loss"]
        scheduler.load_state_dict(checkpoint.extra["scheduler"])
        if checkpoint.ranks == world:
            batches.set_state(checkpoint.extra["batches"])
        else:  # other ranks draw from other generators: new ones, or two would draw the same
            batches.manual_seed((options.seed + rank) * 1_000_003 + done)
        progress.write(f"resumed from {latest}, saved by {checkpoint.ranks} ranks")
    summarized = options.compile and dist.is_initialized()  # there is a summary for what is sharded and compiled
    clock, steps_timed = time.perf_counter(), 0
    for step in range(done + 1, options.steps + 1):
        starts = torch.randint(len(train_text) - options.sequence, (options.batch,), generator=batches)
        loss = train_step(*cut(train_text, starts, options.sequence))
        scheduler.step()
        steps_timed += 1

        last = step == options.steps
        if step == done + 1 or last or step % LOG_EVERY == 0:
            train_loss = mean_over_ranks(loss)  # waits for the device too: only then is the time true
            step_s = (time.perf_counter() - clock) / steps_timed
            if math.isnan(first_loss):
                first_loss = train_loss
            if step == done + 1:
                speed = f"first step{' and compiling' if options.compile else ''} {step_s:.1f} s"
            else:
                speed = f"{world * options.batch * options.sequence / step_s:,.0f} tokens/s  {step_s * 1e3:.0f} ms"
            sent_bytes = zgraph.summary(model).step_bytes if summarized else 0
            wire = f"  wire {sent_bytes / 2**20:.2f} MiB" if sent_bytes else ""
            progress.show(step, f"loss {train_loss:.3f}  {speed}{wire}  {peak_memory(device)}")
            clock, steps_timed = time.perf_counter(), 0
        if last or (options.eval_every and step % options.eval_every == 0):
            held_out_loss = evaluate(model, held_out_text, eval_starts, options.sequence)
            progress.write(f"step {step}: held-out loss {held_out_loss:.3f} nats per byte")
            clock, steps_timed = time.perf_counter(), 0
        if options.checkpoint is not None and (last or step % options.checkpoint_every == 0):
            extra = {"first_loss": first_loss, "scheduler": scheduler.state_dict(), "batches": batches.get_state()}
            zgraph.save_checkpoint(options.checkpoint, model, optimizer, step=step, extra=extra)
            clock, steps_timed = time.perf_counter(), 0
    progress.close()
    if done >= options.steps:  # nothing was left to do
        held_out_loss = evaluate(model, held_out_text, eval_starts, options.sequence)

    text = generate(model, b"import ", SAMPLE_BYTES, options.sequence, options.seed, device)
    progress.write(f"\n--- sample\n{text}")
    if summarized:
        progress.write(f"\n--- zgraph\n{zgraph.summary(model)}")
    seconds = time.perf_counter() - started
    # Nine digits name one float32: two runs that end alike show that they are equal bit for bit.
    progress.write(f"\nloss {first_loss:.9g} -> held-out {held_out_loss:.9g} nats per byte, {seconds:.0f} s in all")
    drop, least = first_loss - held_out_loss, options.min_loss_drop
    failed = least is not None and not drop >= least  # put so that NaN fails too
    if failed:
        progress.write(f"FAILED: the loss fell by {drop:.3f}, --min-loss-drop asks for {least}")
    if dist.is_initialized():
        dist.barrier()  # torchrun stops all ranks when the first one fails: rank 0 must have written by then
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
