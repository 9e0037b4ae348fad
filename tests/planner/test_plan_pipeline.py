"""Plans of pipelines: bytes and peaks beside those of real ranks under torch's schedules, sums, and refusals."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zgraph
from tests.support.pipelines import (
    KEEPS,
    MICRO_BATCHES,
    ROWS,
    WIDTH,
    Chunk,
    Pipeline,
    batch,
    beside_rest,
    buffers_of,
    chunks_of,
    kept_by,
    peak_for_real,
    planned,
    under,
    within,
)
from tests.support.ranks import Ranks, worlds
from zgraph.torch_compat.groups import stages_hold_messages

# --- beside real ranks ----------------------------------------------------------------------------------------------


def sent_for_real(zero_stage: int, chunks: int, schedule: str, kept: Sequence[int] | None) -> dict[str, int]:
    """What this rank sends in its second step, by axis."""
    pipeline = Pipeline(2, chunks, schedule, zero_stage, kept=kept)
    pipeline.step()
    found, of_pp = Counter[str](), dist.get_process_group_ranks(pipeline.mesh.get_group("pp"))
    send = dist.ProcessGroup.send

    def noted(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        axis = "pp" if dist.get_process_group_ranks(group) == of_pp else "dp"
        found[axis] += sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, dst, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "send", noted)
        pipeline.step()
    return dict(found)


@worlds(4)
@pytest.mark.parametrize(
    ("zero_stage", "chunks", "schedule", "budget_bytes"),
    [
        (1, 2, "Interleaved1F1B", None),
        (2, 1, "1F1B", None),
        (3, 1, "GPipe", None),
        (2, 2, "InterleavedZeroBubble", None),
        (1, 2, "ZBVZeroBubble", None),
        (3, 1, "1F1B", KEEPS["1F1B"]),
    ],
)
def test_real_ranks_send_what_was_planned(
    ranks: Ranks, zero_stage: int, chunks: int, schedule: str, budget_bytes: int | None
) -> None:
    found = within(budget_bytes, schedule, zero_stage)
    kept = None if budget_bytes is None else kept_by(found)
    wanted = [{axis: sent.sent_bytes for axis, sent in found.traffic_of(rank).items()} for rank in range(2)]
    assert wanted[0].keys() == {"pp", "dp"}
    assert ranks.run(sent_for_real, zero_stage, chunks, schedule, kept) == [wanted[0], wanted[0], wanted[1], wanted[1]]


def assert_peaks(ranks: Ranks, schedule: str, chunks: int, zero_stage: int, micro_batches: int = MICRO_BATCHES) -> None:
    """Without what rests between steps: parameters, and buffers in which activations and gradients arrive."""
    dp = ranks.world // 2
    axes = {"pp": 2, "dp": dp}
    found = planned(axes, 2 * chunks, zero_stage, schedule=schedule, micro_batches=micro_batches).pipeline
    assert found is not None
    real = ranks.run(peak_for_real, zero_stage, chunks, schedule, dp, micro_batches)
    for rank, peak in enumerate(beside_rest(found)):
        buffers = buffers_of(schedule, rank, chunks, micro_batches)
        for each in real[rank * dp : (rank + 1) * dp]:
            assert peak - buffers == pytest.approx(each, rel=0.05)


@worlds(2)
@pytest.mark.parametrize(
    ("schedule", "chunks", "zero_stage"),
    [
        ("1F1B", 1, 3),
        ("ZBVZeroBubble", 2, 3),
        ("GPipe", 1, 0),
        ("Interleaved1F1B", 2, 3),
        ("InterleavedZeroBubble", 2, 3),
        ("ZBVZeroBubble", 2, 0),
    ],
)
def test_the_peak_of_each_rank_is_what_it_really_holds(
    ranks: Ranks, schedule: str, chunks: int, zero_stage: int
) -> None:
    assert_peaks(ranks, schedule, chunks, zero_stage)


@worlds(4)
@pytest.mark.parametrize(
    ("schedule", "chunks", "zero_stage", "micro_batches"),
    [
        ("1F1B", 1, 0, 4),
        ("1F1B", 1, 1, 2),
        ("1F1B", 1, 1, 4),
        ("GPipe", 1, 2, 4),
        ("Interleaved1F1B", 2, 1, 4),
        ("Interleaved1F1B", 2, 2, 4),
        ("GPipe", 1, 3, 4),
        ("InterleavedZeroBubble", 2, 1, 2),
        ("InterleavedZeroBubble", 2, 1, 4),
        ("ZBVZeroBubble", 2, 2, 4),
    ],
)
def test_planned_peak_of_sharded_stages_is_the_real_one(
    ranks: Ranks, schedule: str, chunks: int, zero_stage: int, micro_batches: int
) -> None:
    """Of two micro-batches the last backward holds most, which reduces the sums of both."""
    assert_peaks(ranks, schedule, chunks, zero_stage, micro_batches)


# --- the plan's own sums --------------------------------------------------------------------------------------------


def shard_on_all(stage: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(stage, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    zgraph.shard(stage, mesh["dp"])


def test_three_axes() -> None:
    """Each stage reduces over tp, forward and backward; the first needs no gradient of its input, nor `up` for it."""
    found = planned({"pp": 2, "dp": 2, "tp": 2}, shard_fn=shard_on_all)
    assert found.pipeline is not None and found.world_size == 8
    message, weights = MICRO_BATCHES * ROWS * WIDTH * 4, 2 * 2 * WIDTH * WIDTH * 4
    first, last = (
        {axis: sent.sent_bytes for axis, sent in found.pipeline.traffic_of(rank).items()} for rank in range(2)
    )
    assert first == {"pp": message, "dp": MICRO_BATCHES * (3 * weights - weights // 2) // 4, "tp": message}
    assert last == {"pp": message, "dp": MICRO_BATCHES * 3 * weights // 4, "tp": 2 * message}
    assert found.traffic["tp"].sent_bytes == 2 * message
    assert [stage.parameter_bytes for stage in found.pipeline.stages] == [weights // 4] * 2
    assert found.sent_bytes == sum(sent.sent_bytes for sent in found.pipeline.traffic_of(1).values())


def test_ranks_of_a_v_send_nothing_to_themselves() -> None:
    """Rank 1 has the two stages at its bottom, rank 0 both ends; each pair of neighbours has one message to send."""
    found = planned({"pp": 2}, 4, schedule="ZBVZeroBubble").pipeline
    assert found is not None and found.places == (0, 1, 1, 0)
    messages = 2 * MICRO_BATCHES * ROWS * WIDTH * 4  # activations of one stage, gradients of another
    assert [found.traffic_of(rank)["pp"].sent_bytes for rank in range(2)] == [messages, messages]


def test_one_micro_batch_is_a_step_of_each_stage() -> None:
    """Beside the plan of the stage alone: times and bytes; and its peak with the buffers and the bits it leaves."""
    found = planned({"pp": 2, "dp": 2}, micro_batches=1).pipeline
    assert found is not None and found.schedule == "GPipe" and found.run.bubble > 0.5
    alone = zgraph.plan(Chunk, world={"dp": 2}, hardware="cpu", batch=batch)
    first, message = found.stages[0], ROWS * WIDTH * 4
    assert (first.cost.forward_us, first.cost.backward_us) == tuple((graph.timeline.step_us,) for graph in alone.graphs)
    assert first.traffic["dp"].sent_bytes == alone.sent_bytes
    # The buffer of the output's gradient; newer torch lets go of the output, which is as large, once it is sent.
    assert found.run.peak_bytes[0] == alone.peak_bytes + (message if stages_hold_messages() else 0)


def test_the_last_backward_finds_the_sums_that_wait() -> None:
    """Beside a single one it holds those of both weights at its highest point, where the first of them is reduced."""
    single, last = (
        planned({"pp": 2, "dp": 2}, zero_stage=1, micro_batches=count, schedule="GPipe").pipeline for count in (1, 2)
    )
    assert single is not None and last is not None
    without, cost = single.stages[1].cost, last.stages[1].cost
    waiting_bytes = cost.gradients.waiting_bytes
    assert (without.gradients.waiting_bytes, waiting_bytes) == (0, 2 * 2 * WIDTH * WIDTH * 4)
    assert cost.memory.closing_peak_bytes == without.memory.closing_peak_bytes + waiting_bytes


def test_the_bubble_of_equal_stages_is_that_of_the_formula() -> None:
    """On links that take no time; the first stage computes no gradient of its input, which makes it faster."""
    instant = zgraph.Hardware.preset("h100")
    for schedule in ("GPipe", "1F1B"):
        found = planned({"pp": 4}, 4, micro_batches=8, schedule=schedule, hardware=instant).pipeline
        assert found is not None
        assert found.unsent.bubble == pytest.approx(3 / (8 + 3), rel=0.1)
        assert found.run.bubble >= found.unsent.bubble
    assert found.run.in_flight == (4, 3, 2, 1)


def test_a_sequence_is_cut_into_stages() -> None:
    """As split_stages does; a list of the same stages has the same plan."""
    hidden = (32, 32, 512, 64, 64, 64)
    layers = [Chunk(one) for one in hidden]
    by_hand = zgraph.split_stages(layers, 2, batch=batch, hardware="cpu")
    options: dict[str, Any] = {"world": {"pp": 2, "dp": 2}, "hardware": "cpu", "batch": batch, "micro_batches": 4}
    cut = zgraph.plan_pipeline(lambda: nn.Sequential(*map(Chunk, hidden)), **options)
    sizes = [len(stage) for stage in by_hand]
    listed = zgraph.plan_pipeline(
        lambda: [nn.Sequential(*map(Chunk, hidden[: sizes[0]])), nn.Sequential(*map(Chunk, hidden[sizes[0] :]))],
        **options,
    )
    assert cut.pipeline is not None and listed.pipeline is not None
    assert [stage.parameter_bytes for stage in cut.pipeline.stages] == [
        stage.parameter_bytes for stage in listed.pipeline.stages
    ]
    assert cut.step_us == listed.step_us
    interleaved = zgraph.plan_pipeline(lambda: nn.Sequential(*map(Chunk, hidden)), chunks=2, **options).pipeline
    assert interleaved is not None and len(interleaved.stages) == 4 and interleaved.schedule == "Interleaved1F1B"


def test_the_text_json_and_report_of_a_pipeline(tmp_path: Any) -> None:
    found = planned({"pp": 2, "dp": 2}, zero_stage=1)
    assert found.pipeline is not None
    text = str(found)
    assert "zgraph.plan for 4 ranks (pp 2 x dp 2) of cpu" in text
    assert f"2 stages, 4 micro-batches, 1F1B: bubble {found.pipeline.run.bubble:.1%}" in text
    assert "with GPipe: " in text and "rank 1: forward " in text and "with 2 in flight" in text and "along pp: " in text
    as_json = found.as_json()
    assert as_json["pipeline"]["schedules"]["1F1B"]["bubble"] == found.pipeline.run.bubble
    assert as_json["step_us"] == found.step_us == found.pipeline.run.step_us
    assert {(graph["stage"], graph["runs"]) for graph in as_json["graphs"]} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert "schedules of 2 stages and 4 micro-batches" in [table.title for table in found.tables()]
    assert any(found.report(tmp_path).rglob("report.json"))
    most = max(found.pipeline.run.peak_bytes)
    assert found.peak_bytes == most and found.ledger[0].together == most


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": None}, "micro_batches=None; write how many, such as micro_batches=8"),
        ({"micro_batches": 0}, "micro_batches=0; write how many"),
        ({"chunks": True}, "chunks=True; write how many"),
        ({"chunks": 2}, "model_fn returned 2 stages, and a pipeline needs chunks=2 for each of its 2 ranks"),
        ({"world": {"pp": 4}}, "model_fn returned 2 stages, and a pipeline needs a multiple of its 4 ranks"),
        ({"schedule": "1F1b"}, "schedule='1F1b' with 4 micro-batches: a plan knows .*; did you mean '1F1B'"),
        ({"micro_batches": 1, "schedule": "1F1B"}, "schedule='1F1B' with 1 micro-batches: it needs at least as many"),
        (
            {"shard_fn": lambda stage, mesh: zgraph.shard(stage, mesh, offload=zgraph.Offload(params="host"))},
            "shard_fn offloads, which is not supported with pipeline parallelism",
        ),
        (
            {"shard_fn": functools.partial(zgraph.shard, zero_stage=2), "passes": under(150_000)},
            "the step of the pipeline does not fit into budget_bytes=150000: under 1F1B, with up to 2 micro-batches in",
        ),
        ({"offload": zgraph.Offload(params="host")}, r"offload with a pipeline, .*: zgraph\.plan\(.* offload=\.\.\.\)"),
        ({"world": {"dp": 2}}, r"world=.* has no pp axis; add one, .* or call zgraph\.plan\."),
    ],
)
def test_invalid_pipeline_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"zgraph\.plan_pipeline: {message}"):
        planned(**cast(dict[str, Any], {"world": {"pp": 2}} | options))


def test_a_model_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="model_fn returned a Chunk, which has no stages for a pipeline of 2 ranks"):
        zgraph.plan_pipeline(Chunk, world={"pp": 2}, batch=batch, micro_batches=2)


class Mapped(Chunk):
    def forward(self, x: Tensor) -> Any:
        return {"x": super().forward(x)}


def test_stages_hand_on_tensors() -> None:
    with pytest.raises(ValueError, match="stage 0 returns a dict; stages hand on plain tensors: return one"):
        zgraph.plan_pipeline(lambda: [Mapped(), Chunk()], world={"pp": 2}, batch=batch, micro_batches=2)


def test_plan_sends_pipelines_to_their_own_function() -> None:
    """Its former arguments go on, with a warning that names the function; what does not belong to them is refused."""
    layers = functools.partial(chunks_of, 2)
    with pytest.warns(zgraph.ZgraphWarning, match="zgraph.plan with a pp axis is now zgraph.plan_pipeline"):
        found = zgraph.plan(cast(Any, layers), world={"pp": 2}, batch=batch, hardware="cpu", micro_batches=4)
    assert str(found) == str(planned({"pp": 2}))
    for options, message in (
        ({"optimizer_fn": lambda model: None}, "optimizer_fn with a pipeline, whose schedule runs outside whole steps"),
        ({"offload": zgraph.Offload(params="host")}, "offload with a pipeline"),
    ):
        with (
            pytest.warns(zgraph.ZgraphWarning),
            pytest.raises(ValueError, match=f"zgraph.plan: {message}"),
        ):
            zgraph.plan(cast(Any, layers), world={"pp": 2}, batch=batch, **cast(Any, options))
    with pytest.raises(ValueError, match="micro_batches=4, and no pipeline; call"):
        zgraph.plan(cast(Any, layers), world={"dp": 2}, batch=batch, micro_batches=4)
    with pytest.raises(ValueError, match="model_fn returned a list; return a module, or call"):
        zgraph.plan(cast(Any, layers), world={"dp": 2}, batch=batch)
    with pytest.raises(TypeError, match="unexpected keyword argument 'micro_batch'"):
        zgraph.plan(Chunk, world={"dp": 2}, batch=batch, micro_batch=4)
