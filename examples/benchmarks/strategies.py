"""The training set-ups that are compared: one small language model, and the table of ways to train it on many ranks.

Every strategy starts from the same weights, sees the same tokens and steps the same optimizer; they differ only in what
they send and when. Each names the compute-alone strategy that runs the same arithmetic under the same lowering without
a network, and has a formula for what it sends, so that a step can be held against the larger of the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

SEED = 1234

POWERSGD_RANK = 4
POWERSGD_MIN_COMPRESSION = 2
# Error feedback and warm start need two plain steps first; the benchmark's own warm-up is longer.
POWERSGD_START_STEP = 2


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model and of one rank's batch.

    By default a step sends for longer than it computes on a 1 Gbit/s link, and computes for about a tenth of a second.
    """

    vocabulary: int = 2048
    width: int = 256
    layers: int = 8
    heads: int = 4
    sequence: int = 64
    batch: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be split over {self.heads} heads")


class Block(nn.Module):
    """Causal attention and a feed-forward layer, both behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, width = hidden.shape
        heads = self.query_key_value(self.attention_norm(hidden))
        heads = heads.view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return hidden + self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))


class LanguageModel(nn.Module):
    """A decoder-only transformer that returns its own loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of predicting tokens[:, 1:] from what stands before; tokens is [batch, sequence + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_batch(config: ModelConfig, step: int, rank: int) -> Tensor:
    """[batch, sequence + 1] tokens that count upwards in a stride of their own; a function of step and rank alone."""
    generator = torch.Generator().manual_seed(SEED + 1_000_003 * step + rank)
    start = torch.randint(config.vocabulary, (config.batch, 1), generator=generator)
    stride = torch.randint(1, 5, (config.batch, 1), generator=generator)
    return (start + stride * torch.arange(config.sequence + 1)) % config.vocabulary


@dataclass(frozen=True)
class Trainer:
    """What one strategy holds between steps."""

    loss: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Setting:
    """What every strategy is built from."""

    config: ModelConfig
    mesh: DeviceMesh

    def new_model(self) -> LanguageModel:
        torch.manual_seed(SEED)
        return LanguageModel(self.config)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One row of the comparison.

    Attributes:
        name: how the command line and the table call it.
        build: makes a trainer; called once per rank, in the same order on all.
        payload_bytes: the formula: what a rank sends per step without headers, from the parameters and the rank count.
        compute: the compute-alone strategy under the same lowering and dtype; None for those themselves.
        shards_optimizer: each rank updates 1/N of the parameters, so its floor holds only that part of the update.
        payload_limit: the run fails when more than this multiple of payload_bytes was sent.
    """

    name: str
    build: Callable[[Setting], Trainer]
    payload_bytes: Callable[[nn.Module, int], float]
    compute: str | None = None
    shards_optimizer: bool = False
    payload_limit: float | None = None


def strategies() -> dict[str, Strategy]:
    """Every row by name, in the order in which a repetition runs them."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    rows = [
        Strategy(name="compute-eager", build=build_alone(fp32), payload_bytes=nothing),
        Strategy(name="compute-eager-bf16", build=build_alone(bf16), payload_bytes=nothing),
        Strategy(name="compute-aot", build=build_alone_with_compiled_blocks, payload_bytes=nothing),
        Strategy(name="compute-zgraph", build=build_alone(fp32, compiled=True), payload_bytes=nothing),
        Strategy(name="compute-zgraph-bf16", build=build_alone(bf16, compiled=True), payload_bytes=nothing),
        Strategy(name="ddp", build=build_ddp(None), payload_bytes=replicated(fp32), compute="compute-eager"),
        Strategy(name="ddp-fp16", build=build_ddp(hook_fp16), payload_bytes=replicated(fp16), compute="compute-eager"),
        Strategy(name="ddp-powersgd", build=build_ddp(hook_powersgd), payload_bytes=powersgd, compute="compute-eager"),
        Strategy(
            name="fsdp2",
            build=build_fsdp2(fp32),
            payload_bytes=sharded(fp32, fp32),
            compute="compute-eager",
            shards_optimizer=True,
        ),
        Strategy(
            name="fsdp2-bf16",
            build=build_fsdp2(bf16),
            payload_bytes=sharded(bf16, fp32),
            compute="compute-eager-bf16",
            shards_optimizer=True,
        ),
        Strategy(
            name="fsdp2-compiled",
            build=build_fsdp2(fp32, compiled=True),
            payload_bytes=sharded(fp32, fp32),
            compute="compute-aot",
            shards_optimizer=True,
        ),
        Strategy(
            name="zgraph-0", build=build_zgraph(0, fp32), payload_bytes=replicated(fp32), compute="compute-zgraph"
        ),
        Strategy(
            name="zgraph-3",
            build=build_zgraph(3, fp32),
            payload_bytes=sharded(fp32, fp32),
            compute="compute-zgraph",
            shards_optimizer=True,
            payload_limit=1.03,
        ),
        Strategy(
            name="zgraph-3-bf16",
            build=build_zgraph(3, bf16),
            # Summed in fp32 where they arrive, gradients need not travel wider than backward made them.
            payload_bytes=sharded(bf16, bf16),
            compute="compute-zgraph-bf16",
            shards_optimizer=True,
            payload_limit=1.03,
        ),
        Strategy(
            name="zgraph-3-eager",
            build=build_zgraph(3, fp32, compiled=False),
            # Without a compiler autograd keeps what forward gathered, and backward gathers nothing.
            payload_bytes=sharded(fp32, fp32, gathers=1),
            compute="compute-eager",
            shards_optimizer=True,
            payload_limit=1.03,
        ),
    ]
    return {row.name: row for row in rows}


# What each rank sends per step. A ring over N ranks moves (N - 1) / N of a tensor once for an all_gather or a
# reduce_scatter and twice for an all_reduce, and no schedule moves less.


def nothing(model: nn.Module, ranks: int) -> float:
    return 0.0


def replicated(wire: torch.dtype) -> Callable[[nn.Module, int], float]:
    """One all_reduce of every gradient."""
    return lambda model, ranks: 2 * wire.itemsize * _numel(model) * (ranks - 1) / ranks


def sharded(gather: torch.dtype, reduce: torch.dtype, gathers: int = 2) -> Callable[[nn.Module, int], float]:
    """Every parameter gathered for forward and again for backward, every gradient reduced to its shard."""
    moved = gathers * gather.itemsize + reduce.itemsize
    return lambda model, ranks: moved * _numel(model) * (ranks - 1) / ranks


def powersgd(model: nn.Module, ranks: int) -> float:
    """An all_reduce of both low-rank factors of each matrix that shrinks enough, and of everything else whole."""
    sent = 0
    for parameter in model.parameters():
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        factors = (rows + columns) * POWERSGD_RANK
        compressed = parameter.dim() > 1 and factors * POWERSGD_MIN_COMPRESSION < parameter.numel()
        sent += factors if compressed else parameter.numel()
    return 2 * torch.float32.itemsize * sent * (ranks - 1) / ranks


def _numel(model: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in model.parameters())


# How each is built. torch.compile is typed as a transformer of callables, so its results are cast back.


def build_alone(dtype: torch.dtype, *, compiled: bool = False) -> Callable[[Setting], Trainer]:
    """The whole model on one rank: the arithmetic of a step and no communication.

    Parameters stay fp32 and are cast for use, as under mixed-precision sharding.
    """

    def build(setting: Setting) -> Trainer:
        model = setting.new_model()

        def loss(tokens: Tensor) -> Tensor:
            if dtype == torch.float32:
                return model(tokens)
            parameters = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
            return cast(Tensor, functional_call(model, parameters, (tokens,)))

        run = cast(Callable[[Tensor], Tensor], _compile_with_zgraph(loss)) if compiled else loss
        return Trainer(run, _adamw(model))

    return build


def build_alone_with_compiled_blocks(setting: Setting) -> Trainer:
    model = setting.new_model()
    _compile_blocks(model)
    return Trainer(model, _adamw(model))


def build_ddp(register_hook: Callable[[DistributedDataParallel], None] | None) -> Callable[[Setting], Trainer]:
    def build(setting: Setting) -> Trainer:
        model = DistributedDataParallel(
            setting.new_model(), process_group=setting.mesh.get_group(), gradient_as_bucket_view=True
        )
        if register_hook is not None:
            register_hook(model)
        return Trainer(model, _adamw(model))

    return build


def hook_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)


def hook_powersgd(model: DistributedDataParallel) -> None:
    state = PowerSGDState(
        model.process_group,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_START_STEP,
        min_compression_rate=POWERSGD_MIN_COMPRESSION,
    )
    model.register_comm_hook(state, powerSGD_hook)


def build_fsdp2(param_dtype: torch.dtype, *, compiled: bool = False) -> Callable[[Setting], Trainer]:
    """Each block and the rest of the model are one unit, gathered again for backward, gradients reduced in fp32."""

    def build(setting: Setting) -> Trainer:
        model = setting.new_model()
        if compiled:
            _compile_blocks(model)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=setting.mesh, mp_policy=policy)
        # By default the root is kept from forward to backward; gathered again, it sends what stage 3 sends.
        fully_shard(model, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=True)
        return Trainer(model, _adamw(model))

    return build


def build_zgraph(zero_stage: int, param_dtype: torch.dtype, *, compiled: bool = True) -> Callable[[Setting], Trainer]:
    def build(setting: Setting) -> Trainer:
        import zgraph  # here, so that the other strategies run where it is not installed

        model = zgraph.shard(
            setting.new_model(),
            setting.mesh,
            zero_stage=zero_stage,
            param_dtype=None if param_dtype == torch.float32 else param_dtype,
            reduce_dtype=torch.float32,
        )
        run = _compile_with_zgraph(model) if compiled else model
        return Trainer(run, _adamw(model))

    return build


def _compile_with_zgraph(function: Callable[..., Any]) -> Callable[..., Any]:
    # The fx lowering runs the graph as it stands, without Inductor, whose C++ compilation takes minutes on one core.
    return torch.compile(function, backend="zgraph", options={"lowering": "fx"})


def _compile_blocks(model: LanguageModel) -> None:
    """Compile block by block, as FSDP2 asks for: its hooks run between the blocks."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = cast(nn.Module, torch.compile(block, backend="aot_eager", fullgraph=True))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
