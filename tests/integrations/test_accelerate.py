"""Scripts of Accelerate on two ranks: equal to a plain loop over the batches of both, and resumed to the bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zgraph
from tests.support.budget import long
from tests.support.front_ends import forget, furthest, launched, loss_of, tied, tokens
from tests.support.ranks import Ranks, worlds
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin
from zgraph.torch_compat.dynamo import is_compiled_in_place

EPOCHS, BATCH, ACCUMULATED, CLIP = 2, 4, 2, 0.1
FX = {"lowering": "fx"}
Run = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def plain() -> Run:
    """One process, on the batches of both ranks: even ones are the first's, odd ones the second's."""
    model = tied()
    optimizer = adamw(model)
    schedule = decaying(optimizer)
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(EPOCHS):
        batches = list(DataLoader(tokens(32), batch_size=BATCH))
        for number in range(0, len(batches), 2):
            loss = sum(loss_of(model(x), y) for x, y in batches[number : number + 2]) / 2
            assert isinstance(loss, Tensor)
            losses.append(loss.item())
            (loss / ACCUMULATED).backward()
            if number % (2 * ACCUMULATED) == 2 * (ACCUMULATED - 1):
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                schedule.step()
                schedule.step()  # Accelerate steps a schedule once for each process
                optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


def script(accelerator: accelerate.Accelerator, model: nn.Module, *, load: str = "", save: str = "") -> Run:
    """The script, which does not know how it is sharded."""
    optimizer = adamw(model)
    model, optimizer, batches, schedule = accelerator.prepare(
        model, optimizer, DataLoader(tokens(32), batch_size=BATCH), decaying(optimizer)
    )
    if load:
        accelerator.load_state(load)
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(EPOCHS):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    if save:
        accelerator.save_state(save)
    return losses, norms, {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}


def made(stage: int = 3, precision: str = "no", **plugin: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATED,
        zgraph_plugin=ZgraphPlugin(**{"zero_stage": stage, "options": FX, **plugin}),
    )


def trained(stage: int, plugin: dict[str, Any]) -> Run:
    with launched():
        return script(made(stage, **plugin), tied())


def by_ddp() -> Run:
    with launched():
        return script(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED), tied())


def test_the_unchanged_script_does_the_same_by_ddp(ranks: Ranks) -> None:
    losses, norms, weights = plain()
    found = ranks.run(by_ddp)[0]
    assert found[0] == pytest.approx(losses, abs=1e-5)
    assert found[1] == pytest.approx(norms, abs=1e-5)
    assert furthest(found[2], weights) < 1e-3


EAGER, INDUCTOR = {"compile": False}, {"options": {"lowering": "inductor"}}


@pytest.mark.parametrize(("stage", "plugin"), [(0, {}), (1, EAGER), (2, {}), (3, {}), (3, EAGER), *long((3, INDUCTOR))])
def test_accumulation_clipping_and_schedule_equal_a_plain_loop(ranks: Ranks, stage: int, plugin: Any) -> None:
    losses, norms, weights = plain()
    found = ranks.run(trained, stage, plugin)
    assert found[1][2] == {}  # weights are the main process's
    assert found[0][0] == pytest.approx(losses, abs=1e-5)
    assert found[0][1] == pytest.approx(norms, abs=1e-5)
    assert furthest(found[0][2], weights) < 1e-3


# --- checkpoints ------------------------------------------------------------------------------------------------------


def loco() -> dict[str, Any]:
    return {**FX, "passes": zgraph.PassList(zgraph.passes.presets.default(compression=zgraph.passes.LoCo()))}


def interrupted(folder: str, plugin: dict[str, Any]) -> bool:
    """Whether a run that saves and goes on equals one that goes on from its folder, with dropout."""
    ends: list[Any] = []
    for load in (False, True):
        with launched():
            accelerator = made(**plugin)
            model = tied(dropout=0.3)
            parts = accelerator.prepare(model, adamw(model), DataLoader(tokens(16), batch_size=BATCH))
            if load:
                accelerator.load_state(folder)
            else:
                epoch(accelerator, *parts)
                accelerator.save_state(folder)
            ends.append((epoch(accelerator, *parts), accelerator.get_state_dict(model)))
    (losses, weights), (resumed, found) = ends
    return losses == resumed and all(torch.equal(found[key], value) for key, value in weights.items())


def epoch(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compressed", [False, True])
def test_a_run_resumes_to_the_bit(ranks: Ranks, compressed: bool, tmp_path: Path) -> None:
    assert ranks.run(interrupted, str(tmp_path), {"options": loco()} if compressed else {}) == [True, True]


def test_one_process_without_others_resumes_to_the_bit(tmp_path: Path) -> None:
    assert interrupted(str(tmp_path), {})


def saved(folder: str) -> Run:
    with launched():
        return script(made(), tied(), save=folder)


def loaded_elsewhere(folder: str) -> dict[str, Tensor]:
    with launched():
        accelerator = made()
        model = tied()
        accelerator.prepare(model, adamw(model), DataLoader(tokens(12), batch_size=BATCH))
        accelerator.load_state(folder)
        return dict(accelerator.get_state_dict(model))


@worlds(1, 3)
def test_another_number_of_ranks_loads_what_two_have_saved(ranks: Ranks, pool: Any, tmp_path: Path) -> None:
    weights = pool.of(2).run(saved, str(tmp_path))[0][2]
    assert furthest(ranks.run(loaded_elsewhere, str(tmp_path))[0], weights) == 0.0


def torn(folder: str) -> str:
    with launched():
        script(made(), tied(), save=folder)
    if dist.get_rank() == 0:
        for last_file in Path(folder, "zgraph_0").rglob("zgraph.json"):
            last_file.unlink()
    dist.barrier()
    with launched(), pytest.raises(zgraph.CheckpointError) as caught:
        script(made(), tied(), load=folder)
    return str(caught.value)


def test_a_torn_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(torn, str(tmp_path)):
        assert "zgraph_0 has no complete checkpoint of Tied" in text and "resume from another folder" in text


# --- several models, precisions, evaluation ---------------------------------------------------------------------------


def taught() -> list[bool]:
    """Which of two models and a frozen teacher a step of the first one's optimizer changes."""
    with launched():
        accelerator = made(compile=False)
        models = [tied(), tied(), tied().requires_grad_(False)]
        first, second, teacher, one, _ = accelerator.prepare(*models, adamw(models[0]), adamw(models[1]))
        before = [zgraph.full_state_dict(model) for model in models]
        x, y = tokens(8)[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
        accelerator.backward(loss_of(first(x), y) + (second(x) - teacher(x)).square().mean())
        one.step()
        after = [zgraph.full_state_dict(model) for model in models]
        return [any(not torch.equal(a[k], b[k]) for k in a) for a, b in zip(after, before, strict=True)]


def test_each_optimizer_steps_its_own_model(ranks: Ranks) -> None:
    assert ranks.run(taught)[0] == [True, False, False]


def in_bf16(plugin: dict[str, Any]) -> tuple[list[float], set[torch.dtype]]:
    with launched():
        model = tied()
        losses, _, _ = script(made(precision="bf16", **plugin), model)
        return losses, {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("plugin", [{}, {"param_dtype": torch.float32}])
def test_bf16_is_close_and_keeps_weights_in_fp32(ranks: Ranks, plugin: Any) -> None:
    losses, dtypes = ranks.run(in_bf16, plugin)[0]
    assert losses == pytest.approx(plain()[0], abs=2e-2)
    assert dtypes == {torch.float32}


def trained_in_bf16() -> tuple[list[str], set[torch.dtype]]:
    """Warnings for a trainable model of bf16 and for a frozen one, and dtypes of weights and optimizer state."""
    with launched(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = made(compile=False)
        model, frozen = tied().bfloat16(), tied().bfloat16().requires_grad_(False)
        optimizer = adamw(model)
        model, _, optimizer = accelerator.prepare(model, frozen, optimizer)
        x, y = tokens(4).tensors
        accelerator.backward(loss_of(model(x), y))
        optimizer.step()
        state = [entries["exp_avg"] for entries in optimizer.state.values()]
        return (
            [str(one.message) for one in caught if one.category is zgraph.ZgraphWarning],
            {tensor.dtype for tensor in (*model.parameters(), *state)},
        )


def test_weights_of_bf16_are_warned_of_once(ranks: Ranks) -> None:
    for texts, dtypes in ranks.run(trained_in_bf16):
        assert len(texts) == 1
        assert re.search(r"\d trainable parameters of Tied, such as gain, are bf16.*dtype=torch.float32", texts[0])
        assert dtypes == {torch.bfloat16}


def compiled_after_an_evaluation() -> bool:
    with launched():
        accelerator, model = made(), tied()
        accelerator.prepare_model(model, evaluation_mode=True)  # as the Trainer's evaluate
        assert not is_compiled_in_place(model)
        accelerator.prepare(model, adamw(model))
        return is_compiled_in_place(model)


def test_a_model_evaluated_before_is_compiled(ranks: Ranks) -> None:
    assert ranks.run(compiled_after_an_evaluation) == [True, True]


def evaluated() -> list[int]:
    """Predictions for 13 rows on two ranks; the last batch is padded, and cut afterwards."""
    with launched():
        accelerator = made()
        model, batches = accelerator.prepare(tied(), DataLoader(tokens(13), batch_size=BATCH))
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(model(x).argmax(-1)) for x, _ in batches]
        return torch.cat(found)[:, 0].tolist()


def test_evaluation_gathers_each_row_once(ranks: Ranks) -> None:
    expected = tied()(tokens(13).tensors[0]).argmax(-1)[:, 0].tolist()
    assert ranks.run(evaluated) == [expected, expected]


# --- what is refused --------------------------------------------------------------------------------------------------


def with_state() -> None:
    model = tied()
    optimizer = adamw(model)
    loss_of(model(torch.ones(1, 2, dtype=torch.long)), torch.ones(1, 2, dtype=torch.long)).backward()
    optimizer.step()
    made().prepare(model, optimizer)


def mapped() -> None:
    model = tied()
    model.hf_device_map = {"": "cpu"}  # pyright: ignore[reportArgumentType]
    made().prepare(model)


def compiled() -> None:
    model = tied()
    model.compile(backend="eager")
    made().prepare(model)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "compiled": (
        lambda: Accelerator(cpu=True, dynamo_backend="inductor"),
        "would compile with .*INDUCTOR, but zgraph compiles the model itself; leave dynamo_backend",
    ),
    "FSDP": (
        lambda: Accelerator(cpu=True, fsdp_plugin=accelerate.FullyShardedDataParallelPlugin()),
        r"Accelerator\(fsdp_plugin=...\) would shard the model in another way; leave it out",
    ),
    "optimizer with state": (with_state, "AdamW has state for .* already, .*; shard the model, or prepare it, before"),
    "device_map": (mapped, "Tied is quantized or was loaded with device_map, .*; load it without"),
    "compiled in place": (
        compiled,
        "Tied is compiled already, but zgraph compiles the model itself; leave compile out",
    ),
    "unknown option": (lambda: ZgraphPlugin(stage=3), "ZgraphPlugin: zgraph.shard has no argument stage"),
    "trigger": (
        lambda: Accelerator.trigger_sync_in_backward(tied()),
        "trigger_sync_in_backward is not available; run the last forward outside of no_sync",
    ),
}


def refusal(name: str) -> None:
    call, text = REFUSED[name]
    with launched(), pytest.raises((ValueError, TypeError), match=text):
        call()


@pytest.mark.parametrize("name", REFUSED)
def test_other_ways_to_shard_are_refused(ranks: Ranks, name: str) -> None:
    ranks.run(refusal, name)


def unseen() -> None:
    """Ranks that torchrun has not started: Accelerate finds a process without others."""
    with pytest.raises(ValueError, match=r"found one process, but the process group has 2, .*; start the script by"):
        Accelerator(cpu=True)
    forget()


def test_ranks_that_accelerate_does_not_see_are_refused(ranks: Ranks) -> None:
    ranks.run(unseen)


def test_accelerate_keeps_what_it_has_prepared_in_two_lists() -> None:
    """The private names that the adapter uses."""
    with launched():
        accelerator = accelerate.Accelerator(cpu=True)
        assert (accelerator._models, accelerator._optimizers) == ([], [])
