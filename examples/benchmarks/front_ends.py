"""A step through Accelerate, the Trainer and Lightning, beside the same step in a plain loop, of zgraph and of DDP.

    python examples/benchmarks/front_ends.py --json FILE        # ten minutes with fx, longer with Inductor

Each rank has a core. Every way trains the same model on the same batches with AdamW and clipping, and runs in processes
of its own, a few times in turns. DDP is compiled as each front end compiles. The first step is counted from the call
that shards the model or wraps it, without Inductor's cache on disk in the first round.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.callbacks import Callback
from ranks import WARM_UP_STEPS, as_rank, run_ranks, say, slowest_ms
from record import about, parser_of, quartiles, save, spread, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from workload import SEED, LanguageModel, ModelConfig, make_batch

import zgraph
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin
from zgraph.integrations.lightning import ZgraphStrategy
from zgraph.integrations.transformers import sharded

RANKS = 2
LIBRARIES = ("zgraph", "DDP")
LOOPS = ("plain loop", "Accelerate", "Trainer", "Lightning")
CLIP, RATE = 1.0, 1e-4


class Losses(nn.Module):
    """The model, which returns its loss as models of Hugging Face do."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.model = LanguageModel(config)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(tokens)}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens, in the order in which the ranks take turns."""

    def __init__(self, config: ModelConfig, steps: int) -> None:
        self.rows = [row for step in range(RANKS * steps) for row in make_batch(config, step, 0)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.rows[index]}


class Clock:
    """The seconds from one step's end to the next; the first begins where the clock is made."""

    def __init__(self) -> None:
        self.begun, self.seconds = time.perf_counter(), list[float]()

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.net(batch["tokens"])["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class TicksOfTrainer(transformers.TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()


class TicksOfLightning(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def batches_of(rows: Rows, batch: int) -> Iterator[Tensor]:
    """This rank's batches, as the samplers of the front ends deal them."""
    for batch_of_all in DataLoader(rows, batch_size=RANKS * batch):
        yield batch_of_all["tokens"][dist.get_rank() :: RANKS]


def plain(library: str, lowering: str, model: nn.Module, rows: Rows, batch: int) -> Clock:
    clock = Clock()
    if library == "zgraph":
        zgraph.shard(model)
        model.compile(backend="zgraph", options={"lowering": lowering})
        optimizer, clip, run = zgraph.step_on_shards(adamw(model)), zgraph.clip_grad_norm_, model
    else:
        optimizer, clip = adamw(model), nn.utils.clip_grad_norm_
        run = torch.compile(DistributedDataParallel(model), backend=torch_backend(lowering))
    for tokens in batches_of(rows, batch):
        run(tokens)["loss"].backward()
        clip(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock


def by_accelerate(library: str, lowering: str, model: nn.Module, rows: Rows, batch: int) -> Clock:
    clock = Clock()
    if library == "zgraph":
        accelerator = Accelerator(cpu=True, zgraph_plugin=ZgraphPlugin(options={"lowering": lowering}))
    else:
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend=torch_backend(lowering))
    model, optimizer, batches = accelerator.prepare(model, adamw(model), DataLoader(rows, batch_size=batch))
    for inputs in batches:
        accelerator.backward(model(**inputs)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock


def by_trainer(library: str, lowering: str, model: nn.Module, rows: Rows, batch: int) -> Clock:
    compiler: dict[str, Any] = {} if library == "zgraph" else {"torch_compile_backend": torch_backend(lowering)}
    cls = sharded(transformers.Trainer, options={"lowering": lowering}) if library == "zgraph" else transformers.Trainer
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_grad_norm=CLIP,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_strategy="no",
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **compiler,
        )
        clock = Clock()
        cls(model, args, train_dataset=rows, callbacks=[TicksOfTrainer(clock)]).train()
    return clock


def by_lightning(library: str, lowering: str, model: nn.Module, rows: Rows, batch: int) -> Clock:
    clock = Clock()
    module = Module(model)
    if library == "zgraph":
        strategy: Any = ZgraphStrategy(options={"lowering": lowering})
    else:
        strategy = "ddp"
        module.net.compile(backend=torch_backend(lowering))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        gradient_clip_val=CLIP,
        callbacks=[TicksOfLightning(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=batch))
    return clock


def torch_backend(lowering: str) -> str:
    """torch's own backend that does as much as one of zgraph's lowerings."""
    return "aot_eager" if lowering == "fx" else "inductor"


def measure(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each step, on the slower rank; the first is the one from sharding on."""
    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # unused: the group exists
    os.environ |= {"GROUP_RANK": "0", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "benchmark"}
    warnings.filterwarnings("ignore", module="lightning")
    config = ModelConfig(**plan["model"])
    run = dict(zip(LOOPS, (plain, by_accelerate, by_trainer, by_lightning), strict=True))[plan["loop"]]
    clock = run(plan["library"], plan["lowering"], Losses(config), Rows(config, plan["steps"]), config.batch)
    return {"step_ms": slowest_ms(clock.seconds)}


def main() -> None:
    parser = parser_of(__doc__, width=512, layers=10, rounds=3, steps=20, lowering="fx")
    args = parser.parse_args()
    model = {"width": args.width, "layers": args.layers}
    found: dict[str, Any] = {"lowering": args.lowering, "model": model, **about(), "rows": {}}
    found["versions"] |= {one.__name__: one.__version__ for one in (accelerate, transformers)} | {
        "lightning": version("lightning")
    }
    ways = [(library, loop) for library in LIBRARIES for loop in LOOPS]
    for number in range(args.rounds):
        for library, loop in ways:
            plan = {"model": model, "steps": WARM_UP_STEPS + args.steps, "lowering": args.lowering}
            environment = {} if number else {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            measured = partial(run_ranks, __file__, {**plan, "library": library, "loop": loop}, range(RANKS))
            first, *later = measured(environment=environment)["step_ms"]
            row = found["rows"].setdefault(f"{library}, {loop}", {"first_s": [], "step_ms": []})
            row["first_s"].append(first / 1e3)
            row["step_ms"] += later[WARM_UP_STEPS - 1 :]
            say(0, f"round {number}, {library}, {loop}: {first / 1e3:.1f} s, then {quartiles(later)[1]:.0f} ms")
    rows = []
    for library, loop in ways:
        row = found["rows"][f"{library}, {loop}"]
        median = quartiles(row["step_ms"])[1]
        row["of_plain_loop"] = median / quartiles(found["rows"][f"{library}, {LOOPS[0]}"]["step_ms"])[1]
        rows.append(
            (f"{library}, {loop}", spread(row["step_ms"]), f"{row['of_plain_loop']:.3f}", f"{row['first_s'][0]:.1f}")
        )
    print(table(("way", "step ms", "of plain loop", "first step, s"), rows))
    save(args.json, found)


if __name__ == "__main__":
    as_rank(measure)
    main()
