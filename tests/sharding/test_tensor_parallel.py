"""Tensor parallelism by torch beside data parallelism by zgraph: models on dp x tp ranks train like the whole model."""

from __future__ import annotations

import copy
import fnmatch
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import zgraph
from tests.support import tensor_parallel as tp
from tests.support.compiled import with_fx
from tests.support.compressing import compressing, feedback_of
from tests.support.ranks import Ranks, worlds
from zgraph.passes import LoCo, presets

BF16 = 4e-2  # gradients of a bf16 model against those of the same model in fp32, relative to the largest entry
MLP: dict[str, Any] = {"build": tp.Mlp, "split": tp.split_mlp, "batch": tp.features}
# Between them every stage, with and without compiler, and each feature that touches gradients, at least once.
CASES = {
    "mlp": tp.Case(**MLP),
    "mlp_windows": tp.Case(**MLP, micro_batches=2, max_norm=0.1, options={"zero_stage": 1}),
    "mlp_torch_clip": tp.Case(
        **MLP,
        compile="eager",
        micro_batches=2,
        max_norm=0.1,
        clip=torch.nn.utils.clip_grad_norm_,
        options={"zero_stage": 0},
    ),
    "hybrid": tp.Case(**MLP, replicas=2, max_norm=0.1),
    "llama_replicated": tp.Case(options={"zero_stage": 0}),
    "llama_inductor": tp.Case(compile="inductor", steps=2),
    "llama_bf16": tp.Case(options={"param_dtype": torch.bfloat16, "zero_stage": 2}, micro_batches=2, rounding=BF16),
    "llama_autocast": tp.Case(autocast=torch.bfloat16, rounding=BF16),
    "sequence": tp.Case(split=tp.split_sequence, max_norm=0.1),
    "tied": tp.Case(build=lambda: tp.Llama(tied=True), split=tp.split_sequence, options={"zero_stage": 2}),
    "repeated": tp.Case(build=lambda: tp.Llama(repeats=1), steps=2),
    "repeated_eager": tp.Case(
        build=lambda: tp.Llama(layers=2, repeats=2),
        split=tp.split_sequence,
        compile="eager",
        micro_batches=2,
        options={"zero_stage": 1},
        steps=2,
    ),
    # With all kept, steps take 19_648 bytes: what is saved is made again, for parameters of stage 2 are kept. In the
    # second model, which takes 37_248, the blocks that are not checkpointed gather parameters again. With fewer of them
    # a step would hold most while the checkpointed block runs again, when what others keep no longer counts.
    "budget": tp.Case(
        split=tp.split_sequence, budget_bytes=18_500, micro_batches=2, options={"zero_stage": 2}, steps=2
    ),
    "budget_repeated": tp.Case(build=lambda: tp.Llama(layers=3, repeats=1), budget_bytes=33_000, steps=2),
}


def run_case(name: str) -> str:
    """Compare a case; what its budget makes of it."""
    report = zgraph.Report()
    tp.compare(CASES[name], report)
    return chosen_in(report)


def chosen_in(report: zgraph.Report) -> str:
    return "\n".join(note for note in report.notes if note.startswith("choose_lifetimes on joint"))


def recomputed_in(chosen: str) -> list[str]:
    """Names of the activations that backward makes again."""
    return [
        name for names in re.findall(r"recomputes [1-9]\d* activations: (.*)", chosen) for name in names.split(", ")
    ]


def regathers(chosen: str) -> bool:
    """Whether backward gathers parameters again that it would have kept without a budget."""
    return any(int(kept) < int(all_) for kept, all_ in re.findall(r"keeps (\d+) of (\d+) gathered parameters", chosen))


# One group of tp 2 and nothing to shard over: what DTensor computes with what a unit reads.
@pytest.mark.parametrize("name", ["mlp", "mlp_torch_clip", "repeated_eager"])
def test_equals_the_whole_model_on_one_tensor_parallel_group(ranks: Ranks, name: str) -> None:
    ranks.run(run_case, name)


@worlds(4)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mlp", "repeated_eager")])
def test_equals_the_whole_model(ranks: Ranks, name: str) -> None:
    chosen, *others = ranks.run(run_case, name)
    assert others == [chosen] * len(others)
    assert (bool(recomputed_in(chosen)), regathers(chosen)) == (name == "budget", name == "budget_repeated"), chosen


def gradients_within(budget_bytes: int | None, split: Callable[[nn.Module, DeviceMesh], None]) -> Any:
    """This rank's parts of the gradients of one backward at stage 3, what its plan chose, and backward's calls."""
    model, _ = tp.built(tp.Case(split=split), tp.mesh_of())
    report = zgraph.Report()
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"), budget_bytes=budget_bytes)
    called = with_fx(model, passes=zgraph.PassList(presets.planned(), target=target), report=report)
    tp.train_micro(tp.Case(), model, called, 0, waits=False)
    grads = {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}  # pyright: ignore
    (frame,) = report.frames
    (nodes,) = (graph.nodes for graph in frame.graphs if graph.direction == "backward")
    calls = [line for line, op in zip(nodes.line, nodes.op, strict=True) if frame.strings[op] == "call_function"]
    return grads, chosen_in(report), [frame.lines.name[line] for line in calls]


def under_a_budget(split: Callable[[nn.Module, DeviceMesh], None], budget_bytes: int) -> str:
    expected, unlimited, before = gradients_within(None, split)
    found, chosen, after = gradients_within(budget_bytes, split)
    assert not unlimited
    for name in recomputed_in(chosen):
        assert name in after and name not in before
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    return chosen


# With all kept, steps take 20_736 bytes, and 17_568 if activations are split along the sequence.
@worlds(4)
@pytest.mark.parametrize(
    ("split", "budget_bytes", "recomputes"), [(tp.split_llama, 17_000, False), (tp.split_sequence, 12_700, True)]
)
def test_a_budget_changes_no_bits_of_gradients(ranks: Ranks, split: Any, budget_bytes: int, recomputes: bool) -> None:
    """Backward gathers parameters again that it would have kept, and makes products of matrices again."""
    first, *others = ranks.run(under_a_budget, split, budget_bytes)
    assert others == [first] * len(others)
    assert regathers(first), first
    assert any(name.startswith("mm") for name in recomputed_in(first)) == recomputes, first


def split_loss(mode: str) -> None:
    case = tp.Case(split=tp.split_loss, compile=mode)
    mesh = tp.mesh_of()
    model, plain = tp.built(case, mesh)
    called = tp.compiled(case, model)
    inputs, target = tp.tokens(0, tp.dp_rank(model))
    with loss_parallel():
        logits = called(inputs)
        assert isinstance(logits, DTensor) and logits.placements[0].is_shard()
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    tp.plain_gradients(case, plain, 0, mesh["dp"].size())
    tp.compare_gradients(case, model, plain, 0)


@worlds(4)
@pytest.mark.parametrize("mode", ["eager", "fx"])
def test_logits_stay_split_for_a_parallel_loss(ranks: Ranks, mode: str) -> None:
    ranks.run(split_loss, mode)


def whole_step(offload: zgraph.Offload) -> None:
    """A step whose model and optimizer rest elsewhere, beside its lines, whose do not."""
    case = tp.Case(split=tp.split_sequence)
    mesh = tp.mesh_of()
    model, _ = tp.built(replace(case, options={"offload": offload}), mesh)
    twin, _ = tp.built(case, mesh)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=False) for one in (model, twin)]

    def lines(trained: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, target: Tensor) -> Any:
        loss = tp.loss_of(trained(inputs), target)
        loss.backward()
        norm = zgraph.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    @zgraph.training_step(model, optimizers[0], options={"lowering": "fx"})
    def step(inputs: Tensor, target: Tensor) -> Any:
        return lines(model, optimizers[0], inputs, target)

    for index in range(3):
        batch = tp.tokens(index, tp.dp_rank(model))
        for found, expected in zip(step(*batch), lines(twin, optimizers[1], *batch), strict=True):
            assert torch.equal(tp.whole(found), tp.whole(expected))
        assert_equal_parts(model, twin)


def assert_equal_parts(model: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(one, DTensor) and isinstance(other, DTensor)
        assert torch.equal(one.to_local(), other.to_local()), name


@worlds(4)
def test_a_whole_step_has_the_same_bits_as_its_lines(ranks: Ranks) -> None:
    ranks.run(whole_step, zgraph.Offload(params="host", optimizer="host"))


@worlds(2)
def test_whole_step_from_disk_equals_its_lines_bitwise(ranks: Ranks, tmp_path: Path) -> None:
    """Six seconds: tensor parallelism's collectives are traced into one graph with everything else."""
    ranks.run(whole_step, zgraph.Offload(params="disk", optimizer="disk", path=str(tmp_path)))


def init(part: nn.Module) -> None:
    if isinstance(part, nn.Linear | nn.Embedding):
        nn.init.normal_(part.weight)
    elif isinstance(part, nn.RMSNorm):
        part.reset_parameters()


def meta_and_back(zero_stage: int) -> None:
    """From the meta device to values, to a full state dict, and to the values of another one."""
    with torch.device("meta"):
        model = tp.Llama(tied=True)
    mesh = tp.mesh_of()
    tp.split_sequence(model, mesh["tp"])
    zgraph.shard(model, mesh["dp"], zero_stage=zero_stage)
    torch.manual_seed(dist.get_rank())
    zgraph.materialize(model, init, seed=3)
    plain = tp.Llama(tied=True)
    torch.manual_seed(3)
    plain.apply(init)
    full = zgraph.full_state_dict(model)
    assert not full or full.keys() == plain.state_dict().keys()
    for name, value in full.items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert model.head.weight is model.embed.weight
    torch.manual_seed(9)
    other = tp.Llama(tied=True)
    model.load_state_dict(other.state_dict())
    found = {name: tp.whole(value) for name, value in model.state_dict().items()}
    for name, value in other.state_dict().items():
        assert torch.equal(found[name], value), name
    inputs, _ = tp.tokens(0, 0)
    torch.testing.assert_close(model(inputs), other(inputs))


@worlds(4)
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_models_are_made_on_meta_and_written_as_one(ranks: Ranks, zero_stage: int) -> None:
    ranks.run(meta_and_back, zero_stage)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, called: Callable[..., Tensor], steps: range) -> None:
    for index in steps:
        tp.train_micro(tp.Case(), model, called, index, waits=False)
        optimizer.step()
        optimizer.zero_grad()


def save_and_continue(folder: str) -> None:
    """Save a run that compresses gradients; go on in it, and in another one that loads: both end with the same bits."""
    mesh = tp.mesh_of()
    case = tp.Case(split=tp.split_sequence, options={"zero_stage": 2})
    model, _ = tp.built(case, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = compressing(model, LoCo())
    trained(model, optimizer, called, range(2))
    path = zgraph.save_checkpoint(folder, model, optimizer, step=2)
    full = zgraph.full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/full.pt")
    other, _ = tp.built(case, mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    zgraph.load_checkpoint(path, other, other_optimizer)
    tp.assert_replicas_equal(model)
    assert feedback_of(other).keys() == feedback_of(model).keys() != set()
    trained(model, optimizer, called, range(2, 4))
    trained(other, other_optimizer, compressing(other, LoCo()), range(2, 4))
    assert_equal_parts(model, other)


def load_elsewhere(folder: str, size: int) -> list[str]:
    """Load on another layout; no tensor parallelism for 0."""

    def leave(model: nn.Module, axis: DeviceMesh) -> None:
        pass

    case = tp.Case(split=tp.split_sequence if size else leave)
    model, _ = tp.built(case, tp.mesh_of(size or 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zgraph.load_checkpoint(f"{folder}/step_00000002", model, optimizer)
    full = torch.load(f"{folder}/full.pt")
    for name, value in model.state_dict().items():
        assert torch.equal(tp.whole(value), full[name]), name
    trained(model, optimizer, model, range(2, 3))
    return [str(one.message) for one in caught if issubclass(one.category, zgraph.ZgraphWarning)]


@worlds(4)
def test_checkpoints_continue_and_load_on_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_and_continue, str(tmp_path))
    for size in (0, 1, 4):
        (text,) = ranks.run(load_elsewhere, str(tmp_path), size)[0]
        assert re.search(r"errors that compression kept start as zeros.*embed\.weight \(first_hop\)", text)


def hugging_face(mode: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = LlamaConfig(
        vocab_size=tp.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    styles = {f"model.{pattern}": style for pattern, style in (config.base_model_tp_plan or {}).items()}
    styles |= model._tp_plan or {}  # pyright: ignore[reportPrivateUsage]
    found = {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in styles.items()
        if fnmatch.fnmatch(name, pattern)
    }
    mesh = tp.mesh_of()
    apply_tensor_parallelism(model, mesh["tp"], {f"{name}.weight": style for name, style in found.items()} | found)
    zgraph.shard(model, mesh["dp"])
    called = model if mode == "eager" else with_fx(model)

    def loss(module: Callable[..., Any], replica: int) -> Tensor:
        inputs, target = tp.tokens(0, replica)
        return tp.loss_of(module(input_ids=inputs, use_cache=False).logits, target)

    loss(called, tp.dp_rank(model)).backward()
    for replica in range(mesh["dp"].size()):
        (loss(plain, replica) / mesh["dp"].size()).backward()
    tp.compare_gradients(tp.Case(), model, plain, 0)
    with torch.no_grad(), pytest.raises(zgraph.ZgraphError) as error:
        model(input_ids=tp.tokens(0, 0)[0], use_cache=False)
    with torch.no_grad(), torch.enable_grad():  # what the error says
        scores = [one(input_ids=tp.tokens(0, 0)[0], use_cache=False).logits.detach() for one in (model, plain)]
    assert torch.allclose(*scores, rtol=0, atol=2e-6)
    return str(error.value)


@worlds(4)
@pytest.mark.parametrize("mode", ["eager", "fx"])
def test_a_hugging_face_model_with_its_own_plan(ranks: Ranks, mode: str) -> None:
    text = ranks.run(hugging_face, mode)[0]
    assert re.search(r"read without gradients .* Hugging Face's tensor parallelism .* torch\.enable_grad\(\)", text)


# --- errors -----------------------------------------------------------------------------------------------------------


def two_layers(axis: DeviceMesh, hidden: int = 10) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 4))
    return parallelize_module(model, axis, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def _plain_part_alone(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(6, 6), two_layers(mesh["tp"]))
    zgraph.shard(model[0], mesh["dp"])
    zgraph.shard(model, mesh["dp"])


def _unnamed(mesh: DeviceMesh) -> None:
    zgraph.shard(two_layers(init_device_mesh("cpu", (dist.get_world_size(),))), mesh["dp"])


REFUSED: dict[str, tuple[Callable[[DeviceMesh], object], str]] = {
    "axis_twice": (lambda mesh: zgraph.shard(two_layers(mesh["tp"]), mesh), r"the axis 'tp' is used twice.*mesh\[\"dp"),
    "default_mesh": (lambda mesh: zgraph.shard(two_layers(mesh["tp"])), r"do not make up one mesh.*slice both"),
    "unnamed": (_unnamed, r"need names; slice both from one mesh"),
    "uneven": (
        lambda mesh: zgraph.shard(two_layers(mesh["tp"], 9), mesh["dp"]),
        r"0\.weight of shape \[9, 6\] is split on dim 0 over 2 ranks.*use a size that 2 divides",
    ),
    "two_axes": (
        lambda mesh: zgraph.shard(nn.Sequential(two_layers(mesh["tp"]), two_layers(mesh["dp"])), mesh["dp"]),
        r"DTensors are on several meshes \(0\.0\.weight on .*1\.0\.weight on .*same mesh\[\"tp\"\]",
    ),
    "plain_part_alone": (_plain_part_alone, r"0\.weight was sharded on .*Shard a tensor-parallel model as a whole"),
}


def refusals() -> dict[str, str]:
    mesh = tp.mesh_of()
    found: dict[str, str] = {}
    for name, (call, _) in REFUSED.items():
        with pytest.raises(ValueError) as error:
            call(mesh)
        found[name] = str(error.value)
    return found


def test_incompatible_parallelism_is_refused(ranks: Ranks) -> None:
    texts = ranks.run(refusals)[0]
    assert {name: text for name, text in texts.items() if not re.search(REFUSED[name][1], text)} == {}


def part_of_a_gradient(as_step: bool) -> str:
    """A norm that is plain and reads a part of the sequence; in the lines of a loop, or in those of a whole step."""

    def split(model: nn.Module, axis: DeviceMesh) -> None:
        assert isinstance(model, tp.Llama)
        norm = model.norm
        tp.split_sequence(model, axis)
        norm._forward_pre_hooks.clear()  # pyright: ignore[reportPrivateUsage]
        norm._forward_hooks.clear()  # pyright: ignore[reportPrivateUsage]
        norm.weight = nn.Parameter(tp.whole(norm.weight).detach().clone())

    case = tp.Case(split=split)
    model, _ = tp.built(case, tp.mesh_of())
    optimizer = torch.optim.AdamW(model.parameters())

    def lines() -> None:
        tp.train_micro(case, model, model, 0, waits=False)
        optimizer.step()

    step = zgraph.training_step(model, optimizer)(lines) if as_step else None
    with pytest.raises(zgraph.ZgraphError) as error:
        lines() if step is None else step.function()
    return str(error.value)


@pytest.mark.parametrize("as_step", [False, True])
def test_unsummed_gradient_is_found_before_first_step(ranks: Ranks, as_step: bool) -> None:
    text = ranks.run(part_of_a_gradient, as_step)[0]
    assert re.search(r"zgraph: norm\.weight got different gradients .* SequenceParallel\(\)", text)


def different_batches(mode: str, check: bool) -> str:
    case = tp.Case(**MLP, compile=mode, options={"check_batch": check})
    model, _ = tp.built(case, tp.mesh_of())
    called: Callable[[Tensor], Any] = model
    if mode == "step":
        optimizer = torch.optim.AdamW(model.parameters())

        @zgraph.training_step(model, optimizer, options={"lowering": "fx"})
        def step(inputs: Tensor) -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        called = step
    elif mode == "fx":
        called = tp.compiled(case, model)
    batch, _ = tp.features(0, dist.get_rank())
    if not check:
        called(batch)
        return ""
    with pytest.raises(zgraph.ZgraphError) as error:
        called(batch)
    return str(error.value)


@pytest.mark.parametrize(("mode", "check"), [("eager", True), ("fx", True), ("step", True), ("eager", False)])
def test_one_tensor_parallel_group_takes_one_batch(ranks: Ranks, mode: str, check: bool) -> None:
    text = ranks.run(different_batches, mode, check)[1]
    assert not check or re.search(r"group \[0, 1\] were given different batches .*check_batch=False", text)
