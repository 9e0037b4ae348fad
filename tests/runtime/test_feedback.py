"""Error feedback beside the steps: loss scales, dropped steps, forgetting, and what the reports tell of it."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.compressing import compressing, feedback_of, kept_tensors
from tests.support.ranks import Ranks
from zgraph.passes import LoCo
from zgraph.runtime.error_feedback import Feedback, Feedbacks

SPEC = {"error": ((2, 1, 32), torch.int8), "error_scale": ((2, 1), torch.bfloat16)}


class Pair(nn.Module):
    """Two layers, either of which can overflow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(16, 12, bias=False)
        self.right = nn.Linear(16, 9, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def make(seed: int = 0, method: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return compressing(zgraph.shard(Pair(), **options), method or LoCo(group=32))


def backward(model: nn.Module, scaler: torch.amp.GradScaler, step: int, overflow: bool = False) -> None:
    """The gradient of `right` overflows on rank 1, where it is told to."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    left, right = model(torch.randn(6, 16, generator=generator))
    factor = 1e9 if overflow and dist.get_rank() == 1 else 1.0
    scaler.scale(left.float().square().mean() + factor * right.float().square().mean()).backward()


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


# --- real ranks ------------------------------------------------------------------------------------------------------


def drop_a_step(kind: str, zero_stage: int) -> dict[str, Any]:
    model = make(param_dtype=torch.float16, zero_stage=zero_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    constructor = zgraph.GradScaler if kind == "zgraph" else torch.amp.GradScaler
    scaler = constructor("cpu", init_scale=1024.0)
    zgraph.set_loss_scale(model, scaler)
    found_inf: list[float] = []
    snapshots: list[dict[str, Tensor]] = []
    weights: list[Tensor] = []
    during: dict[str, Tensor] = {}
    for step in range(4):
        backward(model, scaler, step, overflow=step == 2)
        if step == 2:
            during = kept_tensors(model)
        scaler.unscale_(optimizer)
        found_inf.append(sum(scaler._found_inf_per_device(optimizer).values()).item())  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        if kind == "torch":
            zgraph.set_loss_scale(model, scaler)
        optimizer.zero_grad()
        snapshots.append(kept_tensors(model))
        weights.append(model.left.weight.full_tensor().clone())
    before, after = snapshots[1], snapshots[2]
    return {
        "found_inf": [value > 0 for value in found_inf],
        "scale": scaler.get_scale(),
        "touched by the backward": differing(during, before),
        "codes": [name for name in differing(after, before) if not name.endswith("scale")],
        "halved": all(torch.equal(after[name], before[name] / 2) for name in after if name.endswith("scale")),
        "filled": all(value.count_nonzero() > 0 for value in before.values()),
        "weights stay": torch.equal(weights[2], weights[1]) and not torch.equal(weights[1], weights[0]),
        "goes on": not torch.equal(weights[3], weights[2]) and bool(weights[3].isfinite().all()),
        "changes again": len(differing(snapshots[3], after)),
        "steps": {feedback.steps for slots in feedback_of(model).values() for feedback in slots.values()},
        "copies": [f for slots in feedback_of(model).values() for f in slots.values() if f.before is not None],
    }


@pytest.mark.parametrize(("kind", "zero_stage"), [("zgraph", 3), ("zgraph", 0), ("torch", 3)])
def test_a_dropped_step_leaves_no_trace_in_the_errors(ranks: Ranks, kind: str, zero_stage: int) -> None:
    """fp16, and an overflow on rank 1 in `right` alone: the errors of `left` were changed by the dropped step."""
    for result in ranks.run(drop_a_step, kind, zero_stage):
        assert result["found_inf"] == [False, False, True, False]
        assert result["scale"] == 512
        assert {"left.weight first_hop error", "left.weight first_hop error_scale"} <= {
            *result["touched by the backward"]
        }
        assert result["codes"] == [] and result["halved"] and result["filled"]
        assert result["weights stay"] and result["goes on"]
        assert result["changes again"] == 4
        assert result["steps"] == {3} and result["copies"] == []


def drop_one_of_two() -> dict[str, Any]:
    """Two optimizers, and a scaler that never changes its scale: only its flags tell that `right` was dropped."""
    model = make(param_dtype=torch.float16)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (model.left, model.right)]
    scaler = zgraph.GradScaler("cpu", init_scale=1024.0, backoff_factor=1 - 1e-12, growth_factor=1 + 1e-12)
    zgraph.set_loss_scale(model, scaler)
    snapshots: list[dict[str, Tensor]] = []
    during: dict[str, Tensor] = {}
    for step in range(2):
        backward(model, scaler, step, overflow=step == 1)
        during = kept_tensors(model)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        snapshots.append(kept_tensors(model))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return {
        "scale": scaler.get_scale(),
        "changed": differing(snapshots[1], snapshots[0]),
        "in the backward": differing(during, snapshots[0]),
    }


def test_a_scaler_tells_whose_step_was_dropped(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(drop_one_of_two)):
        left = ["left.weight first_hop error", "left.weight first_hop error_scale"]
        right = ["right.weight first_hop error", "right.weight first_hop error_scale"]
        assert result["scale"] == 1024
        assert result["changed"] == left
        # Rank 0 has sent finite codes of `right`, and must take them back because of rank 1.
        assert result["in the backward"] == left + right * (rank == 0)


def forget() -> dict[str, Any]:
    model = make(method=LoCo(group=32, error_dtype=torch.float32))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    backward(model, scaler, 0)
    before = feedback_of(model)
    text = str(zgraph.summary(model))
    told = [str(zgraph.explain(model)), text]
    zgraph.reset_error_feedback(model)
    after = feedback_of(model)
    backward(model, scaler, 1)
    again = [f.reductions for slots in feedback_of(model).values() for f in slots.values()]
    return {"kept": sorted(before), "told": told, "after": after, "again": again}


def test_forgotten_errors_start_again_and_reports_count_them(ranks: Ranks) -> None:
    # Chunks of 6 x 16 = 3 groups and of 5 x 16 = 2.5 groups, two of each, four bytes an element.
    expected = f"{(2 * 3 + 2 * 3) * 32 * 4 / 2**10:.2f} KiB a rank"
    for result in ranks.run(forget):
        assert result["kept"] == ["left.weight", "right.weight"] and result["after"] == {}
        assert result["again"] == [1, 1]
        explained, summarised = result["told"]
        assert f"error feedback: {expected}" in explained
        assert f"error feedback: {expected}" in summarised


# --- without processes -----------------------------------------------------------------------------------------------


def kept(scale: float | None = None) -> tuple[Feedbacks, Feedback]:
    feedbacks = Feedbacks(loss_scale=scale)
    feedback = feedbacks.of("first_hop", "method", 20, 2, SPEC, torch.device("cpu"), "weight")
    feedback.tensors["error"].fill_(7)
    feedback.tensors["error_scale"].fill_(0.75)
    return feedbacks, feedback


def step(feedback: Feedback, value: int, reset_interval: int = 0) -> None:
    feedback.begin(reset_interval=reset_interval, keep_before=True)
    feedback.tensors["error"].fill_(value)
    feedback.end(closing=True)


def test_a_step_that_forgets_and_is_dropped_has_not_forgotten() -> None:
    feedbacks, feedback = kept(64.0)
    feedback.steps = 4
    step(feedback, 1, reset_interval=4)
    feedbacks.set_loss_scale(32.0)
    assert feedback.steps == 4
    assert feedback.tensors["error"].unique().tolist() == [7]
    assert feedback.tensors["error_scale"].unique().tolist() == [0.375]
    feedback.begin(reset_interval=4, keep_before=True)
    assert feedback.tensors["error"].unique().tolist() == [0]


def test_a_growing_scale_keeps_the_step() -> None:
    feedbacks, feedback = kept(64.0)
    step(feedback, 1)
    feedbacks.set_loss_scale(256.0)
    assert (feedback.tensors["error"].unique().tolist(), feedback.before, feedback.steps) == ([1], None, 1)
    assert feedback.tensors["error_scale"].unique().tolist() == [3.0]


def test_smaller_manual_scale_drops_nothing_if_the_scaler_tells() -> None:
    feedbacks, feedback = kept(64.0)
    step(feedback, 1)
    feedbacks.set_loss_scale(32.0, dropped=False)
    assert feedback.tensors["error"].unique().tolist() == [1]


def test_first_scale_multiplies_nothing_and_its_end_divides() -> None:
    feedbacks, feedback = kept()
    feedbacks.set_loss_scale(64.0)
    assert feedback.tensors["error_scale"].unique().tolist() == [0.75]
    feedbacks.set_loss_scale(None)
    assert feedback.tensors["error_scale"].unique().tolist() == [0.75 / 64]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"method": "another"},
            "keeps the error of method in 2 chunks of 20 elements, and is now compressed by another",
        ),
        ({"numel": 21}, "is now compressed by method in 2 of 21"),
        ({"spec": {"error": ((2, 1, 64), torch.int8)}}, "by another version of the method"),
    ],
    ids=["method", "numel", "spec"],
)
def test_foreign_error_is_not_added_to_a_gradient(change: dict[str, Any], text: str) -> None:
    feedbacks, feedback = kept()
    asked = {"slot": "first_hop", "method": "method", "numel": 20, "chunks": 2, "spec": SPEC} | change
    with pytest.raises(zgraph.ZgraphError, match=r"reset_error_feedback\(model\) on every rank") as caught:
        feedbacks.of(**asked, device=torch.device("cpu"), parameter="layers.0.weight")
    assert text in str(caught.value) and "layers.0.weight" in str(caught.value)
    assert feedbacks.by_slot == {"first_hop": feedback}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_scales_are_refused(ranks: Ranks, scale: float) -> None:
    texts = ranks.run(refused, scale)
    assert all(f"scale={scale}" in text and "nothing in this Linear is sharded" in text for text in texts)


def refused(scale: float) -> str:
    model = zgraph.shard(Pair())
    texts: list[str] = []
    for call in (
        lambda: zgraph.set_loss_scale(model, scale),
        lambda: zgraph.set_loss_scale(nn.Linear(2, 2), 2.0),
        lambda: zgraph.reset_error_feedback(nn.Linear(2, 2)),
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    assert len(texts) == 3
    return " ".join(texts)


def follow() -> None:
    model = zgraph.shard(Pair())
    scaler = zgraph.GradScaler("cpu", init_scale=8.0)
    zgraph.set_loss_scale(model, scaler)
    other = pickle.loads(pickle.dumps(scaler))
    scaler.load_state_dict(other.state_dict() | {"scale": 4.0})
    other.load_state_dict(other.state_dict() | {"scale": 2.0})
    reads = [part._zgraph.by_attribute["weight"] for part in (model.left, model.right)]
    assert [read.state.feedbacks.loss_scale for read in reads] == [4.0, 4.0]
    zgraph.set_loss_scale(model, zgraph.GradScaler("cpu", enabled=False))
    assert [read.state.feedbacks.loss_scale for read in reads] == [None, None]
    gone = weakref.ref(model)
    del model, reads
    gc.collect()
    assert gone() is None


def test_scaler_tells_loaded_scale_and_does_not_keep_model(ranks: Ranks) -> None:
    ranks.run(follow)
