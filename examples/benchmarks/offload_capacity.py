"""The largest GPT that trains in a given memory: plain PyTorch, FSDP2, DeepSpeed, and zgraph on disk.

    sudo python examples/benchmarks/offload_capacity.py                        # half an hour
    sudo python examples/benchmarks/offload_capacity.py --gib 1.5 --ways plain,zgraph --json FILE
    sudo python offload_capacity.py --ways zgraph --layers 23 --width 1536 --exactly --step --steps 9

Each try is a process of its own in a cgroup whose memory is limited (version 1's memory controller), page cache
counted: what is read from files counts like what is allocated, as on a machine with so little memory. glibc is told
to give large blocks back to the system, which it otherwise keeps, and torch to allocate them in huge pages. The model
is a GPT of fixed width; the number of its layers is doubled until a try is killed, and then bisected. A try trains some
steps with fused AdamW; a way counts as able to if the loss fell and the process ended by itself.

plain       eager PyTorch, parameters, gradients and AdamW's state in memory
fsdp2       fully_shard of each block with CPUOffloadPolicy, which on a CPU is all in memory
deepspeed-cpu, deepspeed-nvme
            ZeRO-3 with parameters and AdamW's state on the host, or in files (pip install deepspeed ninja; files need
            libaio-dev as well)
zgraph      shards and AdamW's state on disk, streamed through whole steps
zgraph-8bit the same with bf16 weights and zgraph.AdamW8bit

With --step, zgraph's model is also trained without a limit, to compare losses, and the time of its step is compared
with two that no step can be faster than: that of its transfers with nothing beside them, in the same process and limit,
and that of its computing, which models with nothing on disk show: their time per layer, times the layers.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from builders import adamw, plain_step, shard_fully, whole_step
from ranks import alone
from record import about, parser_of, save, spread
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workload import LanguageModel, ModelConfig

CGROUP = Path("/sys/fs/cgroup/memory")
VOCABULARY, SEQUENCE, BATCH, STEPS = 512, 64, 2, 4
GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
SLOW_STEPS = 2  # the first two are compiled, and write blocks of the disk that were reserved only
IN_FLIGHT_BYTES, UPDATE_BYTES = 2**28, 2**27
MEASURED_LAYERS = (4, 8)  # of models that are not on disk
IN_FLIGHT = 3  # transfers of each direction where nothing computes
Built = tuple[nn.Module, Callable[[Tensor], Tensor]]  # the model, and a step


# --- a try ------------------------------------------------------------------------------------------------------------


def plain(config: ModelConfig, scratch: str) -> Built:
    model = LanguageModel(config)
    return model, plain_step(model, adamw(model))


def fsdp2(config: ModelConfig, scratch: str) -> Built:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = LanguageModel(config)
    shard_fully(model, model.blocks, None, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model, plain_step(model, adamw(model))


def deepspeed(device: str, config: ModelConfig, scratch: str) -> Built:
    """ZeRO-3 with all that can rest elsewhere on "cpu" or "nvme"."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    import deepspeed  # pyright: ignore[reportMissingImports]  # optional

    largest = max(VOCABULARY, 4 * config.width) * config.width  # numbers of a parameter
    place: dict[str, Any] = {"device": device, "pin_memory": False}
    if device == "nvme":
        place["nvme_path"] = os.path.abspath(scratch)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 0.0,  # as zgraph; the default became 1.0 with DeepSpeed#8068
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": place,
            "offload_param": place | {"buffer_size": largest, "buffer_count": 16},
            "sub_group_size": 4 * largest,
            "stage3_max_live_parameters": 8 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2 * largest,
            "reduce_bucket_size": 2 * largest,
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LanguageModel(config)
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, config=settings)

    def step(tokens: Tensor) -> Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return model, step


def on_disk(config: ModelConfig, scratch: str, *, eight_bit: bool = False) -> Built:
    import zgraph

    with torch.device("meta"):
        model = LanguageModel(config).to(torch.bfloat16 if eight_bit else torch.float32)
    offload = zgraph.Offload(params="disk", optimizer="disk", path=scratch)
    model = zgraph.shard(model, zero_stage=3, offload=offload)
    zgraph.materialize(model)
    # Two uses ahead, which takes memory that this limit has: where reading and computing take about as long, one use
    # ahead lets the disk rest whenever they differ.
    ahead = zgraph.passes.StreamStates(prefetch=2, in_flight_bytes=IN_FLIGHT_BYTES, update_bytes=UPDATE_BYTES)
    passes = [ahead if one.name == ahead.name else one for one in zgraph.passes.presets.default()]
    optimizer = zgraph.AdamW8bit(model.parameters(), lr=1e-3) if eight_bit else adamw(model)
    return model, whole_step(model, optimizer, {"lowering": "fx", "passes": zgraph.PassList(passes)})


def in_memory(config: ModelConfig, scratch: str) -> Built:
    """The same step with nothing on disk: how long it computes."""
    import zgraph

    model = zgraph.shard(LanguageModel(config), zero_stage=3)
    return model, whole_step(model, adamw(model), {"lowering": "fx"})


WAYS: dict[str, Callable[[ModelConfig, str], Built]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "deepspeed-cpu": lambda config, scratch: deepspeed("cpu", config, scratch),
    "deepspeed-nvme": lambda config, scratch: deepspeed("nvme", config, scratch),
    "zgraph": on_disk,
    "zgraph-8bit": partial(on_disk, eight_bit=True),
    "memory": in_memory,
}


def transfer_alone(model: nn.Module) -> None:
    """Make a step's transfers with nothing beside them, which leave parameters as they are.

    A step reads each parameter for forward and for backward, whose copy the update writes to, and two moments; it
    writes the last three.
    """
    from zgraph.tiers.copy_lanes import lanes_of

    lanes = lanes_of(torch.device("cpu"))
    assert lanes is not None
    shards = [cast("DTensor", parameter).to_local() for parameter in model.parameters()]
    reading: deque[tuple[Any, Tensor, bool]] = deque()
    writing: deque[Any] = deque()

    def finish_read() -> None:
        read, shard, writes = reading.popleft()
        copy = read.wait()
        if writes:
            writing.append(lanes.store(copy, shard))
        if len(writing) > IN_FLIGHT:
            writing.popleft().wait()

    for turn in range(4):
        for shard in shards:
            reading.append((lanes.reload(shard), shard, turn >= 1))
            if len(reading) > IN_FLIGHT:
                finish_read()
    while reading:
        finish_read()
    while writing:
        writing.popleft().wait()


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its seconds."""
    began = time.perf_counter()
    return run(), time.perf_counter() - began


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks, and written to them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def attempt(way: str, layers: str, width: str, steps: str, scratch: str) -> None:
    """Train, and print what became of it as one line of JSON."""
    torch.set_num_threads(2)
    with alone():
        torch.manual_seed(0)
        model, step = WAYS[way](config_of(int(layers), int(width), BATCH), scratch)
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
        taken = [timed(lambda: step(tokens).item()) for _ in range(int(steps) - 1)]
        before = disk_bytes()
        taken.append(timed(lambda: step(tokens).item()))
        moved = [after - earlier for after, earlier in zip(disk_bytes(), before, strict=True)]
        transfers = [timed(lambda: transfer_alone(model)) for _ in range(int(steps) - STEPS)] if way == "zgraph" else []
        found = {
            # DeepSpeed keeps the size of what it has partitioned beside an empty parameter.
            "numel": sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()),
            "losses": [loss for loss, _ in taken],
            "seconds": [seconds for _, seconds in taken],
            "transfers_alone_s": [seconds for _, seconds in transfers],
            "last_step_disk_bytes": dict(zip(("read", "written"), moved, strict=True)),
        }
        print(json.dumps(found), flush=True)
        os._exit(0)  # what is on disk goes with the process


def config_of(layers: int, width: int, batch: int) -> ModelConfig:
    sizes = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "batch": batch}
    return ModelConfig(width=width, layers=layers, heads=width // 64, **sizes)


# --- in a cgroup ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(gib: float | None) -> Generator[Path | None]:
    """A cgroup with a limit of memory; None for no limit."""
    if gib is None:
        yield None
        return
    group = CGROUP / f"zgraph-capacity-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(int(gib * 2**30)))
    try:
        yield group
    finally:
        group.rmdir()


def run_limited(
    script: str, arguments: Sequence[object], gib: float | None, timeout_s: float | None = None, **variables: str
) -> dict[str, Any] | None:
    """Run a script with `--try` and these arguments and a folder; what its last line says, and the peak of its group.

    None if it ran out of memory or time.
    """
    with limited(gib) as group, tempfile.TemporaryDirectory(dir=".") as scratch:

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, script, "--try", *map(str, arguments), scratch]
        environment = {**os.environ, **GLIBC, **variables}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        try:
            done = subprocess.run(command, env=environment, preexec_fn=enter, timeout=timeout_s, check=False, **pipes)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode and done.returncode not in (-9, 137) and "memory" not in done.stderr.lower():
            print(f"{' '.join(map(str, arguments))}: {done.stderr[-2000:]}", file=sys.stderr)
        if done.returncode or not done.stdout:
            return None
        peak = 0 if group is None else int((group / "memory.max_usage_in_bytes").read_text())
        return {"group_peak_bytes": peak, **json.loads(done.stdout.splitlines()[-1])}


def tried(way: str, layers: int, options: argparse.Namespace, steps: int, *, free: bool = False) -> Any:
    """What a try found; None if it ran out of memory or time, or did not learn."""
    gib = None if free else options.gib
    found = run_limited(__file__, (way, layers, options.width, steps), gib, options.timeout_s, **HUGE_PAGES)
    if found is None or not found["losses"][-1] < found["losses"][0]:
        return None
    return {"layers": layers, "width": options.width, "peak_bytes": found.pop("group_peak_bytes"), **found}


def largest(way: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """The largest model that trains; layers are doubled, and then bisected to an eighth."""
    if options.exactly:
        return tried(way, options.layers, options, options.steps)
    best: dict[str, Any] | None = None
    low, high, fails = 0, options.layers, sys.maxsize
    while fails - low > max(1, low // 8):
        found = tried(way, high, options, STEPS)
        print(f"  {way}: {high} layers {'train' if found else 'do not'}", flush=True)
        if found is None:
            fails = high
        else:
            best, low = found, high
        high = 2 * low if fails == sys.maxsize else (low + fails) // 2
    return best


def judged(best: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The step of a try beside its transfers alone, its computing alone, and the losses of a run without a limit."""
    layers, (few, more) = best["layers"], MEASURED_LAYERS
    steps = {count: tried("memory", count, options, STEPS + SLOW_STEPS, free=True) for count in MEASURED_LAYERS}
    seconds = {count: statistics.median(one["seconds"][SLOW_STEPS:]) for count, one in steps.items()}
    compute_s = seconds[few] + (layers - few) * (seconds[more] - seconds[few]) / (more - few)
    free = tried("zgraph", layers, options, STEPS, free=True)
    step_s, transfers_s = best["seconds"][SLOW_STEPS:], best["transfers_alone_s"]
    same = free is not None and free["losses"] == best["losses"][:STEPS]
    longer = max(statistics.median(transfers_s), compute_s)
    print(
        f"step {spread(step_s, 1)} s, its transfers alone {spread(transfers_s, 1)} s, its computing alone "
        f"{compute_s:.1f} s, {statistics.median(step_s) / longer:.2f} of the longer; losses without a limit "
        f"{'equal' if same else 'differ'}"
    )
    return {"seconds": step_s, "transfers_alone_s": transfers_s, "compute_alone_s": compute_s, "same_losses": same}


def main() -> None:
    if sys.argv[1:2] == ["--try"]:
        attempt(*sys.argv[2:])
    parser = parser_of((__doc__ or "").partition("\n")[0], gib=1.5, width=768, layers=4, timeout_s=900.0, steps=STEPS)
    parser.add_argument("--exactly", action="store_true", help="try that many layers alone, for --steps")
    parser.add_argument("--ways", default="plain,zgraph", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--step", action="store_true", help="compare zgraph's step with its transfers and computing")
    options = parser.parse_args()
    if options.step and not (options.exactly and options.steps > STEPS):
        raise SystemExit(f"--step needs --exactly, and --steps of more than {STEPS}, such as 9")
    where: dict[str, Any] = {**about(), "gib": options.gib}
    print(f"{where['processor']}, {where['commit']}, {options.gib} GiB")
    found = {way: largest(way, options) for way in options.ways.split(",")}
    base = found.get("plain")
    for way, best in found.items():
        if best is None:
            print(f"{way:8} not even {options.layers} layers")
            continue
        ratio = "" if base is None else f", {best['numel'] / base['numel']:.1f} x plain"
        seconds = min(best["seconds"][1:])
        disk = " and ".join(
            f"{moved / best['numel']:.2f} bytes {of}" for of, moved in best["last_step_disk_bytes"].items()
        )
        print(
            f"{way:8} {best['layers']} layers, {best['numel'] / 1e6:.0f} M parameters{ratio}, {seconds:.2f} s a step, "
            f"{disk} per parameter"
        )
    if options.step and (best := found.get("zgraph")) is not None:
        where["step"] = {**where, **judged(best, options)}
    save(options.json, where | {"ways": found})


if __name__ == "__main__":
    main()
