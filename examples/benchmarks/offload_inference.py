"""Inference from disk, with weights as they are and as codes of 8 and 4 bits: bytes read, time, memory and error.

    python examples/benchmarks/offload_inference.py                              # five minutes
    python examples/benchmarks/offload_inference.py --layers 4 --steps 100       # does it run?

Time and memory: a GPT of random weights whose parameters rest on disk takes one token through, again and again, in a
process of its own for each row. The disk's rate is that of reading the same bytes alone, right before. Bytes are those
that the system says the process has read from the disk.

Error: the GPT of examples/train_gpt.py, trained here for some steps, then with its weights quantized and decoded as
they would be at rest: the loss of held-out text, and by how much logits differ, relative to their length.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from offload_capacity import SEQUENCE, VOCABULARY, config_of, run_limited
from ranks import alone
from record import about, parser_of, quartiles, save
from torch import Tensor, nn
from workload import LanguageModel

import zgraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT, cut, evaluate, lr_factor, make_optimizer, read_sources

LAYERS, WIDTH, HEADS, BATCH = 2, 128, 4, 8  # of the one that is trained
WAYS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "fp32": {"params": "disk"},
    "bf16": {"params": "disk"},
    "8 bits": {"params": "disk", "param_bits": 8},
    "4 bits": {"params": "disk", "param_bits": 4},
}


# --- time and memory --------------------------------------------------------------------------------------------------


def read_bytes() -> int:
    """Bytes that this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def disk_rate(folder: str, nbytes: int = 1 << 28) -> float:
    """Bytes per second of reading tensors of 16 MiB, one ahead, and nothing else."""
    from zgraph.tiers.disk.folder import DiskFolder

    disk = DiskFolder(folder, 0)
    parts = [disk.empty((1 << 24,), torch.uint8, "probe") for _ in range(nbytes >> 24)]
    for part in parts:
        disk.start_write(torch.full_like(part, 7), part).wait()
    began = time.perf_counter()
    reads = [disk.start_read(part) for part in parts[:2]]
    for place in range(len(parts)):
        reads[place].wait()
        if place + 2 < len(parts):
            reads.append(disk.start_read(parts[place + 2]))
    return nbytes / (time.perf_counter() - began)


def serve(way: str, layers: str, width: str, turns: str, scratch: str) -> None:
    """Print a row as one line of JSON."""
    torch.set_num_threads(2)
    with alone(), torch.no_grad():
        rate = disk_rate(scratch)
        torch.set_default_dtype(torch.bfloat16 if way == "bf16" else torch.float32)
        model = of_size(int(layers), int(width))
        torch.set_default_dtype(torch.float32)
        offload = zgraph.Offload(**WAYS[way], path=scratch) if WAYS[way] else None
        # What the processor multiplies is fp32 in all rows: few have bf16.
        zgraph.shard(model, param_dtype=torch.float32, offload=offload)
        zgraph.materialize(model, seed=0)
        compiled: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
        tokens = torch.randint(0, VOCABULARY, (1, 2), generator=torch.Generator().manual_seed(1))
        compiled(tokens)
        ms, before = list[float](), read_bytes()
        for _ in range(int(turns)):
            began = time.perf_counter()
            compiled(tokens)
            ms.append(1e3 * (time.perf_counter() - began))
        read = (read_bytes() - before) / int(turns)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"way": way, "ms": ms, "read_bytes": read, "disk_bytes_per_s": rate, "peak_bytes": peak}
        print(json.dumps(found), flush=True)
        os._exit(0)


def of_size(layers: int, width: int) -> LanguageModel:
    """The model that is timed, without values."""
    with torch.device("meta"):
        return LanguageModel(config_of(layers, width, batch=1)).eval().requires_grad_(False)


# --- error ------------------------------------------------------------------------------------------------------------


def trained(steps: int) -> GPT:
    torch.manual_seed(0)
    text, _ = read_sources()
    model = GPT(LAYERS, WIDTH, HEADS, SEQUENCE)
    optimizer = make_optimizer(model, 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
    for _ in range(steps):
        loss = model(*cut(text, torch.randint(len(text) - SEQUENCE, (BATCH,)), SEQUENCE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.eval()


def errors(steps: int) -> list[dict[str, Any]]:
    """Loss and relative error of logits, by bits."""
    weights = trained(steps).state_dict()
    _, text = read_sources()
    windows = torch.linspace(0, len(text) - SEQUENCE - 1, 512).long().view(-1, 32)
    tokens, _ = cut(text, windows[0], SEQUENCE)

    def measured(bits: Any) -> tuple[float, Tensor]:
        model: nn.Module = GPT(LAYERS, WIDTH, HEADS, SEQUENCE)
        model.load_state_dict(weights)
        if bits is not None:
            zgraph.shard(model, offload=zgraph.Offload(params="host", param_bits=bits))
        with torch.no_grad():
            return evaluate(model, text, windows, SEQUENCE), model(tokens)

    exact, expected = measured(None)
    found: list[dict[str, Any]] = [{"bits": 32, "loss": exact, "logits": 0.0}]
    for bits in (8, 4):
        loss, logits = measured(bits)
        found.append({"bits": bits, "loss": loss, "logits": ((logits - expected).norm() / expected.norm()).item()})
    return found


def main() -> None:
    if sys.argv[1:2] == ["--try"]:
        serve(*sys.argv[2:])
    parser = parser_of(__doc__, layers=24, width=1024, turns=7, steps=400)
    parser.add_argument("--gib", type=float, help="limit of memory of each row, page cache counted (root)")
    options = parser.parse_args()
    where = {**about(), "gib": options.gib}
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        row = run_limited(__file__, (way, options.layers, options.width, options.turns), options.gib)
        rows.append(row or {"way": way, "fits": False})
        if row is None:
            print(f"{way:10} does not fit into {options.gib} GiB")
            continue
        ms, at_rate = quartiles(row["ms"])[1], 1e3 * row["read_bytes"] / row["disk_bytes_per_s"]
        print(
            f"{way:10} {ms:7.0f} ms, reads {row['read_bytes'] / 1e6:6.0f} MB, which take {at_rate:5.0f} ms alone; "
            f"peak {row['peak_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
    with alone():
        found = errors(options.steps)
    for entry in found:
        print(f"{entry['bits']:2} bits: loss {entry['loss']:.4f}, logits differ by {100 * entry['logits']:.2f} %")
    config = {name: getattr(options, name) for name in ("layers", "width", "steps")}
    numel = sum(tensor.numel() for tensor in of_size(options.layers, options.width).parameters())
    save(options.json, where | {"config": config, "numel": numel, "rows": rows, "errors": found})


if __name__ == "__main__":
    main()
