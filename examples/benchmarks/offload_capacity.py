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

With --step, zgraph's model is also trained without a limit, to compare losses, and the time of its step is compared
with two that no step can be faster than: that of its transfers with nothing beside them, in the same process and limit,
and that of its computing, which models with nothing on disk show: their time per layer, times the layers. Transfers
take processors too, here those that compute: seconds of processors are given beside.
"""

# HashStore is exported, though not listed.
# pyright: reportPrivateImportUsage=false

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
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from provenance import commit, processor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workload import Block, LanguageModel, ModelConfig

CGROUP = Path("/sys/fs/cgroup/memory")
VOCABULARY, SEQUENCE, BATCH, STEPS = 512, 64, 2, 4
WAYS = ("plain", "fsdp2", "deepspeed-cpu", "deepspeed-nvme", "zgraph")
GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
SLOW_STEPS = 2  # the first two are compiled, and write blocks of the disk that were reserved only
IN_FLIGHT_BYTES, UPDATE_BYTES = 2**28, 2**27
MEASURED_LAYERS = (4, 8)  # of models that are not on disk
IN_FLIGHT = 3  # transfers of each direction where nothing computes


def config_of(layers: int, width: int) -> ModelConfig:
    return ModelConfig(
        vocabulary=VOCABULARY, width=width, layers=layers, heads=width // 64, sequence=SEQUENCE, batch=BATCH
    )


# --- a try ------------------------------------------------------------------------------------------------------------


def plain(config: ModelConfig, scratch: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = LanguageModel(config)
    return model, loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def fsdp2(config: ModelConfig, scratch: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = LanguageModel(config)
    for block in filter(lambda part: isinstance(part, Block), list(model.modules())):
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model, loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def deepspeed(device: str) -> Callable[[ModelConfig, str], tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """ZeRO-3 with all that can rest elsewhere on "cpu" or "nvme"."""

    def build(config: ModelConfig, scratch: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
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
        torch.manual_seed(0)
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

    return build


def on_disk(config: ModelConfig, scratch: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    import zgraph

    torch.manual_seed(0)
    with torch.device("meta"):
        model = LanguageModel(config)
    offload = zgraph.Offload(params="disk", optimizer="disk", path=scratch)
    model = zgraph.shard(model, zero_stage=3, offload=offload)
    zgraph.materialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    # Two uses ahead, which takes memory that this limit has: where reading and computing take about as long, one use
    # ahead lets the disk rest whenever they differ.
    ahead = zgraph.passes.StreamStates(prefetch=2, in_flight_bytes=IN_FLIGHT_BYTES, update_bytes=UPDATE_BYTES)
    passes = [ahead if one.name == ahead.name else one for one in zgraph.passes.presets.default()]
    options = {"lowering": "fx", "passes": zgraph.PassList(passes)}
    return model, zgraph.training_step(model, optimizer, options=options)(loop(model, optimizer))


def in_memory(config: ModelConfig, scratch: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The same step with nothing on disk: how long it computes."""
    import zgraph

    torch.manual_seed(0)
    model = zgraph.shard(LanguageModel(config), zero_stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, zgraph.training_step(model, optimizer, options={"lowering": "fx"})(loop(model, optimizer))


def transfer_alone(model: nn.Module) -> tuple[float, float]:
    """Seconds, and of processors, of a step's transfers with nothing beside them, which leave parameters as they are.

    A step reads each parameter for forward and for backward, whose copy the update writes to, and two moments; it
    writes the last three.
    """
    from zgraph.tiers.copy_lanes import lanes_of
    from zgraph.tiers.thread_lanes import ThreadLanes

    lanes = lanes_of(torch.device("cpu"))
    assert isinstance(lanes, ThreadLanes)
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

    began, cpu_began = time.perf_counter(), time.process_time()
    for turn in range(4):
        for shard in shards:
            reading.append((lanes.reload(shard), shard, turn >= 1))
            if len(reading) > IN_FLIGHT:
                finish_read()
    while reading:
        finish_read()
    while writing:
        writing.popleft().wait()
    return time.perf_counter() - began, time.process_time() - cpu_began


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def attempt(way: str, layers: int, width: int, scratch: str, steps: int) -> None:
    """Train, and print what became of it as one line of JSON."""
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    builds = {
        "plain": plain,
        "fsdp2": fsdp2,
        "deepspeed-cpu": deepspeed("cpu"),
        "deepspeed-nvme": deepspeed("nvme"),
        "zgraph": on_disk,
        "memory": in_memory,
    }
    model, step = builds[way](config_of(layers, width), scratch)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for _ in range(steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(step(tokens).item())
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    # DeepSpeed keeps the size of what it has partitioned beside an empty parameter.
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    alone = [transfer_alone(model) for _ in range(steps - STEPS)] if way == "zgraph" else []
    found = {
        "numel": numel,
        "losses": losses,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "transfers_alone_s": [one for one, _ in alone],
        "transfers_alone_cpu_s": [cpu for _, cpu in alone],
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # what is on disk goes with the process


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


def tried(way: str, layers: int, width: int, gib: float | None, timeout_s: float, steps: int) -> dict[str, Any] | None:
    """What a try printed; None if it ran out of memory or time, or did not learn."""
    with limited(gib) as group, tempfile.TemporaryDirectory(dir=".") as scratch:
        command = [sys.executable, __file__, "--attempt", way, str(layers), str(width), scratch, str(steps)]

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **GLIBC, **HUGE_PAGES},
            preexec_fn=enter,
        )
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        if process.returncode and process.returncode not in (-9, 137) and "memory" not in errors.lower():
            print(f"{way}, {layers} layers: {errors[-2000:]}", file=sys.stderr)
        found = json.loads(output.splitlines()[-1]) if not process.returncode and output else None
        peak = 0 if group is None else int((group / "memory.max_usage_in_bytes").read_text())
    if found is None or not found["losses"][-1] < found["losses"][0]:
        return None
    return {"layers": layers, "width": width, "peak_bytes": peak, **found}


def largest(way: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """The largest model that trains; layers are doubled, and then bisected to an eighth."""
    if options.exactly:
        return tried(way, options.layers, options.width, options.gib, options.timeout_s, options.steps)
    best: dict[str, Any] | None = None
    low, high = 0, options.layers
    while (found := tried(way, high, options.width, options.gib, options.timeout_s, STEPS)) is not None:
        best, low, high = found, high, 2 * high
        print(f"  {way}: {low} layers train, {found['numel'] / 1e6:.0f} M parameters", flush=True)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        found = tried(way, middle, options.width, options.gib, options.timeout_s, STEPS)
        print(f"  {way}: {middle} layers {'train' if found else 'do not'}", flush=True)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best


def judged(best: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The step of a try beside its transfers alone, its computing alone, and the losses of a run without a limit."""
    layers, (few, more) = best["layers"], MEASURED_LAYERS
    steps = {
        count: tried("memory", count, options.width, None, options.timeout_s, STEPS + SLOW_STEPS)
        for count in MEASURED_LAYERS
    }
    free = tried("zgraph", layers, options.width, None, options.timeout_s, STEPS)

    def computing(which: str) -> float:
        found = {count: statistics.median(one[which][SLOW_STEPS:]) for count, one in steps.items() if one}
        return found[few] + (layers - few) * (found[more] - found[few]) / (more - few)

    compute_s = computing("seconds")
    found: dict[str, Any] = {
        "seconds": best["seconds"][SLOW_STEPS:],
        "cpu_seconds": best["cpu_seconds"][SLOW_STEPS:],
        "transfers_alone_s": best["transfers_alone_s"],
        "transfers_alone_cpu_s": best["transfers_alone_cpu_s"],
        "compute_alone_s": compute_s,
        "compute_alone_cpu_s": computing("cpu_seconds"),
        "same_losses": free is not None and free["losses"] == best["losses"][:STEPS],
    }
    step_s, transfers_s = (statistics.median(found[name]) for name in ("seconds", "transfers_alone_s"))
    step_cpu_s, transfers_cpu_s = (statistics.median(found[name]) for name in ("cpu_seconds", "transfers_alone_cpu_s"))
    print(
        f"step {step_s:.1f} s, its transfers alone {transfers_s:.1f} s, its computing alone {compute_s:.1f} s, "
        f"{step_s / max(transfers_s, compute_s):.2f} of the longer; of processors {step_cpu_s:.1f}, "
        f"{transfers_cpu_s:.1f} and {found['compute_alone_cpu_s']:.1f} s; losses without a limit "
        f"{'equal' if found['same_losses'] else 'differ'}"
    )
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.5, help="limit of memory")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4, help="of the first try")
    parser.add_argument("--exactly", action="store_true", help="try that many layers alone")
    parser.add_argument("--ways", default="plain,zgraph", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one try")
    parser.add_argument(
        "--step", action="store_true", help="compare zgraph's step with its transfers and its computing"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of a try of that many layers alone")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--attempt"]:
        way, layers, width, scratch, steps = sys.argv[2:]
        attempt(way, int(layers), int(width), scratch, int(steps))
    options = parsed()
    if options.step and not (options.exactly and options.steps > STEPS):
        raise SystemExit(f"--step needs --exactly, and --steps of more than {STEPS}, such as 9")
    found = {way: largest(way, options) for way in options.ways.split(",")}
    print(f"{processor()}, {commit()}, {options.gib} GiB")
    base = found.get("plain")
    for way, best in found.items():
        if best is None:
            print(f"{way:8} not even {options.layers} layers")
            continue
        ratio = "" if base is None else f", {best['numel'] / base['numel']:.1f} x plain"
        seconds = min(best["seconds"][1:])
        print(f"{way:8} {best['layers']} layers, {best['numel'] / 1e6:.0f} M parameters{ratio}, {seconds:.2f} s a step")
    about: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "commit": commit(), "gib": options.gib}
    if options.step and (best := found.get("zgraph")) is not None:
        about["step"] = {**about, **judged(best, options)}
    if options.json is not None:
        options.json.write_text(json.dumps(about | {"ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
