"""Train one model in many ways over links of a known rate, side by side.

    sudo .venv/bin/python examples/benchmarks/shaped_link.py --ranks 2 --rate 1gbit --json results.json

Every rank, or with --nodes every two of them, runs in a network namespace of its own with one core and one thread a
rank, gloo, and one Ethernet link whose both directions are shaped. Exits with 1 when losses that should be equal
differ.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from builders import (
    Schedule,
    Setting,
    all_reduced,
    build_ddp,
    build_deepspeed,
    build_fsdp2,
    build_zgraph,
    by_rules,
    hook_bf16,
    hook_fp16,
    hook_powersgd,
    loco,
    low_rank,
    planned,
    scheduled_by_torch,
    sign_momentum,
)
from links import Strategy, choose, options_of, parsed, run_as_command, train_in_turns
from ranks import as_rank, say
from torch.distributed.device_mesh import init_device_mesh
from workload import ModelConfig

# Equal operators in equal order are equal in every bit; Inductor fuses otherwise where collectives lie elsewhere.
LOSS_TOLERANCE = {"fx": 0.0, "inductor": 1e-6}
_EPILOG = """\
strategies, in the order in which a repetition runs them:
  ddp               DistributedDataParallel; -fp16, -bf16, -powersgd-1 and -4 with the hook of that name (and rank)
  deepspeed-2, -3   ZeRO stages 2 and 3 (pip install deepspeed; left out where it is not installed)
  fsdp2             fully_shard of each block and of the rest; -bf16 gathers bf16 and reduces fp32
  simplefsdp-overlap
                    SimpleFSDP's graph under the lowering of the zgraph rows: a gather for each parameter, a
                    reduce_scatter for each gradient, bucketed and scheduled by PyTorch's schedule_overlap_bucketing,
                    which is told what things cost here
  torch-overlap     the same scheduler on zgraph's own collectives, which send half of what gloo's reduce_scatter does
  zgraph-0 ... -3   ZeRO stages 0 to 3, planned for the measured machine and compiled as --lowering says, the
                    optimizer with zgraph.step_on_shards; -bf16 gathers bf16, sends bf16 gradients and sums
                    them in fp32; -reduce-bf16 computes in fp32 and sends gradients and their means in bf16; -rules is
                    scheduled without costs; -step runs forward, backward and optimizer as one graph; -all-reduce lets
                    gloo reduce; -loco sends gradients as codes of 4 bits, and means of replicated parameters in bf16,
                    or with -means4 in 4 bits; -lowrank1 and -lowrank4 send factors of that rank; -signs sends signs of
                    momenta (1-bit Adam) after the first step

columns:
  step ms           median over all timed steps of the slowest rank, with quartiles
  predicted, error  what zgraph predicted for forward and backward when it compiled, and by how much it was off
  sent MB           the interface's tx_bytes per step: whole packets, with acknowledgements and one Ethernet, IP and TCP
                    header per packet of up to 64 KiB
  peak MiB          most bytes held at once in a step that is not timed, with what the strategy keeps between steps:
                    the C heap's own count, which is tensors and communication buffers
  loss              of the last step, mean over the ranks; equal data, seeds and number of steps for all

examples:
  sudo .venv/bin/python examples/benchmarks/shaped_link.py
  sudo .venv/bin/python examples/benchmarks/shaped_link.py --ranks 4 --rate 200mbit --strategies ddp,fsdp2,zgraph-3
"""


def main() -> int:
    as_rank(lambda rank, plan: train_in_turns(rank, plan, strategies(), partial(set_up, rank, plan, strategies())))
    parser = options_of((__doc__ or "").partition("\n\n")[0], _EPILOG, ModelConfig(), steps=4)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="default: %(default)s")
    parser.add_argument("--nodes", type=int, choices=(2, 4), help="hosts with a link of their own; default: --ranks")
    parser.add_argument(
        "--lowering",
        choices=list(LOSS_TOLERANCE),
        default="fx",
        help="inductor: every row is compiled by it, minutes each; fx: graphs run node by node (default: %(default)s)",
    )
    arguments = parsed(parser)
    nodes = arguments.nodes or arguments.ranks
    if nodes > arguments.ranks:
        parser.error(f"{arguments.ranks} ranks cannot be spread over {nodes} nodes")
    return run_as_command(
        __file__,
        arguments,
        choose(parser, arguments.strategies, strategies()),
        hosts=[rank * nodes // arguments.ranks for rank in range(arguments.ranks)],
        tolerance=LOSS_TOLERANCE[arguments.lowering],
        # DeepSpeed is told that each rank is alone on its host, or it would go through shared memory.
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"},
    )


def strategies() -> dict[str, Strategy]:
    """Every row by name, in the order in which a repetition runs them."""
    ranks, stages = (1, 4), (0, 1, 2, 3)
    ddp = ("ddp", "ddp-fp16", "ddp-bf16", *(f"ddp-powersgd-{rank}" for rank in ranks))
    bf16_hooks = ("ddp-bf16", "ddp-fp16")
    scheduled = {"simplefsdp-overlap": "reduce_scatter", "torch-overlap": "all_to_all"}
    peers: dict[str, tuple[str, ...]] = {
        **{"0": ("ddp",), "2": ("deepspeed-2",), "3-bf16": ("fsdp2-bf16",)},
        "3": ("fsdp2", "deepspeed-3", *scheduled, "zgraph-3-rules"),
    }
    rows = [
        Strategy("ddp", build_ddp()),
        Strategy("ddp-fp16", build_ddp(hook_fp16)),
        Strategy("ddp-bf16", build_ddp(hook_bf16)),
        *(Strategy(f"ddp-powersgd-{rank}", build_ddp(partial(hook_powersgd, rank), one_bucket=True)) for rank in ranks),
        *(Strategy(f"deepspeed-{stage}", build_deepspeed(stage), needs="deepspeed") for stage in (2, 3)),
        Strategy("fsdp2", build_fsdp2()),
        Strategy("fsdp2-bf16", build_fsdp2(torch.bfloat16)),
        *(
            Strategy(name, build_zgraph(partial(scheduled_by_torch, algorithm), predicts=False), needs="zgraph")
            for name, algorithm in scheduled.items()
        ),
        *(_ours(f"{stage}{suffix}", peers.get(f"{stage}{suffix}", ())) for suffix in ("", "-bf16") for stage in stages),
        _ours("0-reduce-bf16", bf16_hooks),
        _ours("0-rules", ("ddp",), by_rules, equal_loss="zgraph-0"),
        _ours("0-all-reduce-step", ("ddp", "zgraph-0-step"), all_reduced),
        _ours("3-rules", (), by_rules, equal_loss="zgraph-3"),
        *(_ours(f"{name}-step", (f"zgraph-{name}", *peers[name])) for name in ("0", "2", "3", "3-bf16")),
        _ours("0-reduce-bf16-step", ("zgraph-0-reduce-bf16", *bf16_hooks)),
        _ours("0-loco", ddp, loco),
        _ours("0-loco-means4", ddp, partial(loco, 4)),
        *(
            _ours(f"0-lowrank{rank}", ("ddp", "ddp-bf16", f"ddp-powersgd-{rank}"), partial(low_rank, rank))
            for rank in ranks
        ),
        _ours("2-loco-step", (), loco),
        *(_ours(f"{stage}-signs-step", ("ddp-bf16", f"zgraph-{stage}-loco-step"), sign_momentum) for stage in (0, 2)),
        _ours("0-loco-step", ddp, loco),
        _ours("3-bf16-loco", ("fsdp2", "fsdp2-bf16"), loco),
    ]
    return {row.name: row for row in rows}


def _ours(name: str, peers: tuple[str, ...], schedule: Schedule = planned, equal_loss: str | None = None) -> Strategy:
    """Stage and dtypes are those of the name."""
    build = build_zgraph(
        schedule,
        whole=name.endswith("-step"),
        zero_stage=int(name[0]),
        param_dtype=torch.bfloat16 if name[1:].startswith("-bf16") else None,
        reduce_dtype=torch.bfloat16 if "reduce-bf16" in name else None,
    )
    return Strategy(f"zgraph-{name}", build, peers, "zgraph", equal_loss)


def set_up(rank: int, plan: dict[str, Any], table: Mapping[str, Strategy], config: ModelConfig) -> Setting:
    """In a rank: the setting of strategies in `table`, with this machine measured if the plan has some of zgraph's."""
    mesh = init_device_mesh("cpu", (len(plan["addresses"]),), mesh_dim_names=("dp",))
    setting = Setting(config, mesh, plan["lowering"])
    if all(table[name].needs != "zgraph" for name in plan["strategies"]):
        return setting
    import zgraph

    say(rank, "calibrating")
    with tempfile.TemporaryDirectory() as nothing_kept:
        return replace(setting, hardware=zgraph.calibrate(mesh, cache=nothing_kept))


if __name__ == "__main__":
    sys.exit(main())
