"""The table of ways to train one model on many ranks, and what each should send.

Every strategy starts from the same weights, sees the same tokens and steps the same optimizer; they differ only in what
they send and when. Each names the compute-alone strategy that runs the same arithmetic under the same lowering without
a network, and has a formula for what it sends, so that a step can be held against the larger of the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from builders import (
    POWERSGD_BUCKET_MIB,
    POWERSGD_MIN_COMPRESSION,
    POWERSGD_RANKS,
    Setting,
    Trainer,
    all_reduced,
    build_alone,
    build_alone_with_compiled_blocks,
    build_ddp,
    build_deepspeed,
    build_fsdp2,
    build_zgraph,
    by_rules,
    compressed,
    compressed_with_means,
    hook_bf16,
    hook_fp16,
    hook_powersgd,
    low_rank,
    planned,
    simple_fsdp,
    simple_fsdp_with_overlap,
    torch_overlap,
)
from torch import nn


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
        peers: strategies that send the same for the same, which the step is compared with, turn by turn.
        needs: the package that it is left out without.
        equal_loss: the run fails when this strategy, if it runs as well, has another loss: in any bit
            under fx, beyond rounding under Inductor, which fuses otherwise where collectives lie elsewhere.
    """

    name: str
    build: Callable[[Setting], Trainer]
    payload_bytes: Callable[[nn.Module, int], float]
    compute: str | None = None
    shards_optimizer: bool = False
    payload_limit: float | None = None
    peers: tuple[str, ...] = ()
    needs: str = "torch"
    equal_loss: str | None = None


def strategies() -> dict[str, Strategy]:
    """Every row by name, in the order in which a repetition runs them."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    alone = [
        Strategy(name="compute-eager", build=build_alone(fp32), payload_bytes=nothing),
        Strategy(name="compute-eager-bf16", build=build_alone(bf16), payload_bytes=nothing),
        Strategy(name="compute-aot", build=build_alone_with_compiled_blocks, payload_bytes=nothing),
        Strategy(name="compute-zgraph", build=build_alone(fp32, compiled=True), payload_bytes=nothing, needs="zgraph"),
        Strategy(
            name="compute-zgraph-bf16", build=build_alone(bf16, compiled=True), payload_bytes=nothing, needs="zgraph"
        ),
    ]
    ddp = Strategy(name="ddp", build=build_ddp(None), payload_bytes=replicated(fp32), compute="compute-eager")
    fsdp2 = Strategy(
        name="fsdp2",
        build=build_fsdp2(fp32),
        payload_bytes=sharded(fp32, fp32),
        compute="compute-eager",
        shards_optimizer=True,
    )
    peers = [
        ddp,
        replace(ddp, name="ddp-fp16", build=build_ddp(hook_fp16), payload_bytes=replicated(fp16)),
        replace(ddp, name="ddp-bf16", build=build_ddp(hook_bf16), payload_bytes=replicated(bf16)),
        *(
            replace(
                ddp,
                name=f"ddp-powersgd-{rank}",
                build=build_ddp(partial(hook_powersgd, rank), bucket_mib=POWERSGD_BUCKET_MIB),
                payload_bytes=partial(powersgd, rank),
            )
            for rank in POWERSGD_RANKS
        ),
        replace(fsdp2, name="deepspeed-2", build=build_deepspeed(2), payload_bytes=replicated(fp32), needs="deepspeed"),
        replace(fsdp2, name="deepspeed-3", build=build_deepspeed(3), needs="deepspeed"),
        fsdp2,
        replace(
            fsdp2,
            name="fsdp2-bf16",
            build=build_fsdp2(bf16),
            payload_bytes=sharded(bf16, fp32),
            compute="compute-eager-bf16",
        ),
        replace(fsdp2, name="fsdp2-compiled", build=build_fsdp2(fp32, compiled=True), compute="compute-aot"),
    ]
    on_our_graph = replace(fsdp2, compute="compute-zgraph", needs="zgraph")
    scheduled = [
        replace(on_our_graph, name="simplefsdp", build=build_zgraph(3, fp32, simple_fsdp)),
        replace(on_our_graph, name="simplefsdp-overlap", build=build_zgraph(3, fp32, simple_fsdp_with_overlap)),
        replace(on_our_graph, name="torch-overlap", build=build_zgraph(3, fp32, torch_overlap)),
    ]
    peers_of = {
        "zgraph-0": ("ddp",),
        "zgraph-2": ("deepspeed-2",),
        "zgraph-3": (
            *("fsdp2", "fsdp2-compiled", "deepspeed-3", "simplefsdp", "simplefsdp-overlap", "torch-overlap"),
            "zgraph-3-rules",
        ),
        "zgraph-3-bf16": ("fsdp2-bf16",),
    }
    ours = [
        Strategy(
            name=f"zgraph-{stage}{suffix}",
            build=build_zgraph(stage, dtype, planned, predicts=True),
            # Summed in fp32 where they arrive, gradients need not travel wider than backward made them; nor need means
            # of replicated ones, which are gathered.
            payload_bytes=sharded(dtype, dtype, gathers=2 if stage == 3 else 1),
            compute=f"compute-zgraph{suffix}",
            shards_optimizer=stage > 0,
            payload_limit=1.03,
            peers=peers_of.get(f"zgraph-{stage}{suffix}", ()),
            needs="zgraph",
        )
        for dtype, suffix in ((fp32, ""), (bf16, "-bf16"))
        for stage in range(4)
    ]
    stage_3 = replace(on_our_graph, payload_limit=1.03, equal_loss="zgraph-3")
    ours += [
        replace(
            stage_3,
            name="zgraph-0-reduce-bf16",
            build=build_zgraph(0, fp32, planned, predicts=True, reduce_dtype=bf16),
            payload_bytes=replicated(bf16),
            shards_optimizer=False,
            peers=("ddp-bf16", "ddp-fp16"),
            equal_loss=None,
        ),
        replace(
            stage_3,
            name="zgraph-0-rules",
            build=build_zgraph(0, fp32, by_rules, predicts=True),
            payload_bytes=replicated(fp32),
            shards_optimizer=False,
            peers=("ddp",),
            equal_loss="zgraph-0",
        ),
        replace(
            stage_3,
            name="zgraph-0-all-reduce-step",
            build=build_zgraph(0, fp32, all_reduced, whole_step=True),
            payload_bytes=replicated(fp32),
            shards_optimizer=False,
            peers=("ddp", "zgraph-0-step"),
            equal_loss=None,
        ),
        replace(stage_3, name="zgraph-3-rules", build=build_zgraph(3, fp32, by_rules, predicts=True)),
        replace(
            stage_3,
            name="zgraph-3-eager",
            build=build_zgraph(3, fp32, None),
            # Without a compiler autograd keeps what forward gathered, and backward gathers nothing.
            payload_bytes=sharded(fp32, fp32, gathers=1),
            compute="compute-eager",
        ),
    ]
    ours += [
        replace(
            one,
            name=f"{one.name}-step",
            build=build_zgraph(stage, dtype, planned, whole_step=True, reduce_dtype=reduce_dtype),
            peers=(one.name, *one.peers),
        )
        for stage, dtype, reduce_dtype, one in (
            (0, fp32, None, ours[0]),
            (0, fp32, bf16, next(one for one in ours if one.name == "zgraph-0-reduce-bf16")),
            (2, fp32, None, ours[2]),
            (3, fp32, None, ours[3]),
            (3, bf16, None, ours[7]),
        )
    ]
    coded = replace(stage_3, payload_limit=1.05, equal_loss=None)
    compressing_peers = ("ddp", "ddp-fp16", "ddp-bf16", *(f"ddp-powersgd-{rank}" for rank in POWERSGD_RANKS))
    ours += [
        replace(
            coded,
            name="zgraph-0-loco",
            build=build_zgraph(0, fp32, compressed, predicts=True),
            payload_bytes=codes(fp32, gathers=1, means_bits=16),
            shards_optimizer=False,
            peers=compressing_peers,
        ),
        *(
            replace(
                coded,
                name=f"zgraph-0-loco-means{bits}",
                build=build_zgraph(0, fp32, partial(compressed_with_means, bits), predicts=True),
                payload_bytes=codes(fp32, gathers=1, means_bits=bits + SCALE_BITS),
                shards_optimizer=False,
                peers=compressing_peers,
            )
            for bits in (8, 4)
        ),
        *(
            replace(
                coded,
                name=f"zgraph-0-lowrank{rank}",
                build=build_zgraph(0, fp32, partial(low_rank, rank), predicts=True),
                payload_bytes=partial(factors, rank),
                shards_optimizer=False,
                peers=("ddp", "ddp-bf16", f"ddp-powersgd-{rank}"),
            )
            for rank in POWERSGD_RANKS
        ),
        replace(
            coded,
            name="zgraph-3-bf16-loco",
            build=build_zgraph(3, bf16, compressed, predicts=True),
            payload_bytes=codes(bf16, gathers=2, means_bits=16),
            compute="compute-zgraph-bf16",
            peers=("fsdp2", "fsdp2-bf16"),
        ),
    ]
    return {row.name: row for row in [*alone, *peers, *scheduled, *ours]}


SCALE_BITS = 16 / 128  # of an element: bf16, for each group of 128

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


def codes(dtype: torch.dtype, gathers: int, means_bits: float) -> Callable[[nn.Module, int], float]:
    """Matrices are reduced as 4 bits an element and a scale for 128, and gathered in `means_bits`; vectors stay."""

    def sent(model: nn.Module, ranks: int) -> float:
        bits = 0.0
        for parameter in model.parameters():
            wide = 8 * dtype.itemsize
            covered = parameter.dim() > 1 and parameter.numel() >= 2**14
            reduced, gathered = (4 + SCALE_BITS, means_bits) if covered else (wide, wide)
            bits += parameter.numel() * (reduced + gathers * gathered)
        return bits / 8 * (ranks - 1) / ranks

    return sent


def powersgd(rank: int, model: nn.Module, ranks: int) -> float:
    """An all_reduce of both low-rank factors of each matrix that shrinks enough, and of everything else whole."""
    sent = 0
    for parameter in model.parameters():
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        factors = (rows + columns) * rank
        compressed = parameter.dim() > 1 and factors * POWERSGD_MIN_COMPRESSION < parameter.numel()
        sent += factors if compressed else parameter.numel()
    return 2 * torch.float32.itemsize * sent * (ranks - 1) / ranks


def factors(rank: int, model: nn.Module, ranks: int) -> float:
    """Both factors of each large matrix to each other rank, and an all_reduce of everything else."""
    sent = 0.0
    for parameter in model.parameters():
        rows = parameter.shape[0]
        thin = (rows + parameter.numel() // rows) * rank
        covered = parameter.dim() > 1 and parameter.numel() >= 2**14 and 2 * thin <= parameter.numel()
        sent += thin * ranks if covered else 2 * parameter.numel()
    return torch.float32.itemsize * sent * (ranks - 1) / ranks


def _numel(model: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
