"""Sequences shared by ranks in Accelerate, the Trainer and Lightning, with the lines that the docs name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments, default_data_collator

import zgraph
from tests.support import context as cp
from tests.support.front_ends import CONTEXT, VOCABULARY, forget, launched, llama
from tests.support.lightning_runs import torchrun_variables
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin
from zgraph.integrations.lightning import ZgraphStrategy
from zgraph.integrations.transformers import sharded

EXACT = 1e-12
FX = {"lowering": "fx"}


def _context() -> dict[str, Any]:
    return {"mesh": cp.mesh_of(2, 2), "context": "cp"}


def _rows() -> list[dict[str, Tensor]]:
    drawn = torch.randint(VOCABULARY, (8, CONTEXT), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(CONTEXT)  # rows with different numbers of targets
    return [{"input_ids": row, "labels": torch.where(positions < at, -100, row)} for at, row in enumerate(drawn)]


class Whole(Trainer):
    """A trainer whose loader gives all ranks the same sequences."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(_rows(), batch_size=2, collate_fn=self.collate)  # pyright: ignore[reportArgumentType]

    def collate(self, rows: list[Any]) -> Any:
        return default_data_collator(rows)


class Cutting(Whole):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return zgraph.context_batch(self.model, super()._prepare_inputs(inputs))  # pyright: ignore


class TooEarly(Whole):
    def collate(self, rows: list[Any]) -> Any:
        return zgraph.context_batch(self.model, super().collate(rows))  # pyright: ignore


def _trainer(cls: type[Trainer], folder: str, model: Any) -> None:
    options: dict[str, Any] = {
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-2},
        **{"lr_scheduler_type": "constant", "adam_epsilon": 1e-3, "max_grad_norm": 0.5, "optim": "adamw_torch"},
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"},
    }
    with launched():
        args = TrainingArguments(folder, **options)
        trainer = sharded(cls, options=FX, **_context())(model=model, args=args, train_dataset=_rows())  # pyright: ignore
        model.set_attn_implementation("zgraph")
        trainer.train()


def _by_hand(model: Any) -> None:
    opt, rows = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0), _rows()
    for step in (rows[:4], rows[4:]):
        count = sum(row["labels"][1:].ne(-100).sum() for row in step)
        for rows_of in (step[:2], step[2:]):
            given = default_data_collator(rows_of)
            model(**given, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()


def _in_trainer(folder: str) -> tuple[float, str, str]:
    model = llama().double()
    plain = copy.deepcopy(model)
    _trainer(Cutting, folder, model)
    _by_hand(plain)
    too_early = _refusal(lambda: _trainer(TooEarly, folder, llama().double()))
    uncut = _refusal(lambda: _trainer(Whole, folder, llama().double()))
    return cp.furthest([whole(one.detach()) for one in model.parameters()], list(plain.parameters())), too_early, uncut


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (zgraph.ZgraphError, ValueError) as error:
        return str(error)
    return "passed"


@worlds(2)
def test_the_trainer(ranks: Ranks, tmp_path: Path) -> None:
    for apart, too_early, uncut in ranks.run(_in_trainer, str(tmp_path)):
        assert apart < EXACT
        assert "Cut them later: def _prepare_inputs" in too_early
        assert "cut the batch first" in uncut


def _in_accelerate() -> tuple[float, str]:
    def batches() -> DataLoader[Any]:
        given = [cp.batch(number, is_even=False) for number in range(4)]
        tensors = [torch.cat([one[name] for one in given]) for name in ("x", "targets")]
        return DataLoader(TensorDataset(*tensors), batch_size=2)

    def lines(model: Any, opt: Any, accelerator: Accelerator, loader: Any) -> None:
        for x, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**zgraph.context_batch(model, {"x": x, "targets": targets})))
                opt.step()
                opt.zero_grad()

    def prepared(loader: Any, *, takes_loader: bool) -> nn.Module:
        with launched():
            plugin = ZgraphPlugin(options=FX, **_context())
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, zgraph_plugin=plugin)
            model: Any = cp.started(cp.Case())
            opt: Any = torch.optim.SGD(model.parameters(), lr=cp.LR)
            model, opt, *found = accelerator.prepare(model, opt, *([loader] if takes_loader else []))
            lines(model, opt, accelerator, found[0] if takes_loader else loader)
        return model

    refused = _refusal(lambda: prepared(batches(), takes_loader=True))
    model, plain = prepared(batches(), takes_loader=False), cp.started(cp.Case())
    opt = torch.optim.SGD(plain.parameters(), lr=cp.LR)
    for number, (x, targets) in enumerate(batches()):
        (plain(x, targets) / 2).backward()
        if number % 2:
            opt.step()
            opt.zero_grad()
    forget()
    return cp.furthest([whole(one.detach()) for one in model.parameters()], list(plain.parameters())), refused


@worlds(2)
def test_accelerate(ranks: Ranks) -> None:
    for apart, refused in ranks.run(_in_accelerate):
        assert apart < EXACT
        assert "leave this DataLoader out of prepare" in refused


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = cp.started(cp.Case())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return zgraph.context_batch(self, batch)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.net(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=cp.LR)


def _in_lightning() -> tuple[float, str]:
    given: Any = [cp.batch(number, is_even=False) for number in range(2)]
    refused = _refusal(lambda: ZgraphStrategy(**_context()))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with torchrun_variables():
        model = Lit()
        strategy = ZgraphStrategy(compile=False, **_context())
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=1,
            use_distributed_sampler=False,
            enable_model_summary=False,
            **quiet,
        )
        trainer.fit(model, DataLoader(given, batch_size=None))
    plain = cp.started(cp.Case())
    opt = torch.optim.SGD(plain.parameters(), lr=cp.LR)
    for one in given:
        plain(**one).backward()
        opt.step()
        opt.zero_grad()
    return cp.furthest([whole(one.detach()) for one in model.parameters()], list(plain.parameters())), refused


@worlds(2)
def test_lightning(ranks: Ranks) -> None:
    for apart, refused in ranks.run(_in_lightning):
        assert apart < EXACT
        assert "compile=False" in refused
