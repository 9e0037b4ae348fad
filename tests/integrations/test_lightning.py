"""Lightning's Trainer with zgraph's strategy: the run is the one that DDP makes on the same two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.budget import long
from tests.support.compressing import feedback_of
from tests.support.lightning_runs import (
    EPOCHS,
    Net,
    Reseeded,
    batches,
    fitted,
    logged,
    seeded,
    strategy,
    torchrun_variables,
    trainer,
    whole,
)
from tests.support.ranks import Ranks, RanksPool, worlds
from zgraph import ZgraphWarning
from zgraph.integrations.lightning import ZgraphStrategy


class Regression(pl.LightningModule):
    """Notes the dtypes that a step sees; the optimizer was created with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.seen: set[torch.dtype] = set()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        self.seen = {inputs.dtype, targets.dtype}
        self.outputs = outputs.dtype
        loss = F.mse_loss(outputs.float(), targets)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer


def train(
    stage: int | None, manual: bool, lowering: str = "fx"
) -> tuple[list[float], dict[str, float], dict[str, Tensor], Any]:
    """Train and evaluate; by DDP if there is no stage."""
    with torchrun_variables():
        net = seeded(Net, manual=manual)
        found = fitted("ddp" if stage is None else strategy(zero_stage=stage, lowering=lowering), net)
        values = logged(found)
        found.test(net, batches(), verbose=False)
        return net.losses, values | logged(found), whole(net), found.predict(net, batches())


@pytest.fixture(scope="module")
def by_ddp(pool: RanksPool) -> dict[bool, Any]:
    return {manual: pool.of(2).run(train, None, manual) for manual in (False, True)}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_is_that_of_ddp(ranks: Ranks, by_ddp: dict[bool, Any], stage: int, manual: bool) -> None:
    check_run(ranks.run(train, stage, manual), by_ddp[manual], manual)


@pytest.mark.parametrize("lowering", long("inductor"))
def test_a_run_by_inductor_is_that_of_ddp(ranks: Ranks, by_ddp: dict[bool, Any], lowering: str) -> None:
    check_run(ranks.run(train, 3, False, lowering), by_ddp[False], manual=False)


def check_run(results: list[Any], by_ddp: list[Any], manual: bool) -> None:
    for (losses, values, parameters, predicted), expected in zip(results, by_ddp, strict=True):
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert values == pytest.approx(expected[1], abs=1e-5)
        torch.testing.assert_close(parameters, expected[2], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(predicted, expected[3], rtol=1e-5, atol=1e-5)
    assert ("norm" in results[0][1]) is not manual


def resume(kind: type[Net], path: str, **options: Any) -> tuple[list[float], list[float], bool, int]:
    """Losses of the second epoch in one run, and in one that resumes; whether all parameters are the same; and how
    many of them keep error feedback.
    """
    with torchrun_variables():
        net = seeded(kind, dropout=0.5)
        fitted(strategy(**options), net)
        fitted(strategy(**options), seeded(kind, dropout=0.5), max_epochs=1).save_checkpoint(path)
        resumed = kind(dropout=0.5)
        fitted(strategy(**options), resumed, ckpt_path=path)
        expected = whole(net)
        same = all(torch.equal(value, expected[name]) for name, value in whole(resumed).items())
        return net.losses[len(net.losses) // EPOCHS :], resumed.losses, same, len(feedback_of(resumed))


@pytest.mark.parametrize("loco", [False, True], ids=["exact", "loco"])
def test_a_run_resumes_bitwise_from_a_folder(ranks: Ranks, tmp_path: Path, loco: bool) -> None:
    path = str(tmp_path / "folder.ckpt")
    for going_on, resumed, same, kept in ranks.run(resume_from_folder, path, loco):
        assert going_on == resumed
        assert same
        assert bool(kept) is loco


def resume_from_folder(path: str, loco: bool) -> Any:
    return resume(Net, path, loco=loco, zero_stage=3 if loco else 1, save_distributed_checkpoint=True)


def resume_from_file(path: str, stage: int) -> Any:
    return resume(Reseeded, path, zero_stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_resumes_bitwise_from_a_file_that_a_plain_model_loads(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "file.ckpt"
    for going_on, resumed, same, _ in ranks.run(resume_from_file, str(path), stage):
        assert going_on == resumed
        assert same
    saved = torch.load(path)["state_dict"]
    plain = Net.load_from_checkpoint(path)
    assert plain.hparams["dropout"] == 0.5
    assert saved.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())


def warned(path: str) -> None:
    with torchrun_variables():
        found = fitted(strategy(loco=True), Net(), max_epochs=1)
        with pytest.warns(ZgraphWarning, match="save_distributed_checkpoint=True"):
            found.save_checkpoint(path)


def test_a_file_that_lacks_error_feedback_is_warned_of(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(warned, str(tmp_path / "file.ckpt"))


def cross(path: str) -> tuple[Any, Any, Any]:
    """Parameters after two epochs: by DDP, by zgraph from DDP's file of the first, and by DDP from zgraph's file."""
    with torchrun_variables():
        ddp = seeded(Net)
        fitted("ddp", ddp)
        results = [whole(ddp)]
        for first, second in ("ddp", strategy()), (strategy(), "ddp"):
            fitted(first, seeded(Net), max_epochs=1).save_checkpoint(path)
            net = Net()
            fitted(second, net, ckpt_path=path)
            results.append(whole(net))
        return tuple(results)


@worlds(2)
def test_ddp_and_zgraph_resume_from_each_others_files(ranks: Ranks, tmp_path: Path) -> None:
    for expected, zgraph, ddp in ranks.run(cross, str(tmp_path / "file.ckpt")):
        torch.testing.assert_close(zgraph, expected, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ddp, expected, rtol=1e-3, atol=1e-5)


def regress(path: str, is_plain: bool, half: bool, param_dtype: torch.dtype | None = None) -> Any:
    """Dtypes and losses of a run; its optimizer has no state, which a file then lacks, too."""
    generator = torch.Generator().manual_seed(2)
    rows = TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator))
    plugins = [MixedPrecision("16-mixed", device="cpu")] if half else []

    def run(net: Regression, resumed: str | None = None) -> pl.Trainer:
        by = "ddp" if is_plain else strategy(param_dtype=param_dtype)
        found = trainer(by, plugins=plugins, max_epochs=3 if resumed is None else 4)
        found.fit(net, DataLoader(rows, batch_size=4), ckpt_path=resumed)
        return found

    with torchrun_variables():
        net = seeded(Regression)
        found = run(net)
        found.save_checkpoint(path)
        run(Regression(), path)
        return net.seen, net.outputs, net.losses, type(getattr(found.precision_plugin, "scaler", None)).__module__


@worlds(2)
def test_targets_keep_their_dtype_under_a_param_dtype(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "file.ckpt")
    expected = ranks.run(regress, path, True, False)[0]
    seen, outputs, losses, _ = ranks.run(regress, path, False, False, torch.bfloat16)[0]
    assert seen == {torch.float32}
    assert outputs == torch.bfloat16
    assert losses == pytest.approx(expected[2], abs=2e-2)


@worlds(2)
def test_a_scaler_becomes_one_that_all_ranks_agree_on(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "file.ckpt")
    expected, found = ranks.run(regress, path, True, True)[0], ranks.run(regress, path, False, True)[0]
    assert found[2] == pytest.approx(expected[2], abs=1e-3)
    assert found[3].startswith("zgraph.")


def refusals(path: str) -> dict[str, str]:
    """What each run that is refused says; none has made a step."""
    found: dict[str, str] = {}

    def refused(name: str, net: Any, **options: Any) -> None:
        try:
            fitted(strategy(), net, **options)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert not net.losses

    with torchrun_variables():
        refused("compiled", torch.compile(Net()))
        in_place = Net()
        in_place.compile()
        refused("compiled in place", in_place)
        refused("EMA", Net(), callbacks=[EMAWeightAveraging()])
        refused("SWA", Net(), callbacks=[StochasticWeightAveraging(1e-2)])
        stepped: Any = Regression()
        stepped.optimizer = torch.optim.AdamW(stepped.parameters())
        stepped.net(torch.ones(1, 4)).sum().backward()
        stepped.optimizer.step()
        refused("state", stepped)
        fitted(strategy(save_distributed_checkpoint=True), Net(), max_epochs=1).save_checkpoint(path)
        dist.barrier()
        Path(path, "zgraph", ".metadata").unlink(missing_ok=True)  # as a save that was killed leaves it
        dist.barrier()
        refused("torn", Net(), ckpt_path=path)
    return found


@worlds(2)
def test_runs_are_refused_before_their_first_step(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(refusals, str(tmp_path / "folder.ckpt"))[0]
    assert "compiled model" in found.pop("compiled")  # which Lightning itself refuses
    says = {
        "compiled in place": "leave the call out",
        "EMA": "EMAWeightAveraging copies the weights",
        "SWA": "torch.optim.swa_utils.AveragedModel",
        "state": "AdamW has state for net.0.weight",
        "torn": "resume from another checkpoint",
    }
    assert found.keys() == says.keys()
    for name, text in says.items():
        assert text in found[name]


def test_the_import_registers_the_strategy() -> None:
    assert isinstance(pl.Trainer(strategy="zgraph", accelerator="cpu", devices=1).strategy, ZgraphStrategy)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r"ZgraphStrategy: zgraph\.shard has no argument stage"):
        ZgraphStrategy(stage=3)
