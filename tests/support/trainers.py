"""A Trainer for tests: of a tiny Llama, with rows of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from tests.support.front_ends import CONTEXT, VOCABULARY, llama
from zgraph.integrations.transformers import sharded

STEPS = 4
FX = {"lowering": "fx"}


def texts(rows: int, seed: int, shortest: int = CONTEXT) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (rows, CONTEXT), generator=generator)
    lengths = torch.randint(shortest, CONTEXT + 1, (rows,), generator=generator).tolist()
    cut = [row[:length] for row, length in zip(drawn, lengths, strict=True)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in cut]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest row, so that ranks see different lengths."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {key: pad_sequence([row[key] for row in rows], True, value) for key, value in fill.items()}


def trainer(
    folder: str | Path,
    plugin: dict[str, Any] | None,
    model: Any = None,
    optimizers: Any = (None, None),
    shortest: int = CONTEXT,
    **arguments: Any,
) -> Trainer:
    """A Trainer whose global batch is of 8 rows in two micro-batches; without plugin, the Trainer itself."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {
        **{"max_steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
        **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "seed": 3},
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, **arguments},
    }
    batch = 4 // world
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **options
    )
    cls = Trainer if plugin is None else sharded(Trainer, **{"options": FX, **plugin})
    callbacks = [EarlyStoppingCallback(1)] if "metric_for_best_model" in options else []
    data = {"train_dataset": texts(32, 1, shortest), "eval_dataset": texts(12, 2, shortest), "data_collator": padded}
    return cls(model or llama(), args, callbacks=callbacks, optimizers=optimizers, **data)
