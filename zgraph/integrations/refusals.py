"""Arguments and models with which zgraph does not shard: refused, or warned of, before anything is sharded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch import nn

from zgraph.errors import ZgraphWarning
from zgraph.torch_compat.dynamo import is_compiled_in_place, is_compiled_wrapper

OTHER_WAYS = (  # arguments of Accelerator by which something else would shard or wrap the model
    *("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"),
    "parallelism_config",
)
ARGUMENTS = (  # of the Trainer, and what to write
    ("save_on_each_node", "every rank writes its part to one folder; leave it out"),
    ("auto_find_batch_size", "a second try would need the model as it was before it was sharded; set the batch size"),
    ("torch_compile", "zgraph compiles the model itself; leave it out"),
)
# Trainers of trl 1.16 that turn activation checkpointing off and on in each step.
TOGGLING = ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer")


def refuse_other_ways(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError if arguments of an Accelerator ask for another way to shard."""
    for name in OTHER_WAYS:
        if kwargs.get(name) is not None:
            raise ValueError(f"zgraph: Accelerator({name}=...) would shard the model in another way; leave it out.")


def refuse_arguments(trainer: type, args: Any, *, is_compiled: bool) -> None:
    """Raise ValueError if TrainingArguments ask for what a trainer of sharded models cannot do."""
    for name, why in ARGUMENTS:
        if getattr(args, name):
            raise ValueError(f"zgraph: TrainingArguments({name}=True): {why}.")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "8bit" in optimizer:
        raise ValueError(
            f"zgraph: TrainingArguments(optim={optimizer!r}): such optimizers do not step sharded parameters; "
            'write optimizer_cls_and_kwargs=(zgraph.AdamW8bit, {...}) for the trainer, or optim="adamw_torch".'
        )
    toggling = [base.__name__ for base in trainer.__mro__ if base.__name__ in TOGGLING]
    if toggling and is_compiled and args.gradient_checkpointing:
        raise ValueError(
            f"zgraph: {toggling[-1]} turns activation checkpointing off and on in each step, after which all would "
            "be compiled again; write gradient_checkpointing=False in its arguments, or compile=False in sharded."
        )


def refuse_launch(distributed_type: str) -> None:
    """Raise ValueError if Accelerate is configured for another library, or does not see the other ranks."""
    if distributed_type not in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU"):
        raise ValueError(
            f"zgraph: Accelerator is configured for {distributed_type}; choose multi-GPU or multi-CPU in `accelerate "
            "config`."
        )
    if distributed_type == "NO" and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"zgraph: Accelerator found one process, but the process group has {dist.get_world_size()}, which would "
            "train apart; start the script by torchrun or `accelerate launch`."
        )


def refuse_unshardable(model: nn.Module) -> None:
    """Raise ValueError if a model is quantized, is spread over devices, or is compiled already."""
    name = type(model).__name__
    if getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False):
        raise ValueError(
            f"zgraph: {name} is quantized or was loaded with device_map, and cannot be sharded; load it without "
            "quantization_config and device_map."
        )
    if is_compiled_wrapper(model) or is_compiled_in_place(model):
        raise ValueError(
            f"zgraph: {name} is compiled already, but zgraph compiles the model itself; leave compile out, or write "
            "ZgraphPlugin(options={...}) for options of the backend."
        )


def warn_of_bf16(model: nn.Module) -> None:
    """Warn if an optimizer would step weights of bf16, whose small updates round to nothing."""
    found = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype == torch.bfloat16]
    if found:
        warnings.warn(
            f"zgraph: {len(found)} trainable parameters of {type(model).__name__}, such as {found[0]}, are bf16, and "
            "the optimizer steps them in bf16; load the model with dtype=torch.float32, and write "
            'mixed_precision="bf16", or bf16=True in TrainingArguments, to compute in bf16.',
            ZgraphWarning,
            stacklevel=2,
        )


def refuse_uneven(prepared: Any) -> None:
    """Raise ValueError if a DataLoader that Accelerate has prepared gives some ranks a batch less."""
    shares = getattr(prepared, "batch_sampler", None)
    if not isinstance(shares, BatchSamplerShard) or shares.even_batches or shares.drop_last:
        return
    if shares.split_batches or shares.total_length % shares.num_processes:
        raise ValueError(
            "zgraph: even_batches=False gives ranks different numbers of batches, but all ranks must call a sharded "
            "model alike; leave even_batches out (gather_for_metrics drops the rows that were repeated), or write "
            "DataLoader(drop_last=True)."
        )
